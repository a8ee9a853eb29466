"""The threads that update on the host: the CPU lane, and one for parameters on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any

import torch

from dos.devices import Device, Job
from dos.devices.base import HostJob
from dos.guard import Guard, submit
from dos.machine.threads import leave_cores, use_threads
from dos.state.subgroup import Subgroup
from dos.step.turns import Turn, Turns, reject, resolve
from dos.step.unseen import UnseenWrites
from dos.step.work import HostUpdate, Placed, SubgroupUpdate, prepare_updates
from perfmodel import Lane, Op, Span


class HostLane:
    """The CPU lane: updates subgroups one after the other, and copies their parameters to the device.

    Queuing copies takes the host a tenth of the time of an update. Where the device queues them, two threads take the
    turns: while one waits for its update, the other queues the copies of its last turn and prepares its next one. A
    third thread updates, and needs neither Python nor its lock between two updates.
    """

    def __init__(self, device: Device, unseen: UnseenWrites | None = None) -> None:
        self._device = device
        self._unseen = unseen
        self._spans: list[Span] = []
        self.renew()

    def renew(self) -> None:
        """Make new threads, which start with the next `submit`; a forked child does not inherit the parent's."""
        self._sending = Lock()
        # One worker: an empty job of `drain` must end after all jobs before it, and gradients must add up in order.
        self._thread, self._adding = self._new_thread(), self._new_thread()
        self._issuing = ThreadPoolExecutor(1, thread_name_prefix="dos-issue")
        self._other = self._new_thread() if self._device.queues else None
        self._updating = self._new_thread() if self._device.queues else None

    def _new_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="dos-cpu", initializer=self._device.bind_host_thread)

    def submit(self, work: Callable[[], object]) -> Future[Any]:
        """Run `work` once everything submitted before is done."""
        return self._thread.submit(work)

    def add(self, work: Callable[[], object]) -> Future[Any]:
        """Run `work`, which adds up gradients, once all that was added before is done.

        Beside what was submitted: updates that begin in backward wait there for gradients that come here.
        """
        return self._adding.submit(work)

    def issue(self, work: Callable[[], None]) -> Future[None]:
        """Queue work on the device for a hook of backward, once all that was given before is queued."""
        return submit(self._issuing, work)

    def take_spans(self) -> list[Span]:
        """Return the spans of updates since the last call of this. Nothing may be running."""
        spans, self._spans = self._spans, []
        return spans

    def update(self, turns: Turns) -> None:
        """Take all turns; run on this lane. The first failure fails all turns after it.

        Where two threads take turns, the update after a failed upload may have begun.
        """
        serving = other = None
        if self._other is not None and self._updating is not None:
            with suppress(RuntimeError):  # the interpreter ends, and starts no more work: this thread takes all turns
                serving = self._updating.submit(turns.serve)
                other = self._other.submit(self._take, turns)
        try:
            self._take(turns)
        finally:
            _wait_for(other)
            turns.order.close()  # no thread hands over an update any more
            _wait_for(serving)
            if turns.error is not None:
                turns.abandon()

    def _take(self, turns: Turns) -> None:
        """Take turns as long as there are any. An exception outside of a turn fails those that nobody has answered."""
        try:
            use_threads(turns.threads)
            while (found := turns.take()) is not None:
                place, turn = found
                try:
                    with turns.place(place):
                        update = self._prepare(turn)
                        # Beside the update before; the step's first update would wait for it.
                        after = None if place == 0 else self._confirm(turn)
                        span = self._update(turn, update, turns, place)
                    resolve(turn.done, self._send(turn, span, self._confirm(turn) if after is None else after))
                    turns.end()
                except BaseException as error:
                    turns.end(error)
                    reject(turn.done, turns.error or error)
        except BaseException as error:
            turns.fail(error)

    def _prepare(self, turn: Turn) -> HostUpdate | Callable[[], None]:
        """Return the update of a turn."""
        for job in turn.ready:
            # The update reads the staged gradient and the state, which these jobs write.
            job.wait()
        if self._unseen is not None:
            self._unseen.take_over(turn.number, turn.work, turn.after)
        if self._other is None:  # one thread alone prepares within the time of the update, as calibration does
            return lambda: turn.work.prepare_on_host()()
        return turn.work.prepare_on_host()

    def _confirm(self, turn: Turn) -> Sequence[Job]:
        """Return the jobs for which the upload of a turn waits."""
        if turn.confirm is None:
            return turn.after
        with self._sending:  # here, because `step()` would take longer to hand over all turns
            return [turn.confirm()]  # itself behind `after`

    def _update(self, turn: Turn, update: HostUpdate | Callable[[], None], turns: Turns, place: int) -> Span:
        if turns.served and isinstance(update, HostUpdate) and update.native and self._device.only_clocks_updates:
            ran = update.in_order(turns.order, place)
            if ran is None:
                turns.check()
            assert ran is not None, "only an error stops the order"
            return Span(Lane.CPU, Op.UPDATE, turn.number, *ran)
        turns.wait_for(place)
        state = turn.work.subgroup.arena.format
        traffic = int(turn.work.numel * state.update_traffic)
        with self._device.host_update(turn.work.numel, traffic, state.name) as start:
            update()
        return Span(Lane.CPU, Op.UPDATE, turn.number, start, time.perf_counter())

    def _send(self, turn: Turn, span: Span, after: Sequence[Job]) -> Job:
        """Copy the new parameters to the device once all of `after` are done."""
        if turn.work.subgroup.arena.streams:
            # The new parameters are at home. An empty copy would cost the link its latency, and make the next fetch
            # wait for other copies in the queue.
            return HostJob(span)
        self._spans.append(span)
        with self._sending:  # else the start and the end of one copy would enclose another
            # Behind the work that the caller queued before the step, which still reads the old parameters.
            if self._unseen is None:
                return self._device.copy(Op.PARAMETER, turn.number, turn.work.uploads(), after)
            # In the same job: user code may write to the parameters as soon as that has ended.
            remember = self._unseen.remember(turn.work)
            return self._device.copy(Op.PARAMETER, turn.number, turn.work.uploads(), after, remember)


def _wait_for(other: Future[None] | None) -> None:
    if other is not None:
        with suppress(BrokenExecutor):  # the thread could not start, and has taken no turn
            other.result()


class InPlaceLane:
    """Updates parameters that are on the host, one subgroup after the other, beside the caller.

    running: the updates since `settle`, by subgroup.
    """

    def __init__(self, guard: Guard) -> None:
        self.running: dict[Subgroup, Future[None]] = {}
        self._guard = guard
        self._thread: ThreadPoolExecutor | None = None

    def renew(self) -> None:
        """Start another thread with the next `update`; a forked child does not inherit the parent's."""
        self._thread = None

    def update(self, updates: Iterable[SubgroupUpdate]) -> None:
        """Run these updates once all updates before have ended."""
        if self._thread is None:  # most optimizers need no such thread
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dos-in-place", initializer=leave_cores)
        for update in updates:
            self.running[update.subgroup] = self._thread.submit(apply_in_place, update)

    def join(self, subgroup: Subgroup) -> None:
        """Block until this update has ended. Raises RuntimeError if it failed, with the cause."""
        try:
            self.running[subgroup].result()  # the caller reads the parameters from here on
        except Exception as error:
            raise self._guard.failure(error) from error

    def drain(self) -> None:
        """Block until all updates have ended, even failed ones."""
        for running in list(self.running.values()):
            with suppress(Exception):
                running.exception()

    def settle(self) -> None:
        """Block until all updates have ended, and forget them. Raises RuntimeError if one failed, with the cause."""
        for running in self.running.values():
            running.exception()  # waits for all before any failure is raised: user code may then release memory
        try:
            for subgroup in self.running:
                self.join(subgroup)
        finally:
            self.running = {}


def apply_in_place(update: SubgroupUpdate) -> None:
    """Update parameters where they are, on the host."""
    with torch.no_grad():
        prepare_updates([Placed(update, update.subgroup.state)])()
