"""Parts of a step that backward issues, a few subgroups at a time, on a device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from dos.devices import Caller, Device, Job
from dos.devices.base import has_ended
from dos.state.subgroup import Subgroup
from dos.step.issue import Step
from dos.step.iteration import Iteration
from dos.step.ledger import Ledger
from dos.step.work import SubgroupUpdate, Subject
from perfmodel import Placement, Plan, Workload
from perfmodel.plan import Tier
from perfmodel.schedule import schedule_part

MOST_HELD = 6
"""Residents that wait for each other: one launch takes the host less time than several."""


class Final(NamedTuple):
    """A subgroup's update whose gradients are final.

    number: by the plan. tier: of its state. callers: the queues in which backward wrote the gradients.
    """

    number: int
    update: SubgroupUpdate
    tier: Tier
    callers: Collection[Caller]


class Fetches:
    """Fetches to slots that are queued: as many as keep the link busy until the next subgroup comes.

    More would stand in the way of subgroups that come later, and that forward needs sooner.
    """

    def __init__(self) -> None:
        self._queued: deque[Job] = deque()
        self._lasted_s = self._longest_gap_s = 0.0
        self._came = time.perf_counter()

    def subgroup_comes(self) -> None:
        """Note that a subgroup's gradients are final."""
        now = time.perf_counter()
        self._longest_gap_s, self._came = max(self._longest_gap_s, now - self._came), now
        while self._queued and has_ended(self._queued[0]):
            with contextlib.suppress(Exception):  # raised where the step is waited for
                span = self._queued.popleft().wait()
                self._lasted_s = span.end - span.start

    def add(self, job: Job) -> None:
        """Add a fetch that was issued."""
        self._queued.append(job)

    @property
    def enough(self) -> bool:
        """Whether those behind the present one last as long as the longest gap between two subgroups."""
        # Early in backward none has ended; what is fetched too soon then is in the way of nothing.
        return self._lasted_s > 0 and (len(self._queued) - 1) * self._lasted_s >= self._longest_gap_s


class Parts:
    """Reserves the memory of one subgroup after the other, and issues their updates, by the plan of the iteration.

    Updates by the CPU are issued at once. Those of residents wait for the next one of the CPU, or until they are
    MOST_HELD: one launch serves them all. Streamed subgroups wait for a slot, and until the link would have nothing to
    do, and those first that forward needs first, whose gradients come last. What waits is issued when backward ends, or
    the ledger settles.

    Offloaded gradients return through a slot to state on the device, once they have arrived on the host.

    device: of the ledger. plan: of this iteration.
    """

    def __init__(
        self, ledger: Ledger, plan: Plan, subgroups: Sequence[Subgroup], workload: Workload, now: Iteration, left: float
    ) -> None:
        """left: bytes of device memory for slots and for state that comes."""
        self.device: Device = ledger.device
        self.plan = plan
        self._ledger, self._workload, self._now, self._left = ledger, workload, now, left
        self._subgroups = subgroups
        self._index = {subgroup: i for i, subgroup in enumerate(subgroups)}
        self._rank = {i: rank for rank, i in enumerate(plan.order)}
        self._returns = workload.returns
        self._granted = dataclasses.replace(plan, slots=max(1, plan.slots))
        self._held: list[Final] = []
        self._passing: list[Final] = []
        """Updates that wait for a slot."""
        self._busy: deque[Sequence[Job]] = deque()
        """The last jobs of each slot that was used, the oldest first."""
        self._fetches = Fetches()
        ledger.held = self.issue_rest

    def reserve(self, subgroup: Subgroup) -> Tier | None:
        """Reserve the memory of a subgroup's update; return the tier of its state, None if it is to wait for `step()`.

        Raises MemoryError if the host has too little memory.
        """
        i, stores, tier = self._index.get(subgroup), self._ledger.stores, self._ledger.stores.at(subgroup)
        if i is None or tier is None:  # new
            return None
        placement = self.plan.placements[i]
        if stores.disk is not None and (tier is not self.plan.stays(i) or not stores.host.whole(subgroup, tier)):
            return None  # the host's memory is divided anew, for homes and for windows, in `step()` alone
        if self._passes(i, tier) and not self._get_slots(self._slot_bytes(i)):
            return None
        if placement is Placement.GPU_RESIDENT:
            return tier if tier is Tier.DEVICE or self._make_room(subgroup) else None
        on_cpu = tier is Tier.HOST and placement is Placement.CPU
        stores.host.reserve([subgroup], [subgroup] if on_cpu else [])
        return tier

    def _make_room(self, subgroup: Subgroup) -> bool:
        """Allocate room for state that comes to the device to stay."""
        store, nbytes = self._ledger.stores.device, subgroup.load().state_bytes
        if nbytes > self._left:
            return False
        store.expect_denials(True)  # `step()` will try again
        if store.reserve([subgroup]):
            self._left = 0.0  # no attempt after a denial: each one makes the allocator empty its cache
            return False
        self._left -= nbytes
        return True

    def _slot_bytes(self, i: int) -> int:
        """Return the bytes of a slot for the update of a subgroup."""
        subgroup = self._subgroups[i]
        state = subgroup.state.carved_bytes if self.plan.placements[i] is Placement.GPU_STREAMED else 0
        return state + (subgroup.passing_bytes if self._returns else 0)

    def _get_slots(self, needed: int) -> bool:
        """Allocate the slots, unless they are there; return whether there are any of as many bytes as are needed."""
        store = self._ledger.stores.device
        if not store.slots:
            self._busy.clear()
            store.expect_denials(True)
            streamed = self.plan.served(Placement.GPU_STREAMED)
            others = [i for i in range(len(self.plan)) if i not in set(streamed)] if self._returns else []
            alone = max(map(self._slot_bytes, others), default=0)
            nbytes = max([needed, alone, *map(self._slot_bytes, streamed)])
            most = min(self._granted.slots, len(streamed) + len(others))
            fitting = most if math.isinf(self._left) else min(most, int(self._left // nbytes))
            if not fitting and others:  # the memory of one for gradients alone is set apart
                fitting, nbytes = 1, alone
            store.get_slots(fitting, nbytes)
            self._left = self._left - len(store.slots) * nbytes if store.slots else 0.0
        return bool(store.slots) and store.slots[0].nbytes >= needed

    def add(self, update: SubgroupUpdate, tier: Tier, callers: Collection[Caller]) -> None:
        """Issue an update whose memory is reserved and whose gradients are final, or let it wait.

        Raises RuntimeError, with nothing running any more, if a job cannot be issued.
        """
        number = self._index[update.subgroup]
        placement, each = self.plan.placements[number], Final(number, update, tier, callers)
        (self._passing if self._passes(number, tier) else self._held).append(each)
        if len(self._held) == MOST_HELD or placement is Placement.CPU:
            self._issue_held()
        self._fetches.subgroup_comes()
        while self._passing and self._has_slot() and not self._fetches.enough:
            arrived = [each for each in self._passing if all(map(has_ended, each.update.arriving))]
            if not arrived:
                return
            self._issue_passing(arrived)

    def _has_slot(self) -> bool:
        """Return whether the next fetch would find a slot that is free."""
        return len(self._busy) < len(self._ledger.stores.device.slots) or all(map(has_ended, self._busy[0]))

    def _passes(self, i: int, tier: Tier) -> bool:
        """Return whether the state of a subgroup, which is in this tier, or its gradients pass through a slot."""
        placement = self.plan.placements[i]
        if self._returns:
            return not (tier is Tier.HOST and placement is Placement.CPU)
        return tier is Tier.HOST and placement is Placement.GPU_STREAMED

    def issue_rest(self) -> None:
        """Issue the updates that wait. Raises as `add`."""
        self._issue_held()
        while self._passing:
            self._issue_passing(self._passing)

    def _issue_held(self) -> None:
        held, self._held = self._held, []
        if held:
            self._issue(held)

    def _issue_passing(self, some: Sequence[Final]) -> None:
        """Issue the first of these, which wait for a slot, as forward needs them. Blocks until its gradients arrive."""
        store, each = self._ledger.stores.device, min(some, key=lambda each: each.number)
        self._passing.remove(each)
        # The schedule of one subgroup takes the first slot: let that be the one that was used longest ago.
        behind = self._busy.popleft() if len(self._busy) == len(store.slots) else ()
        issued = 0 if self._ledger.step is None else len(self._ledger.step.jobs)
        step = self._issue([each], behind, each.update.arriving)
        self._fetches.add(step.jobs[issued])
        self._busy.append(step.jobs[-1:])  # the flush, behind which the slot is free
        store.slots.append(store.slots.pop(0))

    def _issue(self, part: Sequence[Final], behind: Sequence[Job] = (), arriving: Sequence[Job] = ()) -> Step:
        """behind, arriving: as for `Ledger.issue_part`."""
        part = sorted(part, key=lambda each: self._rank[each.number])
        updates = {each.number: each.update for each in part}
        subjects = {i: Subject(u.subgroup, u, (), () if u.offloaded else u.items) for i, u in updates.items()}
        before = {each.number: subjects[each.number].before_step(each.tier) for each in part}
        if self._now.first_departure is None and Placement.CPU in map(self.plan.placements.__getitem__, before):
            self._now.first_departure = self.device.mark()
        schedule = schedule_part(self._granted, self._workload, before, list(before))
        callers = set[Caller]().union(*(each.callers for each in part))
        # A block that backward uses again may be fetched ahead, and no queue has joined that yet.
        arenas = (each.update.subgroup.arena for each in part)
        reading = [arena.reading for arena in arenas if arena.streams and arena.reading is not None]
        behind = [*behind, *reading]
        return self._ledger.issue_part(schedule, subjects, self.plan.order, self._now, callers, behind, arriving)
