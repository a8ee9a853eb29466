"""The planner with a disk: state in three tiers, and the time that takes."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.format import STATE_FORMATS
from perfmodel.hardware import DISK_RATES
from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.question import Question
from perfmodel.planner.situation import HOST, Situation, disk_s
from perfmodel.planner.whatif import Effect, remedies
from perfmodel.policies import cpu_only, spilled
from perfmodel.windows import WINDOWS
from tests.support import planner
from tests.support.machines import machine
from tests.support.planner import answer, text

GIB, TB = 2**30, 10**12
DESKTOP = "--params 7e9 --machine rtx-4090 --checkpointing --no-accumulation --offload-gradients --subgroup-size 140M"
ON_DISK = f"{DESKTOP} --host 64GiB --disk 2TB --disk-write 4GB"


def question(**settings: Any) -> Question:
    """7B on a desktop whose host of 64 GiB is too small for its state."""
    small = {"accumulation": False, "offload_gradients": True, "host_bytes": 64 * GIB, "disk_bytes": 2 * TB}
    small["chosen_size"] = 140_000_000  # a search of 50 subgroups on three tiers takes a tenth of that of 128
    return planner.question(7e9, "rtx_4090_desktop", **{**small, **settings})


@given(
    st.integers(8, 200),
    st.sampled_from([None, *filter(None, STATE_FORMATS)]),
    st.booleans(),
    st.sampled_from([1, 4]),
    st.sampled_from([0, 2**24, 2**28]),
)
def test_three_tiers_have_all_state_and_none_has_more_than_its_room(
    host_gib: int, state_format: str | None, offload: bool, ranks: int, size: int
) -> None:
    asked = question(
        host_bytes=host_gib * GIB,
        state_format=state_format,
        ranks=ranks,
        fsdp=True,
        chosen_size=size,
        offload_gradients=offload,
    )
    situation = Situation(asked)
    without = Situation(asked.replace(disk_bytes=None))
    assert situation.host.state + situation.disk_per_rank == without.host.state == situation.state_bytes
    if HOST not in without.lacking:
        assert situation.disk_per_rank == 0
        assert math.isinf(situation.update_workload.host_free_bytes)
    elif HOST not in situation.lacking:
        work = situation.update_workload
        assert situation.host_needed <= asked.host_bytes - asked.reserved_on_host  # type: ignore[operator]
        held = situation.spill.window_bytes / WINDOWS
        assert asked.host_bytes - asked.reserved_on_host - situation.host_needed <= 2 * ranks * (held + WINDOWS)  # type: ignore[operator]
        on_disk = spilled(cpu_only(work), work).on_disk
        assert sum(work.subgroups[i].state_bytes for i in on_disk) <= situation.disk_per_rank


def test_state_that_fits_neither_host_nor_device_is_on_disk() -> None:
    assert HOST in Situation(question(disk_bytes=None)).lacking
    found, larger = answer(ON_DISK), Situation(question(host_bytes=96 * GIB))
    best, bound = found["policies"][-1], found["bound"]
    assert found["fits"]
    assert found["device"]["resident_state"] > 0
    assert 0 < found["disk"]["state"] < found["disk"]["per_rank"]
    assert bound["binding"].startswith("disk")
    assert bound["update_s"] <= best["update_s"]
    assert found["job"]["limit"] == "disk"
    plan = adaptive_outcome(larger).plan
    assert plan is not None
    assert sum(larger.update_workload.subgroups[i].state_bytes for i in plan.on_disk) < found["disk"]["state"]
    faster = answer(f"{ON_DISK.replace('4GB', '8GB')} --disk-read 6GB")["policies"][-1]
    assert faster["iteration_s"] < 0.7 * best["iteration_s"]


def test_ranks_of_a_node_share_its_disks() -> None:
    one = Situation(question(fsdp=True, chosen_size=0))
    four = Situation(question(fsdp=True, ranks=4, chosen_size=0))
    for rate in DISK_RATES:
        assert getattr(four.profile, rate) == getattr(one.profile, rate) / 4
    assert four.disk_per_rank < one.disk_per_rank / 3


def test_a_disk_that_is_too_small_and_a_host_that_is_too_small_for_windows(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{DESKTOP} --host 64GiB --disk 10GB"
    small, tiny = answer(line), Situation(question(host_bytes=20 * GIB))
    assert (small["host"]["fits"], small["disk"]["fits"], small["job"]["limit"]) == (True, False, "room on disk")
    found = [row["change"] for row in small["remedies"]]
    assert found == ["with --host 96GB", "with --disk 1TB", "with --state-format int8"]
    assert "DOES NOT FIT. State that does not fit on the host takes" in text(line, capsys)
    assert HOST in tiny.lacking
    assert tiny.disk_per_rank == tiny.state_bytes


def test_a_disk_is_proposed_where_host_memory_is_missing() -> None:
    found = {remedy.effect: remedy for remedy in remedies(Situation(question(disk_bytes=None)))}
    assert found[Effect.DISK].change == "with --disk 1TB"
    assert found[Effect.MACHINE].outcome.seconds < found[Effect.DISK].outcome.seconds


@pytest.mark.parametrize(("duplex", "seconds"), [(1.0, 10), (0.75, 4 + 10 - 0.5 * 4 / 0.75), (0.5, 14), (0.25, 14)])
def test_drives_read_and_write_in_turns_or_at_once(duplex: float, seconds: float) -> None:
    """4 s of reading and 10 of writing; at half its rate both at once gain nothing."""
    alone = {"disk_read_bandwidth": 12.0, "disk_write_bandwidth": 6.0}
    rates = alone | {f"{name}_duplex": duplex * rate for name, rate in alone.items()}
    assert disk_s(4.0, 10.0, machine(**rates)) == pytest.approx(seconds)


def test_json_has_the_disk() -> None:
    found = answer(ON_DISK)
    disk = found["disk"]
    assert disk["fits"]
    assert disk["available"] == 2 * TB
    assert found["machine"]["disk_write_bandwidth"] == 4e9
    assert found["machine"]["disk_write_bandwidth_duplex"] == 2e9
    assert answer("--params 1e8 --machine h100 --host 256GB --disk 2TB")["disk"]["per_rank"] == 0
    assert answer("--params 1e8 --machine h100")["disk"] is None


def test_the_text_names_the_places_of_state(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(text(ON_DISK, capsys).split())
    rests = r"The optimizer state takes [\d.]+ GiB on the GPU and [\d.]+ GiB on the host and [\d.]+ GiB on disk, as"
    assert re.search(rests, shown)
    assert re.search(r"Under any plan the update takes [\d.]+ s at least, limited by disk", shown)
    assert "read 3 GB/s and write 4 GB/s (--disk-read, --disk-write), at once 1.5 GB/s and 2 GB/s" in shown
