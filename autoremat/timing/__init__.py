"""Measured seconds: the rates of a device, and the times of single ops on it."""
