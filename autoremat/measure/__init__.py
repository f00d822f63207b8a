"""Measurements on the device: its rates, the times of ops, and memory peaks."""
