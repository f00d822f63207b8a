"""One budget for a step of several compiled graphs: what they hold at the same time, and which plan each of them gets."""
