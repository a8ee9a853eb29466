"""The protocol of devices: what orders, allocates and releases."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from torch import Tensor

from dos import EmulatedDevice
from dos.devices import Job, ThreadJob
from dos.devices.cuda import CudaDevice
from dos.step.host_lane import HostLane
from dos.step.transit import Transits
from dos.step.turns import Turn
from perfmodel import Lane, Op, Span
from tests.support.races.checker import Checker, here
from tests.support.races.shadow import Clock


class Reached:
    """A job for the work that the caller has queued so far."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wait(self) -> Span:
        if Checker.active is not None:
            Checker.active.receive(self._clock)
        return Span(Lane.GPU, Op.BACKWARD, None, 0.0, 0.0)


class AtOnce(EmulatedDevice):
    """Each job has ended when it is issued: no access overlaps another one in time, ordered or not.

    It counts as one on which the caller's work is queued, so that the same code runs as on a GPU.
    """

    queues = True

    def _queue(self, *job: Any) -> Job:
        issued = super()._queue(*job)
        with (
            contextlib.suppress(Exception),
            contextlib.nullcontext() if Checker.active is None else Checker.active.unnoticed(),
        ):
            issued.wait()
        return _Ended(issued.future)  # type: ignore[attr-defined]


class _Ended(ThreadJob):
    """A job that has ended, and can be asked, as those of a GPU."""

    def at(self) -> float:
        with contextlib.nullcontext() if Checker.active is None else Checker.active.unnoticed():
            return self.future.result().end


def around(patch: pytest.MonkeyPatch, owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Decorate what is called in place of a method, with the method first."""

    def decorate(replacement: Callable[..., Any]) -> None:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            if Checker.active is None:
                return plain(self, *args, **kwargs)
            return replacement(Checker.active, functools.partial(plain, self), self, *args, **kwargs)

        patch.setattr(owner, name, replaced)

    return decorate


def patch_devices(patch: pytest.MonkeyPatch) -> None:
    """The protocol of devices."""

    @around(patch, EmulatedDevice, "_queue")
    def queue(_: Checker, plain: Any, self: Any, op: Op, subgroup: int, *rest: Any) -> Job:
        before, here.what = here.what, f"{op.value} of subgroup {subgroup}"
        try:
            return plain(op, subgroup, *rest)
        finally:
            here.what = before

    @around(patch, CudaDevice, "__init__")
    def make(checker: Checker, plain: Any, self: Any, *rest: Any) -> None:
        checker.misses_order = True
        plain(*rest)

    @around(patch, EmulatedDevice, "join")
    def join(checker: Checker, plain: Any, self: Any, job: Job) -> None:
        with checker.into(checker.queue):
            plain(job)

    @around(patch, EmulatedDevice, "fence")
    def fence(checker: Checker, plain: Any, self: Any, callers: Collection[Any] = ()) -> Sequence[Job]:
        return [*plain(callers), Reached(checker.fence())]

    @around(patch, Transits, "send")
    def send(_: Checker, plain: Any, self: Any, index: int, subgroup: Any, copies: Any, *rest: Any, **more: Any) -> Any:
        # Backward may add to a gradient meanwhile: then no step uses this copy.
        here.sends = None if more.get("freed") else [source for _, source in copies]
        try:
            return plain(index, subgroup, copies, *rest, **more)
        finally:
            here.sends = None

    @around(patch, Transits, "adopt")
    def adopt(checker: Checker, plain: Any, self: Any, plan: Any, subjects: Any) -> Any:
        adopted = plain(plan, subjects)
        late = [item for s in subjects for item in (s.update.items if s.late is None else s.late)]
        checker.use([job for _, job in adopted], [gradient.values for _, gradient in late])
        return adopted

    @around(patch, EmulatedDevice, "allocate")
    def allocate(checker: Checker, plain: Any, self: Any, nbytes: int) -> Tensor:
        buffer: Tensor = plain(nbytes)
        checker.allocate(buffer)
        return buffer

    @around(patch, EmulatedDevice, "refill")
    def refill(checker: Checker, plain: Any, self: Any, buffer: Tensor) -> None:
        plain(buffer)
        checker.allocate(buffer)

    @around(patch, EmulatedDevice, "empty")
    def empty(checker: Checker, plain: Any, self: Any, buffer: Tensor) -> None:
        checker.release(checker.range_of(buffer))
        plain(buffer)

    @around(patch, EmulatedDevice, "free")
    def free(checker: Checker, plain: Any, self: Any, buffer: Tensor) -> None:
        checker.release(checker.range_of(buffer))
        plain(buffer)

    @around(patch, EmulatedDevice, "keep")
    def keep(checker: Checker, plain: Any, self: Any, buffer: Tensor, op: Op | None = None) -> None:
        if op is not None:
            checker.keep(buffer, self._streams[op])
        plain(buffer, op)

    @around(patch, HostLane, "_update")
    def update(_: Checker, plain: Any, self: Any, turn: Turn, *rest: Any) -> Span:
        before, here.what = here.what, f"update of subgroup {turn.number}"
        try:
            return plain(turn, *rest)
        finally:
            here.what = before
