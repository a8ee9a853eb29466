"""Measures the machine."""
