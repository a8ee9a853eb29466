"""How the planner's tables look."""

from __future__ import annotations

from rich import box
from rich.table import Table


def new_table(title: str, *headings: str) -> Table:
    """A table whose columns but the first are numbers."""
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return table
