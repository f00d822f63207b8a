"""Search for a plan: minimum cuts, segments, greedy fill, lower bounds and the Pareto front."""
