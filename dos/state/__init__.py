"""Optimizer state, and the memory that has it."""
