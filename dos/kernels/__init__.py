"""The Adam update, on the CPU and on the GPU."""
