"""The peak of a schedule: the simulator, its live ranges and fusion rules, and the replay of generated code."""
