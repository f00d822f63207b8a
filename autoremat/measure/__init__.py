"""Measurements on the device: its rates, the times of ops, and peaks of memory."""
