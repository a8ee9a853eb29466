"""Parts of a step that backward issues, a few subgroups at a time, on a device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from dos.devices import Caller, Device, Job
from dos.devices.base import has_ended
from dos.state.subgroup import Subgroup
from dos.step.iteration import Iteration
from dos.step.ledger import Ledger
from dos.step.work import SubgroupUpdate, Subject
from perfmodel import Op, Placement, Plan, Timeline, Workload
from perfmodel.plan import Tier
from perfmodel.schedule import schedule_part, turns
from perfmodel.tasks import Schedule, SubgroupState

MOST_KEPT = 1000
"""Schedules of parts that are remembered."""
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


def turn_seconds(workload: Workload, measured: Timeline | None) -> Mapping[Placement, Sequence[float]]:
    """Return the seconds of a slot's turn by subgroup, as fetches took in the last step; none if there were none."""
    fetches = [] if measured is None else [span for span in measured.spans if span.op is Op.PREFETCH]
    nbytes = sum([span.nbytes for span in fetches])
    if not nbytes:
        return {}
    each_s = sum([span.duration for span in fetches]) / nbytes
    return {Placement.GPU_STREAMED: [load.state_bytes * each_s for load in workload.subgroups]}


class Parts:
    """Reserves the memory of one subgroup after the other, and issues their updates, by the plan of the iteration.

    Updates by the CPU are issued at once. Those of residents wait for the next one of the CPU, or until they are
    MOST_HELD: one launch serves them all. Streamed subgroups are queued for the slots in the order in which the plan
    was simulated (`perfmodel.schedule.turns`), behind those that have yet to come and go first, because forward needs
    them sooner. What waits is issued when backward ends, or the ledger settles.

    Offloaded gradients return through a slot to state on the device, once they have arrived on the host.

    device: of the ledger. plan: of this iteration.
    """

    def __init__(
        self,
        ledger: Ledger,
        plan: Plan,
        subgroups: Sequence[Subgroup],
        workload: Workload,
        now: Iteration,
        left: float,
        measured: Timeline | None,
    ) -> None:
        """left: bytes of device memory for slots and for state that comes. measured: the last step, if it is known."""
        self.device: Device = ledger.device
        self.plan = plan
        self._ledger, self._workload, self._now, self._left = ledger, workload, now, left
        self._subgroups = subgroups
        self._index = {subgroup: i for i, subgroup in enumerate(subgroups)}
        self._rank = {i: rank for rank, i in enumerate(plan.order)}
        self._returns = workload.returns
        through = {Placement.GPU_STREAMED, *([Placement.GPU_RESIDENT] if self._returns else [])}
        self._granted = dataclasses.replace(plan, slots=max(1, plan.slots))
        self._held: list[Final] = []
        self._passing: list[Final] = []
        """Updates that wait for a slot."""
        begin = turns(plan, workload, turn_seconds(workload, measured))
        order = [i for i in begin if plan.placements[i] in through]
        self._turn = {i: place for place, i in enumerate(order)}
        self._before = dict(zip(order, accumulate(order, min, initial=len(subgroups)), strict=False))
        """By subgroup that passes through a slot: the lowest of those that go first."""
        self._to_come = len(subgroups)
        """Gradients come from the last subgroup to the first: these have yet to come."""
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
        resident, on_cpu = placement is Placement.GPU_RESIDENT, tier is Tier.HOST and placement is Placement.CPU
        # Pinning waits for the device, whose collectives wait for other ranks, which may wait for this one.
        if subgroup.sharded and not (resident or stores.host.has_reserved(subgroup, updated=on_cpu)):
            return None
        if self._passes(i, tier) and not self._get_slots(self._slot_bytes(i)):
            return None
        if resident:
            return tier if tier is Tier.DEVICE or self._make_room(subgroup) else None
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
        return bool(store.slots) and store.slots[0].memory.nbytes >= needed

    def add(self, update: SubgroupUpdate, tier: Tier, callers: Collection[Caller]) -> None:
        """Issue an update whose memory is reserved and whose gradients are final, or let it wait.

        Raises RuntimeError, with nothing running any more, if a job cannot be issued.
        """
        number = self._index[update.subgroup]
        placement, each = self.plan.placements[number], Final(number, update, tier, callers)
        (self._passing if self._passes(number, tier) else self._held).append(each)
        if len(self._held) == MOST_HELD or placement is Placement.CPU:
            self._issue_held()
        self._to_come = min(self._to_come, number)
        while self._passing:
            each = self._first_passing()
            waits = self._before.get(each.number, self._to_come) < self._to_come
            if waits or not all(map(has_ended, each.update.arriving)):
                return
            self._issue_passing(each)

    def _first_passing(self) -> Final:
        return min(self._passing, key=lambda each: self._turn.get(each.number, 0))

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
            self._issue_passing(self._first_passing())

    def _issue_held(self) -> None:
        held, self._held = self._held, []
        if held:
            self._issue(held)

    def _issue_passing(self, each: Final) -> None:
        """Issue one of those that wait for a slot. Blocks until its gradients arrive."""
        store = self._ledger.stores.device
        self._passing.remove(each)
        # The schedule of one subgroup takes the first slot: let that be the one that was used longest ago.
        self._issue([each], store.slots[0].last, each.update.arriving)
        store.slots.append(store.slots.pop(0))

    def _issue(self, part: Sequence[Final], behind: Sequence[Job] = (), arriving: Sequence[Job] = ()) -> None:
        """behind, arriving: as for `Ledger.issue_part`."""
        part = sorted(part, key=lambda each: self._rank[each.number]) if len(part) > 1 else part
        subjects, before = dict[int, Subject](), dict[int, SubgroupState]()
        callers, behind, now = set[Caller](), [*behind], self._now
        for number, update, tier, queues in part:
            subject = Subject(update.subgroup, update, (), () if update.offloaded else None)
            subjects[number], before[number] = subject, subject.before_step(tier)
            callers.update(queues)
            # A block that backward uses again may be fetched ahead, and no queue has joined that yet.
            if update.subgroup.arena.streams and update.subgroup.arena.reading is not None:
                behind.append(update.subgroup.arena.reading)
            if now.first_departure is None and self.plan.placements[number] is Placement.CPU:
                now.first_departure = self.device.mark()
        schedule = self._schedule(before)
        self._ledger.issue_part(schedule, subjects, self.plan, now, callers, behind, arriving)

    def _schedule(self, before: Mapping[int, SubgroupState]) -> Schedule:
        """Return the schedule of a part, most often that of the last iteration."""
        kept, key = self._ledger.parts, (*before,)
        loads = [self._workload.subgroups[i] for i in key]
        made_of = self._granted, loads, self._workload.windows, [*before.values()]
        found = kept.get(key)
        if found is None or found[0] != made_of:
            if len(kept) > MOST_KEPT:
                kept.clear()
            found = kept[key] = made_of, schedule_part(self._granted, self._workload, before, key)
        return found[1]
