"""Errors, units, checks of single values, the environment, progress and the cache folder. Imports no torch."""
