"""The threads that update on the host: the CPU lane, and one for parameters that are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Condition
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


class Turns:
    """The turns of one step, in their order; they may be taken while others are still handed over."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, Turn] | None] = SimpleQueue()
        self._given = 0

    def give(self, turn: Turn) -> None:
        """Hand over the next one."""
        self._queue.put((self._given, turn))
        self._given += 1

    def close(self) -> None:
        """Say that there are no more. May be called again."""
        self._queue.put(None)

    def take(self) -> tuple[int, Turn] | None:
        """The next turn with its place among all, once it is handed over; None: there are no more. Blocks."""
        found = self._queue.get()
        if found is None:
            self._queue.put(None)  # for the other thread
        return found


class _Order:
    """Lets turns that several threads take update one at a time, in their order. error: the first, or None."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._next = 0
        self._changed = Condition()

    def wait(self, place: int) -> None:
        """Block until all turns before this have updated. Raises the error of one of them."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == place)
            if self.error is not None:
                raise self.error

    @contextmanager
    def keep(self, place: int) -> Iterator[None]:
        """The turn updates within, or fails; then it is the next one's."""
        try:
            yield
        except BaseException as error:
            self._end(place, error)
            raise
        self._end(place, None)

    def fail(self, error: BaseException) -> None:
        """Let all turns fail that have not begun to update."""
        with self._changed:
            self.error = self.error or error

    def _end(self, place: int, error: BaseException | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next == place)
            self.error = self.error or error
            self._next += 1
            self._changed.notify_all()


class HostLane:
    """The CPU lane: updates subgroups one after the other, and sends their parameters up.

    Where copies have to be queued, which takes the host a tenth of the time of an update, two threads take the turns:
    while one updates, the other sends what it has updated and prepares what comes next.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spans: list[Span] = []
        self.renew()

    def renew(self) -> None:
        """Threads from the next `submit` on; a forked child does not inherit those there were."""
        # One worker: `drain` takes the end of an empty job for that of all before it, and gradients add up in order.
        self._thread = self._new_thread()
        self._other = self._new_thread() if self._device.queues else None

    def _new_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="dos-cpu", initializer=self._device.bind_host_thread)

    def submit(self, work: Callable[[], object]) -> Future[Any]:
        """Run `work` once everything submitted before is done."""
        return self._thread.submit(work)

    def take_spans(self) -> list[Span]:
        """The updates since this was asked last. Nothing is running."""
        spans, self._spans = self._spans, []
        return spans

    def update(self, turns: Turns) -> None:
        """Take the turns until there are no more; to be run on this lane. The first failure fails all turns after it.

        Where two threads take them, the update after a failed upload may have begun.
        """
        order, other = _Order(), None
        if self._other is not None:
            with suppress(RuntimeError):  # the interpreter ends, and starts nothing more: this thread does it all
                other = self._other.submit(self._take, turns, order)
        self._take(turns, order)
        if other is not None:
            other.result()

    def _take(self, turns: Turns, order: _Order) -> None:
        while (found := turns.take()) is not None:
            place, turn = found
            try:
                with order.keep(place):
                    update = self._prepare(turn)
                    order.wait(place)
                    span = self._update(turn, update)
                upload = self._send(turn, span)
                # The thread that issues the step may have failed meanwhile, and have said so to all who wait.
                if not turn.done.done():
                    turn.done.set_result(upload)
            except BaseException as error:
                order.fail(error)
                if not turn.done.done():
                    turn.done.set_exception(order.error)

    def _prepare(self, turn: Turn) -> Callable[[], None]:
        for job in turn.ready:
            # The staged gradient, and the state, are read from here on.
            job.wait()
        return turn.work.prepare_on_host()

    def _update(self, turn: Turn, update: Callable[[], None]) -> Span:
        state = turn.work.subgroup.arena.format
        traffic = int(turn.work.numel * state.update_traffic)
        with self._device.host_update(turn.work.numel, traffic, state.name) as start:
            update()
        return Span(Lane.CPU, Op.UPDATE, turn.number, start, time.perf_counter())

    def _send(self, turn: Turn, span: Span) -> Job:
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
