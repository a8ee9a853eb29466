"""Where subgroups are updated, and what is said of it."""
