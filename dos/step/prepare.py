"""Reserves the memory of a step on the device, on the host and on disk, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from dos.state.subgroup import Subgroup
from dos.state.windows import window_bytes
from dos.step.ledger import Ledger
from dos.step.transit import wait_for_all
from dos.step.work import Subject
from perfmodel import Placement, Plan, Workload
from perfmodel.plan import Tier
from perfmodel.tasks import SubgroupState, arriving, leaving, staged, windowed


class Prepared(NamedTuple):
    """A step whose memory is reserved.

    before: each subgroup as the step finds it, by index.
    """

    plan: Plan
    subjects: Sequence[Subject]
    before: Sequence[SubgroupState]


@dataclass(frozen=True)
class Rooms:
    """Homes on the host where there is a disk, before a step is prepared. Subgroups are given by index.

    homes: bytes of the home of each subgroup whose state is anywhere; made: of them, bytes that are allocated.
    from_disk: whether any state is on disk now.
    room: bytes that may still be allocated. windows: bytes of the present windows; through: of the windows needed.
    """

    homes: Mapping[int, int]
    made: Mapping[int, int]
    from_disk: bool
    room: float
    windows: int
    through: int


class Preparation:
    """A context that reserves memory for plan after plan, until one has all the memory that it needs.

    An exception within releases all reserved memory; no state has changed.

    before: each subgroup before the step, by index.
    """

    def __init__(
        self,
        subjects: list[Subject],
        ledger: Ledger,
        work: Workload,
        left: Callable[[Plan, int], float],
        before: Sequence[SubgroupState] = (),
    ) -> None:
        """subjects: all subgroups, by index. work: the workload for which plans are made. left: see `Facts.left`.

        before: each subgroup as it was, where all but the tier of its state is known.
        """
        self._work, self._left = work, left
        self._subjects, self._windows = subjects, work.windows
        self._transits, self._stores = ledger.transits, ledger.stores
        stores = ledger.stores
        tiers = stores.tiers([s.subgroup for s in subjects])
        if before:
            pairs = zip(before, tiers, strict=True)
            self.before = [b if b.state is tier else b._replace(state=tier) for b, tier in pairs]
        else:
            self.before = [s.before_step(tier) for s, tier in zip(subjects, tiers, strict=True)]
        self._nbytes = 0 if stores.disk is None else window_bytes(subject.subgroup for subject in subjects)
        self._attempted = False

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind is None:
            return
        stores = self._stores
        stores.drop_empty()
        # A later step may have another plan, and forward needs the memory of slots meanwhile.
        stores.device.release_slots()
        stores.homes.expose_again()  # user code may write there before it tries again

    @property
    def rooms(self) -> Rooms:
        """The homes on the host as they are now."""
        stores, before = self._stores, self.before
        # State without an update and without a home on the host, its default tier, is nowhere: it was never written.
        somewhere = [
            i
            for i, s in enumerate(self._subjects)
            if s.update is not None or before[i].state is not Tier.HOST or stores.host.has(s.subgroup)
        ]
        return Rooms(
            homes={i: stores.host.home_bytes(self._subjects[i].subgroup) for i in somewhere},
            made={i: stores.homes.made_bytes(self._subjects[i].subgroup) for i in somewhere},
            from_disk=any(each.state is Tier.DISK for each in before),
            room=stores.host.room,
            windows=stores.host.windows.nbytes,
            through=self._windows * self._nbytes,
        )

    def reserve(self, plan: Plan) -> Prepared | frozenset[int]:
        """Reserve the memory of the plan; return the subgroups for which the device has none, if there are any.

        Raises MemoryError if the host has too little memory, OSError if the disk has no room.
        """
        stores, before, subjects = self._stores, self.before, self._subjects
        device = stores.device
        on_disk = stores.disk is not None and (plan.on_disk or stores.disk.nbytes)
        if on_disk and not stores.host.windows.fit(self._windows, self._nbytes):
            # New windows may need the memory of homes, which no fetch may be reading then.
            device.release_slots()
        if not self._attempted:  # else this would forget that the device denied memory to the plan before
            self._attempted = True
            # The rooms that state leaves are kept until the step is over, and may be the memory that is missing.
            device.expect_denials(bool(leaving(plan, before)))
        coming = {i: subjects[i].subgroup for i in arriving(plan, before)}
        new = [i for i, subgroup in coming.items() if stores.at(subgroup) is None]
        fitting = self._make_room(plan, coming)
        without = set(device.reserve(fitting.values()))
        denied = {i for i, subgroup in coming.items() if i not in fitting or subgroup in without}
        for i in set(new) - denied:  # state that was nowhere begins on the device
            device.fetch(coming[i]).zero()
            before[i] = before[i]._replace(state=Tier.DEVICE)
        denied |= self._get_slots(plan, denied)
        # Subgroups that the plan updates on the CPU can do without the room that was denied.
        if denied - set(plan.served(Placement.CPU)):
            return frozenset(denied)
        for i in plan.on_disk:
            if stores.at(subjects[i].subgroup) is None:  # state that was nowhere begins on disk, as zeros
                before[i] = before[i]._replace(state=Tier.DISK)
        self._reserve_on_host(plan)
        return Prepared(plan, subjects, before)

    def _make_room(self, plan: Plan, coming: Mapping[int, Subgroup]) -> dict[int, Subgroup]:
        """Cancel slots that leave too little memory for `coming`; return the subgroups for which there is memory."""
        store, fitting = self._stores.device, dict[int, Subgroup]()
        left = self._left(plan, store.resident_bytes)
        for i, subgroup in coming.items():
            nbytes = 0 if store.has_room(subgroup) else self._work.subgroups[i].state_bytes
            if not nbytes or nbytes <= left:
                fitting[i] = subgroup
                left -= nbytes
        if store.slots and self._work.staging_bytes(len(store.slots)) > left:
            store.release_slots()  # backward has filled them for a plan of which less had to move
        return fitting

    def _reserve_on_host(self, plan: Plan) -> None:
        """Reserve homes, staging and windows, and room on disk."""
        stores, before, subjects = self._stores, self.before, self._subjects
        moved = [i for i, subject in enumerate(subjects) if subject.update or before[i].state is not plan.stays(i)]
        if stores.disk is not None:
            stores.disk.reserve([subjects[i].subgroup for i in moved if plan.stays(i) is Tier.DISK])
        in_windows = self._get_windows(plan) if stores.disk is not None else set()
        served = plan.served(Placement.CPU)
        updated = [subjects[i].subgroup for i in served if subjects[i].update and i not in in_windows]
        # First state that passes through slots, which each step copies; last state that the CPU updates in its home.
        moved.sort(key=frozenset(served).__contains__)
        resting = [subjects[i].subgroup for i in moved if plan.stays(i) is Tier.HOST]
        for subgroup in resting:
            if stores.disk is not None and not stores.host.has(subgroup):
                stores.disk.hide(subgroup)  # memory of files is no home
        # Where there is a limit, state counts together with the staging of its updates on the host.
        stores.host.reserve(resting, resting if stores.disk else updated)

    def _get_windows(self, plan: Plan) -> set[int]:
        """Allocate the windows, if any are needed; return the subgroups that the host updates in one."""
        stores, before, subjects = self._stores, self.before, self._subjects
        through = windowed(plan, before)
        if not through:
            return set()
        windows = stores.host.windows
        if not windows.fit(self._windows, self._nbytes):
            if self._windows * self._nbytes - windows.nbytes > stores.host.room:
                wait_for_all(self._transits.all)  # gradients may be in transit to a home that is dropped below
                at_home = [i for i, each in enumerate(before) if each.state is Tier.HOST is not plan.stays(i)]
                housed = [i for i in at_home if stores.host.has(subjects[i].subgroup)]
                stores.to_disk([subjects[i].subgroup for i in housed], Tier.HOST)
                before[:] = [each._replace(state=Tier.DISK) if i in housed else each for i, each in enumerate(before)]
                through = windowed(plan, before)
            stores.host.make_windows(self._windows, self._nbytes, stores.device.device)
        houses = stores.host.has
        in_windows = {i for i in through if plan.stays(i) is not Tier.HOST and not houses(subjects[i].subgroup)}
        for i in through:
            update = subjects[i].update
            if update is not None and (i in in_windows or before[i].state is Tier.DISK):
                if subjects[i].departed:  # sent to a home that was dropped, perhaps by a step that ran out of memory
                    subjects[i] = subjects[i]._replace(departed=(), late=None)
                update.from_disk, update.place = True, None if i in in_windows else update.place
                before[i] = subjects[i].before_step(before[i].state)
        return in_windows

    def _get_slots(self, plan: Plan, denied: set[int]) -> set[int]:
        """Allocate the slots; if there are none, return the subgroups that would have passed through them.

        denied: subgroups without room on the device, which pass through no slot.
        """
        subjects, before, store = self._subjects, self.before, self._stores.device
        passing = {i: subjects[i] for i in staged(plan, before) if i not in denied}
        nbytes = max((s.slot_bytes(staying=store.has_room(s.subgroup)) for s in passing.values()), default=0)
        filled = [*store.filled]
        first = [subject.subgroup for subject in passing.values()][: len(filled)]
        # Backward may have filled slots for another plan: a step would update from state of other subgroups, or past
        # the end of a slot.
        if store.slots and (first != filled or store.slots[0].memory.nbytes < nbytes):
            store.release_slots()
        if passing and not store.slots:
            left, most = self._left(plan, store.resident_bytes), min(max(plan.slots, 1), len(passing))
            # Where only gradients of residents pass, slots are as small as these, and one is set apart.
            streams = any(not store.has_room(subject.subgroup) for subject in passing.values())
            fitting = self._work.slots_within(left, most, streams=streams)
            home = {i for i, s in passing.items() if not store.has_room(s.subgroup)}
            if not fitting and home:
                return home  # gradients of residents pass through a smaller slot, whose memory is set apart
            store.get_slots(max(fitting, 1), nbytes)
        if store.slots:
            return set()
        for i, subject in passing.items():
            if subject.subgroup.arena.tier is Tier.DEVICE:
                raise torch.OutOfMemoryError(
                    f"there is no device memory through which the gradients of subgroup {i} could come up for its "
                    "update; use a smaller subgroup_size, or policy='adaptive', with which state can leave"
                )
        for i, subject in passing.items():
            # The host updates it now, and it needs no room on the device.
            if before[i].state is not Tier.DEVICE and store.has_room(subject.subgroup):
                store.drop(subject.subgroup)
        # A plan without slots must not stream, not even subgroups without a gradient.
        return {*passing, *plan.served(Placement.GPU_STREAMED)}


def check_slots(plan: Plan, subgroups: Sequence[Subgroup], total: int) -> None:
    """Raise ValueError if the plan streams a subgroup for which a device of `total` bytes could never hold a slot.

    total: 0 if it is not known.
    """
    for i in plan.served(Placement.GPU_STREAMED) if total else ():
        needed = subgroups[i].state.carved_bytes
        if total < needed:
            raise ValueError(
                f"subgroup {i} of {subgroups[i].numel} parameters needs a staging slot of {needed} bytes and the "
                f"device has {total} bytes in all; choose a smaller subgroup_size or policy='cpu'"
            )
