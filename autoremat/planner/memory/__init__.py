"""The peak of a schedule: the simulator, its live ranges and fusion rule, and the replay of generated code."""
