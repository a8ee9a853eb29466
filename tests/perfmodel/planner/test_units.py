"""Sizes, counts and times as people write and read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perfmodel.planner.units import (
    Memory,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_memory,
    parse_rate,
)

READ: dict[Callable[[str], Any], dict[str, Any]] = {
    parse_bytes: {
        "24GiB": 24 * 2**30, "80 GB": 80 * 10**9, "1.5TiB": 3 * 2**39, "1tb": 10**12, "3KB": 3000, "7KiB": 7168,
        "25769803776": 25769803776, "10B": 10, "1e9": 10**9,
    },
    parse_rate: {
        "400Gb": 50e9, "400 Gbit/s": 50e9, "400Gbps": 50e9, "50GB": 50e9, "1.5 TB/s": 1.5e12, "100Mb": 12.5e6,
    },
    parse_count: {"7e9": 7 * 10**9, "7B": 7 * 10**9, "350M": 350_000_000, "1.3b": 13 * 10**8, "64Mi": 64 * 2**20},
    parse_memory: {
        "24GB": Memory("24GB", 24 * 2**30, True),  # as data sheets write it
        "0.5 tb": Memory("0.5 tb", 2**39, True),
        "24GiB": Memory("24GiB", 24 * 2**30, False),
        "24e9": Memory("24e9", 24 * 10**9, False),
    },
}  # fmt: skip
REFUSED: dict[Callable[[str], Any], tuple[str, tuple[str, ...]]] = {
    parse_bytes: ("a size", ("24GiBs", "GiB", "", "-1GiB", "0", "nan", "inf", "1e400", "24 G", "24,5GiB", "0.1B")),
    parse_rate: (
        "a bandwidth per second",
        ("400", "400gb", "GB", "", "-1GB", "0Gb", "nan", "50GiB", "50GB/h", "1e99GB", "0.1Mb"),
    ),
    parse_count: ("a number", ("0", "-7e9", "seven", "7GB", "nan", "0.4")),
    parse_memory: (r"a size such as 24GiB.*found '24GBs'", ("24GBs",)),
}
WRITTEN: dict[Callable[[float], str], dict[float, str]] = {
    format_bytes: {0: "0 B", 1024: "1.0 KiB", 2**20: "1.0 MiB", 1.5 * 2**30: "1.5 GiB", 2**40: "1.0 TiB"},
    format_rate: {50e9: "50 GB/s", 12.5e6: "12.5 MB/s", 999.9e6: "1 GB/s", 2.5e12: "2.5 TB/s"},
    format_count: {999: "999", 6.738e9: "6.74B", 124_439_808: "124M"},
    format_seconds: {
        0.0: "0 s", 1.8: "1.80 s", 0.0456: "45.6 ms", 3e-6: "3.00 us", 1234.0: "1,234 s", 0.919: "919 ms",
    },
}  # fmt: skip


@pytest.mark.parametrize("parse", READ, ids=lambda parse: parse.__name__)
def test_quantities_are_read_and_anything_else_is_refused(parse: Callable[[str], Any]) -> None:
    assert {text: parse(text) for text in READ[parse]} == READ[parse]
    expected, texts = REFUSED[parse]
    for text in texts:
        with pytest.raises(ValueError, match=f"expected {expected}"):
            parse(text)


@pytest.mark.parametrize("write", WRITTEN, ids=lambda write: write.__name__)
def test_quantities_are_written(write: Callable[[float], str]) -> None:
    assert {value: write(value) for value in WRITTEN[write]} == WRITTEN[write]
