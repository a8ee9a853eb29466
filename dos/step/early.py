"""What backward begins for the step to come: gradients on their way to the host, state on its way to the device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from dos.devices import Caller, Copy, Device, Issued, Job
from dos.devices.coalesce import joined
from dos.state.stores import Stores
from dos.state.subgroup import Subgroup
from dos.step.work import Subject
from perfmodel import Op, Placement, Plan
from perfmodel.lanes import Stream
from perfmodel.plan import Move, Tier
from perfmodel.schedule import MOVES, SubgroupState, Task

MOST_EARLY_JOBS = 1000
"""Transfers in flight without a step before the first are let go of."""


class Early:
    """Transfers that are issued before the step that uses them.

    begun: what is under way and no step has, in order.
    prefetched: of that, the state that fills the slots, by subgroup.
    arriving: state that comes to stay, by subgroup; None: its memory is there, and its way has not begun.
    shown: whether user code was given the state at home since the last step. It may write there until the next, which
        would be lost in state that has left before.
    considered: the plan whose streamed subgroups are known.
    """

    def __init__(self, device: Device, stores: Stores) -> None:
        self.begun: list[Issued] = []
        self.prefetched: dict[Subgroup, Issued] = {}
        self.arriving: dict[Subgroup, Issued | None] = {}
        self.shown = False
        self.stores = stores
        self.considered: Plan | None = None
        self._device = device
        self._streamed: Sequence[tuple[int, Tier]] = ()
        self._numbers = itertools.count()

    def send_gradients(self, index: int, copies: Sequence[Copy], callers: Collection[Caller] = ()) -> Issued:
        """Start gradients of one subgroup on their way to the host, after what the caller has queued on the device.

        callers: the queues in which backward wrote them, if not all in the present one.
        """
        self._forget_many()
        # What backward writes in any of them is read here.
        job = self._device.copy(Op.GRADIENT, index, joined(copies), self._device.fence(callers))
        nbytes = sum(source.nbytes for _, source in copies)
        return self._began(Task(Op.GRADIENT, Stream.GRADIENT, index, nbytes), job)

    def prefetch(self, plan: Plan, subgroups: Sequence[Subgroup], spare: Callable[[], int]) -> None:
        """Fill the slots while backward runs, if that was not done yet and they take no more than `spare` bytes."""
        store = self.stores.device
        if store.slots or self.shown:
            return
        if self.considered is not plan:  # asked at each of many gradients
            sources = ((i, self._source(subgroups[i])) for i in plan.served(Placement.GPU_STREAMED))
            self._streamed = [(i, source) for i, source in sources if source is not None]
            self.considered = plan
        streamed = self._streamed
        if not streamed:
            return
        nbytes = max(subgroups[i].state.carved_bytes for i, _ in streamed)
        count = min(plan.slots, len(streamed))
        if nbytes * count > spare():
            return
        store.get_slots(count, nbytes)
        for slot, (i, source) in enumerate(streamed[: len(store.slots)]):
            store.occupy(subgroups[i], slot)
            self.prefetched[subgroups[i]] = self._fetch(i, subgroups[i], source, slot)

    def fetch_residents(self, plan: Plan, subgroups: Sequence[Subgroup]) -> None:
        """Start state that comes to stay on its way while backward runs, as far as there is memory for it.

        Only while no step is in flight: what that still sends home must not be read before it is there. Nor while users
        may write to it.
        """
        if self.shown:
            return
        store = self.stores.device
        store.expect_denials(True)  # the step will try again
        for i in plan.served(Placement.GPU_RESIDENT):
            source = self._source(subgroups[i])
            if source is not None:
                self.arriving[subgroups[i]] = None  # an interruption from here on leaves memory that is no state yet
                if store.reserve([subgroups[i]]):
                    return
                self.arriving[subgroups[i]] = self._fetch(i, subgroups[i], source)

    def _source(self, subgroup: Subgroup) -> Tier | None:
        """Where state can be fetched from beside backward, if anywhere. What is on disk the step brings."""
        tier = self.stores.where(subgroup)
        return None if tier in (Tier.DEVICE, Tier.DISK) else tier

    def _fetch(self, index: int, subgroup: Subgroup, source: Tier, slot: int | None = None) -> Issued:
        move = Move(source, Tier.DEVICE)
        # The caller's stream may still use what was in this memory before.
        job = self.stores.move(move, index, subgroup, self._device.fence())
        return self._began(Task(*MOVES[move], index, subgroup.state.nbytes, (), slot, (), move), job)

    def _began(self, task: Task, job: Job) -> Issued:
        self.begun.append(Issued(next(self._numbers), task, job))
        return self.begun[-1]

    def where(self, subgroup: Subgroup) -> Tier:
        """Where the subgroup's newest state is, at home if nowhere; what is on its way is where it comes from."""
        issued = self.arriving.get(subgroup)
        if issued is not None and issued.task.move is not None:
            return issued.task.move.source
        return self.stores.where(subgroup) or Tier.HOST

    def drop_prefetched(self) -> None:
        """Forget state that was prefetched for another plan than the one that runs, or for a step that was skipped."""
        _end(self.prefetched.values())
        self.prefetched = {}
        self.stores.device.free_slots()

    def drop_arriving(self, subgroups: Iterable[Subgroup]) -> None:
        """Free memory of subgroups that were on their way here; nothing has updated their state, so the host has it."""
        for subgroup in subgroups:
            issued = self.arriving[subgroup]
            _end(() if issued is None else (issued,))
            if self.stores.device.has(subgroup):
                self.stores.device.drop(subgroup)
            del self.arriving[subgroup]

    def end(self) -> None:
        """Wait for what is under way."""
        _end(self.begun)

    def _forget_many(self) -> None:
        """Backward after backward without a step: let go of transfers that have ended. Who uses them has them, too."""
        if len(self.begun) > MOST_EARLY_JOBS:
            _end(self.begun)
            kept = (*self.prefetched.values(), *self.arriving.values())
            self.begun = sorted(issued for issued in kept if issued is not None)

    def find(
        self, plan: Plan, subjects: Sequence[Subject], found: Sequence[SubgroupState]
    ) -> tuple[list[SubgroupState], list[Issued]]:
        """What is found, with what is under way, and all of that which the step uses."""
        # Gradients of what is updated on the device after all have left in vain.
        used = [s.departed if p is Placement.CPU else () for s, p in zip(subjects, plan.placements, strict=True)]
        fetched = [self.prefetched.get(s.subgroup) or self.arriving.get(s.subgroup) for s in subjects]
        begun = [
            # Subgroups may have another order than when it was issued.
            issued._replace(task=issued.task._replace(subgroup=i))
            for i, (departed, state) in enumerate(zip(used, fetched, strict=True))
            for issued in (*departed, *([] if state is None else [state]))
        ]
        begun.sort()
        places = {issued.number: place for place, issued in enumerate(begun)}
        return [
            each._replace(
                departed=tuple(places[issued.number] for issued in departed),
                fetched=None if state is None else places[state.number],
            )
            for each, departed, state in zip(found, used, fetched, strict=True)
        ], begun

    def hand_over(self, begun: Iterable[Issued]) -> None:
        """A step has these from now on."""
        used = {issued.number for issued in begun}
        self.begun = [issued for issued in self.begun if issued.number not in used]
        self.prefetched, self.arriving = {}, {}


def _end(begun: Iterable[Issued]) -> None:
    """Wait for these. What went wrong does not matter: a step that needs them does it again, or says so."""
    for issued in begun:
        with contextlib.suppress(Exception):
            issued.job.wait()
