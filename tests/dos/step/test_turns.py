"""Which turn of the CPU lane is next: none waits for what another one lacks."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

from dos import DOSAdam, EmulatedDevice
from dos.devices import Copy, Job, ThreadJob
from dos.devices.base import HostJob, Promise, has_ended
from dos.step import ledger
from dos.step.turns import Turn, Turns
from perfmodel import Lane, Op, Span
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import Stream
from perfmodel.simulate import Simulator
from tests.support.clock import WAIT_S
from tests.support.inside import session_of
from tests.support.machines import machine
from tests.support.random_plans import RandomPlans
from tests.support.training import FAST, backward, bits, mlp

MISSES = 4
"""As csrc/arrivals.h has it."""


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


def test_of_turns_that_have_arrived_the_first_of_the_plan_is_taken() -> None:
    turns, late = Turns([3, 5, 1, 4, 2, 0]), Future[Span]()
    turns.give(turn(3, ThreadJob(late)))
    for number in (2, 4, 1):
        turns.give(turn(number, arrived(0.0), arrived(number)))
    assert taken(turns, 1) == [1]
    turns.give(turn(5, arrived(9.0)))
    assert taken(turns, 1) == [5], "handed over last"
    late.set_result(span(9.0))
    assert taken(turns, 3) == [3, 4, 2], "arrived last"


@pytest.mark.parametrize("late", [1, 3 * MISSES])
def test_what_is_late_delays_nothing_that_has_arrived(late: int) -> None:
    """Wherever it was handed over, and although only few are asked at a time."""
    turns, coming = Turns(range(100)), Future[Span]()
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
    turns = Turns(range(3))
    for number in range(3):
        turns.give(turn(number, ThreadJob(Future())))
    turns.end(ValueError("the link"))
    assert taken(turns, 3) == [0, 1, 2]
    last = Turns([7])
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
    assert has_ended(HostJob(span(3.0)))
    assert not has_ended(Asked())
    assert has_ended(ThreadJob(failed)), "whoever waits for it finds out"
    assert not has_ended(Promise(unknown))
    issued.set_result(ThreadJob(Future()))
    assert not has_ended(Promise(issued)), "issued is not ended"
    unknown.set_result(arrived(5.0))
    assert has_ended(Promise(unknown))


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


def simulated(optimizer: DOSAdam, profile: HardwareProfile, orders: list[tuple[list[int], list[int]]]) -> type[Turns]:
    """Turns that arrive when the simulator says so, and are taken when its CPU is free.

    orders: receives the orders of updates of each step, as simulated and as taken.
    """

    class Simulated(Turns):
        def __init__(self, planned: Sequence[int], query: int = 0, **options: Any) -> None:
            super().__init__(planned, query, **options)
            self.starts, self.ends = list[tuple[float, int]](), list[float]()
            self.coming, self.closed = list[tuple[float, Future[Span]]](), threading.Event()
            self.real: dict[int, Turn] = {}

        def give(self, turn: Turn) -> None:
            step = session_of(optimizer).ledger.step
            assert step is not None
            made, work = step.schedule, step.iteration.workload
            assert work is not None
            if not self.ends:
                start, self.ends = Simulator(work, profile).serve(made)
                on_host = [n for n, task in enumerate(made.tasks) if task.stream is Stream.CPU]
                self.starts = sorted((start[n], made.tasks[n].subgroup or 0) for n in on_host)
                orders.append(([i for _, i in self.starts], []))
            task = next(t for t in made.tasks if t.stream is Stream.CPU and t.subgroup == turn.number)
            waits = [n for n in task.after if n != made.under_way and made.tasks[n].op is not Op.BACKWARD]
            assert len(waits) == len(turn.ready)
            timed = [(self.ends[n], Future[Span]()) for n in waits]
            self.coming += timed
            # In the place of the jobs, for which the lane waits in any case.
            super().give(turn._replace(ready=[ThreadJob(future) for _, future in timed]))
            self.real[turn.number] = turn

        def close(self, error: BaseException | None = None) -> None:
            super().close(error)
            self.closed.set()

        def take(self) -> tuple[int, Turn] | None:
            assert self.closed.wait(WAIT_S)
            if self.starts:
                now, _ = self.starts.pop(0)
                for end, future in self.coming:
                    if end <= now and not future.done():
                        future.set_result(span(end))
            found = super().take()
            if found is not None:
                orders[-1][1].append(found[1].number)
                found = found[0], self.real[found[1].number]
            return found

    return Simulated


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_the_engine_updates_in_the_simulator_s_order(offload_gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = list[tuple[list[int], list[int]]]()
    for seed in range(4):
        rng = random.Random(seed)
        model = mlp()
        optimizer = DOSAdam(
            model.parameters(),
            policy=RandomPlans(seed, 2),
            subgroup_size=60,
            device=EmulatedDevice(FAST, capacity=10**9),
            offload_gradients=offload_gradients,
        )
        profile = machine(cpu_update_rate=rng.choice([0.5, 2.0, 8.0]), host_bandwidth=rng.choice([30.0, math.inf]))
        monkeypatch.setattr(ledger, "Turns", simulated(optimizer, profile, orders))
        for step in range(6):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
    assert all(predicted == took for predicted, took in orders)
    assert len(orders) > 20
    plain = sum(took != sorted(took) for _, took in orders)
    assert plain > len(orders) // 2, "plans have other orders than that of numbers"
