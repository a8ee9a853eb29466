"""Sizes, counts and times as people write and read them."""

from __future__ import annotations

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

SIZES = {
    "24GiB": 24 * 2**30,
    "80 GB": 80 * 10**9,
    "1.5TiB": 3 * 2**39,
    "1tb": 10**12,
    "3KB": 3000,
    "7KiB": 7168,
    "25769803776": 25769803776,
    "10B": 10,
    "1e9": 10**9,
}
RATES = {"400Gb": 50e9, "400 Gbit/s": 50e9, "400Gbps": 50e9, "50GB": 50e9, "1.5 TB/s": 1.5e12, "100Mb": 12.5e6}
NO_SIZES = ("24GiBs", "GiB", "", "-1GiB", "0", "nan", "inf", "1e400", "24 G", "24,5GiB", "0.1B")
NO_RATES = ("400", "400gb", "GB", "", "-1GB", "0Gb", "nan", "50GiB", "50GB/h", "1e99GB", "0.1Mb")


def test_sizes_and_bandwidths() -> None:
    assert {text: parse_bytes(text) for text in SIZES} == SIZES
    assert {text: parse_rate(text) for text in RATES} == pytest.approx(RATES)
    assert [format_rate(r) for r in (50e9, 12.5e6, 999.9e6, 2.5e12)] == ["50 GB/s", "12.5 MB/s", "1 GB/s", "2.5 TB/s"]


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", NO_RATES)
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(ValueError, match="expected a bandwidth per second"):
        parse_rate(text)


def test_memory_as_data_sheets_write_it() -> None:
    for text, nbytes, nominal in (
        ("24GB", 24 * 2**30, True),
        ("0.5 tb", 2**39, True),
        ("24GiB", 24 * 2**30, False),
        ("24e9", 24 * 10**9, False),
    ):
        assert parse_memory(text) == Memory(text, nbytes, nominal)
    with pytest.raises(ValueError, match=r"expected a size such as 24GiB.*found '24GBs'"):
        parse_memory("24GBs")


def test_counts_and_how_figures_are_written() -> None:
    assert [parse_count(t) for t in ("7e9", "7B", "350M", "1.3b", "12", "64Mi")] == [
        7 * 10**9,
        7 * 10**9,
        350_000_000,
        13 * 10**8,
        12,
        64 * 2**20,
    ]
    for text in ("0", "-7e9", "seven", "7GB", "nan", "0.4"):
        with pytest.raises(ValueError, match="expected a number"):
            parse_count(text)
    assert [format_bytes(n) for n in (0, 1024, 2**20, 1.5 * 2**30, 2**40)] == [
        "0 B",
        "1.0 KiB",
        "1.0 MiB",
        "1.5 GiB",
        "1.0 TiB",
    ]
    assert [format_count(n) for n in (999, 6.738e9, 124_439_808)] == ["999", "6.74B", "124M"]
    found = [format_seconds(s) for s in (0.0, 1.8, 0.0456, 3e-6, 1234.0, 0.919)]
    assert found == ["0 s", "1.80 s", "45.6 ms", "3.00 us", "1,234 s", "919 ms"]
