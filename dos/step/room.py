"""Gets the memory that a step takes, on the device and on the host, before anything has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dos.state.stores import HostStore
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
    store = early.device_store
    early.considered = None
    stays = {subjects[i].subgroup for i in plan.served(Placement.GPU_RESIDENT)}
    early.drop_arriving([s for s, issued in early.arriving.items() if issued is None or s not in stays])
    # What is on its way has not been updated, so the host has it, too.
    here = [store.has(s.subgroup) and s.subgroup not in early.arriving for s in subjects]
    found = [s.found(Tier.DEVICE if is_here else Tier.HOST) for s, is_here in zip(subjects, here, strict=True)]
    taken: list[Subgroup] = []
    try:
        denied = _residents(plan, subjects, found, early, taken)
        denied |= _slots(plan, subjects, found, early, denied)
        plan = dataclasses.replace(plan.on_host(denied), slots=len(store.slots))
        _homes(plan, subjects, found, early.host_store)
    except BaseException:
        for subgroup in filter(store.has, taken):  # in which nothing has arrived
            store.drop(subgroup)
        early.drop_prefetched()
        raise
    return Prepared(plan, subjects, found)


def _residents(
    plan: Plan, subjects: Sequence[Subject], found: list[SubgroupState], early: Early, taken: list[Subgroup]
) -> set[int]:
    """Get memory for state that comes to stay; the subgroups for which there is none.

    found: changed where state that was nowhere yet begins on the device. taken: receives what memory was got for.
    """
    store = early.device_store
    # What leaves is there until the step is over, and may be what is missing.
    store.expect_denials(bool(leaving(plan, found)))
    denied = set()
    for i in arriving(plan, found):
        subgroup = subjects[i].subgroup
        if store.has(subgroup):
            continue  # on its way
        state = store.take(subgroup)
        if state is None:
            denied.add(i)
            continue
        taken.append(subgroup)
        if not early.host_store.has(subgroup):
            state.zero()
            found[i] = found[i]._replace(state=Tier.DEVICE)
    return denied


def _slots(
    plan: Plan, subjects: Sequence[Subject], found: Sequence[SubgroupState], early: Early, denied: set[int]
) -> set[int]:
    """Get the slots; without any, the subgroups that would have passed through them."""
    store = early.device_store
    passing = {i: subjects[i] for i in staged(plan, found) if i not in denied}
    nbytes = max((s.slot_bytes(staying=store.has(s.subgroup)) for s in passing.values()), default=0)
    first = [(i, subject.subgroup) for i, subject in passing.items()][: len(early.prefetched)]
    ahead = [(issued.task.subgroup, subgroup) for subgroup, issued in early.prefetched.items()]
    if store.slots and (first != ahead or store.slots[0].nbytes < nbytes):
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
        elif found[i].state is Tier.HOST and store.has(subject.subgroup):
            store.drop(subject.subgroup)
    # A plan without slots must not stream, not even what has no gradient.
    return {*passing, *plan.served(Placement.GPU_STREAMED)}


def _homes(plan: Plan, subjects: Sequence[Subject], found: Sequence[SubgroupState], store: HostStore) -> None:
    """Get the host's memory: homes of what stays there, and staging of what is updated there."""
    at_home, on_cpu = [], []
    for i, (subject, each) in enumerate(zip(subjects, found, strict=True)):
        if plan.route(i, each.state).stays is Tier.HOST and (each.gradient or each.state is Tier.DEVICE):
            at_home.append(subject.subgroup)
        if plan.placements[i] is Placement.CPU and each.gradient:
            on_cpu.append(subject.subgroup)
    store.take(at_home, incoming=on_cpu, outgoing=on_cpu)
