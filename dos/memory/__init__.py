"""Live device memory, and what it leaves for state."""
