"""Tensors that autograd saves in forward leave for the host, and come back before backward needs them."""
