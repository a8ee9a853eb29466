"""Optimizer state, and where it is."""
