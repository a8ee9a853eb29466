"""Which crossings of two axes `make test` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def crossed(rows: Iterable[Any], columns: Iterable[Any], every: int = 2) -> list[Any]:
    """Return all crossings as parameters of a test: one of so many is quick, the others are slow.

    Each row and each column has quick ones, as the fields of one colour of a chessboard. A value that is a tuple
    stands for several parameters.
    """
    columns = list(columns)
    return [
        pytest.param(*_several(row), *_several(column), marks=[pytest.mark.slow] if (i + j) % every else ())
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
