"""Runs a Plan on a device: prefetch, update and flush pipelined over slots, beside the updates on the host."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dos.devices import Device, Job
from dos.subgroup import State, Subgroup
from dos.work import SubgroupUpdate
from perfmodel import Lane, Op, Placement, Plan, Span, Timeline

logger = logging.getLogger(__name__)


class Engine:
    """Runs one step at a time: `start` issues all its work, `wait` returns when it is done.

    Between steps it owns the state of resident subgroups; `bring_home` returns that to the host.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._cpu_lane = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dos-cpu")
        self._resident: dict[Subgroup, tuple[Tensor, State]] = {}
        self._slots: list[Tensor] = []
        self._jobs: list[Job] = []
        self._updates: Future[list[Span]] | None = None
        self._started = 0.0
        self._failed_allocation_logged = False

    def check(self, plan: Plan, subgroups: Sequence[Subgroup]) -> None:
        """Raise ValueError if the plan streams a subgroup for which the device could never hold a slot."""
        for i in plan.served(Placement.GPU_STREAMED):
            needed, total = subgroups[i].state.carved_bytes, self.device.memory().total
            if needed > total:
                raise ValueError(
                    f"subgroup {i} of {subgroups[i].numel} parameters needs a staging slot of {needed} bytes and the "
                    f"device has {total} bytes in all; choose a smaller subgroup_size or policy='cpu'"
                )

    def start(self, plan: Plan, updates: Sequence[SubgroupUpdate | None]) -> None:
        """Issue the step. updates: by subgroup index of the plan, None for a subgroup without any gradient.

        A subgroup for which the device has no memory is updated on the host in this step.
        """
        self._started = time.perf_counter()
        indices = [i for i in plan.order if updates[i] is not None]
        work = {i: update for i in indices if (update := updates[i]) is not None}
        self._send_home(w.subgroup for i, w in work.items() if plan.placements[i] is not Placement.GPU_RESIDENT)
        arrivals: dict[int, Sequence[Job]] = {}
        placements = self._allocate(plan, work, arrivals)
        # The gradients of this step are complete once the caller's stream has come this far.
        backward = self.device.fence()

        on_host = [i for i in indices if placements[i] is Placement.CPU]
        gradients = [self._fetch_gradient(i, work[i], backward) for i in on_host]
        for i in indices:
            if placements[i] is Placement.GPU_RESIDENT:
                arrived = arrivals.get(i, ())
                state = self._resident[work[i].subgroup][1]
                self._jobs.append(self._update_on_device(i, work[i], state, (*backward, *arrived)))
        streamed = [i for i in indices if placements[i] is Placement.GPU_STREAMED]
        self._stream(streamed, work, backward)
        self._updates = self._cpu_lane.submit(self._update_on_host, on_host, work, gradients)

    def wait(self) -> Timeline | None:
        """Block until the step is done; its spans, in seconds since `start`. None if no step was running.

        Raises what went wrong in any lane, once no work is in flight any more.
        """
        if self._updates is None:
            return None
        spans, errors = [], []
        try:
            spans += self._updates.result()
        except Exception as error:
            errors.append(error)
        for job in self._jobs:
            try:
                spans.append(job.wait())
            except Exception as error:
                errors.append(error)
        self._updates, self._jobs = None, []
        # Every flush has ended, so nothing reads or writes the slots any more.
        for slot in self._slots:
            self.device.free(slot)
        self._slots = []
        if errors:
            raise RuntimeError("the optimizer step failed part way; restore a checkpoint before going on") from errors[
                0
            ]
        origin = self._started
        return Timeline.of(Span(s.lane, s.op, s.subgroup, s.start - origin, s.end - origin) for s in spans)

    def bring_home(self) -> None:
        """Return the state of all resident subgroups to the host, once the running step is done."""
        self.wait()
        self._send_home(list(self._resident))

    def fetch(self, destination: Tensor, source: Tensor) -> None:
        """Copy from the device to the host, after what the caller has queued on the device. Blocks."""
        self.device.copy(Op.GRADIENT, 0, [(destination, source)], self.device.fence()).wait()

    @property
    def resident_bytes(self) -> int:
        """Device memory held between steps."""
        return sum(buffer.nbytes for buffer, _ in self._resident.values())

    def _allocate(
        self, plan: Plan, work: Mapping[int, SubgroupUpdate], arrivals: dict[int, Sequence[Job]]
    ) -> dict[int, Placement]:
        """Get slots and room for residents; the placements that this leaves possible.

        arrivals: receives the prefetches of subgroups that become resident in this step.
        """
        placements = {i: plan.placements[i] for i in work}
        for i, placement in placements.items():
            if placement is Placement.GPU_RESIDENT and work[i].subgroup not in self._resident:
                arrival = self._settle(i, work[i].subgroup)
                if arrival is None:
                    placements[i] = Placement.CPU
                else:
                    arrivals[i] = (arrival,)
        streamed = [i for i, placement in placements.items() if placement is Placement.GPU_STREAMED]
        if streamed:
            nbytes = max(work[i].subgroup.state.carved_bytes for i in streamed)
            for _ in range(min(plan.slots, len(streamed))):
                slot = self._try_allocate(nbytes)
                if slot is None:
                    break
                self._slots.append(slot)
        if not self._slots:
            placements.update(dict.fromkeys(streamed, Placement.CPU))
        return placements

    def _settle(self, index: int, subgroup: Subgroup) -> Job | None:
        """Make a subgroup resident: its prefetch, or None if there is no room."""
        host = subgroup.state
        buffer = self._try_allocate(host.carved_bytes)
        if buffer is None:
            return None
        state = host.carve(buffer)
        self._resident[subgroup] = buffer, state
        self._jobs.append(self._prefetch(index, subgroup, state))
        return self._jobs[-1]

    def _try_allocate(self, nbytes: int) -> Tensor | None:
        try:
            return self.device.allocate(nbytes)
        except torch.OutOfMemoryError as error:
            level = logging.DEBUG if self._failed_allocation_logged else logging.WARNING
            self._failed_allocation_logged = True
            logger.log(level, "no device memory for optimizer state, updating on the host instead: %s", error)
            return None

    def _send_home(self, subgroups: Iterable[Subgroup]) -> None:
        leaving = [s for s in subgroups if s in self._resident]
        flushes = [self._flush(0, s, self._resident[s][1], self.device.fence()) for s in leaving]
        for subgroup, flush in zip(leaving, flushes, strict=True):
            flush.wait()
            self.device.free(self._resident.pop(subgroup)[0])

    def _stream(self, indices: list[int], work: dict[int, SubgroupUpdate], backward: Sequence[Job]) -> None:
        """Pipeline prefetch, update and flush of the subgroups over the slots."""
        vacated: list[Sequence[Job]] = [()] * len(self._slots)
        for rank, i in enumerate(indices):
            slot = rank % len(self._slots)
            subgroup = work[i].subgroup
            state = subgroup.state.carve(self._slots[slot])
            # The slot's last occupant must have left before the next one is written over it.
            fetched = self._prefetch(i, subgroup, state, vacated[slot])
            updated = self._update_on_device(i, work[i], state, (*backward, fetched))
            flushed = self._flush(i, subgroup, state, (updated,))
            vacated[slot] = (flushed,)
            self._jobs += (fetched, updated, flushed)

    def _prefetch(self, index: int, subgroup: Subgroup, state: State, after: Sequence[Job] = ()) -> Job:
        copies = list(zip(state.tensors(), subgroup.state.tensors(), strict=True))
        return self.device.copy(Op.PREFETCH, index, copies, after)

    def _flush(self, index: int, subgroup: Subgroup, state: State, after: Sequence[Job]) -> Job:
        copies = list(zip(subgroup.state.tensors(), state.tensors(), strict=True))
        return self.device.copy(Op.FLUSH, index, copies, after)

    def _update_on_device(self, index: int, work: SubgroupUpdate, state: State, after: Sequence[Job]) -> Job:
        def update() -> None:
            for u in work.pieces:
                u.apply(state, u.gradient, u.piece.of_parameter(u.piece.record.flat))

        return self.device.launch(index, update, work.numel, after)

    def _fetch_gradient(self, index: int, work: SubgroupUpdate, backward: Sequence[Job]) -> Job:
        staged = _staged(work.subgroup.arena.gradient, work.subgroup)
        copies = [(staged[u.piece.start : u.piece.stop], u.gradient) for u in work.pieces]
        job = self.device.copy(Op.GRADIENT, index, copies, backward)
        self._jobs.append(job)
        return job

    def _update_on_host(self, indices: list[int], work: dict[int, SubgroupUpdate], gradients: list[Job]) -> list[Span]:
        """The CPU lane: wait for each gradient, update, send the parameters up. Returns the updates' spans."""
        spans = []
        for i, gradient in zip(indices, gradients, strict=True):
            # The staged gradient is read from here on.
            gradient.wait()
            with self.device.host_update(work[i].numel) as start:
                self._apply_on_host(work[i])
            spans.append(Span(Lane.CPU, Op.UPDATE, i, start, time.perf_counter()))
            self._jobs.append(self._send_parameters(i, work[i]))
        return spans

    def _apply_on_host(self, work: SubgroupUpdate) -> None:
        arena, subgroup = work.subgroup.arena, work.subgroup
        gradient = _staged(arena.gradient, subgroup)
        parameter = None if arena.parameter is None else _staged(arena.parameter, subgroup)
        for u in work.pieces:
            run = slice(u.piece.start, u.piece.stop)
            u.apply(subgroup.state, gradient[run], None if parameter is None else parameter[run])

    def _send_parameters(self, index: int, work: SubgroupUpdate) -> Job:
        arena, subgroup = work.subgroup.arena, work.subgroup
        staged = _staged(arena.state.master if arena.parameter is None else arena.parameter, subgroup)
        copies = [
            (u.piece.of_parameter(u.piece.record.flat), staged[u.piece.start : u.piece.stop]) for u in work.pieces
        ]
        return self.device.copy(Op.PARAMETER, index, copies)


def _staged(buffer: Tensor | None, subgroup: Subgroup) -> Tensor:
    """The subgroup's part of an arena-wide host buffer."""
    assert buffer is not None, "accelerated arenas have staging buffers"
    return buffer[subgroup.start : subgroup.stop]
