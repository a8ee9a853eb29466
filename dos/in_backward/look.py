"""Looks at all gradients and parameters of a subgroup at once, where the last look at each found them settled."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dos.parameters.admission import Group
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.work import Columns, new_columns
from dos.torch_internals.alike import alike
from dos.torch_internals.tensors import version_counter


class Member(Protocol):
    """A parameter whose gradient comes; see `Expected`."""

    @property
    def record(self) -> ParameterRecord: ...
    @property
    def group(self) -> Group: ...
    @property
    def awaiting(self) -> Sequence[Any]: ...
    @property
    def plain(self) -> bool: ...


class Found(NamedTuple):
    """Gradients in the order of the pieces, and the addresses of their values."""

    gradients: tuple[Tensor, ...]
    addresses: list[int]


class Look:
    """A look at a subgroup all of whose parameters and gradients could be used as they were.

    group: of all. records: in the order of the pieces. shared: the places of those that lie in other subgroups, too.
    complete: the others, with their group. alone: their parameters, each with its record's number.
    """

    def __init__(self, subgroup: Subgroup, members: Sequence[Member], given: Sequence[Any]) -> None:
        self.group = members[0].group
        self.records = [member.record for member in members]
        self.shared = [place for place, member in enumerate(members) if len(member.awaiting) > 1]
        own = [member.record for member in members if len(member.awaiting) == 1]
        self.complete = [(record, self.group) for record in own]
        self.alone = [(record.parameter, record.number) for record in own]
        self._subgroup, self._own = subgroup, own
        self._leaves = [record.parameter for record in self.records]
        self._parameters = [record.parameter for record in own]
        gradients = subgroup.inputs_of(given)
        self._places = [place for place, member in enumerate(members) if len(member.awaiting) == 1]
        self._are_alike = alike([*self._parameters, *[gradients[place] for place in self._places]])
        self._nothing = (False,) * len(members), (None,) * len(members)
        self._masters = [n for n, record in enumerate(self.records) if record.arena.whole_masters]

    @classmethod
    def of(cls, subgroup: Subgroup, members: Sequence[Member | None], given: Sequence[Any]) -> Look | None:
        """Return a look at these members, one for each piece; None if they cannot be looked at at once."""
        found = [member for member in members if member is not None and member.plain]
        if len(found) < len(members) or any(member.group is not found[0].group for member in found):
            return None
        return cls(subgroup, found, given) if any(len(member.awaiting) == 1 for member in found) else None

    def take(self, given: Sequence[Any], state: dict[Any, Any] | None) -> Found | None:
        """Return the gradients if all parameters are settled still, and no gradient was replaced; None: not known.

        given: gradients by number of the record, as hooks found them. state: compared with the records, if it is given.
        """
        gradients, own = self._subgroup.inputs_of(given), self._own
        if not all(map(operator.is_, gradients, [leaf.grad for leaf in self._leaves])):
            return None  # user code replaced one while it waited
        mine = [gradients[place] for place in self._places] if self.shared else gradients
        if not self._are_alike(*self._parameters, *mine):
            return None
        count = self.records[0].count
        for record in self.records:
            if record.count != count or record.stand_in or record.written_late:
                return None
        if [record for record in own if record.rewritten]:
            return None
        if [*map(version_counter, self._parameters)] != [record.version for record in own]:
            return None
        if [*map(Tensor.data_ptr, self._parameters)] != [record.data_ptr for record in own]:
            return None
        if state is not None and not all(r.intact(dict.get(state, r.parameter) or {}) for r in own):
            return None
        addresses = [*map(Tensor.data_ptr, gradients)]
        return None if 0 in addresses else Found(gradients, addresses)

    def masters_written(self) -> list[bool]:
        """Return whether user code has written to the whole master of each."""
        written = [False] * len(self.records)
        for place in self._masters:
            written[place] = self.records[place].master_written
        return written

    def columns(self, found: Found, setting: int, written: Sequence[bool]) -> Columns:
        """Return what was found as an update takes it."""
        no, none = self._nothing
        return new_columns((*found, (setting,) * len(no), no, no, written, none))
