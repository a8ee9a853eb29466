"""What checks a machine: `python -m experiments.gpu_check` runs it, and none of it reproduces the paper."""
