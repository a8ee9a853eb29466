"""Which parameters there are, and what users do to them."""
