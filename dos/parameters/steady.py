"""Looks at all parameters at once where nothing has changed since the last step, as in most steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dos.parameters.admission import Group
from dos.parameters.live_state import LiveState
from dos.parameters.registry import Registry
from dos.state.record import ParameterRecord
from dos.torch_internals.alike import Alike
from dos.torch_internals.tensors import version_counter

Form = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]
"""The dtype, shape, strides and sign of a gradient, as of `dos.gradients.identity.Token`."""


class Given(NamedTuple):
    """The gradients of a step, in the order of its members: tensors, the addresses of their values, and their forms.

    forms: None where they were not looked at.
    """

    gradients: list[Tensor]
    addresses: list[int]
    forms: Sequence[Form | None]


class Steady:
    """The parameters of a look that found all of them settled, so that the next look need not ask one by one.

    members: those that had a gradient. counts: how many of them are in each group.
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
        self._forms = [(g.dtype, g.shape, g.stride(), g.is_neg()) for g in gradients]
        self._alike = Alike([*self._with, *gradients])

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
        return Given(gradients, [gradient.data_ptr() for gradient in gradients], self._forms)


def same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Return whether both have the same objects in the same order."""
    return len(these) == len(those) and all(map(operator.is_, these, those))
