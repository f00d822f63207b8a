"""The options of a compilation, and the defaults that ``configure`` sets. Imports no torch."""
