"""Checks of a machine: `python -m experiments.gpu_check` runs them, and none of them reproduces the paper."""
