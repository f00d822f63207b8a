"""Workspaces of kernels: the bytes that a kernel allocates beside its results and frees before it returns."""
