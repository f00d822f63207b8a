"""Search for a plan: minimum cuts, a local search, stays, lower bounds and the Pareto front."""
