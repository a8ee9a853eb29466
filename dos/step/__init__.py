"""One step: its updates, its memory, issuing it and waiting for it."""
