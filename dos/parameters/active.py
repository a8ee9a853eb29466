"""The parameters that take part in a step, looked at all at once where nothing has changed, and their updates."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dos.gradients.offload import OffloadedGradients
from dos.parameters.admission import Group
from dos.parameters.live_state import LiveState
from dos.parameters.registry import Registry
from dos.state.record import Form, ParameterRecord, form_of
from dos.state.subgroup import Piece, Subgroup, taking
from dos.step.prepare import Prepared
from dos.step.work import Columns, Input, SubgroupUpdate, new_input
from dos.torch_internals.alike import alike
from dos.torch_internals.tensors import version_counter


class Given(NamedTuple):
    """The gradients of a step, in the order of its members: tensors, the addresses of their values, and their forms.

    steady: the look that found them.
    """

    gradients: list[Tensor]
    addresses: list[int]
    forms: Sequence[Form]
    steady: Steady


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


class Share(NamedTuple):
    """A subgroup's share of a `Steady` look: which columns of its update last, and which of the members it takes."""

    pieces: Sequence[Piece]
    take: Callable[[Sequence[Any]], tuple[Any, ...]]
    settings: Sequence[int]
    none: Sequence[bool]
    forms: Sequence[Form]

    def columns(self, given: Given, masters: Sequence[bool] | None) -> Columns:
        """Return the columns with these gradients. masters: which masters user code has written to; None: none."""
        written = self.none if masters is None else self.take(masters)
        return Columns(
            self.take(given.gradients),
            self.take(given.addresses),
            self.settings,
            self.none,
            self.none,
            written,
            self.forms,
        )


class Steady:
    """The parameters of a look that found all of them settled, so that the next look need not ask one by one.

    members: those that had a gradient. records: theirs. of_groups: one of each group. counts: how many are in each one.
    with_masters: the records that have whole masters, by place among the members. shares: those that were asked for.
    """

    def __init__(
        self,
        members: list[tuple[ParameterRecord, Group]],
        groups: Sequence[Group],
        extras: list[Any],
        registry: Registry,
    ) -> None:
        """extras: what the rule said of each group. No record is wrapped, and none is of a weight that streams."""
        self.members = members
        self._registry, self._groups, self._extras = registry, [*groups], extras
        self._parameters = [[*group["params"]] for group in groups]
        self._records_made = registry.records_made, len(registry.records)
        self.records = [record for record, _ in members]
        self._with = [record.parameter for record in self.records]
        own = set(map(id, self._with))
        self._without = [p for parameters in self._parameters for p in parameters if id(p) not in own]
        gradients = [p.grad for p in self._with if p.grad is not None]
        self.counts = [sum(1 for p in parameters if id(p) in own) for parameters in self._parameters]
        self._forms = [form_of(gradient) for gradient in gradients]
        for record, form in zip(self.records, self._forms, strict=True):
            record.form = form  # the same object: comparing it takes no time
        self._are_alike = alike([*self._with, *gradients])
        numbered = {number: place for place, number in enumerate(n for n, count in enumerate(self.counts) if count)}
        of = {id(p): numbered[n] for n, parameters in enumerate(self._parameters) for p in parameters if id(p) in own}
        self._which = [of[id(p)] for p in self._with]
        self.of_groups = [*dict(zip(self._which, members, strict=True)).values()]
        self._places = {record: place for place, record in enumerate(self.records)}
        self.shares: dict[Subgroup, Share | None] = {}
        self.with_masters = {n: r for n, r in enumerate(self.records) if r.arena.whole_masters}

    def given(self, groups: Sequence[Group], extras: list[Any], state: LiveState | None) -> Given | None:
        """Return the gradients of all members, and of no others, if all of them are settled still; None: not known.

        state: compared with the records; None: nobody can have changed an entry.
        """
        registry, records, own = self._registry, self.records, self._with
        if (registry.records_made, len(registry.records)) != self._records_made or extras != self._extras:
            return None
        if not same(groups, self._groups):
            return None
        if not all(same(group["params"], before) for group, before in zip(groups, self._parameters, strict=True)):
            return None
        gradients = [gradient for p in own if (gradient := p.grad) is not None]
        if len(gradients) != len(own) or [p for p in self._without if p.grad is not None]:
            return None
        if not self._are_alike(*own, *gradients):
            return None
        if registry.may_mark and [record for record in records if record.rewritten]:
            return None
        if [*map(version_counter, own)] != [r.version for r in records]:
            return None
        if [*map(Tensor.data_ptr, own)] != [r.data_ptr for r in records]:
            return None
        if state is not None and not all(r.intact(dict.get(state, r.parameter) or {}) for r in records):
            return None
        return Given(gradients, [*map(Tensor.data_ptr, gradients)], self._forms, self)

    def share(self, subgroup: Subgroup) -> Share | None:
        """Return what a subgroup's update has of this; None if none of its parameters has a gradient."""
        if subgroup in self.shares:
            return self.shares[subgroup]
        pieces = [piece for piece in subgroup.pieces if piece.record in self._places]
        found = None
        if pieces:
            take = taking([self._places[piece.record] for piece in pieces])
            whole = len(pieces) == len(subgroup.pieces)
            none = (False,) * len(pieces)
            found = Share(subgroup.pieces if whole else pieces, take, take(self._which), none, take(self._forms))
        self.shares[subgroup] = found
        return found

    def settings(self, count: float, scale: float) -> list[Any]:
        """Return the settings of the next step of each group. count: of steps so far."""
        return [record.arena.rule.settings(group, count + 1, scale) for record, group in self.of_groups]

    def counts_alike(self) -> float | None:
        """Return how many steps all of the members have taken; None: not the same number."""
        counts = [record.count for record in self.records]
        return counts[0] if counts and counts.count(counts[0]) == len(counts) else None

    @property
    def masters_written(self) -> list[bool]:
        """Whether user code has written to the whole master of each member."""
        found = [False] * len(self.members)
        for place, record in self.with_masters.items():
            found[place] = record.master_written
        return found


def same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Return whether both have the same objects in the same order."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def updates_of(active: Active, registry: Registry, scales: float | Sequence[float]) -> dict[Subgroup, SubgroupUpdate]:
    """Return the update of each subgroup that has a gradient. scales: the factor of each gradient, or of all."""
    members, settled, given = active
    count = None if given is None or not isinstance(scales, float) else given.steady.counts_alike()
    if given is not None and count is not None and isinstance(scales, float):
        return updates_alike(given, given.steady.settings(count, scales), registry)
    settings, gradients = _each_with_its_settings(active, registry, scales)
    updates = {}
    for subgroup in itertools.chain(registry.on_host, registry.accelerated):
        there = registry.offloaded.enabled and subgroup.arena.accelerated
        update = SubgroupUpdate.of(subgroup, gradients, settings, offloaded=there, written=settled < len(members))
        if update is not None:
            updates[subgroup] = update
    return updates


def updates_alike(given: Given, settings: Sequence[Any], registry: Registry) -> dict[Subgroup, SubgroupUpdate]:
    """Return the updates where all have taken as many steps, of which the gradients alone are new.

    settings: see `Steady.settings`.
    """
    steady = given.steady
    masters = steady.masters_written if steady.with_masters else None
    updates = {}
    for subgroup in itertools.chain(registry.on_host, registry.accelerated):
        share = steady.shares[subgroup] if subgroup in steady.shares else steady.share(subgroup)
        if share is not None:
            columns = share.columns(given, masters)
            updates[subgroup] = SubgroupUpdate(subgroup, share.pieces, columns, settings, written=False)
    return updates


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
    gradients: list[Input | None] = [None] * registry.records_made
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
