"""The profile of a step of several compiled graphs."""
