"""The planner: which tensors a step saves and which it recomputes. Imports no torch."""
