"""Workarounds for code that Inductor generates. They do not decide which tensors are saved."""
