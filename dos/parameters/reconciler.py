"""Follows the changes that user code makes to parameters, gradients and state between two steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dos.devices import memory_of
from dos.parameters.active import Active, Given, Steady, same
from dos.parameters.admission import Group, check_overlaps, check_parameter
from dos.parameters.live_state import LiveState
from dos.parameters.registry import Registry
from dos.rules.base import Rule
from dos.sharding.local import laid_out_as, local
from dos.state.arena import Arena
from dos.state.own_storage import overlap_with
from dos.state.record import ParameterRecord, step_of
from dos.torch_internals.operators import add_to_all


class Look(NamedTuple):
    """The parameters that have a gradient as a step finds them, with their groups.

    settled: parameters that are unchanged since the last step. others: parameters that are new, or of which the
        gradient, the memory or the state is.
    gone: records of arenas none of whose parameters is in a group any more, or has an entry in the state.
    given: the gradients of the settled ones, where they were looked at all at once, and there are no others.
    """

    settled: list[tuple[ParameterRecord, Group]]
    others: list[tuple[Tensor, Group]]
    gone: list[ParameterRecord]
    given: Given | None = None


class Reconciler:
    """Makes records and arenas agree with parameters, gradients and `optimizer.state` as user code has changed them.

    A record that is fresh and has an entry is of a first step that has not been counted.

    state: the optimizer's entries.
    """

    state: LiveState

    def __init__(self, registry: Registry, rule: Rule) -> None:
        self._registry = registry
        self._rule = rule
        self._steady: Steady | None = None
        """The findings of the last look, if they were those of the one before."""
        self._last: list[ParameterRecord] = []
        """The records of the last look, if all were settled."""

    def look(self, groups: Sequence[Group]) -> Look:
        """Sort all parameters with a gradient: `others` can be used, but must be enrolled and settled first.

        Raises before anything is changed if a parameter, a gradient, a setting or a state cannot be used.
        """
        records, known, state, seen = self._registry.records, 0, self.state, self.state.read
        away: Collection[ParameterRecord] = ()
        if self._registry.offloaded.enabled:
            self._registry.offloaded.check()
            away = self._registry.offloaded.records
        extras = [self._rule.extra(group) for group in groups]
        given = self._given(groups, extras)
        if given is not None and self._steady is not None:
            for number, group in enumerate(groups):
                if self._steady.counts[number]:
                    self._rule.check(group, f"param group {number}")
            return Look(self._steady.members, [], [], given)
        self._steady = None
        settled: list[tuple[ParameterRecord, Group]] = []
        others: list[tuple[Tensor, Group]] = []
        for number, (group, extra) in enumerate(zip(groups, extras, strict=True)):
            checked = False
            for p in group["params"]:
                gradient = p.grad
                record = records.get(id(p))
                known += record is not None
                if gradient is None and record not in away:
                    gradient = None if record is None else record.leaf.grad
                    if gradient is None:
                        continue
                if not checked:
                    self._rule.check(group, f"param group {number}")
                    checked = True
                if record is not None and record.wrapped:
                    gradient = record.gradient
                if (
                    record is not None
                    and record.settled(gradient)
                    and (not extra or extra.keys() <= record.arena.format.names)
                    and not (seen and not record.intact(dict.get(state, p) or {}))
                ):
                    settled.append((record, group))
                else:
                    check_parameter(p, group, self._entry(p), record, self._registry.devices, self._rule)
                    others.append((p, group))
        gone = self._replaced(groups) if known < len(records) else []
        before, self._last = self._last, [] if others or gone else [record for record, _ in settled]
        # Another time, because the members may change from step to step, as experts do.
        plain = not (self._registry.wrapped or self._registry.offloaded.enabled)
        if plain and before and same(before, self._last):
            self._steady = Steady(settled, groups, extras, self._registry)
        return Look(settled, others, gone)

    def look_ahead(self, groups: Sequence[Group]) -> Given | None:
        """Return the gradients that `look` would find now; None: not known, or user code may write to state."""
        if self.state.read or self._registry.offloaded.enabled:
            return None
        return self._given(groups, [self._rule.extra(group) for group in groups])

    def _given(self, groups: Sequence[Group], extras: list[Any]) -> Given | None:
        state = self.state if self.state.read else None
        return None if self._steady is None else self._steady.given(groups, extras, state)

    def forget(self) -> None:
        """Forget what the last look has found, so that records that are forgotten are released."""
        self._steady, self._last = None, []

    def _entry(self, parameter: Tensor) -> dict[str, Any]:
        """Return the parameter's entry in `optimizer.state`, empty if it has none."""
        return dict.get(self.state, parameter) or {}

    def _replaced(self, groups: Sequence[Group]) -> list[ParameterRecord]:
        records, members = self._registry.records, {id(p) for group in groups for p in group["params"]}
        used = {r.arena for key, r in records.items() if key in members or r.parameter in self.state}
        used |= {r.arena for r in records.values() if r.arena.weights}  # whose blocks stream on
        return [record for record in records.values() if record.arena not in used]

    def need_home(self, found: Iterable[tuple[ParameterRecord, Group]]) -> bool:
        """Return whether `settle` reads or writes state of these at home, so that it must be moved there before.

        State that is flushed after `settle` would overwrite the values that `settle` has written.
        """
        each = ((record, self._entry(record.parameter)) for record, _ in found)
        # State of a newcomer is nowhere yet.
        return any((entry or not record.fresh) and not record.is_adopted(entry) for record, entry in each)

    def settle(self, found: Sequence[tuple[ParameterRecord, Group]], groups: Sequence[Group]) -> None:
        """Write the values of `state` into the arenas of these records, and look up where their memory lies.

        If they `need_home`, their state must be at home.
        """
        for record, _ in found:
            record.write_step()
        if any(record.moved() for record, _ in found):
            check_overlaps([(p, group) for group in groups for p in group["params"] if id(p) in self._registry.records])
        entries = ((record, self._entry(record.parameter)) for record, _ in found)
        changed = [(record, entry) for record, entry in entries if entry and not record.is_adopted(entry)]
        for record, _ in changed:
            record.renew_views()
        lies_in_state = overlap_with(self._registry.state_memory() if changed else ())
        for record, entry in changed:
            # An entry may have live tensors of another parameter's state, as when user code exchanges two entries:
            # writing the other one would change them.
            copy_live(entry, record.views, lies_in_state)
        for record, _ in found:
            gradient = record.gradient
            if gradient is not None:
                record.arena.stage_gradients_as(gradient.dtype)
            if dict.get(self.state, record.parameter) is None:
                dict.__setitem__(self.state, record.parameter, {})
            self._adopt(record, dict.__getitem__(self.state, record.parameter))
            flat = record.flat
            record.locate()
            # Batches have addresses of the parameter's former memory, which may be freed.
            if record.flat is not flat:
                self._registry.forget_batches(record)
            record.remember_gradient(gradient)

    def _adopt(self, record: ParameterRecord, entry: dict[str, Any]) -> None:
        """Make `entry`, which is empty or was filled by user code or a checkpoint, the live view of the state."""
        step = step_of(entry)
        if record.is_adopted(entry):
            entry["step"] = step
            record.adopt_step(step)
            return
        # State that was never written is zero wherever it will be placed, and takes no memory at home until then.
        if any(key in entry for key in self._rule.keys):
            record.fresh = False
        if not record.fresh:
            self._make_homes([record])
            self._rule.write_entry(entry, record.parameter, record.views)
        for key in self._rule.keys:
            if key not in record.views:
                entry.pop(key, None)
        entry.update({"step": step.clone(), **record.views})
        record.adopt_step(entry["step"])
        record.version = -1  # the next update makes the master agree with the parameter

    def count(self, active: Active) -> None:
        """Count the step in the records, and in `optimizer.state` if user code has read entries there."""
        for record, _ in active.members[active.settled :]:
            record.fresh = False
        for record, _ in active.members:
            record.count += 1
        if self.state.read and active.members:
            add_to_all([record.step for record, _ in active.members], 1)
            for record, _ in active.members:
                record.saw_step()

    def lacking_fields(self, groups: Sequence[Group]) -> list[ParameterRecord]:
        """Return records whose arenas lack fields of state that these loaded groups ask for.

        Raises RuntimeError if they have gradients on the host, which would be lost with the arenas.
        """
        short: dict[Arena, Mapping[str, str]] = {}
        for group in groups:
            extra = self._rule.extra(group)
            arenas = {record.arena for record in map(self._registry.record, group["params"]) if record is not None}
            short |= {arena: extra for arena in arenas if not extra.keys() <= arena.format.names}
        found = [record for record in self._registry.records.values() if record.arena in short]
        for record in found:
            if record in self._registry.offloaded.records:
                settings = ", ".join(short[record.arena].values())
                raise RuntimeError(
                    f"the state dict has {settings}, for which the optimizer has to make its memory anew, and there "
                    "are gradients in that, moved there by offload_gradients=True; call optimizer.zero_grad() before "
                    "load_state_dict(), or load before backward"
                )
        return found

    def withdraw(self) -> None:
        """Remove the entries of parameters whose first step failed, so that they have no state."""
        for parameter, entry in list(dict.items(self.state)):
            record = self._registry.record(parameter)
            if not entry or (record is not None and record.fresh and record.is_adopted(entry)):
                dict.pop(self.state, parameter)

    def keep_state(self, active: Active) -> None:
        """Make entries and homes, all zero, for the state of parameters before their first step, for torch to fill."""
        fresh = [record for record, _ in active.members if record.fresh]
        self._make_homes(fresh)
        for record in fresh:
            record.fresh = False
        self.state.read = True

    def _make_homes(self, records: Iterable[ParameterRecord]) -> None:
        """Reserve the homes of the state of these records."""
        places, every = self._registry.places, self._registry.accelerated
        self._registry.homes.reserve((subgroup for record in records for subgroup, _ in places[record]), every)


def copy_live(entry: dict[str, Any], own: Mapping[str, Tensor], lies_in_state: Callable[[Tensor], bool]) -> None:
    """Replace the tensors of an entry that lie in the memory of state, except those in `own`, by copies."""
    for key, value in entry.items():
        if isinstance(value, Tensor) and value is not own.get(key) and lies_in_state(local(value)):
            entry[key] = laid_out_as(local(value).clone(), value)


def live_views(state: Mapping[Tensor, Any], lies_in_state: Callable[[Tensor], bool]) -> list[Tensor]:
    """Return the parameters of which a tensor in the entry lies in the memory of state."""
    tensors = ((p, local(v)) for p, entry in state.items() for v in entry.values() if isinstance(v, Tensor))
    return [p for p, tensor in tensors if memory_of(tensor) is not None and lies_in_state(tensor)]
