"""Sizes, counts and times as people write them."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass

LARGEST = 1e18
"""Larger counts and sizes are mistakes."""

_BYTES = {"": 1, "B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("KMGT", start=1)
    for binary in ("", "i")
}
_RATES = {
    f"{prefix}{kind}": 1000.0**power / bits
    for power, prefix in enumerate("MGT", start=2)
    for kind, bits in (("b", 8), ("bit", 8), ("B", 1))
}
"""Bandwidths by unit, in bytes per second: networks are sold in bits, links in bytes."""
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30}
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)", re.IGNORECASE)


class UnitError(argparse.ArgumentTypeError, ValueError):
    """A text that is no such quantity. argparse shows its message as it is."""


def parse_bytes(text: str) -> int:
    """The bytes that `24GiB`, `80 GB`, `1.5TiB` or `25769803776` mean; 1 GB is 1000**3, 1 GiB 1024**3.

    Raises ValueError for anything else, and for sizes that are not positive.
    """
    number, unit = _split(text)
    units = {name.upper(): size for name, size in _BYTES.items()}
    if unit.upper() not in units:
        raise UnitError(f"expected a size such as 24GiB, in {', '.join(filter(None, _BYTES))}, found {text!r}")
    value = number * units[unit.upper()]
    if not 1 <= value <= LARGEST:
        raise UnitError(f"expected a size of 1 byte or more (and {LARGEST:.0e} at most), found {text!r}")
    if not unit and value < 2**20:
        raise UnitError(f"{text} would be {value:g} bytes; write the unit, such as {text.strip()}GB")
    return round(value)


def parse_bytes_or_0(text: str) -> int:
    """As `parse_bytes`, but `0` is a size, too."""
    return 0 if text.strip() == "0" else parse_bytes(text)


@dataclass(frozen=True)
class Memory:
    """A size of memory. text: as it was written. nominal: whether that is how data sheets write it."""

    text: str
    nbytes: int
    nominal: bool


def parse_memory(text: str) -> Memory:
    """As `parse_bytes`, but `24GB` is what data sheets and memory modules mean by it: 24 * 1024**3 bytes.

    So is `24` without a unit: memory of some bytes does not exist. Raises ValueError as `parse_bytes` does.
    """
    number, unit = _split(text)
    if not unit and 1 <= number < 2**20:
        text, unit = f"{text.strip()}GB", "GB"
    nbytes = parse_bytes(text)
    nominal = unit.upper() in ("KB", "MB", "GB", "TB")
    if nominal:
        nbytes = round(number * _BYTES[f"{unit[0].upper()}iB"])
    return Memory(text.strip(), nbytes, nominal)


def parse_count(text: str) -> int:
    """The whole number that `7e9`, `7B`, `350M`, `64Mi` or `7000000000` mean.

    Raises ValueError for anything else, and for numbers below 1.
    """
    number, unit = _split(text)
    if unit.upper() not in _COUNTS:
        raise UnitError(f"expected a number such as 7e9, 7B or 350M, found {text!r}")
    value = number * _COUNTS[unit.upper()]
    if not 1 <= value <= LARGEST:
        raise UnitError(f"expected a number of 1 or more (and {LARGEST:.0e} at most), found {text!r}")
    return round(value)


def parse_rate(text: str) -> float:
    """The bytes per second that `400Gb` (bits), `50GB` (bytes), `400Gbps` or `50 GB/s` mean.

    Raises ValueError for anything else, and for rates below a megabit.
    """
    number, unit = _split(text.strip().removesuffix("/s").removesuffix("ps"))
    value = number * _RATES.get(unit, math.nan)
    if not 1e6 / 8 <= value <= LARGEST:
        raise UnitError(f"expected a bandwidth per second such as 400Gb (bits) or 50GB (bytes), found {text!r}")
    return value


def parse_positive(text: str) -> float:
    """The number. Raises ValueError for anything else, and for what is not from 1e-6 to 1e9."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1e-6 <= value <= 1e9:
        raise UnitError(f"expected a number above 0 (1e-6 to 1e9), found {text!r}")
    return value


def parse_share(text: str) -> float:
    """As `parse_positive`, and no more than 1."""
    value = parse_positive(text)
    if value > 1:
        raise UnitError(f"expected a number in (0, 1], found {text!r}")
    return value


def parse_offloaded(text: str) -> float | str:
    """What leaves: `none`, `auto`, or a share from 0 to 1."""
    if text in ("none", "0"):
        return 0.0
    return text if text == "auto" else parse_share(text)


def format_bytes(nbytes: float) -> str:
    """With a binary prefix: `24.0 GiB`."""
    for power, prefix in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")):
        if abs(nbytes) >= 0.9995 * 1024**power:
            return f"{nbytes / 1024**power:.1f} {prefix}B"
    return f"{nbytes:.0f} B"


def format_rate(rate: float) -> str:
    """Three digits, in decimal units as data sheets have them: `450 GB/s`."""
    scale, unit = (1e9, "GB/s") if rate >= 0.9995e9 else (1e6, "MB/s")
    return f"{rate / scale:.3g} {unit}" if rate < 0.9995e12 else f"{rate / 1e12:.3g} TB/s"


def format_count(count: float) -> str:
    """Three digits and a suffix: `6.74B`."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * scale:
            return f"{count / scale:.3g}{suffix}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Three digits: `1.23 s`, `45.6 ms`."""
    if seconds == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * scale or unit == "us":
            value = seconds / scale
            return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:#.3g}".rstrip(".") + f" {unit}"
    raise AssertionError("the last unit takes any time")


def _split(text: str) -> tuple[float, str]:
    """The number and its unit; not a number with no unit if there is none."""
    match = _NUMBER.fullmatch(text.strip())
    return (float(match[1]), match[2]) if match else (math.nan, text if text.strip() else "?")
