"""The memory of a whole device: the tensors that exist, and those that the optimizer will make."""
