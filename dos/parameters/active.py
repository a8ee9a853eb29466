"""The parameters that take part in a step, and the update of each subgroup."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from dos.gradients.offload import OffloadedGradients
from dos.parameters.admission import Group
from dos.parameters.registry import Registry
from dos.parameters.steady import Given
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.prepare import Prepared
from dos.step.work import Input, SubgroupUpdate, new_input


class Active(NamedTuple):
    """The parameters that take part in a step.

    members: the records of parameters with a gradient, with their groups.
    settled: how many of them, first of all, are as the last step left them.
    given: their gradients, where all of them were looked at at once.
    """

    members: list[tuple[ParameterRecord, Group]]
    settled: int
    given: Given | None = None


class Ready(NamedTuple):
    """A prepared step. on_device: the part whose memory is reserved there; None without parameters there."""

    active: Active
    updates: Mapping[Subgroup, SubgroupUpdate]
    on_device: Prepared | None


def updates_of(active: Active, registry: Registry, scales: Iterable[float]) -> dict[Subgroup, SubgroupUpdate]:
    """Return the update of each subgroup that has a gradient. scales: the factor of each gradient."""
    members, settled, given = active
    records, offloaded = [record for record, _ in members], registry.offloaded
    # Column by column, and not record by record: the step's first work waits for this.
    keys = [*zip([id(group) for _, group in members], [r.count for r in records], scales, strict=False)]
    alike = dict(zip(keys, members, strict=True))  # most often all of a group
    settings = [
        record.arena.rule.settings(group, count + 1, scale) for (_, count, scale), (record, group) in alike.items()
    ]
    number = {key: number for number, key in enumerate(alike)}
    if given is None:
        values = [_value(r, offloaded) for r in records[:settled]]
        values += [_value(r, offloaded, flat=True) for r in records[settled:]]
        given = Given(values, [value.data_ptr() for value in values], [None] * len(values))
    inputs = zip(
        given.gradients,
        given.addresses,
        [number[key] for key in keys],
        [False] * settled + [r.changed() for r in records[settled:]],
        [r.fresh for r in records],
        [r.arena.whole_masters and r.master_written for r in records],
        given.forms,
        strict=True,
    )
    gradients: list[Input | None] = [None] * registry.numbered
    for record, each in zip(records, inputs, strict=True):
        gradients[record.number] = new_input(each)
    updates = {}
    any_written = settled < len(members)
    for subgroup in itertools.chain(registry.on_host, registry.accelerated):
        there = offloaded.enabled and subgroup.arena.accelerated
        update = SubgroupUpdate(subgroup, gradients, settings, offloaded=there, written=any_written)
        if update.items:
            updates[subgroup] = update
    return updates


def _value(record: ParameterRecord, offloaded: OffloadedGradients, *, flat: bool = False) -> Tensor:
    """Return the gradient of a record. flat: whether it may have another layout than the parameter."""
    if record in offloaded.records:
        return offloaded.flat(record)
    mine = record.gradient
    assert mine is not None, "each record has one"
    return record.flat_gradient(mine) if flat else mine
