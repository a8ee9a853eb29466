"""Gradients that a backward is expected to write, and the subgroups that wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dos.devices import Caller, Device
from dos.in_backward.look import Look
from dos.parameters.active import same
from dos.parameters.admission import Group
from dos.parameters.registry import Registry
from dos.rules.base import Rule
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup


class Learned(NamedTuple):
    """The findings of the last backward that was a step.

    times: how often it has written each gradient: the last time it is final. beside: see Run. late: the parameters that
        a module has read after that, which wait for `step()`. All by id: of another parameter with this id a use too
        many raises.
    """

    times: Mapping[int, int]
    beside: Mapping[int, int]
    late: frozenset[int]


NOTHING = Learned({}, {}, frozenset())


class Awaiting:
    """A subgroup that waits for gradients.

    left: how many have yet to come. callers: the queues in which backward wrote the others; queue: the number of the
        last one that was added.
    look: the last one that found all of them as the next one may; None: none has.
    """

    __slots__ = ("callers", "left", "look", "queue", "subgroup")

    def __init__(self, subgroup: Subgroup) -> None:
        self.subgroup = subgroup
        self.look: Look | None = None
        self.begin(0)

    def begin(self, left: int) -> None:
        """Wait for so many gradients."""
        self.left, self.callers, self.queue = left, set[Caller](), -1

    def written_in(self, device: Device | None) -> None:
        """Note the queue in which backward has written a gradient."""
        # Autograd runs each node on the stream of its forward: gradients of one subgroup may be written on several.
        self.queue = -1 if device is None else device.caller_number()
        self.callers.add(None if device is None else device.caller())


class Expected(NamedTuple):
    """A gradient that comes as often as `times`.

    group: of its parameter. awaiting: the subgroups that wait for it. plain: whether it stays in `p.grad` meanwhile.
    alone: the only subgroup, where no more has to be known of the gradient than that it was written; else None.
    """

    record: ParameterRecord
    times: int
    group: Group
    awaiting: Sequence[Awaiting]
    plain: bool
    alone: Awaiting | None


class Expectations:
    """Gradients that backward is expected to write, by what was learned; kept for the next one: most are alike.

    of: the gradients, by the id of the parameter.
    """

    def __init__(self, registry: Registry, rule: Rule, groups: Sequence[Group], learned: Learned) -> None:
        self._made_of = _facts(registry, rule, groups, learned)
        self._groups, self._parameters = [*groups], [[*group["params"]] for group in groups]
        self._subgroups = [*registry.on_host, *registry.accelerated]
        self.of: dict[int, Expected] = {}
        awaiting = {subgroup: Awaiting(subgroup) for subgroup in self._subgroups}
        extra = [frozenset(rule.extra(group)) for group in groups]
        of_parameter = {id(p): each for each in zip(groups, extra, strict=True) for p in each[0]["params"]}
        for key, times in learned.times.items():
            record, (group, fields) = registry.records.get(key), of_parameter.get(key, (None, ()))
            if record is None:
                continue
            mine = [awaiting[subgroup] for subgroup, _ in registry.places[record]]
            for each in mine:
                each.left += 1
            if group is not None and key not in learned.late and (not fields or fields <= record.arena.format.names):
                apart = record.leaf is not record.parameter or record.wrapped or registry.offloaded.enabled
                alone = mine[0] if len(mine) == 1 and not apart else None  # none has a parameter without elements
                self.of[key] = Expected(record, times, group, mine, not apart, alone)
        self._counts = [(each, each.left) for each in awaiting.values()]

    def hold(self, registry: Registry, rule: Rule, groups: Sequence[Group], learned: Learned) -> bool:
        """Return whether new ones would be the same."""
        return (
            same(groups, self._groups)
            and all(same(group["params"], before) for group, before in zip(groups, self._parameters, strict=True))
            and same([*registry.on_host, *registry.accelerated], self._subgroups)
            and _facts(registry, rule, groups, learned) == self._made_of
        )

    def begin(self) -> None:
        """Begin another backward, which has written nothing yet."""
        for each, count in self._counts:
            each.begin(count)


def _facts(registry: Registry, rule: Rule, groups: Sequence[Group], learned: Learned) -> tuple[object, ...]:
    """Return what expectations follow from, beside groups and subgroups."""
    return registry.records_made, len(registry.records), learned.times, learned.late, [rule.extra(g) for g in groups]
