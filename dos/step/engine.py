"""Runs a Plan on a device: prefetch, update and flush pipelined over slots, beside the updates on the host."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from dos.devices import LANE_OF, Device, Job
from dos.guard import Guard
from dos.lifetime import on_own_thread
from dos.state.device_store import DeviceStore
from dos.state.homes import Homes
from dos.state.stores import Stores
from dos.state.subgroup import Subgroup
from dos.step.early import Early
from dos.step.host_lane import HostLane, Turn
from dos.step.issue import Step, on_disk
from dos.step.iteration import Iteration
from dos.step.room import Prepared, make_room
from dos.step.work import Subject
from perfmodel import Op, Placement, Plan, Span, Timeline, Workload
from perfmodel.plan import Move, Tier
from perfmodel.schedule import Schedule, SubgroupState, schedule_step


class Engine:
    """Runs one step at a time: `start` issues all its work, `wait_for` waits for one subgroup, `wait` for all.

    Between steps it owns the state of resident subgroups; `bring_home` returns that to the host.

    host: the CPU lane. stores: what holds the state. early: what backward has begun for the next step.
    guard: of the optimizer; the caller holds its lock. It is broken if a step fails.
    aside: steps that the device has not ended, behind which another one may be queued, with their iterations.
    schedule: of the last step that was issued; None before the first.
    ran: when its tasks ran, and nothing else.
    origin: the 0 of the last timeline, on the clock of time.perf_counter.
    trims: whether state has left the device and its memory is cached there.
    """

    def __init__(self, device: Device, homes: Homes, guard: Guard) -> None:
        self.device = device
        self.guard = guard
        self.host = HostLane(device)
        self.stores = Stores(DeviceStore(device), homes)
        self.schedule: Schedule | None = None
        self.ran = Timeline(())
        self.early = Early(device, self.stores)
        self._step: Step | None = None
        self.aside: deque[tuple[Step, Iteration]] = deque()
        self._lane_done: Future[None] | None = None
        """None: the host has no part in the step."""
        self._started = 0.0
        self.origin = 0.0
        self.trims = False
        guard.working.add(self)

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

    def prepare(self, plan: Plan, subjects: list[Subject], windows: int) -> Prepared:
        """See `dos.step.room.make_room`."""
        self._started = time.perf_counter()
        self.device.owner = self.device.caller()
        return make_room(plan, subjects, self.early, windows)

    def start(self, prepared: Prepared, workload: Workload) -> None:
        """Issue the step.

        workload: that the plan was made for.
        Raises RuntimeError if it fails part way.
        """
        plan, subjects, found = prepared
        self.early.shown = False
        self.stores.homes.shown.clear()
        try:
            self._meet_parameters(plan, subjects, found)
            found, begun = self.early.find(plan, subjects, found)
            self.schedule = schedule_step(plan, workload, found, [issued.task for issued in begun])
            step = Step(self.device, self.stores, self.schedule, subjects, begun, self._started)
            self._step = step
            self.early.hand_over(begun)
            turns = step.issue()
            self._lane_done = None
            gives_back = step.leaving or step.homes or self.stores.device.slots
            if turns or gives_back or any(map(on_disk, step.jobs)):
                self._lane_done = self.host.submit(functools.partial(self._run_host_lane, turns, step))
        except BaseException as error:
            failure = self.guard.failure(error)
            # Part of the step is under way; nothing may wait for the rest.
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
        if self._step is not None and subgroup in self._step.done:
            self._join([self._step.done[subgroup]])

    def _join(self, done: Iterable[Future[Job]]) -> None:
        try:
            for job in done:
                # The new parameters are read from here on, and gradients overwritten.
                self.device.join(job.result())
        except Exception as error:
            raise self.guard.failure(error) from error

    def order_caller(self) -> None:
        """Order what the caller queues on the device from now on behind the whole step.

        Blocks until the host has had its part, and slots and the memory of leaving state are free again.
        Raises RuntimeError if the step failed, with the cause.
        """
        if self._step is None:
            return
        self._join(dict.fromkeys(self._step.done.values()))
        if self._lane_done is not None:
            self._lane_done.result()
        self._step.ordered = self.device.mark()

    @property
    def queued(self) -> bool:
        """Whether all of the step is on the device, before what the caller queues there, and has not come to its end.

        Then another one may begin, which comes behind this one; see `set_aside`.
        """
        if self._step is None or self._lane_done is not None or self.early.begun:
            return False
        return self._step.ordered is not None and not self._step.through

    def set_aside(self, stepped: Iteration) -> None:
        """Give up the step that is `queued`, so that another may begin; `read` tells its times."""
        assert self._step is not None, "it is queued"
        self.aside.append((self._step, stepped))
        self._step = None

    def read(self, step: Step) -> Timeline:
        """As `wait`, of one that was set aside."""
        errors: list[Exception] = []
        spans = _spans(step.jobs, errors)
        if errors:
            raise self.guard.failure(errors[0]) from errors[0]
        return self._ran(step, spans)

    def _ran(self, step: Step, spans: Sequence[Span], unused: Sequence[Span] = ()) -> Timeline:
        # A device whose work is queued may only now have come to the end of backward.
        origin = self.origin = max([step.started, *(job.wait().end for job in step.backward)])
        self.ran = _timeline(spans, origin)
        return _timeline([*spans, *unused], origin) if unused else self.ran

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight that the next step or `bring_home` would have to wait for."""
        return not self.early.begun and self._step is None

    def wait(self) -> Timeline | None:
        """Block until nothing is in flight; the spans, None if no step was.

        They are in seconds since the step was called, or backward ended on the device, whichever was later. Early
        transfers come before 0.
        Raises RuntimeError for what went wrong in any lane, with the first cause, once no work is in flight any more.
        """
        if self.idle:
            return None
        # It may be interrupted anywhere, and then is called again: nothing is let go of before all has been seen.
        errors: list[Exception] = []
        step = self._step
        spans = _spans([] if step is None else step.all_jobs(errors), errors)
        unused = _spans([issued.job for issued in self.early.begun], errors)
        if self._lane_done is not None:
            self._lane_done.result()  # slots and the memory of leaving state are free again
        spans += self.host.spans
        self.early.drop_prefetched()
        if step is None:
            errors = []  # gradients that no step has used, or whose use says that they did not arrive
        self.guard.failed |= bool(errors)
        for subgroup, home in [] if step is None or errors else step.homes:
            home.drop(subgroup)
        self.early.begun, self._step, self._lane_done, self.host.spans = [], None, None, []
        if errors:
            raise self.guard.failure(errors[0]) from errors[0]
        if step is None:
            return None
        return self._ran(step, spans, unused)

    def finish(self) -> None:
        """`wait` for an owner who is gone, to whom errors cannot be told; for steps that were set aside, too."""
        if on_own_thread():
            return  # it was collected there
        with contextlib.suppress(Exception):
            if self.aside:  # its streams are in order: what was set aside before has ended with it
                _spans(self.aside[-1][0].jobs, [])
            self.wait()

    def drain(self) -> None:
        """Block until nothing that was issued so far is running, whatever came of it. The next `wait` says that."""
        if on_own_thread():
            return
        disk = self.stores.disk
        for thread in (self.host, *(() if disk is None else (disk.reading, disk.writing))):
            with contextlib.suppress(Exception):
                thread.submit(lambda: None).result()
        for op in LANE_OF:  # in-order streams, so what is issued last ends last
            with contextlib.suppress(Exception):
                last = self.device.launch(0, lambda: None, 0) if op is Op.UPDATE else self.device.copy(op, 0, [])
                last.wait()

    def after_fork(self) -> None:
        """Renew what a forked child does not inherit: threads."""
        self.host.renew()
        if self.stores.disk is not None:
            self.stores.disk.renew()

    def bring_home(self, subgroups: Iterable[Subgroup]) -> None:
        """Return the state of all these subgroups to where it has its home, once the running step is done."""
        self.wait()
        self.early.shown = True
        self.stores.device.expect_denials(False)
        self.early.drop_arriving(list(self.early.arriving))
        subgroups, stores = list(subgroups), self.stores
        stores.write_kept()
        places, homes = {s: stores.where(s) for s in subgroups}, stores.homes.tiers(subgroups, subgroups)
        away = [(s, Move(tier, homes[s])) for s, tier in places.items() if tier not in (None, homes[s])]
        to_disk = [s for s, move in away if move == Move(Tier.DEVICE, Tier.DISK)]
        away = [(s, move) for s, move in away if Tier.DISK not in move]
        stores.homes.reserve_on_host([s for s, _ in away])
        after = self.device.fence()
        if to_disk:
            stores.to_disk(to_disk, Tier.DEVICE, after)
        for job in [self.stores.move(move, 0, s, after) for s, move in away]:
            # The host reads the state from here on.
            job.wait()
        for subgroup, move in away:
            self.stores.of[move.source].drop(subgroup)

    def spill_to_disk(self, subgroups: Iterable[Subgroup]) -> None:
        """Bring state of these from the host to disk where offloaded gradients need its room. In backward, too.

        Raises OSError if the disk has no room either.
        """
        stores = self.stores
        stores.host.lower_share()
        if stores.disk is None or stores.host.room >= 0:
            return
        self.wait()
        self.early.drop_arriving(list(self.early.arriving))
        stores.write_kept()
        try:
            stores.leave_host(subgroups)
        finally:
            stores.homes.show_again()

    def abandon(self) -> None:
        """End what backward has begun, once nothing of it is running; resident state stays."""
        self.drain()
        self.early.drop_prefetched()
        self.early.drop_arriving(list(self.early.arriving))

    def let_go(self, subgroups: Iterable[Subgroup]) -> None:
        """Free the state of these; nothing is in flight."""
        for subgroup in subgroups:
            for tier, store in self.stores.of.items():
                if tier is not subgroup.arena.tier and store.has(subgroup):
                    store.drop(subgroup)
            self.stores.host.windows.leave(subgroup)

    def _meet_parameters(self, plan: Plan, subjects: Sequence[Subject], found: Sequence[SubgroupState]) -> None:
        """Bring parameters to which others wrote since our last step to masters that the host updates."""
        for i in plan.served(Placement.CPU):
            subgroup, update = subjects[i].subgroup, subjects[i].update
            if update is None or update.from_disk:
                continue  # they follow when it has come
            if found[i].state is Tier.HOST:
                copies = update.download_written()
                if copies:
                    self.device.copy(Op.GRADIENT, 0, copies, self.device.fence()).wait()
                    update.follow_on_host()
            elif found[i].gradient is Tier.HOST:
                update.follow(self.stores.of[found[i].state].fetch(subgroup))  # from where it comes here first

    def _run_host_lane(self, turns: Sequence[Turn], step: Step) -> None:
        """The host's part of a step: update, then give back memory that was needed for it only."""
        self.host.update(turns)
        for job in step.last.values():
            with contextlib.suppress(Exception):  # said by `wait`, which waits for the same jobs
                job.wait()
        self.stores.device.free_slots()
        for subgroup, store in step.leaving:
            store.drop(subgroup)
        self.trims |= bool(step.leaving)

    def trim(self) -> None:
        """Give what has left the device to other processes, which may be waiting. It waits, so never in a hook."""
        if self.trims:
            self.trims = False
            self.device.trim()


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
    return Timeline.of(span.since(origin) for span in spans)
