"""A training step as a graph of ops and values, and schedules of it."""
