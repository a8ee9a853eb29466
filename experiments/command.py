"""What the experiments' command lines share."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, without the usage, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    """A whole number of 1 or more, for `type=`."""
    value = int(text) if text.lstrip("+-").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return value
