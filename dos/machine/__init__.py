"""The host: threads, memory, and its measured profiles."""
