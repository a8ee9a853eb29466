"""Runs a Plan on a device: prefetch, update and flush pipelined over slots, beside the updates on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices import LANES, Caller, Copy, Device, Job
from dos.devices.coalesce import joined
from dos.guard import Guard
from dos.lifetime import watch
from dos.sharding.fingerprint import fingerprint, still
from dos.state.stores import DeviceStore, HostStore
from dos.state.subgroup import Subgroup
from dos.step.host_lane import HostLane, Turn
from dos.step.issue import Issued, Step, state_copies
from dos.step.work import Subject
from perfmodel import Op, Placement, Plan, Span, Timeline, Workload
from perfmodel.lanes import Stream
from perfmodel.plan import Tier
from perfmodel.schedule import Found, Schedule, Task, arriving, leaving, schedule_step, staged

MOST_EARLY_JOBS = 1000
"""Transfers in flight without a step before the first are let go of."""


class Prepared(NamedTuple):
    """A step for which there is memory.

    found: what it finds of each subgroup, by index.
    """

    plan: Plan
    subjects: Sequence[Subject]
    found: Sequence[Found]


class Engine:
    """Runs one step at a time: `start` issues all its work, `wait_for` waits for one subgroup, `wait` for all.

    Between steps it owns the state of resident subgroups; `bring_home` returns that to the host.

    host_store, device_store: what holds the state.
    guard: of the optimizer; whoever calls holds its lock. It is broken if a step fails.
    schedule: of the last step that was issued; None before the first.
    ran: when its tasks ran, and nothing else.
    origin: the 0 of the last timeline, on the clock of time.perf_counter.
    """

    def __init__(self, device: Device, host_store: HostStore, guard: Guard) -> None:
        self.device = device
        self.guard = guard
        self._host = HostLane(device)
        self.host_store = host_store
        self.device_store = DeviceStore(device)
        self.schedule: Schedule | None = None
        self.ran = Timeline(())
        self._begun: list[Issued] = []
        """What is under way for the next step."""
        self._prefetched: dict[Subgroup, Issued] = {}
        self._arriving: dict[Subgroup, Issued | None] = {}
        """State that comes to stay, by subgroup; None: its memory is there, and its way has not begun."""
        self._copied: dict[Subgroup, list[Tensor]] = {}
        """Residents whose state is at home, too, with fingerprints of what is there."""
        self._shown = False
        """Whether somebody was given the state at home since the last step, and may write there until the next."""
        self._considered: Plan | None = None
        self._streamed: Sequence[int] = ()
        self._step: Step | None = None
        self._lane_done: Future[None] | None = None
        self._started = 0.0
        self.origin = 0.0
        guard.drains.append(weakref.WeakMethod(self.drain))
        watch(self)

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
        if len(self._begun) > MOST_EARLY_JOBS and self._step is None:
            self._forget_begun()
        # What backward writes in any of them is read here.
        job = self.device.copy(Op.GRADIENT, index, joined(copies), self.device.fence(callers))
        nbytes = sum(source.nbytes for _, source in copies)
        self._begun.append(Issued(Task(Op.GRADIENT, Stream.GRADIENT, index, nbytes), job))
        return job

    def run_on_host(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` on the CPU lane, in order."""
        return self._host.submit(work)

    def prefetch_early(self, plan: Plan, subgroups: Sequence[Subgroup], spare: Callable[[], int]) -> None:
        """Fill the slots while backward runs, if that was not done yet and they take no more than `spare` bytes."""
        store = self.device_store
        if store.slots or self._shown:
            return
        if self._considered is not plan:  # asked at each of many gradients
            streams = [i for i in plan.served(Placement.GPU_STREAMED) if not store.has(subgroups[i])]
            self._streamed = [i for i in streams if self.host_store.has(subgroups[i])]
            self._considered = plan
        streamed = self._streamed
        if not streamed:
            return
        nbytes = max(subgroups[i].state.carved_bytes for i in streamed)
        count = min(plan.slots, len(streamed))
        if nbytes * count > spare():
            return
        store.get_slots(count, nbytes)
        for i, (number, slot) in zip(streamed, enumerate(store.slots), strict=False):
            host = subgroups[i].state
            # The caller's stream may still use what was in this memory before.
            job = self.device.copy(Op.PREFETCH, i, state_copies(host.carve(slot), host), self.device.fence())
            self._begun.append(Issued(Task(Op.PREFETCH, Stream.PREFETCH, i, host.nbytes, (), number), job))
            self._prefetched[subgroups[i]] = self._begun[-1]

    def settle_early(self, plan: Plan, subgroups: Sequence[Subgroup]) -> None:
        """Start state that comes to stay on its way while backward runs, as far as there is memory for it.

        Only while no step is in flight: what that still sends home must not be read before it is there. Nor while users
        may write to it.
        """
        if self._shown:
            return
        store = self.device_store
        store.expect_denials(True)  # the step will try again
        for i in plan.served(Placement.GPU_RESIDENT):
            if not store.has(subgroups[i]) and self.host_store.has(subgroups[i]):
                self._arriving[subgroups[i]] = None  # an interruption from here on leaves memory that is no state yet
                state = store.take(subgroups[i])
                if state is None:
                    return
                host = subgroups[i].state
                # The caller's stream may still use what was in this memory before.
                job = self.device.copy(Op.PREFETCH, i, state_copies(state, host), self.device.fence())
                self._begun.append(Issued(Task(Op.PREFETCH, Stream.PREFETCH, i, host.nbytes), job))
                self._arriving[subgroups[i]] = self._begun[-1]

    def drop_prefetched(self) -> None:
        """Forget state that was prefetched for another plan than the one that runs, or for a step that was skipped."""
        for issued in self._prefetched.values():
            with contextlib.suppress(Exception):  # whoever needs that state fetches it again
                issued.job.wait()
        self._prefetched = {}
        self.device_store.free_slots()

    def make_room(self, plan: Plan, subjects: Sequence[Subject]) -> Prepared:
        """Get the memory that the step takes, on the device and on the host; the plan as far as there is.

        subjects: all subgroups, by index.
        A subgroup for which the device has no memory is updated on the host in this step.
        Raises MemoryError if the host has none either. No state has changed then.
        """
        self._started = time.perf_counter()
        self._considered = None
        stays = {subjects[i].subgroup for i in plan.served(Placement.GPU_RESIDENT)}
        self._drop_arriving([s for s, issued in self._arriving.items() if issued is None or s not in stays])
        # What is on its way has not been updated, so the host has it, too.
        here = [self.device_store.has(s.subgroup) and s.subgroup not in self._arriving for s in subjects]
        found = [s.found(Tier.DEVICE if is_here else Tier.HOST) for s, is_here in zip(subjects, here, strict=True)]
        taken: list[Subgroup] = []
        try:
            plan = self._make_room_on_device(plan, subjects, found, taken)
            self._make_room_on_host(plan, subjects, found)
        except BaseException:
            for subgroup in filter(self.device_store.has, taken):  # in which nothing has arrived
                self.device_store.drop(subgroup)
            self.drop_prefetched()
            raise
        return Prepared(plan, subjects, found)

    def _make_room_on_host(self, plan: Plan, subjects: Sequence[Subject], found: Sequence[Found]) -> None:
        at_home, on_cpu = [], []
        for i, (subject, each) in enumerate(zip(subjects, found, strict=True)):
            if plan.route(i, each.state).stays is Tier.HOST and (each.gradient or each.state is Tier.DEVICE):
                at_home.append(subject.subgroup)
            if plan.placements[i] is Placement.CPU and each.gradient:
                on_cpu.append(subject.subgroup)
        self.host_store.take(at_home, incoming=on_cpu, outgoing=on_cpu)

    def start(self, prepared: Prepared, workload: Workload) -> None:
        """Issue the step.

        workload: that the plan was made for.
        Raises RuntimeError if it fails part way.
        """
        plan, subjects, found = prepared
        self._copied, self._shown = {}, False
        try:
            self._meet_parameters(plan, subjects, found)
            found, begun = self._find_begun(plan, subjects, found)
            self.schedule = schedule_step(plan, workload, found, [issued.task for issued in begun])
            step = self._step = Step(self.device, self.device_store, self.schedule, subjects, found, begun)
            self._prefetched, self._arriving = {}, {}
            turns = step.issue()
            self._lane_done = self._host.submit(functools.partial(self._run_host_lane, turns, step))
        except BaseException as error:
            failure = self.guard.failure(error)
            # Part of the step is under way; nobody may wait for the rest.
            if self._step is not None:
                self._step.fail(failure)
            self.drain()
            if isinstance(error, Exception):
                raise failure from error
            raise

    def wait_for(self, subgroup: Subgroup) -> None:
        """Order what the caller queues on the device from now on behind the step's update of this subgroup.

        Raises RuntimeError if the step failed, with the cause.
        """
        done = None if self._step is None else self._step.done.get(subgroup)
        if done is not None:
            try:
                # The new parameters are read from here on.
                self.device.join(done.result())
            except Exception as error:
                raise self.guard.failure(error) from error

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight that anybody would have to wait for."""
        return not self._begun and self._step is None

    def wait(self) -> Timeline | None:
        """Block until nothing is in flight; the spans in seconds since `start`, early transfers before 0.

        None if no step was in flight.

        Raises RuntimeError for what went wrong in any lane, with the first cause, once no work is in flight any more.
        """
        if self.idle:
            return None
        # It may be interrupted anywhere, and then is called again: nothing is let go of before all has been seen.
        errors: list[Exception] = []
        step = self._step
        jobs = [] if step is None else step.all_jobs(errors)
        used = {id(job) for job in jobs}
        spans = _spans(jobs, errors)
        unused = _spans([issued.job for issued in self._begun if id(issued.job) not in used], errors)
        if self._lane_done is not None:
            self._lane_done.result()  # slots and the memory of leaving state are free again
        spans += self._host.spans
        self.drop_prefetched()
        if step is None:
            errors = []  # gradients that nobody has used, or whose use says that they did not arrive
        self.guard.failed |= bool(errors)
        self._begun, self._step, self._lane_done, self._host.spans = [], None, None, []
        if errors:
            raise self.guard.failure(errors[0]) from errors[0]
        if step is None:
            return None
        # A device whose work is queued may only now have come to the end of backward.
        origin = self.origin = max([self._started, *(job.wait().end for job in step.backward)])
        self.ran = _timeline(spans, origin)
        return _timeline(spans + unused, origin) if unused else self.ran

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
        self.copy_home()
        for subgroup in list(self.device_store.resident):
            self.device_store.drop(subgroup)
        self._copied = {}

    def copy_home(self) -> None:
        """Copy the state of all resident subgroups to the host, once the running step is done; it stays here, too."""
        self.wait()
        self.heed_home()
        self._shown = True
        self.device_store.expect_denials(False)
        self._drop_arriving(list(self._arriving))
        resident = {s: state for s, state in self.device_store.resident.items() if s not in self._copied}
        self.host_store.take(resident)
        after = self.device.fence()
        flushes = [self.device.copy(Op.FLUSH, 0, state_copies(s.state, resident[s]), after) for s in resident]
        for flush in flushes:
            # The host reads the state from here on.
            flush.wait()

    def remember_home(self) -> None:
        """What `copy_home` has copied may be written by somebody now; see `heed_home`."""
        new = [s for s in self.device_store.resident if s not in self._copied]
        self._copied |= {s: [fingerprint(tensor) for tensor in s.state.tensors()] for s in new}

    def heed_home(self) -> None:
        """Where somebody wrote to state at home since it was copied there, that is what counts."""
        copied, self._copied = self._copied, {}
        for subgroup, bits in copied.items():
            if all(still(list(zip(bits, subgroup.state.tensors(), strict=True)))):
                self._copied[subgroup] = bits
            else:
                self.device_store.drop(subgroup)

    def abandon(self) -> None:
        """End what backward has begun, once nothing of it is running; resident state stays."""
        self.drain()
        self.drop_prefetched()
        self._drop_arriving(list(self._arriving))

    def fetch(self, destination: Tensor, source: Tensor) -> None:
        """Copy from the device to the host, after what the caller has queued on the device. Blocks."""
        self.device.copy(Op.GRADIENT, 0, [(destination, source)], self.device.fence()).wait()

    def _forget_begun(self) -> None:
        """Backward after backward without a step: let go of transfers that have ended. Who uses them has them, too."""
        kept = [i for i in (*self._prefetched.values(), *self._arriving.values()) if i is not None]
        for issued in self._begun:
            with contextlib.suppress(Exception):
                issued.job.wait()
        self._begun = kept

    def _find_begun(
        self, plan: Plan, subjects: Sequence[Subject], found: Sequence[Found]
    ) -> tuple[list[Found], list[Issued]]:
        """What is found, with what is under way, and all of that which the step uses."""
        known = {id(issued.job): issued for issued in self._begun}
        fetched = {
            s: issued for s, issued in (*self._prefetched.items(), *self._arriving.items()) if issued is not None
        }
        used = {id(issued.job): issued for issued in fetched.values()}
        # Gradients of what is updated on the device after all have left in vain.
        left = [s.departed if p is Placement.CPU else () for s, p in zip(subjects, plan.placements, strict=True)]
        for i, jobs in enumerate(left):
            for job in jobs:
                # What has been let go of is used all the same.
                whole = Task(Op.GRADIENT, Stream.GRADIENT, i, subjects[i].subgroup.gradient.nbytes)
                used[id(job)] = known.get(id(job)) or Issued(whole, job)
        begun = [issued for job, issued in known.items() if job in used]
        begun += [issued for job, issued in used.items() if job not in known]
        places = {id(issued.job): place for place, issued in enumerate(begun)}

        def with_begun(subject: Subject, found: Found, jobs: Sequence[Job]) -> Found:
            way = fetched.get(subject.subgroup)
            place = None if way is None else places[id(way.job)]
            return found._replace(departed=tuple(places[id(job)] for job in jobs), fetched=place)

        return [with_begun(*each) for each in zip(subjects, found, left, strict=True)], begun

    def _meet_parameters(self, plan: Plan, subjects: Sequence[Subject], found: Sequence[Found]) -> None:
        """Bring parameters to which others wrote since our last step to masters that the host updates."""
        for i in plan.served(Placement.CPU):
            subgroup, update = subjects[i].subgroup, subjects[i].update
            if update is not None and found[i].state is Tier.HOST:
                update.follow_on_host(self.fetch)
            elif update is not None and found[i].gradient is Tier.HOST:
                update.follow(self.device_store.state(subgroup))  # from where it comes here first

    def _make_room_on_device(
        self, plan: Plan, subjects: Sequence[Subject], found: list[Found], taken: list[Subgroup]
    ) -> Plan:
        """Get memory for state that comes to stay and for slots; the plan as far as there is.

        found: changed where state that was nowhere yet begins on the device. taken: receives what memory was got for.
        """
        store = self.device_store
        # What leaves is there until the step is over, and may be what is missing.
        store.expect_denials(bool(leaving(plan, found)))
        denied = []
        for i in arriving(plan, found):
            subgroup = subjects[i].subgroup
            if store.has(subgroup):
                continue  # on its way
            state = store.take(subgroup)
            if state is None:
                denied.append(i)
                continue
            taken.append(subgroup)
            if not self.host_store.has(subgroup):
                state.zero()
                found[i] = found[i]._replace(state=Tier.DEVICE)
        plan = plan.on_host(denied)
        passing = {i: subjects[i] for i in staged(plan, found)}
        nbytes = max((s.slot_bytes(staying=store.has(s.subgroup)) for s in passing.values()), default=0)
        first = [(i, subject.subgroup) for i, subject in passing.items()][: len(self._prefetched)]
        ahead = [(issued.task.subgroup, subgroup) for subgroup, issued in self._prefetched.items()]
        if store.slots and (first != ahead or store.slots[0].nbytes < nbytes):
            self.drop_prefetched()
        if passing and not store.slots:
            store.get_slots(min(max(plan.slots, 1), len(passing)), nbytes)
        if passing and not store.slots:
            never = [i for i in passing if passing[i].subgroup.arena.tier is Tier.DEVICE]
            if never:
                raise torch.OutOfMemoryError(
                    f"there is no device memory through which the gradients of subgroup {never[0]} could come up for "
                    "its update; use a smaller subgroup_size, or policy='adaptive', with which state can leave"
                )
            for i in passing:
                if passing[i].subgroup in self._arriving:
                    self._drop_arriving([passing[i].subgroup])
                elif found[i].state is Tier.HOST and store.has(passing[i].subgroup):
                    store.drop(passing[i].subgroup)
            plan = plan.on_host(passing)
        if not store.slots:  # a plan without slots must not stream, not even what has no gradient
            plan = plan.on_host(plan.served(Placement.GPU_STREAMED))
        return dataclasses.replace(plan, slots=len(store.slots))

    def _drop_arriving(self, subgroups: Iterable[Subgroup]) -> None:
        """Free memory of subgroups that were on their way here; nothing has updated their state, so the host has it."""
        for subgroup in subgroups:
            issued = self._arriving[subgroup]
            if issued is not None:
                with contextlib.suppress(Exception):  # whoever needs that state fetches it again
                    issued.job.wait()
            if self.device_store.has(subgroup):
                self.device_store.drop(subgroup)
            del self._arriving[subgroup]

    def _run_host_lane(self, turns: Sequence[Turn], step: Step) -> None:
        """The host's part of a step: update, then give back memory that was needed for it only."""
        self._host.update(turns)
        for job in step.last.values():
            with contextlib.suppress(Exception):  # said by `wait`, which waits for the same jobs
                job.wait()
        self.device_store.free_slots()
        for subgroup in step.leaving:
            self.device_store.drop(subgroup)
        if step.leaving:
            self.device.trim()  # another process may be waiting for it


def _spans(jobs: Iterable[Job], errors: list[Exception]) -> list[Span]:
    """When they ran; blocks. errors: receives what went wrong."""
    spans = []
    for job in jobs:
        try:
            spans.append(job.wait())
        except Exception as error:
            errors.append(error)
    return spans


def _timeline(spans: Iterable[Span], origin: float) -> Timeline:
    return Timeline.of(Span(s.lane, s.op, s.subgroup, s.start - origin, s.end - origin) for s in spans)
