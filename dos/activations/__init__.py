"""Moves tensors that autograd saves in forward to the host, and back before backward needs them."""
