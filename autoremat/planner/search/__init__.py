"""The search for a plan: minimum cuts, segments, greedy fill, lower bounds, and fixed policies to compare with."""
