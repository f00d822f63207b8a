"""Improvement of plans for ``autoremat.plan``: interval model, large-neighbourhood search, annealing, time-indexed bound."""
