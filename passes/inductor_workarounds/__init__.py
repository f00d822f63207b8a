"""Workarounds for code that Inductor generates. None of them decides what is saved."""
