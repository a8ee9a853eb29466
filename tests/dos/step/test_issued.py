"""What the engine asks of a device is the schedule, task by task, whatever has happened before."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.devices import Caller, Copy, Job
from dos.state.device_store import DeviceStore
from perfmodel import Lane, Op, Span
from perfmodel.format import MIXED
from perfmodel.lanes import Stream
from perfmodel.tasks import Schedule, Task
from tests.support.devices import Unreliable
from tests.support.inside import plan_anew, session_of
from tests.support.random_plans import RandomPlans
from tests.support.training import backward, bits, ended_steps, mlp

pytestmark = pytest.mark.usefixtures("one_core")

STREAMS = {
    Op.GRADIENT: Stream.GRADIENT,
    Op.PREFETCH: Stream.PREFETCH,
    Op.FLUSH: Stream.FLUSH,
    Op.PARAMETER: Stream.PARAMETER,
}


class Seen:
    """A job; the host's lane is seen to wait for it."""

    def __init__(self, job: Job | None, device: Recording, fences: Sequence[Job] = ()) -> None:
        self.job, self.device, self.fences = job, device, fences

    def wait(self) -> Span:
        if _on_host_lane():
            self.device.waited.append(self)
        for each in self.fences:
            each.wait()
        return Span(Lane.GPU, Op.BACKWARD, None, 0.0, 0.0) if self.job is None else self.job.wait()


class Asked(NamedTuple):
    """One thing that a device was asked for. slot: that a copy fills or empties."""

    op: Op
    stream: Stream
    subgroup: int | None
    size: int
    after: tuple[Seen, ...]
    slot: int | None
    job: Seen | None


class Recording(Unreliable):
    """Writes down what the caller and the host's lane ask for."""

    def __init__(self, seed: int, failing: float) -> None:
        super().__init__(failing, capacity=10**9, seed=seed)
        self.by_caller: list[Asked] = []
        self.by_host: list[Asked] = []
        self.waited: list[Seen] = []
        self.store: DeviceStore | None = None

    def fence(self, callers: Collection[Caller] = ()) -> Sequence[Job]:
        return (Seen(None, self, super().fence(callers)),)

    def copy(self, op: Op, subgroup: int, copies: Sequence[Copy], after: Sequence[Job] = ()) -> Job:
        job = Seen(super().copy(op, subgroup, copies, after), self)
        slot = None
        for number, buffer in enumerate([] if self.store is None else self.store.slots):
            first = buffer.memory.data_ptr()
            memory = range(first, first + buffer.memory.nbytes)
            if any(tensor.data_ptr() in memory for pair in copies for tensor in pair):
                slot = number
        size = sum(source.nbytes for _, source in copies)
        self._log().append(Asked(op, STREAMS[op], subgroup, size, tuple(after), slot, job))
        return job

    def launch(
        self,
        subgroup: int,
        update: Callable[[], None],
        numel: int,
        after: Sequence[Job] = (),
        reads: Sequence[Tensor] = (),
        state_format: str = MIXED.name,
    ) -> Job:
        job = Seen(super().launch(subgroup, update, numel, after, reads, state_format), self)
        self._log().append(Asked(Op.UPDATE, Stream.GPU, subgroup, numel, tuple(after), None, job))
        return job

    @contextmanager
    def host_update(self, numel: int, traffic: int, state_format: str = MIXED.name) -> Iterator[float]:
        self.by_host.append(Asked(Op.UPDATE, Stream.CPU, None, numel, tuple(self.waited), None, None))
        self.waited.clear()
        with super().host_update(numel, traffic, state_format) as start:
            yield start

    def _log(self) -> list[Asked]:
        return self.by_host if _on_host_lane() else self.by_caller


def _on_host_lane() -> bool:
    return threading.current_thread().name.startswith("dos-cpu")


def compare(schedule: Schedule, device: Recording, early: int) -> None:
    """Requests with tasks. early: how many of the caller's came before those of the step."""
    tasks, under_way = schedule.tasks, schedule.under_way
    assert tasks[under_way].op is Op.BACKWARD
    numbers: dict[Seen, object] = {}

    # Under way: the last of each kind, on each stream in the order in which they were asked for.
    asked_on = {stream: [asked for asked in device.by_caller[:early] if asked.stream is stream] for stream in Stream}
    for task in reversed(tasks[:under_way]):
        if task.op is Op.BACKWARD:
            continue
        left = asked_on[task.stream]
        while _what(left[-1]) != _what(task):
            left.pop()
        asked = left.pop()
        assert asked.job is not None
        numbers[asked.job] = "under way", *_what(task)

    def waits(task: Task) -> set[object]:
        # What `step()` issues has no piece of backward to wait for.
        before = [n for n in task.after if n >= under_way or tasks[n].op is not Op.BACKWARD]
        return {("under way", *_what(tasks[n])) if n < under_way else n for n in before}

    # Before the step, the host's lane has added up what came of offloaded gradients.
    added = {asked.job for asked in device.by_caller[:early]} - numbers.keys()

    def waited(asked: Asked) -> set[object]:
        return {under_way if job.job is None else numbers[job] for job in asked.after if job not in added}

    issued = [n for n in range(under_way + 1, len(tasks)) if tasks[n].stream not in (Stream.CPU, Stream.PARAMETER)]
    for number, asked in zip(issued, device.by_caller[early:], strict=True):
        task = tasks[number]
        assert _what(asked) == _what(task)
        assert waited(asked) == waits(task)
        if task.op is not Op.UPDATE and not (task.op is Op.PREFETCH and task.slot is None):
            assert asked.slot == task.slot
        assert asked.job is not None
        numbers[asked.job] = number
    # In any order: updates run as their gradients arrive.
    on_host = {tasks[n].subgroup: n for n in range(under_way + 1, len(tasks)) if tasks[n].stream is Stream.CPU}
    assert len(device.by_host) == 2 * len(on_host)
    for asked, upload in zip(device.by_host[::2], device.by_host[1::2], strict=True):
        number = on_host.pop(upload.subgroup)
        task, parameter = tasks[number : number + 2]
        assert (asked.op, asked.stream, asked.size) == (task.op, task.stream, task.size)
        # The host called step(), so it need not wait for that.
        assert waited(asked) == waits(task) - {under_way}
        assert _what(upload) == _what(parameter)
        assert parameter.after[0] == number, "parameters go up at the end of their update"
        assert waited(upload) == waits(parameter) - {number}


def _what(made: Asked | Task) -> tuple[Op, Stream, int | None, int]:
    return made.op, made.stream, made.subgroup, made.size


def kinds(schedule: Schedule, early: int, device: Recording) -> Iterator[str]:
    """The ways that subgroups took in a step, and what else came by."""
    ways: dict[int | None, list[str]] = {}
    for task in schedule.tasks[schedule.under_way + 1 :]:
        ways.setdefault(task.subgroup, []).append(task.op.value)
    begun = [task for task in schedule.tasks[: schedule.under_way] if task.op is not Op.BACKWARD]
    for task in begun:
        ways.setdefault(task.subgroup, []).insert(0, f"({task.op.value})")
    for way in ways.values():
        yield " ".join(way)
    if early > len(begun):
        yield "in vain"
    if device.failures:
        yield "no memory"


def history(seed: int, *, dtype: torch.dtype, offload_gradients: bool, failing: float, attached: bool) -> Counter[str]:
    """Train a small network in every odd way, comparing each step; what has come by."""
    rng = random.Random(seed)
    model, twin = mlp(dtype), mlp(dtype)
    device = Recording(seed, failing)
    optimizer = DOSAdam(
        model.parameters(),
        policy=RandomPlans(seed, rng.randint(1, 4)),
        subgroup_size=rng.choice([100, 150, 400]),
        device=device,
        offload_gradients=offload_gradients,
    )
    ended = ended_steps(optimizer)
    device.store = session_of(optimizer).ledger.stores.device
    reference = DOSAdam(twin.parameters(), state_format="float32")
    if attached:
        optimizer.attach(model)
    found: Counter[str] = Counter()
    for step in range(10):
        if step:
            optimizer.synchronize()
        device.by_caller.clear()
        device.by_host.clear()
        device.waited.clear()
        device.failures = 0
        if rng.random() < 0.5:
            plan_anew(optimizer)
        # In the first step all have a gradient: when state is made later, what is under way is
        # waited for and let go of.
        both_backward(rng, model, twin, change=step > 0 and not offload_gradients)
        if rng.random() < 0.5:
            plan_anew(optimizer)
        early = len(device.by_caller)
        optimizer.step()
        reference.step()
        optimizer.synchronize()
        schedule = ended[-1].schedule
        if step:  # the first reads the parameters before it issues anything
            compare(schedule, device, early)
            found.update(kinds(schedule, early, device))
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())
    return found


def both_backward(rng: random.Random, model: nn.Module, twin: nn.Module, *, change: bool) -> None:
    """Backward, once or twice, in both. change: one gradient may be dropped or changed then."""
    number, one, drop = rng.randint(1, 2), rng.randrange(10), rng.random() < 0.5
    seed = rng.randrange(1000)
    for network in (model, twin):
        network.zero_grad()
        backward(network, seed, micro_batches=number)
        if change and one < 5:
            parameter = list(network.parameters())[one]
            parameter.grad = None if drop else parameter.grad.mul_(0.5)


DEVICE = {
    *("gradient update parameter", "(gradient) update parameter", "(gradient) gradient update parameter"),
    *("prefetch update flush", "(prefetch) update flush"),
    *("prefetch update", "update", "update flush", "flush"),
}
HOST = {"update parameter", "prefetch update flush", "prefetch update"}
"""The ways of subgroups whose gradients are on the device or on the host."""


@pytest.mark.parametrize(
    ("dtype", "offload_gradients", "ways"),
    [
        (torch.float32, False, DEVICE),
        (torch.bfloat16, False, DEVICE),
        (torch.float32, True, HOST | {"gradient update parameter", "gradient flush update parameter"}),
        (torch.bfloat16, True, HOST | {"gradient update parameter", "gradient flush update parameter"}),
        (torch.float16, True, HOST | {"flush update parameter"}),
    ],
)
def test_requests_are_the_schedule_s(dtype: torch.dtype, offload_gradients: bool, ways: set[str]) -> None:
    """In half of the histories memory is missing. Parameters that are masters, or halves, come to the host where the
    device has updated them."""
    found: Counter[str] = Counter()
    for seed in range(8):
        settings = {"failing": 0.2 * (seed // 2 % 2), "attached": bool(seed % 2)}
        found += history(seed, dtype=dtype, offload_gradients=offload_gradients, **settings)
    assert ways | {"in vain", "no memory"} <= found.keys()
    assert dtype is not torch.float16 or found.keys() == ways | {"in vain", "no memory"}
