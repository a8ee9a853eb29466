"""The arithmetic of a dry accelerator, without a clock, and its machines."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

import pytest

from experiments.dry import __main__ as dry
from experiments.dry.machines import (
    BACKWARD_S,
    BLOCKS,
    CORES,
    FILES,
    FORWARD_S,
    RESULTS,
    SETTINGS,
    TAIL_S,
    THREADS,
    Asked,
    Machine,
    Setting,
    interpolated,
    machine,
)
from experiments.simdev.build import UnavailableError, arithmetic, library
from perfmodel import Op, Workload
from perfmodel.adaptive import adaptive
from perfmodel.format import MIXED, SPLIT, Format
from perfmodel.lanes import Stream
from perfmodel.simulate import Scope, Simulator
from perfmodel.tasks import Schedule
from tests.support.crossings import crossed
from tests.support.figures import read_figures

TO_DEVICE, TO_HOST = 0, 1
FIGURES = [10.0, 10.0, 8.0, 6.0, 0.8, 1.2, 1.0, 20.0, 5.0]
"""Of a machine: links alone and duplex, weights of links and CPU, the total of host memory, and what copies to the
device get beside the CPU at least."""
ALL_AT_ONCE = [10.0, 10.0, 10.0, 10.0, 1.0, 1.0, 1.0, 1e9, 0.0]
"""Of one whose host memory is never short."""
PARAMETERS = 1_190_435_200


@pytest.fixture(autouse=True)
def _compiled() -> None:
    try:
        arithmetic()
    except UnavailableError as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture
def asked() -> Asked:
    return Asked(ALL_AT_ONCE)


def test_copies_of_a_link_run_one_after_the_other(asked: Asked) -> None:
    """In the order in which they were ready; both links at once, and compute beside them."""
    asked.copy(1, TO_DEVICE, 20)
    asked.copy(2, TO_DEVICE, 10)
    asked.copy(3, TO_HOST, 10)
    asked.compute(4, 1.5)
    ends = [asked.mark(stream) for stream in (1, 2, 3, 4)]
    asked.advance(100)
    assert [asked.at(end) for end in ends] == pytest.approx([2, 3, 1, 1.5])


def test_a_link_stays_with_a_stream_while_that_has_a_copy_ready(asked: Asked) -> None:
    for _ in range(3):
        asked.copy(1, TO_DEVICE, 10)
    asked.copy(2, TO_DEVICE, 10)
    first, second = asked.mark(1), asked.mark(2)
    asked.advance(100)
    assert (asked.at(first), asked.at(second)) == pytest.approx((3, 4))


def test_a_kernel_between_two_copies_gives_the_link_away(asked: Asked) -> None:
    asked.copy(1, TO_DEVICE, 10)
    asked.compute(1, 0.001)
    asked.copy(1, TO_DEVICE, 10)
    asked.copy(2, TO_DEVICE, 10)
    first, second = asked.mark(1), asked.mark(2)
    asked.advance(100)
    assert (asked.at(first), asked.at(second)) == pytest.approx((3, 2))


def test_of_those_that_wait_the_one_that_is_ready_longest_is_next(asked: Asked) -> None:
    """Not the one that was queued first: it waited for compute."""
    asked.compute(9, 0.5)
    begun = asked.mark(9)
    asked.copy(3, TO_DEVICE, 10)
    asked.wait(1, begun)
    asked.copy(1, TO_DEVICE, 10)
    asked.advance(0.25)
    asked.copy(2, TO_DEVICE, 10)
    ends = [asked.mark(stream) for stream in (1, 2, 3)]
    asked.advance(100)
    assert [asked.at(end) for end in ends] == pytest.approx([3, 2, 1])


def test_what_ended_has_ended_at_its_own_time(asked: Asked) -> None:
    """However seldom the time is moved on; nothing has ended before."""
    asked.copy(1, TO_DEVICE, 10)
    end = asked.mark(1)
    asked.wait(2, end)
    asked.compute(2, 2)
    later = asked.mark(2)
    asked.advance(0.9)
    assert math.isinf(asked.at(end))
    asked.advance(50)
    assert (asked.at(end), asked.at(later)) == pytest.approx((1, 3))


def test_streams_that_compute_share_the_device(asked: Asked) -> None:
    asked.compute(1, 1)
    asked.compute(2, 3)
    ends = asked.mark(1), asked.mark(2)
    asked.advance(100)
    assert [asked.at(end) for end in ends] == pytest.approx([2, 4])


WANTED = 14.0, 8.0, 6.0
"""By the CPU and the links, with FIGURES."""


@pytest.mark.parametrize(
    ("total", "shares"),
    [
        (28, WANTED),
        (20, [20 * each / 27.6 for each in (14 * 1.0, 8 * 0.8, 6 * 1.2)]),
        (26, [20 * each / 20.4 for each in (14 * 1.0, 8 * 0.8)] + [6]),
    ],
)
def test_host_memory_is_divided_by_weight_and_demand(total: float, shares: Sequence[float]) -> None:
    """None gets more than it wants, which leaves more to the others."""
    asked = Asked([*FIGURES[:-2], total, 0.0])
    ends = [asked.update(shares[0] / 2, rate=7, traffic=2)]
    for link in (TO_DEVICE, TO_HOST):
        asked.copy(link, link, shares[1 + link])
        ends.append(asked.mark(link))
    asked.advance(1e6)
    assert [asked.at(end) for end in ends] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(("total", "left"), [(30, 10), (20, 6), (17, 5)])
def test_the_cpu_keeps_its_rate_beside_copies_to_the_device(total: float, left: float) -> None:
    """Which get what is left of host memory, but a least share whatever the CPU takes."""
    asked = Asked([*FIGURES[:-2], total, FIGURES[-1]])
    asked.copy(1, TO_DEVICE, left)
    ends = asked.update(7, rate=7, traffic=2), asked.mark(1)
    asked.advance(100)
    assert [asked.at(end) for end in ends] == pytest.approx([1, 1])


def test_rates_with_all_three_busy_are_those_that_were_measured() -> None:
    found, second = machine("h200"), 1e-3
    file = RESULTS / "nvidia-h200-2026-11-27" / "results.json"
    measured = json.loads(file.read_text())["checks"]["calibration"]["figures"]["figures"]
    rate, *links = (
        measured[f"{name}_beside"]["value"] for name in ("cpu_update_rate", "h2d_bandwidth", "d2h_bandwidth")
    )
    asked = Asked(found.figures(CORES))
    ends = [asked.update(rate * second, found.cpu_rate(MIXED, CORES), MIXED.update_traffic)]
    for link, bandwidth in enumerate(links):
        asked.copy(link, link, bandwidth * second)
        ends.append(asked.mark(link))
    asked.advance(1)
    assert [asked.at(end) for end in ends] == pytest.approx([second] * 3, rel=5e-3)


@pytest.mark.parametrize("name", FILES)
def test_rates_are_between_those_of_the_numbers_of_threads_that_were_measured(name: str) -> None:
    of = machine(name)
    for each in of.profile.by_threads:
        assert interpolated(of.profile, each.cpu_threads) == of.profile.with_threads(each.cpu_threads)
    few, middle, many = (interpolated(of.profile, threads) for threads in (4, 6, 8))
    assert middle.cpu_update_rate == pytest.approx((few.cpu_update_rate + many.cpu_update_rate) / 2)
    assert of.cpu_rate(MIXED, CORES) == of.profile.by_threads[-1].cpu_update_rate
    assert of.figures(6) == of.all_figures[6 * len(FIGURES) : 7 * len(FIGURES)]


def test_iterations_are_those_that_no_profiler_watched() -> None:
    assert machine("h100").measured_s(SETTINGS["half"], "step") == 0.30361
    assert machine("h200").measured_s(SETTINGS["half"], "backward") == 0.295
    assert machine("h200").measured_s(SETTINGS["int8 cpu"], "step") is None


@pytest.mark.parametrize("name", FILES)
def test_a_floor_is_backward_and_the_shortest_update(name: str) -> None:
    """That of the CPU alone at its own rate: copies of values take less time."""
    of = machine(name)
    cpu_s, tenth_s, half_s = (
        of.floor_s(SETTINGS[each], PARAMETERS, attached=True) for each in ("cpu", "tenth", "half")
    )
    assert cpu_s == pytest.approx(BLOCKS * BACKWARD_S + PARAMETERS / of.cpu_rate(SPLIT, THREADS) + TAIL_S)
    assert cpu_s > tenth_s > half_s > BLOCKS * (BACKWARD_S + FORWARD_S)


@pytest.mark.timeout(600)
def test_a_small_row(capsys: pytest.CaptureFixture[str]) -> None:
    """All of it runs, in a process of its own; its times say nothing."""
    try:
        library()
    except UnavailableError as unavailable:
        pytest.skip(str(unavailable))
    words = "--machine h200 --setting half --attached --layers 2 --warm-up 1 --steps 1 --process-group --json"
    status = dry.main(words.split())
    (row,) = read_figures(capsys.readouterr().out, status)["rows"]
    assert row.keys() >= set(dry.COLUMNS)
    assert min(row["iteration_ms"], row["device_backward_ms"]) > 2 * 3.6


def test_adaptive_is_compared_with_fixed_policies_that_need_no_more_memory() -> None:
    assert SETTINGS["cpu"].fixed == []
    assert SETTINGS["tenth"].fixed == ["cpu", "stride:2", "stride:3", "stride:5", "0.9"]
    assert {"0.5", "0.75"} <= set(SETTINGS["half"].fixed)
    own = {"machine": "h200", "attached": True}
    rows = [
        {**own, "setting": "tenth", "iteration_ms": 104.0},
        {**own, "setting": "tenth, stride:2", "iteration_ms": 101.0},
        {**own, "setting": "tenth, cpu", "iteration_ms": 130.0},
        {**own, "setting": "half", "iteration_ms": 101.0},
        {**own, "setting": "half, 0.5", "iteration_ms": 100.0},
    ]
    tenth, half = dry.limits(rows)
    assert (tenth.measured, tenth.note) == (104 / 101, "tenth, stride:2")
    assert tenth.missed
    assert not half.missed


LOOK_S = 5e-5
"""Between two looks whether the CPU may begin its next update."""


def played_s(made: Schedule, work: Workload, of: Machine, state: Format) -> float:
    """Seconds of a schedule on a dry accelerator whose host takes no time, and has the CPU lane's rule."""
    device, now, moments = Asked(of.figures(of.profile.cpu_threads)), 0.0, dict[int, int]()
    waiting, turns, running = dict(enumerate(made.tasks)), list[int](), -1
    each_s, rate = work.seconds_by_size, of.cpu_rate(state, of.profile.cpu_threads)
    traffic = state.update_traffic * of.profile.cpu_traffic_factor

    def queue() -> None:
        """Queue all that waits for nothing which the CPU has not begun."""
        held = set[Stream]()
        for number, task in list(waiting.items()):
            stream = task.stream
            if not moments.keys() >= {*task.after} or stream in held:
                held |= {stream} - {Stream.CPU, Stream.PARAMETER}  # others are in order
                continue
            del waiting[number]
            if stream is Stream.CPU:
                turns.append(number)
                continue
            for other in task.after:
                device.wait(stream, moments[other])
            if stream is Stream.COMPUTE:
                device.compute(stream, each_s[task.op is Op.FORWARD] * task.size)
            elif stream is Stream.GPU:
                device.compute(stream, task.size / of.gpu_rate(state))
            else:
                device.copy(stream, int(stream in (Stream.GRADIENT, Stream.FLUSH)), task.size)
            moments[number] = device.mark(stream)

    queue()
    while waiting or turns:
        now += LOOK_S
        device.advance(now)
        if running >= 0 and device.at(running) > now:
            continue
        ready = (n for n in sorted(turns) if all(device.at(moments[other]) <= now for other in made.tasks[n].after))
        if (number := next(ready, -1)) >= 0:
            turns.remove(number)
            running = moments[number] = device.update(made.tasks[number].size, rate, traffic)
            queue()
    device.advance(1e3)
    return max(map(device.at, moments.values()))


@pytest.mark.parametrize(("attached", "ahead_s"), [(True, 0.04), (False, 0.0)])
@pytest.mark.parametrize(("name", "setting"), crossed(FILES, list(SETTINGS.values())[1:]))
def test_a_prediction_is_what_the_dry_accelerator_takes_if_the_host_takes_no_time(
    name: str, setting: Setting, attached: bool, ahead_s: float
) -> None:
    of, n = machine(name), 50
    ample = dict.fromkeys(["host_bandwidth"], 1e15)  # planner and accelerator share scarce host memory by other rules
    rates = tuple(dataclasses.replace(each, **ample) for each in of.profile.by_threads)
    of = dataclasses.replace(of, profile=of.profile.replace(by_threads=rates, **ample))
    times = {"forward_s": BLOCKS * FORWARD_S * attached, "backward_s": BLOCKS * BACKWARD_S, "ahead_s": ahead_s}
    work = Workload.of_sizes([PARAMETERS // n] * n, setting.format, **times)
    free = (setting.share or 0.0) * work.state_bytes
    work = dataclasses.replace(work, peak_free_bytes=free, shared_free_bytes=free, update_free_bytes=free)
    simulator = Simulator(work, of.profile, Scope.beside(work))
    plan = adaptive(work, of.profile)
    assert simulator.makespan(plan) == pytest.approx(
        played_s(simulator.schedule(plan), work, of, setting.format), rel=0.04
    )
