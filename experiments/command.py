"""Options and tables that the experiments' commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.table import Table


class Parser(argparse.ArgumentParser):
    """The parser of a command of experiments, described by the first line of its module's docstring.

    It says what is wrong with the arguments in one line, without the usage, and exits with status 2.
    """

    def __init__(self, name: str, doc: str | None, *, json: bool = True, **settings: Any) -> None:
        """json: whether the command ends with a line of JSON if it is asked to."""
        super().__init__(f"python -m experiments.{name}", description=(doc or "").partition("\n")[0], **settings)
        if json:
            self.add_argument("--json", action="store_true", help="end with one line of JSON")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def add_count(self, name: str, default: int | None, what: str) -> None:
        """An option that is a whole number of 1 or more."""
        shown = what if default is None else f"{what} ({default})"
        self.add_argument(f"--{name}", type=positive, default=default, help=shown)

    def add_out(self, default: str | None, what: str = "folder for what is written") -> None:
        """The option `--out`."""
        shown = f"{what} ({default})" if default else what
        self.add_argument("--out", type=Path, default=default and Path(default), help=shown)


def positive(text: str) -> int:
    """A whole number of 1 or more, for `type=`."""
    value = int(text) if text.lstrip("+-").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return value


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Table:
    """A table for people; all columns but the first `left` are aligned to the right."""
    found = Table(title=title)
    for position, heading in enumerate(headings):
        found.add_column(heading, justify="left" if position < left else "right")
    for row in rows:
        found.add_row(*row)
    return found


def table_of(title: str, rows: Sequence[Mapping[str, Any]], *keys: str, left: int = 1) -> Table:
    """A table for people of an experiment's rows: the columns of these keys, or of all that rows have."""
    shown = keys or tuple(dict.fromkeys(key for row in rows for key in row))
    cells = ([cell(key, row.get(key)) for key in shown] for row in rows)
    return table(title, list(map(heading, shown)), cells, left=left)


def heading(key: str) -> str:
    """The heading of a key's column: without the unit, which its cells have or the title."""
    unit = "" if key.endswith("_per_s") else "_s"
    return key.removesuffix(unit).removesuffix("_bytes").removesuffix("_equal").replace("_", " ")


def cell(key: str, value: Any) -> str:
    """A value as tables show it, by its key: bits, bytes, shares and errors, other figures. None is empty."""
    if value is None or isinstance(value, str):
        return value or ""
    if key.endswith("_equal"):
        return "equal" if value else "DIFFERENT"
    if key.endswith("_bytes"):
        power, unit = (30, "GiB") if value >= 2**30 else (20, "MiB")
        return f"{value / 2**power:.2f} {unit}"
    if "share" in key or key.endswith("_error"):
        return f"{value:.1%}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table as Markdown, the first line its heading, numbers to the right."""
    heading, *rest = lines
    rule = ["---", *("---:" for _ in heading[1:])]
    rows = (f"| {' | '.join(cells)} |" for cells in (heading, rule, *rest))
    return "\n".join(row.replace("\n", "<br>") for row in rows)
