"""Gradients on their way, on the host, clipped and scaled."""
