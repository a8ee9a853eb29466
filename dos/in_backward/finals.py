"""One iteration of updates in backward: which gradients are final, and the updates of what waited for them alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dos.devices import ThreadJob
from dos.guard import Guard
from dos.in_backward.expected import NOTHING, Awaiting, Expected, Learned
from dos.in_backward.look import Look
from dos.in_backward.refusals import AGAIN, SET
from dos.in_backward.runs import Run
from dos.parameters.admission import Group
from dos.parameters.reconciler import Reconciler
from dos.parameters.registry import Registry, tell_autograd
from dos.rules.base import Rule
from dos.state.record import ParameterRecord
from dos.state.subgroup import Piece
from dos.step.parts import Parts
from dos.step.work import Columns, Input, Placed, SubgroupUpdate, new_input, prepare_updates
from dos.weights.parts import will_write


class Finals:
    """The gradients of one iteration as they become final, until `step()` ends it.

    parts: issues updates on the device; None: none are issued there.
    expected: the gradients that are expected, by the id of the parameter. given: those that are final, by number of the
        record.
    complete: the records whose update was issued as a whole, with their groups. issued: all pieces that were. Some of
        these updates wait for others, see `Parts`; nothing may happen any more that would have to come before them.
    updated: the records of which any piece is in `issued`.
    """

    def __init__(self, registry: Registry, reconciler: Reconciler, guard: Guard, rule: Rule) -> None:
        self.parts: Parts | None = None
        self.expected: Mapping[int, Expected] = {}
        self.given: list[Tensor | None] = []
        self.complete: list[tuple[ParameterRecord, Group]] = []
        self.issued: set[Piece] = set()
        self.updated: set[ParameterRecord] = set()
        self._registry, self._reconciler, self._guard, self._rule = registry, reconciler, guard, rule
        self._offloads = registry.offloaded.enabled
        self._learned = NOTHING
        self._inputs: list[Input | None] = []
        """Gradients that were looked at, in the form that an update takes, by number of the record."""
        self._left: dict[ParameterRecord, int] = {}
        """The number of pieces that wait, of records of which some do not."""
        self._settings: list[Any] = []
        self._known: dict[tuple[int, float], int] = {}
        self._setting: tuple[Group | None, float, int] = None, 0.0, 0

    def open(self, expected: Mapping[int, Expected], parts: Parts | None, learned: Learned) -> None:
        """Let this backward update, for which all that was learned still holds. parts: issues those on the device."""
        made = self._registry.records_made
        self.parts, self._learned, self.expected = parts, learned, expected
        self.given, self._inputs = [None] * made, [None] * made

    def _wait(self, awaiting: Awaiting, record: ParameterRecord, gradient: Tensor) -> None:
        """Let a final gradient wait for the others of its subgroup."""
        self.given[record.number] = gradient
        awaiting.left -= 1
        awaiting.written_in(None if self.parts is None else self.parts.device)

    def count(self, run: Run, parameter: Tensor, leaf: Tensor) -> Expected | None:
        """Count a gradient that backward has written to `leaf`; return what it is if it is final, else None.

        Raises RuntimeError if the parameter was updated already.
        """
        key, learned = id(parameter), self._learned
        run.times[key] = times = run.times.get(key, 0) + 1
        each = self.expected.get(key)
        record = self._registry.records.get(key) if each is None else each.record
        apart = record is not None and record.leaf is not parameter
        if apart and leaf is parameter:
            run.beside[key] = run.beside.get(key, 0) + 1
        if each is None or times != each.times:
            if record in self.updated:
                raise RuntimeError(AGAIN.format(tuple(parameter.shape), times - 1))
            return None
        if not (run.alone and run.updates):
            return None
        # The loss may use a weight that streams beside its block, as a penalty does, for the first time.
        if apart and (run.beside.get(key, 0) != learned.beside.get(key, 0) or self._comes_beside(run, key, parameter)):
            return None
        return each

    def _comes_beside(self, run: Run, key: int, parameter: Tensor) -> bool:
        """Return whether this backward has yet to write the gradient of a weight itself, beside that of its copy."""
        return key not in run.beside and will_write(parameter)

    def ready(self, run: Run, each: Expected) -> None:
        """Use a gradient that is final: update the subgroups that waited for it alone."""
        record = each.record
        if self._offloads and record.arena.accelerated:
            gradient = self._registry.offloaded.coming(record)
        else:
            gradient = record.gradient if record.wrapped else record.leaf.grad
        if gradient is None:
            return
        if not each.awaiting and self._input(record, gradient) is not None:
            self._completed(record)
        for awaiting in each.awaiting:
            self._wait(awaiting, record, gradient)
            if not awaiting.left:
                self._update(run, awaiting)

    def _input(self, record: ParameterRecord, gradient: Tensor) -> Input | None:
        """Return a gradient as an update takes it; None if `step()` has to look at it, or at the parameter."""
        found, reconciler = self._inputs[record.number], self._reconciler
        if found is not None:  # it lies in several subgroups
            return found
        away = self._offloads and record.arena.accelerated
        if record.numel and not record.settled(None if away else gradient):
            return None
        if record.stand_in or record.written_late or record.fresh:
            return None
        if reconciler.state.read and not record.intact(dict.get(reconciler.state, record.parameter) or {}):
            return None
        setting = self._setting_of(self.expected[id(record.parameter)].group, record.count)
        own = record.arena.whole_masters and record.master_written
        found = self._inputs[record.number] = new_input(
            (gradient, gradient.data_ptr(), setting, False, False, own, None)
        )
        return found

    def _setting_of(self, group: Group, count: float) -> int:
        """Return the index of a group's settings in a step behind `count` others."""
        before, known, setting = self._setting
        if group is not before or count != known:  # most often all parameters have the same
            setting = self._known.setdefault((id(group), count), len(self._settings))
            self._setting = group, count, setting
            if setting == len(self._settings):
                self._settings.append(self._rule.settings(group, count + 1, 1.0))
        return setting

    def _columns(self, awaiting: Awaiting) -> Columns | None:
        """Return all gradients of a subgroup as an update takes them, asked at once; None: look at each."""
        look, state = awaiting.look, self._reconciler.state
        found = None if look is None else look.take(self.given, state if state.read else None)
        if look is None or found is None:
            return None
        setting, written = self._setting_of(look.group, look.records[0].count), look.masters_written()
        for place in look.shared:  # whose version another subgroup's update may have raised
            each = self._input(look.records[place], found.gradients[place])
            if each is None:
                return None
            written[place] = each.master_written
        return look.columns(found, setting, written)

    def _update(self, run: Run, awaiting: Awaiting) -> None:
        """Update a subgroup if it is as the last step has left it and there is memory for that; else `step()` does."""
        subgroup, parts, tier = awaiting.subgroup, self.parts, None
        away = self._offloads and subgroup.arena.accelerated
        columns = self._columns(awaiting)
        if columns is None and not self._look_at_each(awaiting, away=away):
            return
        if subgroup.arena.accelerated:
            tier = None if parts is None else parts.reserve(subgroup)
            if tier is None:
                return
        if columns is None:
            update = SubgroupUpdate.of(subgroup, self._inputs, self._settings, offloaded=away, written=False)
        else:
            update = SubgroupUpdate(subgroup, subgroup.pieces, columns, self._settings, written=False)
        assert update is not None, "it has waited for a gradient"
        with self._guard.change():
            run.issued = True
            records = [piece.record for piece in update.pieces]
            if away:
                handles = map(self._registry.offloaded.handle, dict.fromkeys(records))
                update.arriving = [ThreadJob(each) for each in handles if each is not None]
            if parts is not None and tier is not None:
                parts.add(update, tier, awaiting.callers)
                # At once, even if the update waits: a graph of before this backward, or one that is kept, would compute
                # with the new weights.
                tell_autograd(records)
            else:
                prepare_updates([Placed(update, subgroup.state)])()
                self._registry.written(records)
            self.issued.update(update.pieces)
            self.updated.update(records)
            shared = records
            if columns is not None and awaiting.look is not None:
                shared = [records[place] for place in awaiting.look.shared]
                self._completed_alone(awaiting.look)
            for record in shared:
                places = len(self._registry.places[record])
                left = self._left[record] = self._left.get(record, places) - 1 if places > 1 else 0
                if not left:
                    self._completed(record)

    def _look_at_each(self, awaiting: Awaiting, *, away: bool) -> bool:
        """Look at the gradients and parameters of a subgroup one by one; return whether it can be updated."""
        given, pieces = self.given, awaiting.subgroup.pieces
        for piece in pieces:
            record, gradient = piece.record, given[piece.record.number]
            if gradient is None:
                continue
            if not (away or record.gradient is gradient):  # user code replaced it while it waited
                if record in self.updated:
                    raise RuntimeError(SET.format(tuple(record.parameter.shape)))
                return False
            if self._input(record, gradient) is None:
                return False
        expected = [self.expected.get(id(piece.record.parameter)) for piece in pieces]
        awaiting.look = None if away else Look.of(awaiting.subgroup, expected, given)
        return True

    def _completed_alone(self, look: Look) -> None:
        """Release the gradients of a subgroup that lie in no other one, as `_completed`."""
        given = self.given
        self.complete += look.complete
        for parameter, number in look.alone:
            parameter.grad = given[number] = None

    def _completed(self, record: ParameterRecord) -> None:
        """Release a gradient whose updates are issued: they refer to its memory as long as they read it."""
        self.complete.append((record, self.expected[id(record.parameter)].group))
        record.parameter.grad = self.given[record.number] = self._inputs[record.number] = None
        if self._offloads:
            self._registry.offloaded.give(record)
