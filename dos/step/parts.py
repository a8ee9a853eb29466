"""Parts of a step that backward issues, a few subgroups at a time, on a device."""

from __future__ import annotations

import dataclasses
import math
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

MOST_HELD, MOST_ON_CPU = 6, 3
"""Subgroups that wait for each other, which takes the host less time than one by one; as many with one of the CPU's."""
BACKLOG = 2
"""Turns that the CPU has before it while others wait."""


class Final(NamedTuple):
    """A subgroup's update whose gradients are final.

    number: by the plan. tier: of its state. callers: the queues in which backward wrote the gradients.
    """

    number: int
    update: SubgroupUpdate
    tier: Tier
    callers: Collection[Caller]


class Parts:
    """Reserves the memory of one subgroup after the other, and issues their updates, by the plan of the iteration.

    Updates by the CPU are issued at once, unless it has others to do. Those of residents wait for the next one of the
    CPU, or until they are MOST_HELD: one launch serves them all. Streamed subgroups wait for a slot, and those first
    that forward needs first, whose gradients come last. What waits is issued when backward ends, or the ledger settles.

    device: of the ledger. plan: of this iteration.
    """

    def __init__(
        self, ledger: Ledger, plan: Plan, subgroups: Sequence[Subgroup], workload: Workload, now: Iteration, left: float
    ) -> None:
        """left: bytes of device memory for slots and for state that comes."""
        self.device: Device = ledger.device
        self.plan = plan
        self._ledger, self._workload, self._now, self._left = ledger, workload, now, left
        self._index = {subgroup: i for i, subgroup in enumerate(subgroups)}
        self._rank = {i: rank for rank, i in enumerate(plan.order)}
        streamed = plan.served(Placement.GPU_STREAMED)
        self._slot_bytes = max((subgroups[i].state.carved_bytes for i in streamed), default=0)
        self._slots = min(plan.slots, len(streamed))
        self._granted = dataclasses.replace(plan, slots=max(1, plan.slots))
        self._held: list[Final] = []
        self._streamed: list[Final] = []
        """Updates of streamed state that wait for a slot."""
        self._busy: deque[Sequence[Job]] = deque()
        """The last jobs of each slot that was used, the oldest first."""
        ledger.held = self.issue_rest

    def reserve(self, subgroup: Subgroup) -> Tier | None:
        """Reserve the memory of a subgroup's update; return the tier of its state, None if it is to wait for `step()`.

        Raises MemoryError if the host has too little memory.
        """
        # Before anything is reserved: the device then has room for state that has yet to come.
        i, stores, tier = self._index.get(subgroup), self._ledger.stores, self._ledger.at(subgroup)
        if i is None or tier is None:  # new
            return None
        placement = self.plan.placements[i]
        if placement is Placement.GPU_RESIDENT:
            return tier if tier is Tier.DEVICE or self._make_room(subgroup) else None
        if tier is Tier.HOST and placement is Placement.GPU_STREAMED and not self._get_slots():
            return None
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

    def _get_slots(self) -> bool:
        store, nbytes = self._ledger.stores.device, self._slot_bytes
        if not store.slots:
            self._busy.clear()
            store.expect_denials(True)
            fitting = self._slots if math.isinf(self._left) else int(self._left // nbytes)
            store.get_slots(min(self._slots, fitting), nbytes)
            self._left = self._left - len(store.slots) * nbytes if store.slots else 0.0
        return bool(store.slots)

    def add(self, update: SubgroupUpdate, tier: Tier, callers: Collection[Caller]) -> None:
        """Issue an update whose memory is reserved and whose gradients are final, or let it wait.

        Raises RuntimeError, with nothing running any more, if a job cannot be issued.
        """
        number = self._index[update.subgroup]
        placement, each = self.plan.placements[number], Final(number, update, tier, callers)
        (self._streamed if self._passes(each) else self._held).append(each)
        count, on_cpu = len(self._held), placement is Placement.CPU
        if count == MOST_HELD or (on_cpu and (count >= MOST_ON_CPU or self._ledger.backlog < BACKLOG)):
            self._issue_held()
        store = self._ledger.stores.device
        if self._streamed and (len(self._busy) < len(store.slots) or all(map(has_ended, self._busy[0]))):
            self._issue_streamed()

    def _passes(self, each: Final) -> bool:
        """Return whether the state passes through a slot."""
        return each.tier is Tier.HOST and self.plan.placements[each.number] is Placement.GPU_STREAMED

    def issue_rest(self) -> None:
        """Issue the updates that wait. Raises as `add`."""
        self._issue_held()
        while self._streamed:
            self._issue_streamed()

    def _issue_held(self) -> None:
        held, self._held = self._held, []
        if held:
            self._issue(held)

    def _issue_streamed(self) -> None:
        store, each = self._ledger.stores.device, min(self._streamed, key=lambda each: each.number)
        self._streamed.remove(each)
        # The schedule of one subgroup takes the first slot: let that be the one that was used longest ago.
        behind = self._busy.popleft() if len(self._busy) == len(store.slots) else ()
        step = self._issue([each], behind)
        self._busy.append(step.jobs[-1:])  # the flush, behind which the slot is free
        store.slots.append(store.slots.pop(0))

    def _issue(self, part: Sequence[Final], behind: Sequence[Job] = ()) -> Step:
        """behind: as for `Ledger.issue_part`."""
        part = sorted(part, key=lambda each: self._rank[each.number])
        subjects = {each.number: Subject(each.update.subgroup, each.update, (), each.update.items) for each in part}
        found = {each.number: subjects[each.number].found(each.tier) for each in part}
        if self._now.first_departure is None and Placement.CPU in map(self.plan.placements.__getitem__, found):
            self._now.first_departure = self.device.mark()
        schedule = schedule_part(self._granted, self._workload, found, list(found))
        callers = set[Caller]().union(*(each.callers for each in part))
        return self._ledger.issue_part(schedule, subjects, self.plan.order, self._now, callers, behind)
