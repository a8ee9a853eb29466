"""Gets the memory that a step takes, on the device and on the host, before anything has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from dos.state.stores import Store
from dos.state.subgroup import Subgroup
from dos.step.early import Early
from dos.step.work import Subject
from perfmodel import Placement, Plan
from perfmodel.plan import Tier
from perfmodel.schedule import SubgroupState, arriving, leaving, staged


class Prepared(NamedTuple):
    """A step for which there is memory.

    found: what it finds of each subgroup, by index.
    """

    plan: Plan
    subjects: Sequence[Subject]
    found: Sequence[SubgroupState]


def make_room(plan: Plan, subjects: Sequence[Subject], early: Early) -> Prepared:
    """Get the memory that the step takes, on the device and on the host; the plan as far as there is.

    subjects: all subgroups, by index. early: what backward has begun for the step.
    A subgroup for which the device has no memory is updated on the host in this step.
    Raises MemoryError if the host has none either. No state has changed then.
    """
    stores, device = early.stores, early.stores.device
    early.considered = None
    stays = {subjects[i].subgroup for i in plan.served(Placement.GPU_RESIDENT)}
    early.drop_arriving([s for s, issued in early.arriving.items() if issued is None or s not in stays])
    found = [s.found(early.where(s.subgroup)) for s in subjects]
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
        denied |= _get_slots(plan, subjects, found, early, denied)
        plan = dataclasses.replace(plan.on_host(denied), slots=len(device.slots))
        moved = [i for i, subject in enumerate(subjects) if subject.update or found[i].state is not plan.stays(i)]
        for tier in set(stores.of) - {Tier.DEVICE, Tier.HOST}:
            reserve(tier, [subjects[i].subgroup for i in moved if plan.stays(i) is tier])
        on_cpu = [subjects[i].subgroup for i in plan.served(Placement.CPU) if subjects[i].update]
        stores.host.reserve([subjects[i].subgroup for i in moved if plan.stays(i) is Tier.HOST], on_cpu)
    except BaseException:
        for store, subgroup in reserved:
            if store.has(subgroup):  # to which nothing has come
                store.drop(subgroup)
        early.drop_prefetched()
        raise
    return Prepared(plan, subjects, found)


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
    never = [i for i, subject in passing.items() if subject.subgroup.arena.tier is Tier.DEVICE]
    if never:
        raise torch.OutOfMemoryError(
            f"there is no device memory through which the gradients of subgroup {never[0]} could come up for "
            "its update; use a smaller subgroup_size, or policy='adaptive', with which state can leave"
        )
    for i, subject in passing.items():
        if subject.subgroup in early.arriving:
            early.drop_arriving([subject.subgroup])
        elif found[i].state is not Tier.DEVICE and store.has(subject.subgroup):
            store.drop(subject.subgroup)
    # A plan without slots must not stream, not even what has no gradient.
    return {*passing, *plan.served(Placement.GPU_STREAMED)}
