"""Improvement of plans for ``autoremat.plan``: annealing, and the integer program of the interval model."""
