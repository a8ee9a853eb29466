"""Host memory as it is shared: by the model's own figures, and as an H100 shared it while it trained."""

from __future__ import annotations

import functools
import itertools
import json
import math
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dos.calibration.bench import BANDWIDTHS
from dos.calibration.rounds import Figure, Link, Rounds
from dos.calibration.sharing import shares
from perfmodel import Lane, Op, Placement, Plan, Workload
from perfmodel.format import SPLIT
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import CPU, D2H, H2D, LANES, lane_speeds
from perfmodel.scope import Scope
from perfmodel.simulate import simulate
from perfmodel.workload import SubgroupLoad
from tests.support.calibration import TINY

RESULTS = Path(__file__).parents[3] / "experiments" / "results" / "nvidia-h100-2026-11-28"
TRAFFIC, NUMEL, NBYTES = 28, 10**7, 10**8
NUMEL_OF_EACH = 36_073_796
"""Parameters of the subgroups that the H100 updated."""
Kept = dict[str, float]
"""Shares of its rate by lane, of CPU, H2D and D2H, of those that run at once."""
TOGETHER = ("CPU", "H2D"), ("CPU", "D2H"), ("CPU", "H2D", "D2H")
NUMBERS = {"CPU": CPU, "H2D": H2D, "D2H": D2H}
LANE = {Op.PREFETCH: "H2D", Op.FLUSH: "D2H"}


def model(profile: HardwareProfile, together: tuple[str, ...]) -> Kept:
    """Shares of the rates that each has without the CPU, or alone."""
    seconds = {lane: LANES[Lane(lane)].seconds(NUMEL if lane == "CPU" else NBYTES, profile) for lane in together}
    sizes = {lane: NUMEL * TRAFFIC if lane == "CPU" else NBYTES for lane in together}
    speeds = lane_speeds({NUMBERS[lane]: sizes[lane] / seconds[lane] for lane in together}, profile)
    links = [NUMBERS[lane] for lane in together if lane != "CPU"]
    without = lane_speeds(dict.fromkeys(links, 0.0), profile)
    return {lane: speeds[NUMBERS[lane]] / without[NUMBERS[lane]] for lane in together}


def fitted(profile: HardwareProfile, kept: dict[tuple[str, ...], Kept]) -> HardwareProfile:
    """The profile that calibration makes of these measurements."""
    link = Link(
        Rounds(TINY, lambda value: [value]), BANDWIDTHS, "copy_latency_s", "cpu_update_rate_beside", NBYTES, 1,
        lambda op, size: [],
    )  # fmt: skip
    names = [*BANDWIDTHS.values(), *(f"{name}_duplex" for name in BANDWIDTHS.values()), "copy_latency_s"]
    figures = {name: Figure(getattr(profile, name), 0.1) for name in names}
    figures["cpu_update_rate"] = Figure(NUMEL / LANES[Lane.CPU].seconds(NUMEL, profile), 0.1)
    for together, found in kept.items():
        ways = tuple(op for op in BANDWIDTHS if LANE[op] in together)
        of_update, *of_copies = link.names_beside(ways)
        figures[of_update] = Figure(figures["cpu_update_rate"].value * found["CPU"], 0.2)
        for name, op in zip(of_copies, ways, strict=True):
            figures[name] = Figure(link.rate_without(figures, op, ways) * found[LANE[op]], 0.2)
    return profile.replace(**{name: figure.value for name, figure in shares(figures, link).items()})


rates = st.floats(1e10, 1e11)


@given(rates, rates, st.floats(1e9, 6e9), st.floats(0.3, 1.2), st.floats(0.3, 2.0), st.floats(0.3, 2.0))
def test_what_the_model_shares_is_found_again(
    h2d: float, d2h: float, cpu: float, enough: float, h2d_weight: float, d2h_weight: float
) -> None:
    profile = HardwareProfile(
        "drawn", enough * (cpu * TRAFFIC + h2d + d2h), cpu, h2d, d2h, 0.9 * h2d, 0.8 * d2h, 1e11,
        h2d_weight=h2d_weight, d2h_weight=d2h_weight,
    )  # fmt: skip
    kept = {together: model(profile, together) for together in TOGETHER}
    found = fitted(profile.replace(host_bandwidth=1e12, h2d_weight=1.0, d2h_weight=1.0), kept)
    for together in TOGETHER:
        assert model(found, together) == pytest.approx(kept[together], rel=0.03)


@functools.cache
def row(name: str) -> dict[str, Any]:
    rows = (json.loads(line) for line in (RESULTS / "rows.jsonl").read_text().splitlines())
    return next(each for each in rows if each["row"] == name)


def without_a_break(lane: str) -> list[tuple[float, float, float]]:
    """Start and end of each time in which a lane was busy, and the parameters or bytes meanwhile: one update each."""
    each, found = SubgroupLoad.of(NUMEL_OF_EACH, SPLIT), list[tuple[float, float, float]]()
    for on, op, _, start, end, _ in sorted(row("tenth")["spans"], key=itemgetter(3)):
        if on == lane:
            copied = each.state_bytes if op in ("PREFETCH", "FLUSH") else each.parameter_bytes
            begun, until, size = (start, end, each.numel if lane == "CPU" else copied)
            if lane != "CPU" and found and start <= found[-1][1]:
                begun, before, more = found.pop()
                until, size = max(before, end), size + more
            found.append((begun, until, size))
    return found


@functools.cache
def rates_by_lanes() -> dict[tuple[str, ...], dict[str, float]]:
    """Parameters and bytes a second of each lane by the lanes that were busy at once: a least-squares fit."""
    found = {lane: without_a_break(lane) for lane in NUMBERS}
    edges = sorted({at for each in found.values() for start, end, _ in each for at in (start, end)})
    busy = {at: tuple(lane for lane in found if any(a <= at < b for a, b, _ in found[lane])) for at in edges}
    rates: dict[tuple[str, ...], dict[str, float]] = {}
    for lane, each in found.items():
        sets = sorted({lanes for lanes in busy.values() if lane in lanes})
        times = np.zeros((len(each), len(sets)))
        for row_of, (start, end, _) in zip(times, each, strict=True):
            for at, until in itertools.pairwise(edges):
                if start <= at < end:
                    row_of[sets.index(busy[at])] += until - at
        root = np.sqrt(times.sum(axis=1))
        solved = np.linalg.lstsq(times / root[:, None], [size for *_, size in each] / root, rcond=None)[0]
        for lanes, rate in zip(sets, solved.tolist(), strict=True):
            rates.setdefault(lanes, {})[lane] = rate * 1e3
    return rates


@functools.cache
def h100(triple: str) -> tuple[HardwareProfile, dict[tuple[str, ...], Kept]]:
    """The profile, and what each kept of its rate beside others. triple: of what all three lanes at once are.

    Pairs of lanes are those of a step.
    """
    profile = HardwareProfile.load(RESULTS / "profile.json")
    cpu = profile.cpu_update_rate * profile.cpu_speed_split
    alone = {"CPU": cpu, "H2D": profile.h2d_bandwidth, "D2H": profile.d2h_bandwidth}
    duplex = alone | {"H2D": profile.h2d_bandwidth_duplex, "D2H": profile.d2h_bandwidth_duplex}
    kept = {
        lanes: {lane: rate / (alone, duplex)[len(lanes) > 2][lane] for lane, rate in rates_by_lanes()[lanes].items()}
        for lanes in TOGETHER
    }
    if triple == "calibration":  # to which the profile was fitted
        kept[TOGETHER[2]] = model(profile, TOGETHER[2])
    return profile, kept


def test_the_table_of_the_results() -> None:
    page = (RESULTS / "README.md").read_text()
    for lanes in TOGETHER:
        rates = rates_by_lanes()[lanes]
        cells = [f" {rates[lane] / 1e9:.1f} " if lane in rates else " " for lane in NUMBERS]
        assert f"| {', '.join(lanes)} |{'|'.join(cells)}|\n" in page


@pytest.mark.parametrize("triple", ["calibration", "step"])
def test_pairs_and_all_three_lanes_of_an_h100_are_within_a_tenth(triple: str) -> None:
    profile, kept = h100(triple)
    found = fitted(profile, kept)
    for together in TOGETHER:
        assert model(found, together) == pytest.approx(kept[together], rel=0.1)


def test_a_step_of_an_h100_is_simulated_within_a_tenth() -> None:
    """Memory for a tenth of the state: 22 subgroups on the CPU, 9 streamed through one slot."""
    profile, kept = h100("step")
    letters = {"C": Placement.CPU, "S": Placement.GPU_STREAMED, "R": Placement.GPU_RESIDENT}
    plan = Plan(tuple(letters[each] for each in row("tenth")["placements"]), tuple(range(33)), 1)
    work = Workload.of_sizes([NUMEL_OF_EACH] * 33, SPLIT, forward_s=0.068, backward_s=0.138)
    timeline = simulate(plan, work, fitted(profile, kept), Scope.beside(work))
    for lane, op in ((Lane.CPU, Op.UPDATE), (Lane.H2D, Op.PREFETCH), (Lane.D2H, Op.FLUSH)):
        took = [each[3:5] for each in row("tenth")["spans"] if each[:2] == [lane.value, op.name]]
        spans = [span for span in timeline.on(lane) if span.op is op]
        assert len(spans) == len(took)
        mean_s = math.fsum(end - start for start, end in took) / len(took) / 1e3
        assert math.fsum(span.duration for span in spans) / len(spans) == pytest.approx(mean_s, rel=0.1)
        assert spans[-1].end - work.backward_s == pytest.approx(max(took)[1] / 1e3, rel=0.1)
