"""Updates during backward: each subgroup is updated once its gradients are final, and `step()` ends the iteration."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from dos.backward import Backward
from dos.gradients.other_steps import NOT_FOUND, watch_steps
from dos.guard import Guard, warn
from dos.in_backward.expected import NOTHING, Expectations, Learned
from dos.in_backward.finals import Finals
from dos.in_backward.refusals import (
    CAPTURED,
    CHANGED,
    DOUBLE,
    HOOK,
    PART,
    RANKS,
    READ,
    SCALED,
    SET,
    SPARSE,
    UNENDED,
    WRITTEN,
    ZEROED,
)
from dos.in_backward.runs import Run, accumulating
from dos.parameters.admission import Group
from dos.parameters.reconciler import Reconciler
from dos.parameters.registry import Registry
from dos.parameters.watching import first_hooked
from dos.planning.decisions import Facts
from dos.rules.base import Rule
from dos.sharding import ddp
from dos.sharding.local import version
from dos.state.record import ParameterRecord
from dos.state.subgroup import Piece, Subgroup
from dos.step.ledger import Ledger
from dos.step.parts import Parts
from dos.step.work import SubgroupUpdate
from dos.torch_internals.modes import in_backward
from perfmodel import Plan


class InBackward:
    """The updates of one optimizer during backward.

    The first backward after `attach` updates nothing, and `step()` does: it shows how often each gradient comes, and
    whether a module reads a parameter afterwards, so that whatever cannot be updated in backward is found before
    anything has changed. From the second one on a parameter is *ready* when its gradient came as often as before. A
    subgroup whose expected parameters are all ready is updated. Whatever is not as the last step has left it (written
    to, edited, new, of another dtype) is not ready: `step()` updates what is left, as without this.

    members: the ids of the attached model's parameters; no others are updated in backward.
    run: the backward that runs; None: none, or several at once, of which no gradient can be told apart.
    held: how many `no_update()` surround the caller.
    unended: whether a backward that is a step has ended, and `step()` was not called since.
    complete: the records whose update was issued as a whole, with their groups. issued: all pieces that were. Some of
        these updates wait for others, see `Parts`; nothing may happen any more that would have to come before them.
    planned: the plan of this iteration with what it was made for, where weights stream: `step()` moves blocks.
    expectations: of the last backward that has updated; None: none has, or parameters were forgotten since.
    """

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        reconciler: Reconciler,
        guard: Guard,
        rule: Rule,
        members: set[int],
        *,
        reduced: bool,
    ) -> None:
        """reduced: whether ranks have reduced each gradient when its hook runs, as FSDP2 does."""
        self.members = members
        self._reduced = reduced
        self.run: Run | None = None
        self.held = 0
        self.unended = False
        self.planned: tuple[Plan, Facts] | None = None
        self.expectations: Expectations | None = None
        self._registry, self._ledger, self._reconciler = registry, ledger, reconciler
        self._guard, self._rule = guard, rule
        self._runs: list[Run] = []
        self._learned = NOTHING
        self._kept: dict[Tensor, Tensor] = {}
        """Gradients that wait for `step()`, taken from `p.grad` when backward ended; others may wait on the host."""
        self._waits = False
        """Whether any gradients wait."""
        self._used: tuple[Collection[ParameterRecord], Collection[Tensor]] = (), ()
        """The records that the last iteration has updated in backward, and the parameters that its step has."""
        self._warned = self._told = False
        self._settings_before: list[Any] = []
        self._forget()
        watch_steps(self)

    def _forget(self) -> None:
        """Begin another iteration."""
        self.finals = Finals(self._registry, self._reconciler, self._guard, self._rule)
        self.planned, self._ledger.held, self._waits = None, None, False

    @property
    def complete(self) -> list[tuple[ParameterRecord, Group]]:
        """The records whose update was issued as a whole, with their groups."""
        return self.finals.complete

    @property
    def issued(self) -> set[Piece]:
        """All pieces of which an update was issued."""
        return self.finals.issued

    # Which backward is a step.

    def begin(self, run: Run) -> None:
        """Begin a backward."""
        self.drop_used()
        run.updates, run.alone = not self.held and not accumulating(), not self._runs
        for other in self._runs:
            other.alone = False
        self._runs.append(run)
        self._count_runs()

    def issue_rest(self) -> None:
        """Issue the updates that wait for others; after this backward none comes until `step()`."""
        if self.finals.parts is not None:
            with self._guard.change():
                self.finals.parts.issue_rest()
        self._ledger.held = None  # a cycle of references

    def end(self, run: Run, parameters: Iterable[Tensor]) -> None:
        """End a backward. parameters: of the optimizer. Its gradients that wait for `step()` leave `p.grad`."""
        self._runs.remove(run)
        self._count_runs()
        if not run.began or not run.updates:
            return
        self.unended = True
        self._waits = bool(self.offloaded)
        if run.alone:  # else some gradients were not counted
            late = {p for p, times in run.read.items() if times == run.times.get(p)}
            self._learned = Learned(run.times, run.beside, self._learned.late | late)
        for p in parameters:
            if id(p) in self.members and p.grad is not None:
                self._kept[p], p.grad = p.grad, None
                self._waits = True

    def fail(self, run: Run, error: BaseException) -> None:
        """End a backward that has raised, even as it began. If it has updated anything, the optimizer is broken."""
        if run in self._runs:
            self._runs.remove(run)
            self._count_runs()
        if run.issued:
            failure = self._guard.failure(error)
            self._ledger.abandon(error if isinstance(error, Exception) else failure)
        elif run.began:
            self._forget()

    @property
    def under_way(self) -> bool:
        """Whether a backward runs, or an iteration has to be ended."""
        return bool(self._runs) or self.unended

    def _count_runs(self) -> None:
        self.run = self._runs[0] if len(self._runs) == 1 else None

    def reads(self) -> bool:
        """Return whether a backward reads what this thread reads; another thread's forward is none of its."""
        return bool(self._runs) and in_backward()

    def check_use(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether a backward is about to read these parameters, whose last use is later then.

        Raises RuntimeError if it has updated any of them, or if others read while only some parameters are updated.
        """
        if not self.reads():
            self.check_whole()
            return False
        for p in parameters:
            if self._registry.record(p) in self.finals.updated:
                raise RuntimeError(UNENDED if self.unended else READ.format(tuple(p.shape)))
            for run in self._runs:
                if id(p) in run.times:
                    run.read[id(p)] = run.times[id(p)]
        return True

    def has_updated(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the backward that runs has updated any of these."""
        return any(self._registry.record(p) in self.finals.updated for p in parameters)

    def check_whole(self) -> None:
        """Raise RuntimeError if some parameters are updated and others are not."""
        if self.issued and (self._runs or self._waits):
            raise RuntimeError(PART)

    # Gradients.

    def check(self, parameter: Tensor, leaf: Tensor, on_device: Backward | None, parameters: Iterable[Tensor]) -> None:
        """Raise RuntimeError for a backward that cannot be used, at its first gradient, before anything has changed.

        parameter: whose gradient it is, in `leaf.grad`. parameters: of the optimizer.
        """
        run = self.run
        problem = self._problem(parameter, run, on_device, parameters)
        if problem is not None:
            leaf.grad = None
            raise RuntimeError(problem)
        if run is not None:
            run.checked = True

    def refuse_sparse(self, leaf: Tensor) -> None:
        """Raise RuntimeError for a sparse gradient, which is dropped."""
        leaf.grad = None
        raise RuntimeError(SPARSE.format(tuple(leaf.shape)))

    def _problem(
        self, parameter: Tensor, run: Run | None, on_device: Backward | None, parameters: Iterable[Tensor]
    ) -> str | None:
        """Return the reason for which no gradient of the backward that runs can be used; None: all can."""
        if on_device is not None and on_device.device.capturing():
            return CAPTURED
        if self.unended:
            return UNENDED
        if run is not None and run.updates and run.double:
            return DOUBLE
        if not self.members.isdisjoint(ddp.reduced):
            return RANKS.format("DistributedDataParallel")
        if ddp.several_ranks() and not self._reduced:
            return RANKS.format("a job of several ranks")
        among = (parameter,) if run is None else parameters
        hooked = first_hooked([p for p in among if id(p) in self.members])
        return None if hooked is None else HOOK.format(tuple(hooked.shape))

    def remember_settings(self, groups: Sequence[Group]) -> None:
        """Note the settings with which this backward updates. Raises ValueError if one cannot be used."""
        for number, group in enumerate(groups):
            self._rule.check(group, f"param group {number}")
        self._settings_before = [self._rule.settings(group, 1.0, 1.0) for group in groups]

    def open(self, groups: Sequence[Group], parts: Parts | None) -> None:
        """Let this backward update, for which all that was learned still holds. parts: issues those on the device."""
        facts = self._registry, self._rule, groups, self._learned
        if self.expectations is None or not self.expectations.hold(*facts):
            self.expectations = Expectations(*facts)
        self.expectations.begin()
        self.finals.open(self.expectations.of, parts, self._learned)

    @property
    def plan(self) -> Plan | None:
        """The plan of this iteration on the device; None: nothing is updated there in backward."""
        return None if self.finals.parts is None else self.finals.parts.plan

    @property
    def knows(self) -> bool:
        """Whether a backward has shown which gradients come."""
        return bool(self._learned.times)

    def ready(self, run: Run, parameter: Tensor, leaf: Tensor) -> None:
        """Use a gradient that backward has written to `leaf`: update the subgroups that waited for it alone.

        Raises RuntimeError if the parameter was updated already.
        """
        final = self.finals.count(run, parameter, leaf)
        if final is not None:
            self.finals.ready(run, final)

    # The step.

    def check_step(self, groups: Sequence[Group], *, scaled: bool) -> None:
        """Raise RuntimeError, with nothing changed, if `step()` comes in a way that these updates do not allow."""
        if scaled:
            raise RuntimeError(SCALED)
        if not self.unended:
            return
        for number, (group, before) in enumerate(zip(groups, self._settings_before, strict=False)):
            now = self._rule.settings(group, 1.0, 1.0)
            if now != before:
                name, old, new = _first_difference(before, now)
                raise RuntimeError(CHANGED.format(number, name, old, new))
        # Of those whose update still runs user code cannot have read the module's attribute, as to write to it.
        for record in self.finals.updated.difference(self._ledger.unfinished):
            if version(record.parameter) != record.version:
                raise RuntimeError(WRITTEN.format(tuple(record.parameter.shape)))

    def restore(self) -> None:
        """Give the gradients that wait for `step()` back to `p.grad`. Raises RuntimeError if user code has set one."""
        for p in self._kept:
            if p.grad is not None:
                raise RuntimeError(SET.format(tuple(p.shape)))
        for record, _ in self.complete:
            if record.parameter.grad is not None:
                raise RuntimeError(SET.format(tuple(record.parameter.shape)))
        for p, gradient in self._kept.items():
            p.grad = gradient
        self._used, self._kept = (self.finals.updated, list(self._kept)), {}

    @property
    def offloaded(self) -> list[ParameterRecord]:
        """The records of members whose gradients are on the host."""
        return [r for r in self._registry.offloaded.records if id(r.parameter) in self.members]

    def keeps(self, record: ParameterRecord) -> bool:
        """Return whether the parameter's gradient waits for `step()`, so that user code cannot drop it any more."""
        return self.unended and id(record.parameter) in self.members

    def taken_of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return those of another optimizer's parameters of which this one alone has used the gradients."""
        updated, kept = (self.finals.updated, self._kept) if self.unended else self._used
        here = {id(record.parameter) for record in updated}.union(map(id, kept)) if updated or kept else ()
        return [p for p in parameters if id(p) in here and p.grad is None] if here else []

    def stepped(self, optimizer: Optimizer) -> None:
        """Warn once if an optimizer that is not ours has made a step without the gradients that this one has used."""
        if not self._told and not hasattr(optimizer, "edit_gradients"):  # ours raise
            found = self.taken_of(p for group in optimizer.param_groups for p in group["params"])
            if found:
                self._told = True
                how = "attach(updates='backward')"
                warn(NOT_FOUND.format(type(optimizer).__name__, len(found), tuple(found[0].shape), how))

    def drop_used(self) -> None:
        """Note that no other optimizer is to use the gradients of the last iteration."""
        self._used = (), ()

    def warn_of_zeroing(self, parameters: Iterable[Tensor]) -> None:
        """Warn once that user code zeroes gradients of an iteration that is not ended, if they are of members."""
        if not self._warned and not self.members.isdisjoint(map(id, parameters)):
            self._warned = True
            warn(ZEROED)

    def left(self, updates: Mapping[Subgroup, SubgroupUpdate]) -> dict[Subgroup, SubgroupUpdate]:
        """Return these updates without what backward has updated of parameters that lie in several subgroups."""
        found = {subgroup: update.without(self.issued) for subgroup, update in updates.items()}
        return {subgroup: update for subgroup, update in found.items() if update.pieces}

    def finish(self, parameters: Iterable[Tensor]) -> None:
        """End the iteration, whose step was issued. parameters: of the optimizer."""
        self.unended = False
        for p in parameters:
            if id(p) in self.members:
                p.grad = None
        self._forget()


def _first_difference(before: Any, now: Any) -> tuple[str, Any, Any]:
    """Return the name of the first setting that differs, with both values."""
    name = next(name for name in vars(before) if getattr(before, name) != getattr(now, name))
    return name, getattr(before, name), getattr(now, name)
