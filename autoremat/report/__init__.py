"""Reports of plans as data, text, tables, HTML and plots. Imports no torch."""
