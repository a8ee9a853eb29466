"""The threads that update on the host: the CPU lane, and one for parameters that are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from dos.devices import Device, Job
from dos.devices.base import HostJob
from dos.machine.threads import leave_a_core
from dos.step.work import Placed, SubgroupUpdate, prepare_updates
from perfmodel import Lane, Op, Span


class Turn(NamedTuple):
    """One subgroup's update on the host.

    number: of the subgroup in the plan.
    ready: the jobs that bring its gradients, and its state if that was elsewhere.
    after: those before whose end its parameters may not be overwritten.
    done: receives the job that brings the new ones to the device, or has updated them at home, or what went wrong.
    """

    number: int
    work: SubgroupUpdate
    ready: Sequence[Job]
    after: Sequence[Job]
    done: Future[Job]


class HostLane:
    """The CPU lane: updates subgroups one after the other, and sends their parameters up."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spans: list[Span] = []
        self.renew()

    def renew(self) -> None:
        """A thread from the next `submit` on; a forked child does not inherit the one there was."""
        # One worker: `drain` takes the end of an empty job for that of all before it, and gradients add up in order.
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="dos-cpu", initializer=self._device.bind_host_thread
        )

    def submit(self, work: Callable[[], object]) -> Future[Any]:
        """Run `work` once everything submitted before is done."""
        return self._thread.submit(work)

    def take_spans(self) -> list[Span]:
        """The updates since this was asked last. Nothing is running."""
        spans, self._spans = self._spans, []
        return spans

    def update(self, turns: Sequence[Turn]) -> None:
        """Take the turns; to be run on this lane. The first failure fails all turns after it."""
        error: BaseException | None = None
        for turn in turns:
            if error is None:
                try:
                    upload = self._take(turn)
                    # The thread that issues the step may have failed meanwhile, and have said so to all who wait.
                    if not turn.done.done():
                        turn.done.set_result(upload)
                    continue
                except BaseException as failure:
                    error = failure
            if not turn.done.done():
                turn.done.set_exception(error)

    def _take(self, turn: Turn) -> Job:
        for job in turn.ready:
            # The staged gradient, and the state, are read from here on.
            job.wait()
        state = turn.work.subgroup.arena.format
        traffic = int(turn.work.numel * state.update_traffic)
        with self._device.host_update(turn.work.numel, traffic, state.name) as start:
            turn.work.apply_on_host()
        span = Span(Lane.CPU, Op.UPDATE, turn.number, start, time.perf_counter())
        if turn.work.subgroup.arena.streams:
            # The new parameters are at home. An empty copy in their place would cost the link its latency, and make the
            # next fetch wait for whatever else is queued there.
            return HostJob(span)
        self._spans.append(span)
        # Whatever the caller queued before the step still reads the old parameters.
        return self._device.copy(Op.PARAMETER, turn.number, turn.work.uploads(), turn.after)


class InPlaceLane:
    """Updates parameters that are on the host, one subgroup after the other, beside the caller."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def renew(self) -> None:
        """A thread from the next `submit` on; a forked child does not inherit the one there was."""
        self._thread = None

    def submit(self, update: SubgroupUpdate) -> Future[None]:
        """Run the update once those submitted before have ended."""
        if self._thread is None:  # most optimizers need none
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dos-in-place", initializer=leave_a_core)
        return self._thread.submit(apply_in_place, update)


def apply_in_place(update: SubgroupUpdate) -> None:
    """Update parameters where they are, on the host."""
    with torch.no_grad():
        prepare_updates([Placed(update, update.subgroup.state)])()
