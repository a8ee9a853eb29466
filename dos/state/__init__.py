"""What optimizer state is, and where."""
