"""A plan, its file, and its check by an independent count."""
