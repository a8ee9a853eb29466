"""Profiles: validation, the JSON format, the built-in machines."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from perfmodel.hardware import RATES, HardwareProfile, Provenance, ThreadRates, builtin_profiles

H100 = HardwareProfile.builtin("h100")


def test_save_and_load_give_the_same_profile(tmp_path: Path) -> None:
    profile = dataclasses.replace(H100, host_bandwidth=math.inf, cpu_threads=8)
    profile.save(tmp_path / "p.json")
    assert HardwareProfile.load(tmp_path / "p.json") == profile
    assert json.loads((tmp_path / "p.json").read_text())["host_bandwidth"] is None


def test_defaults_may_be_left_out_of_a_file() -> None:
    values = H100.to_json()
    del values["ranks_per_host"], values["copy_latency_s"]
    assert HardwareProfile.from_json(values) == dataclasses.replace(H100, ranks_per_host=1, copy_latency_s=10e-6)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 10**400, math.nan, "fast", None, True])
def test_rates_must_be_positive_numbers(rate: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"profile 'h100': {rate} must be a positive number"):
        dataclasses.replace(H100, **{rate: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("copy_latency_s", -1e-6),
        ("launch_latency_s", math.inf),
        ("ranks_per_host", 0),
        ("cpu_threads", -1),
        ("h2d_bandwidth", math.inf),  # only that of the host may be
    ],
)
def test_other_figures_that_no_machine_has(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(H100, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, this program reads version 1; measure again"),
        ({"version": None}, "version None"),
        ({"warp_drive": 1.0}, "unknown warp_drive"),
        ({"host_bandwidth": 10**400}, "host_bandwidth must be a positive number"),
        ({"cpu_speed_split": 1e-300}, "cpu_speed_split"),
        ({"copy_latency_s": 10**400}, "copy_latency_s must be a number from 0"),
        ({"ranks_per_host": 10**400}, "ranks_per_host must be a whole number from 1"),
        ({"cpu_threads": True}, "cpu_threads must be a whole number"),
        ({"name": []}, "name must be a text"),
        ({"provenance": {"source": []}}, "source must be one of"),
        ({"provenance": {"source": "measured", "machine": 5}}, "machine must be a text"),
        ({"provenance": {"source": "hearsay"}}, "measured, fitted, data sheet, found 'hearsay'"),
        ({"provenance": {"who": "me"}}, "bad provenance"),
        ({"h2d_bandwidth": -1}, r"h2d_bandwidth must be a positive number from 1e-30 to 1e\+30, found -1"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**H100.to_json(), **change}))
    with pytest.raises(ValueError, match=message) as error:
        HardwareProfile.load(path)
    assert str(path) in str(error.value)


def test_files_with_rates_of_earlier_versions_load() -> None:
    assert HardwareProfile.from_json({**H100.to_json(), "cast_rate": 1e9, "gpu_bandwidth": 1e12}) == H100


def test_missing_rates_and_files_that_are_no_profile(tmp_path: Path) -> None:
    values = H100.to_json()
    del values["cpu_update_rate"]
    with pytest.raises(ValueError, match="missing cpu_update_rate"):
        HardwareProfile.from_json(values)
    with pytest.raises(ValueError, match="a JSON object, found list"):
        HardwareProfile.from_json([1])
    for text, message in ((b'{"version": 1, ', ""), (b"[" * 10**5, ".*recursion"), (b"\xff\xfe{", "")):
        (tmp_path / "bad.json").write_bytes(text)
        with pytest.raises(ValueError, match=rf"bad\.json{message}"):
            HardwareProfile.load(tmp_path / "bad.json")
    with pytest.raises(FileNotFoundError):
        HardwareProfile.load(tmp_path / "none.json")


def test_builtin_machines() -> None:
    profiles = builtin_profiles()
    fitted = {name for name, p in profiles.items() if p.provenance.source == "fitted"}
    assert fitted == {"h100", "a100_bound", "a100_unbound"}
    assert {p.provenance.source for n, p in profiles.items() if n not in fitted} == {"data sheet"}
    assert all(p.provenance.machine for p in profiles.values())
    assert "unknown" in profiles
    with pytest.raises(ValueError, match="no built-in hardware profile 'abacus'; there are a100_bound"):
        HardwareProfile.builtin("abacus")


def test_ranks_share_the_host_and_scaling_keeps_proportions() -> None:
    assert H100.host_bandwidth_per_rank == H100.host_bandwidth / 4
    half = H100.scaled(0.5)
    assert (half.host_bandwidth, half.h2d_bandwidth) == (H100.host_bandwidth / 2, H100.h2d_bandwidth / 2)
    assert (half.disk_read_bandwidth, half.disk_latency_s) == (H100.disk_read_bandwidth / 2, H100.disk_latency_s)
    assert half.disk_write_bandwidth_duplex == H100.disk_write_bandwidth_duplex / 2
    assert (half.copy_latency_s, half.cpu_traffic_factor) == (H100.copy_latency_s, H100.cpu_traffic_factor)
    assert Provenance("measured").date == ""


def test_infinite_bandwidth_is_null_in_plain_json_by_threads_too() -> None:
    profile = HardwareProfile.builtin("h100")
    rates = ThreadRates(4, 1e9, math.inf, 0.7, 1.0)
    profile = dataclasses.replace(profile, host_bandwidth=math.inf, by_threads=(rates,))
    text = json.dumps(profile.to_json(), allow_nan=False)
    assert HardwareProfile.from_json(json.loads(text)) == profile


def by_threads(slowdown: float | None = None) -> HardwareProfile:
    """A machine of up to 12 threads. slowdown: as measured."""
    some = ((2, 2e9, 20e9), (4, 3e9, 30e9), (8, 5e9, 40e9), (12, 6e9, 44e9))
    rates = tuple(ThreadRates(n, rate, host, 1.0, n / 2, slowdown) for n, rate, host in some)
    return HardwareProfile.builtin("h100").replace(cpu_threads=12, cpu_update_rate=6e9, by_threads=rates)


def test_between_two_numbers_of_threads_rates_are_between() -> None:
    found = by_threads().with_threads(10)
    assert (found.cpu_threads, found.cpu_update_rate, found.host_bandwidth) == (10, 5.5e9, 42e9)
    assert (found.d2h_weight, found.slowdown) == (5.0, pytest.approx(1.9))
    assert by_threads().with_threads(1).cpu_update_rate == 2e9
    assert by_threads().with_threads(0) == by_threads()


def test_what_updates_slow_the_host_by_is_what_was_measured() -> None:
    profile = by_threads(slowdown=1.5)
    assert profile.with_threads(10).slowdown == 1.5
    few, *others = profile.by_threads
    of_all = profile.replace(by_threads=(dataclasses.replace(few, host_slowdown=1.1), *others))
    assert of_all.with_threads(3).slowdown == pytest.approx(1.3)
    assert HardwareProfile.from_json(json.loads(json.dumps(of_all.to_json()))) == of_all


def test_a_corrected_rate_is_corrected_for_all_threads() -> None:
    found = by_threads().corrected(cpu_update_rate=3e9, h2d_bandwidth=7.0)
    assert [each.cpu_update_rate for each in found.by_threads] == [1e9, 1.5e9, 2.5e9, 3e9]
    assert (found.h2d_bandwidth, found.with_threads(8).cpu_update_rate) == (7.0, 2.5e9)
    assert found.by_threads[0].host_bandwidth == 20e9
