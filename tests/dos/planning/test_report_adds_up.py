"""What explain() and metrics() say of one step adds up, whatever was waited for and wherever state is."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dos import DOSAdam, EmulatedDevice
from dos.devices import Memory
from dos.planning.reading import Reading, Source
from dos.planning.report import Report
from dos.step.iteration import Iteration, Wait
from perfmodel import Lane, Op, Placement, Plan, Span, Timeline, Workload
from tests.support.blocks import WIDE, loss, net
from tests.support.training import FAST, profile

ROUNDED = 0.11
"""Milliseconds by which a sum of two rounded figures may differ from a third."""


class At(NamedTuple):
    seconds: float | None

    def at(self) -> float | None:
        return self.seconds


def milliseconds(pattern: str, text: str) -> float | None:
    found = re.search(pattern.replace("MS", r"(-?[\d.]+) ms"), text)
    return None if found is None else float(found[1])


def assert_adds_up(text: str, metrics: dict[str, float]) -> None:
    assert all(math.isfinite(value) and value >= 0 for value in metrics.values())
    for name, value in metrics.items():
        if name.startswith("share") or name in ("efficiency", "activation_share"):
            assert value <= 1 + 1e-9, name
    assert metrics["waited_s"] <= min(metrics["update_s"], metrics["exposed_s"]) + 1e-9
    assert metrics["memory_free_bytes"] <= metrics["memory_total_bytes"]
    assert "-" not in re.findall(r"Measured: (.*)", text)[0].replace("from step()", "")
    update, waited = milliseconds("Measured: MS", text), milliseconds("the caller waited MS", text)
    assert update is not None
    assert waited is not None
    assert waited <= update
    outside = milliseconds("and MS outside of it", text) or 0.0
    assert waited + outside == pytest.approx(1e3 * metrics["exposed_s"], abs=ROUNDED)
    room = re.search(r"room for ([\d.]+) (\w+) of ([\d.]+) (\w+) of optimizer state", text)
    if room and room[2] == room[4]:
        assert float(room[1]) <= float(room[3])
    if "predicted_s" in metrics and "bound_s" in metrics:
        assert metrics["bound_s"] <= 1.001 * metrics["predicted_s"] + 1e-6
    if "efficiency" in metrics and metrics["compute_s"] + metrics["exposed_s"]:
        ratio = (metrics["compute_s"] + metrics["bound_s"]) / (metrics["compute_s"] + metrics["exposed_s"])
        assert metrics["efficiency"] == pytest.approx(ratio, rel=0.01)


moments = st.floats(-2, 5)
spans = st.tuples(moments, st.floats(0, 3), st.sampled_from((Lane.CPU, Lane.D2H, Lane.H2D)))


@settings(max_examples=80)
@given(
    st.lists(st.tuples(moments, st.floats(0, 3)), max_size=6),
    st.lists(spans, max_size=4),
    st.lists(st.sampled_from((Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT)), min_size=1, max_size=5),
    st.integers(0, 10**8),
    st.floats(0, 3),
)
def test_any_report_adds_up(
    waits: list[tuple[float, float]],
    ran: list[tuple[float, float, Lane]],
    placements: list[Placement],
    free: int,
    backward_s: float,
) -> None:
    """Waits at any times, before step() too, that overlap each other; transfers that ended before step()."""
    workload = Workload.of_sizes([10**6] * len(placements), peak_free_bytes=free, shared_free_bytes=free)
    workload = dataclasses.replace(workload, backward_s=backward_s)
    plan = Plan(tuple(placements), tuple(range(len(placements))), int(Placement.GPU_STREAMED in placements))
    iteration = Iteration(EmulatedDevice(FAST, 1))
    origin = 100.0
    iteration.waits += [Wait(At(origin + at), At(origin + at + length)) for at, length in waits]
    measured = Timeline.of(Span(lane, Op.UPDATE, 0, at, at + length) for at, length, lane in ran)
    reading = Reading(Memory(free, free), Source.DEVICE)
    # A policy with a profile makes no plan for which there is no memory; others may ask for one.
    machine = profile(cpu_update_rate=1e6) if set(placements) == {Placement.CPU} else None
    report = Report(iteration, plan, workload, machine, measured, origin, reading, 10**9, 0, 0, "", real=False)
    assert_adds_up(str(report), report.metrics())


ON_DISK: dict[str, Any] = {"disk": "state", "policy": "cpu", "subgroup_size": 2048}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cpu": {"policy": "cpu"},
    "resident": {"policy": "resident"},
    "streamed": {"policy": "stride:1"},
    "attached": {"attach": {}},
    "offload": {"offload_gradients": True},
    "offload, attached": {"offload_gradients": True, "attach": {}},
    "activations": {"attach": {"activations": 1.0}},
    "disk": {**ON_DISK, "host_memory": 200_000, "attach": {}},
    **{f"weights={n}": {"offload_gradients": True, "attach": {"weights": n}} for n in (0, 2, 99, "auto")},
    "weights=0, disk": {**ON_DISK, "host_memory": 500_000, "offload_gradients": True, "attach": {"weights": 0}},
    "int8": {"state_format": "int8", "attach": {}},
    "in backward": {"policy": "cpu", "attach": {"updates": "backward"}},
    "in backward, offload": {"policy": "cpu", "offload_gradients": True, "attach": {"updates": "backward"}},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("one_core")
def test_a_report_of_a_step_adds_up(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {**MODES[mode]}
    attach = options.pop("attach", None)
    monkeypatch.setattr("dos.rules.adamw.LEAST_CODED", 128)
    model = net(width=WIDE if "disk" in mode else 16)
    numel = sum(p.numel() for p in model.parameters())
    device = EmulatedDevice(FAST.scaled(1e-4), capacity=40 * numel)
    optimizer = DOSAdam(model.parameters(), device=device, **{"subgroup_size": numel // 5, **options})
    if attach is not None:
        optimizer.attach(model, **attach)
    for step in range(4):
        for last in (False, True):
            with contextlib.nullcontext() if last else optimizer.no_update():
                loss(model, step).backward()
        if step:
            assert_adds_up(optimizer.explain(), optimizer.metrics())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert_adds_up(optimizer.explain(), optimizer.metrics())
    assert ("% int8" in optimizer.explain()) == (mode == "int8")
    assert (optimizer.metrics().get("disk_held_bytes", 0) > 0) == ("disk" in mode)


def test_waits_that_overlap_count_once_and_only_those_of_the_update_are_said_to_be_of_it() -> None:
    iteration = Iteration(EmulatedDevice(FAST, 1))
    iteration.waits += [
        Wait(At(0.0), At(2.0)),
        Wait(At(1.0), At(3.0)),
        Wait(At(5.0), At(6.0)),
        Wait(At(None), At(None)),
    ]
    assert iteration.exposed_s == 4.0
    assert iteration.waited_s(2.5, 5.5) == 1.0
