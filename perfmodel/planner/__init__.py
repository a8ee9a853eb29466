"""The planner, `python -m perfmodel`: question, answer, and their presentation."""
