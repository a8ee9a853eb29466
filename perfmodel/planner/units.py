"""Sizes, counts and times as people write them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

LARGEST = 1e18
"""Larger counts and sizes are mistakes."""
FEWEST = 10_000
"""Parameters of a model that a user can mean; of fewer the unit was left out."""

_BYTES = {"": 1.0, "B": 1.0} | {
    f"{prefix}{suffix}": float(base**power)
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}
_RATES = {
    f"{prefix}{kind}{per}": 1000.0**power / bits
    for power, prefix in enumerate("MGT", start=2)
    for kind, bits in (("b", 8), ("bit", 8), ("B", 1))
    for per in ("", "ps", "/s")
}
"""Bandwidths by unit, in bytes per second: networks are sold in bits, links in bytes."""
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30}
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z/%]*)", re.IGNORECASE)

_SIZES = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}
_SPEEDS = {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6}
_NUMBERS = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


class UnitError(argparse.ArgumentTypeError, ValueError):
    """A text that is no such quantity. argparse shows its message as it is."""


def parse_bytes(text: str) -> int:
    """The bytes that `24GiB`, `80 GB`, `1.5TiB` or `25769803776` mean; 1 GB is 1000**3, 1 GiB 1024**3.

    Raises ValueError for anything else, and for sizes that are not positive.
    """
    value = _quantity(text, _BYTES, "a size such as 24GiB, of 1 byte or more (and 1e+18 at most)", upper=True)
    if value < 2**20 and text.strip()[-1] in "0123456789.":
        raise UnitError(f"{text} would be {value:g} bytes; write the unit, such as {text.strip()}GB")
    return round(value)


def parse_bytes_or_0(text: str) -> int:
    """Bytes as `parse_bytes` reads them, but `0` is a size, too."""
    return 0 if text.strip() == "0" else parse_bytes(text)


class Memory(NamedTuple):
    """A size of memory. text: as it was written. nominal: whether that is how data sheets write it."""

    text: str
    nbytes: int
    nominal: bool


def parse_memory(text: str) -> Memory:
    """Memory as `parse_bytes` reads it, but `24GB` is 24 * 1024**3 bytes, as on data sheets and memory modules.

    So is `24` without a unit: memory of some bytes does not exist. Raises ValueError as `parse_bytes` does, and for
    less than 1 GiB, which no GPU and no host has.
    """
    text = text.strip()
    if (match := _NUMBER.fullmatch(text)) and not match[2] and 1 <= float(match[1]) < 2**20:
        text += "GB"
    nominal = text[-2:].upper() in ("KB", "MB", "GB", "TB")
    nbytes = parse_bytes(f"{text[:-1]}iB" if nominal else text)
    if nbytes < 2**30:
        meant = re.sub("[KM](?=i?B$)", "G", text, flags=re.IGNORECASE)
        raise UnitError(f"expected 1GB or more, found {text!r}" + (meant != text) * f"; did you mean {meant}?")
    return Memory(text, nbytes, nominal)


def parse_count(text: str) -> int:
    """The whole number that `7e9`, `7B`, `350M`, `64Mi` or `7000000000` mean.

    Raises ValueError for anything else, and for numbers below 1.
    """
    return round(_quantity(text, _COUNTS, "a number such as 7e9, 7B or 350M, of 1 or more (and 1e+18 at most)", True))


def parse_parameters(text: str) -> int:
    """Parameters of a model as `parse_count` reads them. Raises ValueError for fewer than FEWEST, too."""
    count = parse_count(text)
    if count < FEWEST:
        number = text.strip().rstrip("kKiI")
        meant = f"did you mean {number}B, or {number}M?"
        raise UnitError(f"expected {FEWEST:,} parameters or more, found {text!r}; {meant}")
    return count


def parse_rate(text: str) -> float:
    """The bytes per second that `400Gb` (bits), `50GB` (bytes), `400Gbps` or `50 GB/s` mean.

    Raises ValueError for anything else, and for rates below a megabit.
    """
    return _quantity(text, _RATES, "a bandwidth per second such as 400Gb (bits) or 50GB (bytes)", least=1e6 / 8)


def parse_positive(text: str) -> float:
    """The number. Raises ValueError for anything else, and for numbers below 1e-6 or above 1e9."""
    return _quantity(text, {"": 1.0}, "a number above 0 (1e-6 to 1e9)", least=1e-6, most=1e9)


def parse_share(text: str) -> float:
    """The share that `0.4` or `40%` mean. Raises ValueError for anything else, and for shares below 1e-6 or above 1."""
    return _quantity(text, {"": 1.0, "%": 0.01}, "a share such as 0.4 or 40%, above 0 and up to 1", least=1e-6, most=1)


def parse_offloaded(text: str) -> float | str:
    """Share of the saved tensors that moves to the host: `none`, `auto`, or a share from 0 to 1."""
    if text in ("none", "0"):
        return 0.0
    return text if text == "auto" else parse_share(text)


def in_gib(nbytes: int) -> str:
    """Whole GiB as memory is sold, and `parse_memory` reads it: `128GB`."""
    return f"{nbytes >> 30}GB"


def in_tb(nbytes: int) -> str:
    """Whole TB as drives are sold: `2TB`."""
    return f"{nbytes // 10**12}TB"


def format_bytes(nbytes: float) -> str:
    """Write bytes with a binary prefix: `24.0 GiB`."""
    value, unit = _in_unit(nbytes, _SIZES)
    return f"{value:.{0 if unit == 'B' else 1}f} {unit}"


def format_rate(rate: float) -> str:
    """Write a rate with three digits, in decimal units as data sheets have them: `450 GB/s`."""
    value, unit = _in_unit(rate, _SPEEDS)
    return f"{value:.3g} {unit}"


def format_tflops(rate: float) -> str:
    """Write FLOP/s as data sheets do: `63.9 TFLOP/s`, `1,350 TFLOP/s`."""
    value = rate / 1e12
    return f"{value:,.0f} TFLOP/s" if value >= 999.5 else f"{value:.3g} TFLOP/s"


def format_count(count: float) -> str:
    """Write a count with three digits and a suffix: `6.74B`."""
    value, unit = _in_unit(count, _NUMBERS)
    return f"{value:.3g}{unit}"


def format_seconds(seconds: float) -> str:
    """Write seconds with three digits: `1.23 s`, `45.6 ms`."""
    if seconds == 0:
        return "0 s"
    value, unit = _in_unit(seconds, _TIMES)
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:#.3g}".rstrip(".") + f" {unit}"


def _quantity(
    text: str, units: Mapping[str, float], expected: str, upper: bool = False, least: float = 1.0, most: float = LARGEST
) -> float:
    """The number and its unit multiplied. upper: whether units are in upper case, however they are written."""
    match = _NUMBER.fullmatch(text.strip())
    value = float(match[1]) * units.get(match[2].upper() if upper else match[2], math.nan) if match else math.nan
    if not least <= value <= most:
        raise UnitError(f"expected {expected}, found {text!r}")
    return value


def _in_unit(value: float, units: Mapping[str, float]) -> tuple[float, str]:
    """The value in the largest unit of which it is at least about one; in the last one if it is less than that."""
    unit = next((unit for unit, size in units.items() if abs(value) >= 0.9995 * size), [*units][-1])
    return value / units[unit], unit
