"""Gradients in transit and on the host, and their clipping and scaling."""
