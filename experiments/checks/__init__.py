"""What `python -m experiments.gpu_check` checks, a module for each check."""
