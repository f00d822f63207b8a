"""User tools: ``explain``, ``pareto``, ``max_batch``."""
