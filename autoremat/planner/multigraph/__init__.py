"""Several graphs in one step: assignment of plans to graphs under one budget, and the step profile's result."""
