"""Policies and constraints: the values that a user or a model wants saved or recomputed."""
