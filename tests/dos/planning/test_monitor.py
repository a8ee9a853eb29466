"""When memory is looked at, and what becomes of the figures: room in whole subgroups, budgets, hysteresis."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dos import DOSAdam, EmulatedDevice
from dos.devices import Memory
from dos.planning.forecast import MARGIN
from dos.planning.monitor import SHARE_AT_FIRST, SHARE_OF_TIME, Budget, MemoryMonitor
from perfmodel import Op, SubgroupLoad, Workload
from tests.support.devices import TOTAL, Card, monitor_of
from tests.support.training import FAST, bits, mlp, train

# When samples are taken.


class Clock:
    """Stands for the module `time`; reading it takes no time."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_sampling_takes_no_more_than_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("dos.planning.monitor.time", clock)
    took = 2e-3
    device = Card(None)

    def slow() -> Memory:
        clock.now += took
        device.reads += 1
        return Memory(500_000, TOTAL)

    device.memory = slow
    monitor = monitor_of(device)
    # The first peak is looked at closely, for nothing is known of it.
    for share in (SHARE_AT_FIRST, SHARE_OF_TIME):
        device.reads, began = 0, clock.now
        for _ in range(100_000):
            clock.now += 1e-4
            monitor.sample()
        elapsed = clock.now - began
        assert 0.5 * share < device.reads * took / elapsed <= share * 1.2
        monitor.end_iteration()
    before = device.reads
    for phase in (Op.BACKWARD, Op.UPDATE, Op.FORWARD):
        monitor.enter(phase)
    assert device.reads == before + 3, "the phases' beginnings are always looked at"


# What becomes of the figures.


LOADS = (SubgroupLoad(100, 400, 400, 1200),) * 10


def follow(device: Card, free: list[int], attached: bool = False) -> list[Workload]:
    """The workloads of iterations with so much free throughout; what is resident is seen as held."""
    held = [0]
    monitor = MemoryMonitor(device, held=lambda: held[0])
    works = []
    for nbytes in free:
        for phase in (Op.BACKWARD, Op.UPDATE):
            device.says = Memory(nbytes - held[0], TOTAL)
            monitor.enter(phase)
        works.append(Workload(LOADS, **monitor.limits(LOADS, update_overlaps_forward=attached)))
        held[0] = int(works[-1].peak_free_bytes)
        device.says = Memory(nbytes - held[0], TOTAL)
        monitor.end_iteration()
    return works


MARGIN_BYTES = int(MARGIN * TOTAL)


def test_room_is_counted_in_whole_subgroups() -> None:
    works = follow(Card(None), [MARGIN_BYTES + 4 * 1200 + 1100] * 3)
    assert [w.peak_free_bytes for w in works] == [4800] * 3
    works = follow(Card(None), [MARGIN_BYTES + 10**5] * 3)
    assert [w.peak_free_bytes for w in works] == [12_000] * 3, "of all the state there is"
    works = follow(Card(None), [MARGIN_BYTES] * 3)
    assert [w.peak_free_bytes for w in works] == [0] * 3


def test_noise_does_not_make_state_travel() -> None:
    """At the edge of a subgroup: it goes home once, and comes back only for a quarter more than it needs."""
    edge = MARGIN_BYTES + 4 * 1200
    noise = [7, -5, 0, 120, -90, 30, 299, -299, 250, 1, -1, 180, -250, 299, 299, 299, 299, 299, 299, 299, 0, 299]
    works = follow(Card(None), [edge + n for n in noise])
    assert [w.peak_free_bytes for w in works] == [4800] + [3600] * (len(noise) - 1)
    works = follow(Card(None), [edge - 1] + [edge + 300] * 6)
    assert [w.peak_free_bytes for w in works] == [3600] * 5 + [4800] * 2


def test_slots_may_use_what_is_free_while_updating_unless_the_update_runs_on() -> None:
    device = Card(None)
    monitor = monitor_of(device)
    for phase, free in ((Op.BACKWARD, 4 * 1200 + 5), (Op.UPDATE, 7 * 1200 + 5)):
        device.says = Memory(MARGIN_BYTES + free, TOTAL)
        monitor.enter(phase)
    alone = Workload(LOADS, **monitor.limits(LOADS, update_overlaps_forward=False))
    assert (alone.peak_free_bytes, alone.shared_free_bytes) == (4800, 7 * 1200)
    beside = Workload(LOADS, **monitor.limits(LOADS, update_overlaps_forward=True))
    assert (beside.peak_free_bytes, beside.shared_free_bytes) == (4800, 4800)


def test_slots_may_be_filled_in_backward_where_its_second_half_leaves_room_for_whole_ones() -> None:
    device = Card(None)
    monitor = monitor_of(device)

    def iterate() -> Workload:
        for phase, free in ((Op.BACKWARD, 4 * 1200 + 5), (Op.BACKWARD, 6 * 1200 + 1100), (Op.UPDATE, 9 * 1200)):
            device.says = Memory(MARGIN_BYTES + free, TOTAL)
            if free == 6 * 1200 + 1100:
                monitor.spare_in_backward()
            else:
                monitor.enter(phase)
        found = Workload(LOADS, **monitor.limits(LOADS, update_overlaps_forward=False))
        monitor.end_iteration()
        return found

    assert iterate().half_freed_bytes is None
    assert iterate().half_freed_bytes == 2 * 1200


def budgeted(budget: Budget, free: int = 10_000 + MARGIN_BYTES) -> float:
    monitor = monitor_of(Card(None, free=free), budget)
    monitor.enter(Op.UPDATE)
    return Workload(LOADS, **monitor.limits(LOADS, update_overlaps_forward=False)).peak_free_bytes


@pytest.mark.parametrize(
    ("budget", "room"),
    [
        (None, 9600),
        (0, 0),
        (2400, 2400),
        (2399, 1200),
        (10**9, 9600),
        (0.0, 0),
        (0.0036, 3600),
        (1.0, 9600),
        (lambda: 4800, 4800),
        (lambda: 4800.5, 4800),
        (lambda: 10**12, 12_000),
        (lambda: 0, 0),
    ],
)
def test_numbers_cap_and_functions_replace_what_is_measured(budget: Budget, room: int) -> None:
    assert budgeted(budget) == room


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (lambda: None, TypeError, ": .*the function must give bytes as an int, found None"),
        (lambda: "4 GiB", TypeError, ": .*found '4 GiB'"),
        (lambda: True, TypeError, ": .*found True"),
        (lambda: -1, ValueError, ": .*must give 0 or more bytes, found -1"),
        (lambda: 0.5, ValueError, ": .*must give bytes, found 0.5; multiply a share by the device's memory"),
        (lambda: math.nan, ValueError, ": .*found nan"),
        (lambda: math.inf, ValueError, ": .*found inf"),
        ("1 GiB", TypeError, " must be .*found"),
        (True, TypeError, " must be .*found"),
        (-1, ValueError, " must be .*found"),
        (1.5, ValueError, " must be .*found"),
        (math.nan, ValueError, " must be .*found"),
    ],
)
def test_budgets_that_are_none(budget: Any, error: type[Exception], message: str) -> None:
    model = mlp()
    before = bits(model.parameters())
    with pytest.raises(error, match=f"memory_budget{message}"):
        train(model, DOSAdam(model.parameters(), device=EmulatedDevice(FAST, 10**7), memory_budget=budget), 1)
    assert bits(model.parameters()) == before
