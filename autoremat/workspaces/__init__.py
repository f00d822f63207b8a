"""Workspaces of kernels: the bytes that a kernel allocates and frees besides its results."""
