"""Profiles a training step of several compiled graphs, which share one budget."""
