"""Plans for the update of subgroups, and reports of them."""
