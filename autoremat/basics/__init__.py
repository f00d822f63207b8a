"""Errors, units, checks of single values, environment variables, progress messages and the cache folder. Imports no torch."""
