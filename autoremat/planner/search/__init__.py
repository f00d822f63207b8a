"""Search for a plan: minimum cuts, segments, greedy fill, lower bounds, the Pareto front and baselines."""
