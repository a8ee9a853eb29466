"""Looks at all parameters at once where nothing has changed since the last step, as in most steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dos.parameters.admission import Group
from dos.parameters.live_state import LiveState
from dos.parameters.registry import Registry
from dos.state.record import Form, ParameterRecord, form_of
from dos.torch_internals.alike import Alike
from dos.torch_internals.tensors import version_counter


class Given(NamedTuple):
    """The gradients of a step, in the order of its members: tensors, the addresses of their values, and their forms.

    steady: the look that found them.
    """

    gradients: list[Tensor]
    addresses: list[int]
    forms: Sequence[Form]
    steady: Steady


class Steady:
    """The parameters of a look that found all of them settled, so that the next look need not ask one by one.

    members: those that had a gradient. counts: how many of them are in each group; which: the place, among the groups
        that have any, of each one's group.
    numbers: of their records. with_masters: the records that have whole masters, by place among the members.
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
        self._numbered = registry.numbered, len(registry.records)
        self._records = [record for record, _ in members]
        self._with = [record.parameter for record in self._records]
        own = set(map(id, self._with))
        self._without = [p for parameters in self._parameters for p in parameters if id(p) not in own]
        gradients = [p.grad for p in self._with if p.grad is not None]
        self.counts = [sum(1 for p in parameters if id(p) in own) for parameters in self._parameters]
        self._forms = [form_of(gradient) for gradient in gradients]
        for record, form in zip(self._records, self._forms, strict=True):
            record.form = form  # the same object: comparing it takes no time
        self._alike = Alike([*self._with, *gradients])
        numbered = {number: place for place, number in enumerate(n for n, count in enumerate(self.counts) if count)}
        of = {id(p): numbered[n] for n, parameters in enumerate(self._parameters) for p in parameters if id(p) in own}
        self.which = [of[id(p)] for p in self._with]
        self.numbers = [record.number for record in self._records]
        self.with_masters = {n: r for n, r in enumerate(self._records) if r.arena.whole_masters}

    def given(self, groups: Sequence[Group], extras: list[Any], state: LiveState | None) -> Given | None:
        """Return the gradients of all members, and of no others, if all of them are settled still; None: not known.

        state: compared with the records; None: nobody can have changed an entry.
        """
        registry, records, own = self._registry, self._records, self._with
        if (registry.numbered, len(registry.records)) != self._numbered or extras != self._extras:
            return None
        if not same(groups, self._groups):
            return None
        if not all(same(group["params"], before) for group, before in zip(groups, self._parameters, strict=True)):
            return None
        gradients = [gradient for p in own if (gradient := p.grad) is not None]
        if len(gradients) != len(own) or [p for p in self._without if p.grad is not None]:
            return None
        if not self._alike.holds([*own, *gradients]) or [record for record in records if record.rewritten]:
            return None
        if [version_counter(p) for p in own] != [r.version for r in records]:
            return None
        if [p.data_ptr() for p in own] != [r.data_ptr for r in records]:
            return None
        if state is not None and not all(r.intact(dict.get(state, r.parameter) or {}) for r in records):
            return None
        return Given(gradients, [gradient.data_ptr() for gradient in gradients], self._forms, self)

    def counts_alike(self) -> float | None:
        """Return how many steps all of the members have taken; None: not the same number."""
        counts = [record.count for record in self._records]
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
