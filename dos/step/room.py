"""Gets the memory that a step takes, on the device and on the host, before anything has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from dos.state.stores import Store, Stores
from dos.state.subgroup import Subgroup
from dos.state.windows import window_bytes
from dos.step.early import Early
from dos.step.work import Subject
from perfmodel import Placement, Plan
from perfmodel.plan import Tier
from perfmodel.schedule import SubgroupState, arriving, leaving, staged, windowed


class Prepared(NamedTuple):
    """A step for which there is memory.

    found: what it finds of each subgroup, by index.
    """

    plan: Plan
    subjects: Sequence[Subject]
    found: Sequence[SubgroupState]


def make_room(plan: Plan, subjects: list[Subject], early: Early, windows: int = 0) -> Prepared:
    """Get the memory that the step takes, on the device and on the host; the plan as far as there is.

    subjects: all subgroups, by index. early: what backward has begun for the step. windows: how many it counts on.
    A subgroup for which the device has no memory is updated on the host in this step.
    Raises MemoryError if the host has none either, OSError if the disk has no room. No state has changed then.
    """
    stores, device = early.stores, early.stores.device
    early.considered = None
    residents = {subjects[i].subgroup for i in plan.served(Placement.GPU_RESIDENT)}
    early.drop_arriving([s for s, issued in early.arriving.items() if issued is None or s not in residents])
    nbytes = 0 if stores.disk is None else window_bytes(subject.subgroup for subject in subjects)
    on_disk = stores.disk is not None and (plan.on_disk or stores.disk.nbytes)
    if on_disk and not stores.host.windows.fit(windows, nbytes):
        # State may have to leave the host for windows, and nothing may be reading it then.
        early.drop_prefetched()
        early.drop_arriving(list(early.arriving))
    kept = stores.host.windows.kept
    found = [s.found(early.where(s.subgroup)) for s in subjects]
    for i, subject in enumerate(subjects) if stores.disk else ():
        found[i] = found[i]._replace(window=kept.get(subject.subgroup))
    reserved: list[tuple[Store, Subgroup]] = []

    def reserve(tier: Tier, subgroups: Iterable[Subgroup]) -> list[Subgroup]:
        store = stores.of[tier]
        without = [subgroup for subgroup in subgroups if not store.has(subgroup)]
        reserved.extend((store, subgroup) for subgroup in without)
        return store.reserve(without)

    try:
        # What leaves is there until the step is over, and may be what is missing.
        device.expect_denials(bool(leaving(plan, found)))
        coming = {i: subjects[i].subgroup for i in arriving(plan, found)}
        new = [i for i, subgroup in coming.items() if stores.where(subgroup) is None]
        without = set(reserve(Tier.DEVICE, coming.values()))
        denied = {i for i, subgroup in coming.items() if subgroup in without}
        for i in set(new) - denied:  # state that was nowhere begins on the device
            device.fetch(coming[i]).zero()
            found[i] = found[i]._replace(state=Tier.DEVICE)
        if denied:  # what the CPU cannot update passes through a slot
            through = {i for i in denied if not subjects[i].subgroup.arena.rule.on_cpu}
            plan, denied = plan.streaming(through), denied - through
        denied |= _get_slots(plan, subjects, found, early, denied)
        plan = dataclasses.replace(plan.on_host(denied), slots=len(device.slots))
        plan = _at_home(plan, subjects, found, stores, windows * nbytes)
        moved = [i for i, subject in enumerate(subjects) if subject.update or found[i].state is not plan.stays(i)]
        for tier in set(stores.of) - {Tier.DEVICE, Tier.HOST}:
            reserve(tier, [subjects[i].subgroup for i in moved if plan.stays(i) is tier])
        in_windows = _get_windows(plan, subjects, found, early, windows, nbytes)
        updated = [i for i in plan.served(Placement.CPU) if subjects[i].update and i not in in_windows]
        resting = [subjects[i].subgroup for i in moved if plan.stays(i) is Tier.HOST]
        for subgroup in resting:
            if stores.disk is not None and not stores.host.houses(subgroup):
                stores.disk.hide(subgroup)  # memory of files is no home
        # Where there is a limit, state counts with what its updates on the host take.
        on_cpu = resting if stores.disk else [subjects[i].subgroup for i in updated]
        stores.host.reserve(resting, on_cpu)
    except BaseException:
        for store, subgroup in reserved:
            if store.has(subgroup) and not (store is stores.disk and stores.where(subgroup) is Tier.DISK):
                store.drop(subgroup)  # to which nothing has come
        early.drop_prefetched()
        stores.homes.show_again()  # user code may write there before it tries again
        raise
    return Prepared(plan, subjects, found)


def _at_home(plan: Plan, subjects: Sequence[Subject], found: list[SubgroupState], stores: Stores, through: int) -> Plan:
    """The plan with what is in windows on disk, and so what the host has no room for until other state has left.

    through: bytes of windows.
    """
    if stores.disk is None:
        return plan
    more = {i for i, each in enumerate(found) if each.window is not None and plan.stays(i) is not Tier.DEVICE}
    # What has no update and is on the host without a home is nowhere.
    somewhere = (
        i
        for i, s in enumerate(subjects)
        if s.update is not None or found[i].state is not Tier.HOST or stores.host.houses(s.subgroup)
    )
    resting = {subjects[i].subgroup: i for i in somewhere if i not in more and plan.stays(i) is Tier.HOST}
    # What comes home passes through windows, too; and so does all if not everything has room without them.
    passes = bool(plan.on_disk or more or any(each.state is Tier.DISK for each in found))
    housed = stores.homes.housed(resting, through if passes else 0)
    if len(housed) < len(resting) and not passes:
        housed = stores.homes.housed(resting, through)
    more |= {i for subgroup, i in resting.items() if subgroup not in housed}
    plan = dataclasses.replace(plan, on_disk=plan.on_disk | more)
    for i in plan.on_disk:
        if stores.where(subjects[i].subgroup) is None:  # it begins there, as zeros
            found[i] = found[i]._replace(state=Tier.DISK)
    return plan


def _get_windows(
    plan: Plan, subjects: list[Subject], found: list[SubgroupState], early: Early, count: int, nbytes: int
) -> set[int]:
    """Get `count` windows of `nbytes`, if any are needed; the subgroups that the host updates in one."""
    stores = early.stores
    through = windowed(plan, found)
    if not through:
        return set()
    windows = stores.host.windows
    if not windows.fit(count, nbytes):
        stores.write_kept()
        found[:] = [each._replace(state=Tier.DISK, window=None) if each.window is not None else each for each in found]
        if count * nbytes - windows.nbytes > stores.host.room:
            early.end()  # what leaves a home or comes to it
            at_home = [i for i, each in enumerate(found) if each.state is Tier.HOST is not plan.stays(i)]
            housed = [i for i in at_home if stores.host.houses(subjects[i].subgroup)]
            stores.to_disk([subjects[i].subgroup for i in housed], Tier.HOST)
            found[:] = [each._replace(state=Tier.DISK) if i in housed else each for i, each in enumerate(found)]
            through = windowed(plan, found)
        stores.host.make_windows(count, nbytes, stores.device.device)
    in_windows = {i for i in through if plan.stays(i) is not Tier.HOST and not stores.host.houses(subjects[i].subgroup)}
    for i in through:
        update = subjects[i].update
        if update is not None and (i in in_windows or found[i].state is Tier.DISK):
            if subjects[i].departed:  # for a home which is no more, perhaps since a step that had no memory
                subjects[i] = subjects[i]._replace(departed=(), late=update.items)
            update.from_disk, update.place = True, None if i in in_windows else update.place
            found[i] = subjects[i].found(found[i].state)._replace(window=found[i].window)
    return in_windows


def _get_slots(
    plan: Plan, subjects: Sequence[Subject], found: Sequence[SubgroupState], early: Early, denied: set[int]
) -> set[int]:
    """Get the slots; without any, the subgroups that would have passed through them."""
    store = early.stores.device
    passing = {i: subjects[i] for i in staged(plan, found) if i not in denied}
    nbytes = max((s.slot_bytes(staying=store.has(s.subgroup)) for s in passing.values()), default=0)
    first = [subject.subgroup for subject in passing.values()][: len(early.prefetched)]
    if store.slots and (first != list(early.prefetched) or store.slots[0].nbytes < nbytes):
        early.drop_prefetched()
    if passing and not store.slots:
        store.get_slots(min(max(plan.slots, 1), len(passing)), nbytes)
    if store.slots:
        return set()
    for i, subject in passing.items():
        arena = subject.subgroup.arena
        if arena.tier is Tier.DEVICE or not arena.rule.on_cpu:
            lasting = "gradients", "policy='adaptive', with which state can leave"
            what, hint = lasting if arena.rule.on_cpu else ("state", "free some, for the CPU cannot update it")
            raise torch.OutOfMemoryError(
                f"there is no device memory through which the {what} of subgroup {i} could come up for its update; use "
                f"a smaller subgroup_size, or {hint}"
            )
    for i, subject in passing.items():
        if subject.subgroup in early.arriving:
            early.drop_arriving([subject.subgroup])
        elif found[i].state is not Tier.DEVICE and store.has(subject.subgroup):
            store.drop(subject.subgroup)
    # A plan without slots must not stream, not even what has no gradient.
    return {*passing, *plan.served(Placement.GPU_STREAMED)}
