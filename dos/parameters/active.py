"""The parameters that take part in a step, and the update of each subgroup."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dos.parameters.admission import Group
from dos.parameters.registry import Registry
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.prepare import Prepared
from dos.step.work import Input, SubgroupUpdate, new_input


class Active(NamedTuple):
    """The parameters that take part in a step.

    members: the records of parameters with a gradient, with their groups.
    settled: how many of them, first of all, are as the last step left them.
    """

    members: list[tuple[ParameterRecord, Group]]
    settled: int


class Ready(NamedTuple):
    """A prepared step. on_device: the part whose memory is reserved there; None without parameters there."""

    active: Active
    updates: Mapping[Subgroup, SubgroupUpdate]
    on_device: Prepared | None


def updates_of(active: Active, registry: Registry, scales: Iterable[float]) -> dict[Subgroup, SubgroupUpdate]:
    """Return the update of each subgroup that has a gradient. scales: the factor of each gradient."""
    gradients: list[Input | None] = [None] * registry.numbered
    settings: list[Any] = []
    offloaded, away = registry.offloaded, registry.offloaded.records
    before: tuple[Group | None, float, float] = None, 0.0, 0.0
    known: dict[tuple[int, float, float], int] = {}
    setting = 0
    for number, ((record, group), scale) in enumerate(zip(active.members, scales, strict=False)):
        # Most often all parameters have the same settings.
        if group is not before[0] or record.count != before[1] or scale != before[2]:
            before = group, record.count, scale
            setting = known.setdefault((id(group), record.count, scale), len(known))
            if setting == len(settings):
                settings.append(record.arena.rule.settings(group, record.count + 1, scale))
        if record in away:
            gradient = offloaded.flat(record)
        else:
            mine = record.gradient if record.wrapped else record.leaf.grad
            assert mine is not None, "each record has one"
            gradient = mine if number < active.settled else record.flat_gradient(mine)
        written = number >= active.settled and record.changed()
        own = record.arena.whole_masters and record.master_written
        gradients[record.number] = new_input((gradient, gradient.data_ptr(), setting, written, record.fresh, own))
    updates = {}
    any_written = active.settled < len(active.members)
    for subgroup in itertools.chain(registry.on_host, registry.accelerated):
        there = offloaded.enabled and subgroup.arena.accelerated
        update = SubgroupUpdate(subgroup, gradients, settings, offloaded=there, written=any_written)
        if update.items:
            updates[subgroup] = update
    return updates
