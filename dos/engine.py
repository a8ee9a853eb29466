"""Runs a Plan on a device: prefetch, update and flush pipelined over slots, beside the updates on the host."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future

from torch import Tensor

from dos.devices import LANES, Caller, Copy, Device, Job
from dos.guard import Guard
from dos.holdings import Holdings
from dos.host_lane import HostLane, Turn
from dos.subgroup import State, Subgroup
from dos.work import SubgroupUpdate
from perfmodel import Op, Placement, Plan, Span, Timeline

MOST_EARLY_JOBS = 1000
"""Transfers in flight without a step before the first are let go of."""
Departed = Mapping[Subgroup, Sequence[Job]]
"""The copies by which gradients of a subgroup left during backward."""


class Engine:
    """Runs one step at a time: `start` issues all its work, `wait_for` waits for one subgroup, `wait` for all.

    Between steps it owns the state of resident subgroups; `bring_home` returns that to the host.

    guard: of the optimizer; whoever calls holds its lock. It is broken if a step fails.
    steady: whether the last step ran as planned, with no subgroup that came to stay, left, or found no memory.
    origin: the 0 of the last timeline, on the clock of time.perf_counter.
    """

    def __init__(self, device: Device, guard: Guard) -> None:
        self.device = device
        self.guard = guard
        self._host = HostLane(device)
        self.holdings = Holdings(device)
        self._prefetched: dict[Subgroup, tuple[State, Job]] = {}
        self._arriving: dict[Subgroup, Job | None] = {}
        self._considered: Plan | None = None
        self._streamed: Sequence[int] = ()
        self._jobs: list[Job] = []
        self._done: dict[Subgroup, Future[Job]] = {}
        self.origin = 0.0
        self._started = 0.0
        self._backward: Sequence[Job] = ()
        self.steady = True
        self._lane_done: Future[None] | None = None
        guard.drain = weakref.WeakMethod(self.drain)
        _engines.add(self)

    def check(self, plan: Plan, subgroups: Sequence[Subgroup], total: int) -> None:
        """Raise ValueError if the plan streams a subgroup for which a device of `total` bytes could never hold a slot.

        total: 0 if it is not known.
        """
        for i in plan.served(Placement.GPU_STREAMED):
            needed = subgroups[i].state.carved_bytes
            if 0 < total < needed:
                raise ValueError(
                    f"subgroup {i} of {subgroups[i].numel} parameters needs a staging slot of {needed} bytes and the "
                    f"device has {total} bytes in all; choose a smaller subgroup_size or policy='cpu'"
                )

    def send_gradients(self, index: int, copies: Sequence[Copy], callers: Collection[Caller] = ()) -> Job:
        """Start gradients of one subgroup on their way to the host, after what the caller has queued on the device.

        callers: the queues in which backward wrote them, if not all in the present one.
        """
        if len(self._jobs) > MOST_EARLY_JOBS and not self._done:
            self._forget_early_jobs()
        # What backward writes in any of them is read here.
        job = self.device.copy(Op.GRADIENT, index, copies, self.device.fence(callers))
        self._jobs.append(job)
        return job

    def run_on_host(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` on the CPU lane, in order."""
        return self._host.submit(work)

    def prefetch_early(self, plan: Plan, subgroups: Sequence[Subgroup], spare: int) -> None:
        """Fill the slots while backward runs, if that was not done yet and they take no more than `spare` bytes."""
        holdings = self.holdings
        if holdings.slots:
            return
        if self._considered is not plan:  # asked at each of many gradients
            self._streamed = [i for i in plan.served(Placement.GPU_STREAMED) if subgroups[i] not in holdings.resident]
            self._considered = plan
        streamed = self._streamed
        if not streamed:
            return
        nbytes = max(subgroups[i].state.carved_bytes for i in streamed)
        count = min(plan.slots, len(streamed))
        if nbytes * count > spare:
            return
        holdings.get_slots(count, nbytes)
        for i, slot in zip(streamed, holdings.slots, strict=False):
            state = subgroups[i].state.carve(slot)
            self._prefetched[subgroups[i]] = state, self._prefetch(i, subgroups[i], state, self.device.fence())

    def settle_early(self, plan: Plan, subgroups: Sequence[Subgroup]) -> None:
        """Start state that comes to stay on its way while backward runs, as far as there is memory for it.

        Only while no step is in flight: what that still sends home must not be read before it is there.
        """
        holdings = self.holdings
        holdings.expect_denials(True)  # the step will try again
        for i in plan.served(Placement.GPU_RESIDENT):
            if subgroups[i] not in holdings.resident:
                self._arriving[subgroups[i]] = None  # an interruption from here on leaves memory that is no state yet
                state = holdings.settle(subgroups[i])
                if state is None:
                    return
                # The caller's stream may still use what was in this memory before.
                self._arriving[subgroups[i]] = self._prefetch(i, subgroups[i], state, self.device.fence())

    def drop_prefetched(self) -> None:
        """Forget state that was prefetched for another plan than the one that runs, or for a step that was skipped."""
        for _, job in self._prefetched.values():
            with contextlib.suppress(Exception):  # whoever needs that state fetches it again
                job.wait()
        self._prefetched = {}
        self.holdings.free_slots()

    def start(
        self,
        plan: Plan,
        subgroups: Sequence[Subgroup],
        updates: Sequence[SubgroupUpdate | None],
        departed: Departed,
        missing: Sequence[Sequence[Copy]],
    ) -> None:
        """Issue the step.

        subgroups: all of the plan, by index. updates: the same, None for a subgroup without any gradient.
        departed: gradients already on their way. missing: by index, the copies that bring the others.
        A subgroup for which the device has no memory is updated on the host in this step.
        Raises RuntimeError if it fails part way.
        """
        self._started = time.perf_counter()
        self._considered = None
        try:
            self._issue(plan, subgroups, updates, departed, missing)
        except BaseException as error:
            failure = self._failure(error)
            # Part of the step is under way; nobody may wait for the rest.
            for future in self._done.values():
                if not future.done():
                    future.set_exception(failure)
            self.drain()
            if isinstance(error, Exception):
                raise failure from error
            raise

    def _issue(
        self,
        plan: Plan,
        subgroups: Sequence[Subgroup],
        updates: Sequence[SubgroupUpdate | None],
        departed: Departed,
        missing: Sequence[Sequence[Copy]],
    ) -> None:
        """Issue all work of a step in the order in which the lanes shall serve it."""
        holdings = self.holdings
        self._drop_arriving([s for s, job in self._arriving.items() if job is None])
        indices = [i for i in plan.order if updates[i] is not None]
        work = {i: update for i in indices if (update := updates[i]) is not None}
        stays = {
            s for s, placement in zip(subgroups, plan.placements, strict=True) if placement is Placement.GPU_RESIDENT
        }
        holdings.expect_denials(not stays.issuperset(holdings.resident))  # what leaves is there until the step is over
        placements, arrivals = self._allocate(plan, work)
        leaving = [
            i
            for i, subgroup in enumerate(subgroups)
            if subgroup in holdings.resident and plan.placements[i] is not Placement.GPU_RESIDENT
        ]
        self.steady = not (leaving or arrivals or self._arriving or holdings.denied is not None)
        # The gradients of this step are complete once the caller's stream has come this far.
        backward = self._backward = self.device.fence()

        for i in indices:
            if placements[i] is Placement.GPU_RESIDENT and not work[i].offloaded:
                state = holdings.resident[work[i].subgroup]
                self._update_on_device(i, work[i], state, None, (*backward, *arrivals.get(i, ())))
        turns = []
        for i in indices:
            if placements[i] is Placement.CPU:
                gradients = list(departed.get(work[i].subgroup, ()))
                if missing[i]:
                    gradients.append(self.device.copy(Op.GRADIENT, i, missing[i], backward))
                    self._jobs.append(gradients[-1])
                self._done[work[i].subgroup] = Future()
                turns.append(Turn(i, work[i], gradients, self._done[work[i].subgroup]))
        staged = [i for i in indices if _needs_slot(work[i], placements[i])]
        last = [self._leave(i, subgroups[i], backward) for i in leaving if i not in staged]
        last += self._stream(staged, work, backward, arrivals)
        last += [self._leave(i, subgroups[i], backward) for i in leaving if i in staged]
        self._arriving = {}
        self._lane_done = self._host.submit(
            functools.partial(self._run_cpu_lane, turns, backward, last, [subgroups[i] for i in leaving])
        )

    def wait_for(self, subgroup: Subgroup) -> None:
        """Order what the caller queues on the device from now on behind the step's update of this subgroup.

        Raises RuntimeError if the step failed, with the cause.
        """
        done = self._done.get(subgroup)
        if done is not None:
            try:
                # The new parameters are read from here on.
                self.device.join(done.result())
            except Exception as error:
                raise self._failure(error) from error

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight that anybody would have to wait for."""
        return not self._jobs and not self._done

    def wait(self) -> Timeline | None:
        """Block until nothing is in flight; the spans in seconds since `start`, early transfers before 0.

        None if no step was in flight.

        Raises RuntimeError for what went wrong in any lane, with the first cause, once no work is in flight any more.
        """
        if self.idle:
            return None
        # It may be interrupted anywhere, and then is called again: nothing is let go of before all has been seen.
        spans: list[Span] = []
        errors: list[Exception] = []
        stepped = bool(self._done)
        for future in self._done.values():
            try:
                future.result()
            except Exception as error:
                errors.append(error)
        for job in self._jobs:  # complete, now that the CPU lane has issued its last upload
            try:
                spans.append(job.wait())
            except Exception as error:
                errors.append(error)
        if self._lane_done is not None:
            self._lane_done.result()  # slots and the memory of leaving state are free again
        spans += self._host.spans
        self.drop_prefetched()
        if not stepped:
            errors = []  # gradients that nobody has used, or whose use says that they did not arrive
        self.guard.failed |= bool(errors)
        self._jobs, self._done, self._lane_done, self._host.spans = [], {}, None, []
        if errors:
            raise self._failure(errors[0]) from errors[0]
        if not stepped:
            return None
        # A device whose work is queued may only now have come to the end of backward.
        origin = self.origin = max([self._started, *(job.wait().end for job in self._backward)])
        return Timeline.of(Span(s.lane, s.op, s.subgroup, s.start - origin, s.end - origin) for s in spans)

    def finish(self) -> None:
        """`wait` for an owner who is gone: nobody is left to tell what went wrong."""
        if threading.current_thread().name.startswith("dos-"):
            return  # collected on a thread that would wait for itself
        with contextlib.suppress(Exception):
            self.wait()

    def drain(self) -> None:
        """Block until nothing that was issued so far is running, whatever came of it. The next `wait` says that."""
        if threading.current_thread().name.startswith("dos-"):
            return  # a thread that would wait for itself
        with contextlib.suppress(Exception):
            self.run_on_host(lambda: None).result()
        for op in LANES:  # in-order streams, so what is issued last ends last
            with contextlib.suppress(Exception):
                last = self.device.launch(0, lambda: None, 0) if op is Op.UPDATE else self.device.copy(op, 0, [])
                last.wait()

    def after_fork(self) -> None:
        """Renew what a forked child does not inherit: threads."""
        self._host.renew()

    def bring_home(self) -> None:
        """Return the state of all resident subgroups to the host, once the running step is done."""
        self.wait()
        self.holdings.expect_denials(False)
        self._send_home(dict.fromkeys([*self.holdings.resident, *self._arriving]))

    def abandon(self) -> None:
        """End what backward has begun, once nothing of it is running; resident state stays."""
        self.drain()
        self.drop_prefetched()
        self._drop_arriving(list(self._arriving))

    def fetch(self, destination: Tensor, source: Tensor) -> None:
        """Copy from the device to the host, after what the caller has queued on the device. Blocks."""
        self.device.copy(Op.GRADIENT, 0, [(destination, source)], self.device.fence()).wait()

    def _forget_early_jobs(self) -> None:
        """Backward after backward without a step: let go of transfers that have ended. Who uses them has them, too."""
        for job in self._jobs:
            with contextlib.suppress(Exception):
                job.wait()
        self._jobs = []

    def _failure(self, error: BaseException) -> RuntimeError:
        self.guard.failed = True
        return RuntimeError(f"the optimizer step failed part way ({error}); restore a checkpoint before going on")

    def _allocate(
        self, plan: Plan, work: Mapping[int, SubgroupUpdate]
    ) -> tuple[dict[int, Placement], dict[int, Sequence[Job]]]:
        """Get slots and room for residents: the placements that this leaves possible, and new residents' prefetches.

        State that is on the device is updated there, whether the plan lets it stay or not.
        """
        holdings = self.holdings
        arrivals: dict[int, Sequence[Job]] = {}
        placements = {
            i: Placement.GPU_RESIDENT if w.subgroup in holdings.resident else plan.placements[i]
            for i, w in work.items()
        }
        for i, placement in placements.items():
            if placement is Placement.GPU_RESIDENT and work[i].subgroup not in holdings.resident:
                state = holdings.settle(work[i].subgroup)
                if state is None:
                    placements[i] = Placement.CPU
                else:
                    # The caller's stream may still use what was in this memory before.
                    arrivals[i] = (self._prefetch(i, work[i].subgroup, state, self.device.fence()),)
            elif (job := self._arriving.get(work[i].subgroup)) is not None:
                arrivals[i] = (job,)
        streamed = [i for i, placement in placements.items() if _needs_slot(work[i], placement)]
        nbytes = max((self._slot_bytes(work[i]) for i in streamed), default=0)
        first = [work[i].subgroup for i in streamed[: len(self._prefetched)]]
        if holdings.slots and (first != list(self._prefetched) or holdings.slots[0].nbytes < nbytes):
            self.drop_prefetched()
        if streamed and not holdings.slots:
            holdings.get_slots(min(max(plan.slots, 1), len(streamed)), nbytes)
        if not holdings.slots:
            for job in itertools.chain.from_iterable(arrivals.get(i, ()) for i in streamed):
                job.wait()  # state that is still arriving must not go home before it is there
            self._send_home(work[i].subgroup for i in streamed)
            placements.update(dict.fromkeys(streamed, Placement.CPU))
        return placements, arrivals

    def _drop_arriving(self, subgroups: Iterable[Subgroup]) -> None:
        """Free memory of subgroups that were on their way here; nothing has updated their state, so the host has it."""
        for subgroup in subgroups:
            job = self._arriving[subgroup]
            if job is not None:
                with contextlib.suppress(Exception):  # whoever needs that state fetches it again
                    job.wait()
            if subgroup in self.holdings.resident:
                self.holdings.evict(subgroup)
            del self._arriving[subgroup]

    def _slot_bytes(self, work: SubgroupUpdate) -> int:
        return work.gradient_bytes if work.subgroup in self.holdings.resident else work.slot_bytes

    def _send_home(self, subgroups: Iterable[Subgroup]) -> None:
        """Return resident state to the host and free its memory here. Blocks; what writes to it must have ended."""
        subgroups = list(subgroups)
        self._drop_arriving([s for s in subgroups if s in self._arriving])
        leaving = [s for s in subgroups if s in self.holdings.resident]
        flushes = [self._flush(0, s, self.holdings.resident[s], self.device.fence()) for s in leaving]
        for subgroup, flush in zip(leaving, flushes, strict=True):
            # The host reads the state, and the memory goes, from here on.
            flush.wait()
            self.holdings.evict(subgroup)

    def _leave(self, index: int, subgroup: Subgroup, backward: Sequence[Job]) -> Job:
        """Start resident state on its way home, behind its update if it has one in this step."""
        updated = self._done.get(subgroup)
        after = backward if updated is None else (updated.result(),)
        if (arrived := self._arriving.get(subgroup)) is not None:
            after = (*after, arrived)  # state that is still arriving must not go home before it is there
        self._jobs.append(self._flush(index, subgroup, self.holdings.resident[subgroup], after))
        return self._jobs[-1]

    def _stream(
        self,
        indices: list[int],
        work: Mapping[int, SubgroupUpdate],
        backward: Sequence[Job],
        arrivals: Mapping[int, Sequence[Job]],
    ) -> list[Job]:
        """Pipeline prefetch, update and flush of the subgroups over the slots; the jobs after which slots are free.

        Residents are among them where offloaded gradients must come up again; their state is not moved.
        """
        slots, resident = self.holdings.slots, self.holdings.resident
        # The caller's stream may still use what was in the slots' memory before they were allocated.
        vacated: list[Sequence[Job]] = [backward] * len(slots)
        for i, number in zip(indices, itertools.cycle(range(len(slots))), strict=False):
            subgroup, slot = work[i].subgroup, slots[number]
            stays = subgroup in resident
            if stays:
                state, before = resident[subgroup], arrivals.get(i, ())
            elif subgroup in self._prefetched:
                state, before = self._prefetched[subgroup][0], (self._prefetched[subgroup][1],)
            else:
                state = subgroup.state.carve(slot)
                # The slot's last occupant must have left before the next one is written over it.
                before = (self._prefetch(i, subgroup, state, vacated[number]),)
            gradient = None
            if work[i].offloaded:
                gradient, copies = work[i].fetch_gradients(slot[0 if stays else subgroup.state.carved_bytes :])
                before = (*before, self.device.copy(Op.PREFETCH, i, copies, vacated[number]))
                self._jobs.append(before[-1])
            updated = self._update_on_device(i, work[i], state, gradient, (*backward, *before))
            if stays:
                vacated[number] = (updated,)
            else:
                flushed = self._flush(i, subgroup, state, (updated,))
                self._jobs.append(flushed)
                vacated[number] = (flushed,)
        self._prefetched = {}
        return list(itertools.chain.from_iterable(vacated))

    def _prefetch(self, index: int, subgroup: Subgroup, state: State, after: Sequence[Job]) -> Job:
        copies = list(zip(state.tensors(), subgroup.state.tensors(), strict=True))
        self._jobs.append(self.device.copy(Op.PREFETCH, index, copies, after))
        return self._jobs[-1]

    def _flush(self, index: int, subgroup: Subgroup, state: State, after: Sequence[Job]) -> Job:
        copies = list(zip(subgroup.state.tensors(), state.tensors(), strict=True))
        return self.device.copy(Op.FLUSH, index, copies, after)

    def _update_on_device(
        self, index: int, work: SubgroupUpdate, state: State, gradient: Tensor | None, after: Sequence[Job]
    ) -> Job:
        reads = [u.gradient for u in work.pieces] if gradient is None else []
        job = self.device.launch(index, lambda: work.apply_on_device(state, gradient), work.numel, after, reads)
        self._jobs.append(job)
        self._done[work.subgroup] = Future()
        self._done[work.subgroup].set_result(job)
        return job

    def _run_cpu_lane(
        self, turns: Sequence[Turn], backward: Sequence[Job], last: Sequence[Job], leaving: Sequence[Subgroup]
    ) -> None:
        """The host's part of a step: update, then give back device memory that was needed for this step only.

        last: the jobs after which nothing uses slots and the state of leaving subgroups.
        """
        self._host.update(turns, backward, self._jobs)
        for job in last:
            with contextlib.suppress(Exception):  # said by `wait`, which waits for the same jobs
                job.wait()
        self.holdings.free_slots()
        for subgroup in leaving:
            self.holdings.evict(subgroup)
        if leaving:
            self.device.trim()  # another process may be waiting for it


def _needs_slot(work: SubgroupUpdate, placement: Placement) -> bool:
    """Whether a subgroup passes through the staging slots: with its state, or with its offloaded gradients alone."""
    return placement is Placement.GPU_STREAMED or (placement is Placement.GPU_RESIDENT and work.offloaded)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _finish_engines() -> None:
    for engine in list(_engines):
        engine.finish()


def _renew_engines() -> None:
    for engine in list(_engines):
        engine.after_fork()


os.register_at_fork(after_in_child=_renew_engines)  # a forked child has threads of its own
# Work in flight ends before executors shut down at the interpreter's exit; this runs before theirs, which came earlier.
threading._register_atexit(_finish_engines)  # type: ignore[attr-defined]
