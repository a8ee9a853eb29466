"""One step: what it does, memory for it, issuing it, waiting for it."""
