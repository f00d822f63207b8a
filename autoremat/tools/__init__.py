"""User tools: ``explain``, ``pareto``, ``max_batch``, and plans in eager training."""
