"""The CPU lane: turns update one at a time, in their order, from the first that is handed over on."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dos import DOSAdam, EmulatedDevice
from dos.devices import Job, ThreadJob
from dos.devices.base import HostJob, Promise
from dos.kernels.adam import AdamArrays, AdamStep
from dos.kernels.update import AdamBatch, Arrivals, prepare
from dos.state.device_store import DeviceStore
from dos.step import host_lane
from dos.step import turns as turns_module
from dos.step.host_lane import HostLane
from dos.step.turns import Turn, Turns, reject, resolve
from dos.step.work import HostUpdate
from perfmodel import Lane, Op, Span
from perfmodel.format import MIXED
from perfmodel.lanes import Stream
from tests.support.clock import WAIT_S, eventually
from tests.support.fake_cuda import FakeCudaDevice, install
from tests.support.training import FAST, backward, mlp, train


class Device:
    """Queues copies or, as an emulated one, does them at once; `send` is called with a subgroup for each."""

    def __init__(self, queues: bool, send: Callable[[int], object]) -> None:
        self.queues, self.send = queues, send

    only_clocks_updates = True

    def bind_host_thread(self) -> None: ...

    @contextmanager
    def host_update(self, numel: int, traffic: int, state_format: str) -> Iterator[float]:
        yield time.perf_counter()

    def copy(self, op: Op, subgroup: int, copies: object, after: object) -> HostJob:
        self.send(subgroup)
        return HostJob(Span(Lane.H2D, op, subgroup, 0.0, 0.0))


def turn(number: int, prepare: Callable[[], Callable[[], object]]) -> Turn:
    arena = SimpleNamespace(format=MIXED, streams=False)
    work: Any = SimpleNamespace(prepare_on_host=prepare, numel=1, uploads=list, subgroup=SimpleNamespace(arena=arena))
    return Turn(number, work, (), (), Future())


def run(lane: Any, given: list[Turn], turns: Turns | None = None) -> list[object]:
    """The turns on a lane; what each came to: a job or an error."""
    turns = turns or Turns(range(len(given)))
    done = lane.submit(lambda: lane.update(turns))
    for each in given:
        turns.give(each)
    turns.close()
    done.result(WAIT_S)
    return [each.done.exception(0) or each.done.result() for each in given]


@pytest.mark.parametrize("queues", [False, True])
def test_updates_run_one_at_a_time_in_order(queues: bool) -> None:
    events: list[tuple[str, int]] = []

    def prepare(number: int) -> Callable[[], object]:
        def update() -> None:
            events.append(("begin", number))
            time.sleep(1e-3 * (number % 3))
            events.append(("end", number))

        time.sleep(1e-3 * (number % 4))  # so that later ones are ready first
        return update

    device: Any = Device(queues, lambda subgroup: None)
    lane = HostLane(device)
    run(lane, [turn(n, lambda n=n: prepare(n)) for n in range(20)])
    assert events == [(what, number) for number in range(20) for what in ("begin", "end")]
    assert [span.subgroup for span in sorted(lane.take_spans(), key=lambda span: span.start)] == list(range(20))


def test_where_copies_are_queued_the_next_update_waits_for_none() -> None:
    begun, sent = Event(), list[int]()

    def send(subgroup: int) -> None:
        if subgroup == 0:
            assert begun.wait(WAIT_S), "the second update waits until the first has been sent"
        sent.append(subgroup)

    device: Any = Device(True, send)
    run(HostLane(device), [turn(0, lambda: list), turn(1, lambda: begun.set)])
    assert sorted(sent) == [0, 1]


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("moment", ["prepare", "update"])
def test_the_first_failure_fails_all_after_it(queues: bool, moment: str) -> None:
    failing, updated = Event(), list[int]()

    def fail() -> Any:
        failing.set()
        raise ValueError("the second")

    def prepare_first() -> Callable[[], object]:
        if queues and moment == "prepare":  # then the other thread fails before the first update begins
            assert failing.wait(WAIT_S)
            time.sleep(0.05)
        return lambda: updated.append(0)

    device: Any = Device(queues, lambda subgroup: None)
    given = [turn(n, lambda n=n: lambda: updated.append(n)) for n in range(6)]
    given[:2] = turn(0, prepare_first), turn(1, fail if moment == "prepare" else lambda: fail)
    first, *others = run(HostLane(device), given)
    assert isinstance(first, HostJob)
    assert updated == [0]
    assert {str(each) for each in others} == {"the second"}


@pytest.mark.parametrize("queues", [False, True])
def test_a_failed_upload_fails_what_has_not_begun(queues: bool) -> None:
    def send(subgroup: int) -> None:
        if subgroup == 1:
            raise ValueError("the link")

    def prepare(number: int) -> Callable[[], object]:
        assert number < 3 or eventually(lambda: turns.error is not None)
        return lambda: updated.append(number)

    device: Any = Device(queues, send)
    turns, updated = Turns(range(8)), list[int]()
    ends = run(HostLane(device), [turn(n, lambda n=n: prepare(n)) for n in range(8)], turns)
    assert isinstance(ends[0], HostJob)
    assert str(ends[1]) == "the link"
    assert updated in ([0, 1], [0, 1, 2]), "the other thread may have begun"
    assert {str(each) for each in ends[len(updated) :]} == {"the link"}


def test_a_failed_upload_fails_updates_that_were_handed_over() -> None:
    turns, updated = Turns(range(3)), torch.ones(4)
    batch = AdamBatch([AdamArrays(torch.ones(4), updated, torch.zeros(4), torch.zeros(4))])
    settings = AdamStep(lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0, step=1)
    batch.choose([settings])
    work: Any = SimpleNamespace(finish_on_host=lambda: None)
    update = HostUpdate(work, prepare([batch], [settings]))
    with ThreadPoolExecutor(2) as threads:
        threads.submit(turns.serve)
        given = threads.submit(update.in_order, turns.order, 1)
        turns.end(ValueError("the link"))
        turns.order.leave(0)
        ran = given.result(WAIT_S)
        turns.order.close()
    assert ran is None
    assert updated.tolist() == [1] * 4


def test_each_update_is_one_native_call_on_a_device_that_is_queued_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = install(monkeypatch, seed=None)
    native, plain = list[int](), list[object]()
    in_order, call, take = HostUpdate.in_order, HostUpdate.__call__, Turns.take

    def counted(update: HostUpdate, order: Any, place: int) -> Any:
        native.append(place)
        return in_order(update, order, place)

    def take_once_served(turns: Turns) -> Any:
        end = time.monotonic() + WAIT_S
        while not turns.served and time.monotonic() < end:
            time.sleep(1e-4)
        return take(turns)

    model, twin = mlp(), mlp()
    train(twin, DOSAdam(twin.parameters(), policy="cpu", subgroup_size=300, device=EmulatedDevice(FAST, 10**9)), 2)
    monkeypatch.setattr(HostUpdate, "in_order", counted)
    monkeypatch.setattr(HostUpdate, "__call__", lambda update: plain.append(update) or call(update))
    monkeypatch.setattr(Turns, "take", take_once_served)
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=300, device=FakeCudaDevice(runtime))
    train(model, optimizer, 2)
    optimizer.synchronize()
    count = len(optimizer.plan().placements)
    assert sorted(native) == sorted([*range(count)] * 2)
    assert not plain
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


class Waiting(EmulatedDevice):
    """Issues one of a step's copies of state home once the host has begun an update.

    act: is called then. number: of the copy. closed: updates wait for it.
    """

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        super().__init__(FAST, capacity=10**7)
        self.act, self.flushed, self.updated, self.number = act, 0, 0, 5
        self.updating, self.closed = Event(), Event()
        self.closed.set()

    def copy(self, op: Op, *args: Any, **settings: Any) -> Any:
        self.flushed += op is Op.FLUSH
        if op is Op.FLUSH and self.flushed == self.number:
            assert self.updating.wait(WAIT_S), "no update on the host begins until all of the step is issued"
            self.act()
        return super().copy(op, *args, **settings)

    @contextmanager
    def host_update(self, *args: Any) -> Iterator[float]:
        self.updating.set()
        self.updated += 1
        with super().host_update(*args) as start:
            assert self.closed.wait(WAIT_S)
            yield start


def test_the_host_begins_before_the_step_is_issued() -> None:
    model, device = mlp(), Waiting()
    optimizer = DOSAdam(model.parameters(), policy="stride:2", subgroup_size=100, device=device)
    for _ in range(3):
        device.updating.clear()
        device.flushed = 0
        model(torch.ones(8, 24)).square().mean().backward()
        optimizer.synchronize()  # gradients that left in backward are there
        optimizer.step()
        optimizer.synchronize()
        assert device.flushed > 5
        device.number = 1  # from the second step on, for which gradients leave in backward, nothing comes before


def step(device: EmulatedDevice) -> DOSAdam:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy="stride:2", subgroup_size=100, device=device)
    model(torch.ones(8, 24)).square().mean().backward()
    optimizer.step()
    return optimizer


def test_nothing_more_is_updated_once_issuing_has_failed_and_slots_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = list[str]()
    free = DeviceStore.release_slots

    def noted(store: DeviceStore) -> None:
        freed.append(threading.current_thread().name)
        free(store)

    monkeypatch.setattr(DeviceStore, "release_slots", noted)

    def fail() -> None:
        raise ValueError("the link")

    device, close = Waiting(fail), Turns.close
    device.closed.clear()
    monkeypatch.setattr(Turns, "close", lambda *arguments: (close(*arguments), device.closed.set()))
    with pytest.raises(RuntimeError, match="the link"):
        step(device)
    assert device.updated == 1, "only what had begun"
    assert not any(name.startswith("dos-cpu") for name in freed), "what was being issued may still use them"


def test_slots_stay_while_a_copy_runs_behind_which_another_was_never_issued() -> None:
    """As a job is whose read from disk has failed, and which the thread that reads was to issue."""
    store, running, never = DeviceStore(EmulatedDevice(FAST, 10**6)), Future[Span](), Future[Job]()
    store.get_slots(1, 1000)
    for job in (ThreadJob(running), Promise(never)):
        store.use(Stream.PREFETCH, job, (), 0)
    never.set_exception(OSError("the disk"))
    releasing = threading.Thread(target=store.release_slots)
    releasing.start()
    releasing.join(0.2)
    assert store.nbytes
    running.set_result(Span(Lane.H2D, Op.PREFETCH, 0, 0.0, 1.0))
    releasing.join(WAIT_S)
    assert not store.nbytes


def test_a_fork_while_a_step_is_issued_waits_for_the_turns_that_were_given() -> None:
    children = list[int]()

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        children.append(os.waitpid(child, 0)[1])

    device = Waiting(fork)
    step(device).synchronize()
    assert children == [0]
    assert device.updated > 3


@pytest.mark.parametrize("late", [False, True])
def test_an_exception_as_a_turn_is_given_ends_the_step(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C raises between any two lines."""

    class Interrupted:
        def __init__(self, query: int) -> None:
            self._plain = Arrivals(query)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._plain, name)

        def give(self, *turn: Any) -> None:
            given.append(turn)
            second = len(given) == 2  # the lane has begun by then
            if late or not second:
                self._plain.give(*turn)
            if second:
                raise KeyboardInterrupt

    given = list[Any]()
    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=100, device=Waiting())
    model(torch.ones(8, 24)).square().mean().backward()
    monkeypatch.setattr(turns_module, "Arrivals", Interrupted)
    ended = list[BaseException]()

    def step() -> None:
        try:
            optimizer.step()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert [type(error) for error in ended] == [KeyboardInterrupt], "step() hangs"
    with pytest.raises(RuntimeError, match="step 0 was the last complete one"):
        optimizer.step()


@pytest.mark.parametrize("often", [1, 99])
@pytest.mark.parametrize("queues", [False, True])
def test_an_exception_as_a_turn_is_taken_fails_all_turns(
    queues: bool, often: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether another thread goes on to take turns or not, and also those that are given later."""

    class Failing:
        def __init__(self, query: int) -> None:
            self._plain = Arrivals(query)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._plain, name)

        def take(self) -> Any:
            taken.append(0)
            if len(taken) <= often:
                raise MemoryError
            return self._plain.take()

    taken = list[int]()
    monkeypatch.setattr(turns_module, "Arrivals", Failing)
    lane, turns = HostLane(Device(queues, lambda number: None)), Turns(range(4))
    given = [turn(number, lambda: lambda: None) for number in range(4)]
    turns.give(given[0])
    done = lane.submit(lambda: lane.update(turns))
    if not queues:
        done.result(WAIT_S)
    for each in given[1:]:
        turns.give(each)
    turns.wait()
    turns.close()
    done.result(WAIT_S)
    assert [type(each.done.exception(WAIT_S)) for each in given] == 4 * [MemoryError]


@pytest.mark.parametrize("queues", [False, True])
def test_an_exception_before_the_first_turn_fails_all_turns(queues: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(count: int) -> None:
        raise MemoryError

    monkeypatch.setattr(host_lane, "use_threads", fail)
    found = run(HostLane(Device(queues, lambda number: None)), [turn(n, lambda: lambda: None) for n in range(3)])
    assert [type(each) for each in found] == 3 * [MemoryError]


@pytest.mark.parametrize("attached", [False, True])
def test_slots_that_the_lane_cannot_release_fail_the_step(attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    release = DeviceStore.release_slots

    def fail(store: DeviceStore) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError
        release(store)

    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy="stride:2", subgroup_size=100, device=EmulatedDevice(FAST, 10**6))
    if attached:
        optimizer.attach(model)
    train(model, optimizer, steps=1)
    optimizer.synchronize()
    monkeypatch.setattr(DeviceStore, "release_slots", fail)
    with pytest.raises(RuntimeError, match=r"failed part way \(MemoryError\)"):
        train(model, optimizer, steps=2)
    with pytest.raises(RuntimeError, match="undefined state: step 1 was the last complete one"):
        optimizer.step()
    optimizer.synchronize()


def test_an_answer_that_comes_late_is_no_error() -> None:
    """The thread that issues a step fails all of it while the lane ends a turn."""
    future: Future[int] = Future()
    resolve(future, 1)
    reject(future, ValueError())
    resolve(future, 2)
    assert future.result() == 1


@pytest.mark.parametrize("queues", [False, True])
def test_the_first_turn_begins_although_the_caller_keeps_pythons_lock(
    queues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the caller hands over another turn: a thread would otherwise wait 5 ms for the lock, here for ever."""
    device = FakeCudaDevice(install(monkeypatch, seed=None)) if queues else EmulatedDevice(FAST, 10**9)
    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=300, device=device)
    train(model, optimizer, 2)
    backward(model, 0)
    optimizer.synchronize()  # all gradients are on the host
    begun, handed_over = list[str](), list[list[str]]()
    update, give = HostLane._update, Turns.give

    def updated(lane: HostLane, *arguments: Any) -> Span:
        begun.append("update")
        return update(lane, *arguments)

    def given(turns: Turns, each: Turn) -> None:
        handed_over.append([*begun])
        give(turns, each)

    monkeypatch.setattr(HostLane, "_update", updated)
    monkeypatch.setattr(Turns, "give", given)
    monkeypatch.setattr(turns_module, "BEGIN_S", WAIT_S)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        optimizer.step()
    finally:
        sys.setswitchinterval(interval)
    optimizer.synchronize()
    assert len(handed_over) > 1
    assert handed_over[:2] == [[], ["update"]]


def test_the_caller_does_not_wait_for_a_first_turn_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "BEGIN_S", 1e6)
    turns = Turns([0])
    turns.let_begin(turn(0, lambda: lambda: None)._replace(ready=[ThreadJob(Future())]))


@pytest.mark.parametrize("late", [False, True])
def test_what_arrives_while_an_update_runs_goes_before_what_was_there(late: bool) -> None:
    """Where backward still runs; both threads of the lane had waited for a turn."""
    awaited, ending = list[int](), Event()

    def await_end(place: int) -> None:
        awaited.append(place)
        assert place < 0 or ending.wait(WAIT_S)

    turns = Turns(range(3), late=late)
    turns.order, turns.served = SimpleNamespace(await_end=await_end), True
    with ThreadPoolExecutor(2) as threads:
        takers = [threads.submit(turns.take) for _ in range(2)]
        found = list[int]()
        for number in (2, 1, 0):
            turns.give(turn(number, lambda: lambda: None))
            if number == 1 and late:
                assert eventually(lambda: 0 in awaited)
            elif number > 0:
                assert eventually(lambda number=number: sum(each.done() for each in takers) == 3 - number)
        ending.set()
        found = sorted(each.result(WAIT_S)[1].number for each in takers)
        turns.close()
    assert found == ([0, 2] if late else [1, 2])


@pytest.mark.parametrize("of_user", [5e-3, 5e-5])
@pytest.mark.parametrize("fails", [False, True])
def test_the_caller_gives_up_pythons_lock_often_in_step(
    of_user: float, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second turn, and the upload of the first one, wait for it for 5 ms each, as on an H100."""
    model, found = mlp(), list[float]()
    optimizer = DOSAdam(model.parameters(), device=EmulatedDevice(FAST, 10**9), policy="cpu")
    give = Turns.give

    def given(turns: Turns, turn: Turn) -> None:
        found.append(sys.getswitchinterval())
        give(turns, turn)
        if fails:
            raise RuntimeError

    monkeypatch.setattr(Turns, "give", given)
    before = sys.getswitchinterval()
    sys.setswitchinterval(of_user)
    try:
        backward(model, 0)
        with pytest.raises(RuntimeError) if fails else nullcontext():
            optimizer.step()
        assert sys.getswitchinterval() == pytest.approx(of_user), "the user's again"
    finally:
        sys.setswitchinterval(before)
    assert found
    assert found == pytest.approx([min(of_user, 1e-4)] * len(found))
