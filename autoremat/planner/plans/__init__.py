"""Plans, plan files, and the independent check of a plan."""
