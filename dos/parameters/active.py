"""The parameters that take part in a step, and the update of each subgroup."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dos.gradients.offload import OffloadedGradients
from dos.parameters.admission import Group
from dos.parameters.registry import Registry
from dos.parameters.steady import Given
from dos.state.record import Form, ParameterRecord
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


def updates_of(active: Active, registry: Registry, scales: float | Sequence[float]) -> dict[Subgroup, SubgroupUpdate]:
    """Return the update of each subgroup that has a gradient. scales: the factor of each gradient, or of all."""
    members, settled, given = active
    count = None if given is None or not isinstance(scales, float) else given.steady.counts_alike()
    if given is None or count is None or not isinstance(scales, float):
        settings, gradients = _each_with_its_settings(active, registry, scales)
    else:
        settings, gradients = _alike(given, count, registry, scales)
    updates = {}
    any_written, complete = settled < len(members), len(members) == registry.numbered
    for subgroup in itertools.chain(registry.on_host, registry.accelerated):
        there = registry.offloaded.enabled and subgroup.arena.accelerated
        update = SubgroupUpdate(subgroup, gradients, settings, offloaded=there, written=any_written, complete=complete)
        if update.items:
            updates[subgroup] = update
    return updates


def _alike(given: Given, count: float, registry: Registry, scale: float) -> tuple[list[Any], list[Input | None]]:
    """Return the settings of the step, and the inputs by number, where all have taken `count` steps.

    Column by column, because the step's first work waits for this.
    """
    steady = given.steady
    of_each = dict(zip(steady.which, steady.members, strict=True))
    settings = [record.arena.rule.settings(group, count + 1, scale) for record, group in of_each.values()]
    never = itertools.repeat(False)
    masters: Iterable[bool] = steady.masters_written if steady.with_masters else never
    inputs = zip(given.gradients, given.addresses, steady.which, never, never, masters, given.forms, strict=False)
    gradients: list[Input | None] = [None] * registry.numbered
    for number, each in zip(steady.numbers, map(new_input, inputs), strict=True):
        gradients[number] = each
    return settings, gradients


def _each_with_its_settings(
    active: Active, registry: Registry, scales: float | Sequence[float]
) -> tuple[list[Any], list[Input | None]]:
    """Return the different settings of the step, and the inputs by number."""
    members, settled, given = active
    records, offloaded = [record for record, _ in members], registry.offloaded
    factors = itertools.repeat(scales) if isinstance(scales, float) else scales
    keys = [*zip([id(group) for _, group in members], [r.count for r in records], factors, strict=False)]
    alike = dict(zip(keys, members, strict=True))  # most often all of a group
    settings = [
        record.arena.rule.settings(group, count + 1, scale) for (_, count, scale), (record, group) in alike.items()
    ]
    number = {key: number for number, key in enumerate(alike)}
    if given is None:
        values = [_value(r, offloaded) for r in records[:settled]]
        values += [_value(r, offloaded, flat=True) for r in records[settled:]]
        addresses = [value.data_ptr() for value in values]
        forms: Iterable[Form | None] = itertools.repeat(None)
    else:
        values, addresses, forms = given.gradients, given.addresses, given.forms
    inputs = zip(
        values,
        addresses,
        [number[key] for key in keys],
        [False] * settled + [r.changed() for r in records[settled:]],
        [r.fresh for r in records],
        [r.arena.whole_masters and r.master_written for r in records],
        forms,
        strict=False,
    )
    gradients: list[Input | None] = [None] * registry.numbered
    for record, each in zip(records, inputs, strict=True):
        gradients[record.number] = new_input(each)
    return settings, gradients


def _value(record: ParameterRecord, offloaded: OffloadedGradients, *, flat: bool = False) -> Tensor:
    """Return the gradient of a record. flat: whether it may have another layout than the parameter."""
    if record in offloaded.records:
        return offloaded.flat(record)
    mine = record.gradient
    assert mine is not None, "each record has one"
    return record.flat_gradient(mine) if flat else mine
