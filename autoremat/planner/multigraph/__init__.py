"""One budget for the several graphs of a step."""
