"""The planner, `python -m perfmodel`: what is asked, the answer, and how it is shown."""
