"""Which turn of the CPU lane is next: none waits for what another one lacks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

from dos import DOSAdam, EmulatedDevice
from dos.devices import Copy, Job, ThreadJob
from dos.devices.base import HostJob, ended_at
from dos.step.issue import Promise
from dos.step.turns import MISSES, Turn, Turns
from perfmodel import Lane, Op, Span
from tests.support.training import FAST, backward, bits, mlp

WAIT_S = 20


def span(end: float) -> Span:
    return Span(Lane.D2H, Op.GRADIENT, 0, 0.0, end)


def arrived(end: float) -> ThreadJob:
    future = Future[Span]()
    future.set_result(span(end))
    return ThreadJob(future)


def turn(number: int, *ready: Job) -> Turn:
    work: Any = None
    return Turn(number, work, ready, (), Future())


def taken(turns: Turns, count: int) -> list[int]:
    found = [turns.take() for _ in range(count)]
    assert [place for place, _ in filter(None, found)] == sorted(place for place, _ in filter(None, found))
    return [each.number for _, each in filter(None, found)]


@pytest.mark.parametrize(("by_number", "order"), [(False, [2, 5, 1, 4]), (True, [1, 2, 4, 5])])
def test_turns_are_taken_as_forward_needs_them_or_as_they_arrive(by_number: bool, order: list[int]) -> None:
    turns = Turns(by_number=by_number)
    for number, end in ((5, 2.0), (1, 2.0), (4, 3.0), (2, 1.0)):
        turns.give(turn(number, arrived(0.0), arrived(end)))
    assert taken(turns, 4) == order


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("late", [1, 3 * MISSES])
def test_what_is_late_delays_nothing_that_has_arrived(by_number: bool, late: int) -> None:
    """Wherever it was handed over, and although only few are asked at a time."""
    turns, coming = Turns(by_number=by_number), Future[Span]()
    for number in range(late):
        turns.give(turn(number, arrived(0.0), ThreadJob(coming)))
    for number in range(late, late + 3):
        turns.give(turn(number, arrived(number)))
    with ThreadPoolExecutor(2) as threads:  # as the CPU lane's
        first = [threads.submit(turns.take) for _ in range(3)]
        assert sorted(each.result(WAIT_S)[1].number for each in first) == [late, late + 1, late + 2]
        waiting = threads.submit(turns.take)
        turns.give(turn(99, arrived(0.0)))
        assert waiting.result(WAIT_S)[1].number == 99, "given while a thread waits"
        waiting = threads.submit(turns.take)
        coming.set_result(span(1.0))
        assert waiting.result(WAIT_S)[1].number == 0
    assert taken(turns, late - 1) == [*range(1, late)]


def test_all_are_taken_at_once_after_an_error_and_the_last_one_in_any_case() -> None:
    turns = Turns()
    for number in range(3):
        turns.give(turn(number, ThreadJob(Future())))
    turns.end(ValueError("the link"))
    assert taken(turns, 3) == [0, 1, 2]
    last = Turns()
    last.give(turn(7, ThreadJob(Future())))
    last.close()
    assert taken(last, 1) == [7], "the thread that takes it waits for it"
    assert last.take() is None


def test_when_jobs_have_ended() -> None:
    class Asked:
        def at(self) -> float | None:
            return None

        def wait(self) -> Span:
            raise AssertionError

    failed, issued, unknown = Future[Span](), Future[Job](), Future[Job]()
    failed.set_exception(ValueError())
    assert ended_at(HostJob(span(3.0))) == 3.0
    assert ended_at(Asked()) is None
    assert ended_at(ThreadJob(failed)) == float("-inf"), "whoever waits for it finds out"
    assert ended_at(Promise(unknown)) is None
    issued.set_result(ThreadJob(Future()))
    assert ended_at(Promise(issued)) is None, "issued is not ended"
    unknown.set_result(arrived(5.0))
    assert ended_at(Promise(unknown)) == 5.0


class Late(EmulatedDevice):
    """The gradients of one subgroup arrive once all others were updated, although their copy is issued like others.

    updates: of the present step.
    """

    def __init__(self, subgroup: int) -> None:
        super().__init__(FAST, capacity=10**9)
        self.subgroup, self.others, self.updates, self.missed = subgroup, 0, 0, False
        self.come = threading.Event()

    def begin(self, others: int) -> None:
        self.others, self.updates = others, 0
        self.come.clear()

    def copy(self, op: Op, subgroup: int, copies: Sequence[Copy], *rest: Any) -> Job:
        job = super().copy(op, subgroup, copies, *rest)
        if op is not Op.GRADIENT or subgroup != self.subgroup or not self.others:
            return job
        late = Future[Span]()

        def come() -> None:
            self.missed |= not self.come.wait(WAIT_S)
            late.set_result(job.wait())

        threading.Thread(target=come, daemon=True).start()
        return ThreadJob(late)

    def host_update(self, *arguments: Any) -> AbstractContextManager[float]:
        self.updates += 1
        if self.updates == self.others:
            self.come.set()
        return super().host_update(*arguments)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("late", [0, 2])
def test_a_late_gradient_delays_no_other_update_and_no_bit_changes(late: int, attached: bool) -> None:
    model, twin, device = mlp(), mlp(), Late(late)
    reference = DOSAdam(twin.parameters())
    for step in range(4):
        backward(twin, step)
        reference.step()
        reference.zero_grad()
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=300, device=device)
    if attached:
        optimizer.attach(model)

    for step in range(4):
        device.begin(len(optimizer.plan().placements) - 1 if step else 0)
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
    assert not device.missed, "updates waited for the gradient that was late"
    assert bits(model.parameters()) == bits(twin.parameters())
