"""Costs: converts FLOPs and bytes to seconds."""
