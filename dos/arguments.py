"""Numbers that users pass: accepted where their meaning is clear, as from numpy or as 4e9, else refused by name."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

LEAST_FLOAT_COUNT = 1024
"""A whole float from here on is a count where a float may also be a share: below, it is more likely a percentage."""


def is_number(value: object) -> bool:
    """Return whether the value is a real number, also one of numpy's, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_whole(number: Any) -> bool:
    return isinstance(number, numbers.Integral) or (math.isfinite(number) and number == math.floor(number))


def whole_number(value: Any, what: str, unit: str, *, least: int = 0) -> int:
    """Return a count as an int: of an int, or of a float without a fraction.

    what: the argument's name. unit: of the count, such as "bytes".
    Raises TypeError for anything but a number, ValueError for one below `least` or with a fraction.
    """
    hint = " (4 GiB are 4 * 2**30)" if unit == "bytes" else ""
    if not is_number(value):
        raise TypeError(f"{what} must be a whole number of {unit}{hint}, found {value!r}")
    if not _is_whole(value) or value < least:
        raise ValueError(f"{what} must be a whole number of {unit}{hint}, {least} or more; found {value!r}")
    return int(value)


def share_or_count(value: Any, least_float: float = LEAST_FLOAT_COUNT) -> float | int | None:
    """Return a share from 0 to 1 as a float, or a count of 0 or more as an int; None if the number is neither.

    value: a number. An int is a count, 1 included; so is a float from `least_float` on that has no fraction.
    """
    if isinstance(value, int | np.integer):
        return int(value) if value >= 0 else None
    if 0 <= value <= 1:
        return float(value)
    return int(value) if value >= least_float and _is_whole(value) else None


def flag(value: object, what: str) -> bool:
    """Return True or False: of a bool, also numpy's, or of 1 or 0. Raises TypeError for anything else."""
    if isinstance(value, numbers.Real | np.bool_) and value in (True, False):
        return bool(value)
    raise TypeError(f"{what} must be True or False, found {value!r}")


def given_bytes(value: Any, what: str) -> int:
    """Return bytes that a function of the user has given. what: the argument whose function it is.

    Raises TypeError for anything but a number, ValueError for one below 0 or infinite.
    """
    if not is_number(value):
        raise TypeError(f"{what}: the function must give bytes as an int, found {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{what}: the function must give 0 or more bytes, found {value}")
    if 0 < value < 1:
        raise ValueError(
            f"{what}: the function must give bytes, found {value}; multiply a share by the device's memory"
        )
    return int(value)
