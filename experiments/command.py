"""What the experiments' command lines share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.table import Table


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, without the usage, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def add_count(self, name: str, default: int | None, what: str, *, formerly: str = "") -> None:
        """An option that is a whole number of 1 or more. formerly: what it was called, which still works."""
        shown = what if default is None else f"{what} ({default})"
        self.add_argument(f"--{name}", type=positive, default=default, help=shown)
        if formerly:
            suppressed = argparse.SUPPRESS
            self.add_argument(f"--{formerly}", dest=name, type=positive, default=suppressed, help=suppressed)

    def add_out(self, default: str | None, what: str = "folder for what is written", *, formerly: str = "") -> None:
        """The option `--out`. formerly: what it was called, which still works."""
        shown = f"{what} ({default})" if default else what
        self.add_argument("--out", type=Path, default=default and Path(default), help=shown)
        if formerly:
            self.add_argument(f"--{formerly}", dest="out", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def add_json(self) -> None:
        """The option `--json`."""
        self.add_argument("--json", action="store_true", help="end with one line of JSON")


def positive(text: str) -> int:
    """A whole number of 1 or more, for `type=`."""
    value = int(text) if text.lstrip("+-").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return value


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Table:
    """For people; all columns but the first `left` are aligned to the right."""
    found = Table(title=title)
    for position, heading in enumerate(headings):
        found.add_column(heading, justify="left" if position < left else "right")
    for row in rows:
        found.add_row(*row)
    return found


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table as Markdown, the first line its heading, numbers to the right."""
    heading, *rest = lines
    rule = ["---", *("---:" for _ in heading[1:])]
    rows = (f"| {' | '.join(cells)} |" for cells in (heading, rule, *rest))
    return "\n".join(row.replace("\n", "<br>") for row in rows)


def seconds(*values: float | None, digits: int = 3) -> list[str]:
    """Cells of a table; nothing for what is not known."""
    return ["" if value is None else f"{value:.{digits}f}" for value in values]
