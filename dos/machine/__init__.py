"""The host: threads, memory, and what was measured of it."""
