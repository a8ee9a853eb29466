"""Parts of a step that backward issues, one subgroup at a time, on a device."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Collection, Sequence

from dos.devices import Caller, Device, Job
from dos.state.subgroup import Subgroup
from dos.step.iteration import Iteration
from dos.step.ledger import Ledger
from dos.step.work import SubgroupUpdate, Subject
from perfmodel import Placement, Plan, Workload
from perfmodel.plan import Tier
from perfmodel.tasks import SubgroupState


class Parts:
    """Reserves the memory of one subgroup after the other, and issues their updates, by the plan of the iteration.

    device: of the ledger. plan: of this iteration. left: bytes of device memory for slots and for state that comes.
    """

    def __init__(
        self, ledger: Ledger, plan: Plan, subgroups: Sequence[Subgroup], workload: Workload, now: Iteration, left: float
    ) -> None:
        self.device: Device = ledger.device
        self.plan = plan
        self._ledger, self._workload, self._now, self._left = ledger, workload, now, left
        self._index = {subgroup: i for i, subgroup in enumerate(subgroups)}
        self._subjects = [Subject(subgroup, None, (), ()) for subgroup in subgroups]
        self._found = [SubgroupState(plan.stays(i), None, 0, None, 0) for i in range(len(subgroups))]
        streamed = plan.served(Placement.GPU_STREAMED)
        self._slot_bytes = max((subgroups[i].state.carved_bytes for i in streamed), default=0)
        self._slots = min(plan.slots, len(streamed))
        self._granted = dataclasses.replace(plan, slots=max(1, plan.slots))
        self._busy: deque[Sequence[Job]] = deque()
        """The last jobs of each slot that was used, the oldest first."""

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

    def issue(self, update: SubgroupUpdate, tier: Tier, callers: Collection[Caller]) -> None:
        """Issue the update of a subgroup whose memory is reserved.

        tier: of its state. callers: the queues in which backward wrote its gradients.
        Raises RuntimeError, with nothing running any more, if a job cannot be issued.
        """
        ledger, store, i = self._ledger, self._ledger.stores.device, self._index[update.subgroup]
        subjects, found = list(self._subjects), list(self._found)
        subjects[i] = Subject(update.subgroup, update, (), update.items)
        found[i] = subjects[i].found(tier)
        streams = tier is Tier.HOST and self.plan.placements[i] is Placement.GPU_STREAMED
        behind: Sequence[Job] = ()
        # The schedule of one subgroup takes the first slot: let that be the one that was used longest ago.
        if streams and len(self._busy) == len(store.slots):
            behind = self._busy.popleft()
        if self._now.first_departure is None and self.plan.placements[i] is Placement.CPU:
            self._now.first_departure = self.device.mark()
        ledger.issue_part(self._granted, subjects, found, self._workload, self._now, callers, behind)
        if streams:
            assert ledger.step is not None, "it was issued"
            self._busy.append(ledger.step.jobs[-1:])  # the flush, behind which the slot is free
            store.slots.append(store.slots.pop(0))
