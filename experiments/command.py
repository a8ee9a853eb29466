"""What the experiments' command lines share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn


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
