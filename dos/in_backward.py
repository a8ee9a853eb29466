"""Updates during backward: each subgroup is updated once its gradients are final, and `step()` ends the iteration."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dos.backward import Backward
from dos.devices import Caller, ThreadJob
from dos.guard import Guard
from dos.options import Options
from dos.parameters.admission import Group
from dos.parameters.reconciler import Reconciler
from dos.parameters.registry import Registry, tell_autograd
from dos.parameters.watching import first_hooked
from dos.planning.decide import Facts
from dos.rules.base import Rule
from dos.sharding.ddp import reduced_parameters, several_ranks
from dos.sharding.local import is_sharded, version
from dos.state.record import ParameterRecord
from dos.state.subgroup import Piece, Subgroup
from dos.step.ledger import Ledger
from dos.step.parts import Parts
from dos.step.work import Input, Placed, SubgroupUpdate, new_input, prepare_updates
from dos.torch_internals.modes import in_backward
from dos.torch_internals.module_parameters import parameters_of
from dos.torch_internals.patches import replace_run_backward
from dos.weights.parts import will_write
from perfmodel import Plan

UNENDED = (
    "a backward has updated parameters, as attach(updates='backward') says, and step() has not ended that iteration; "
    "call optimizer.step() after each backward, or surround each backward that only adds up gradients, or belongs to "
    "another model's loss, with optimizer.no_update()"
)

_AGAIN = (
    "the gradient of a parameter of shape {} came once more in a backward that has already updated it: in earlier "
    "backwards it came {} times; attach the model again, which makes the next iteration update in step() and look anew"
)

_READ = (
    "a parameter of shape {} was read in the backward that has already updated it, as where checkpointing recomputes "
    "its module: that would compute with the new weights; attach the model again, which makes the next iteration "
    "update in step() and look anew, or attach it without updates='backward'"
)

_PART = (
    "the model was used between backward and step(), when some of its parameters are updated, and others will be by "
    "step(), as attach(updates='backward') says; call optimizer.step() first"
)

_DOUBLE = (
    "backward(create_graph=True) computes a second derivative with the weights of now, which attach(updates='backward')"
    " would have updated by then; surround it with optimizer.no_update(), or attach the model without updates="
)

_HOOK = (
    "a parameter of shape {} has a hook of register_post_accumulate_grad_hook(), which reads p.grad, and "
    "attach(updates='backward') takes that away; use parameter.register_hook(), or attach the model without updates="
)

_SPARSE = (
    "a parameter of shape {} has a sparse gradient, which DOSAdam does not update; build the embedding with "
    "sparse=False, or train it with torch.optim.SparseAdam"
)

_CAPTURED = (
    "a CUDA graph that captures backward writes gradients where it has found them, and runs no hooks, in which "
    "attach(updates='backward') updates; attach the model without updates="
)

_RANKS = (
    "{} reduces gradients after backward's hooks, in which attach(updates='backward') uses them; attach the model "
    "without updates="
)

_CHANGED = (
    "the settings of param group {} were changed between backward and step(), too late for the updates that backward "
    "has begun, as attach(updates='backward') says: {} was {} then and is {} now; change settings, as by a scheduler, "
    "after step() and before the next backward"
)

_SCALED = (
    "GradScaler scales the loss, and attach(updates='backward') updates before its step() could unscale the gradients; "
    "train in bfloat16 without GradScaler, or attach the model without updates="
)

_SET = (
    "user code has set p.grad of a parameter of shape {} between backward and step(), when attach(updates='backward') "
    "has taken its gradient; edit gradients in hooks of parameter.register_hook()"
)

_WRITTEN = (
    "user code wrote to a parameter of shape {} between backward and step(), when backward had updated it, as "
    "attach(updates='backward') says; write to parameters after step(), or attach the model without updates="
)

STATE_READ = (
    "optimizer.state was read, or a state dict loaded, after a backward that has updated state, and before step() has "
    "ended that iteration, as attach(updates='backward') says; call optimizer.step() first"
)

CLOSURE = (
    "step(closure) would call a backward, which updates parameters by itself, as attach(updates='backward') says; call "
    "backward and then step(), or attach the model without updates="
)

TOUCHED = (
    "the gradients are used while backward runs, as attach(updates='backward') says, so that they can be neither "
    "clipped, measured nor edited before step(); attach the model without updates=, or edit each gradient in a hook of "
    "parameter.register_hook()"
)


@dataclass(eq=False)
class Run:
    """One backward that user code has begun, with those that it runs within itself, as reentrant checkpointing does.

    double: whether it makes a graph of its own. updates: whether it is a step; False within `no_update()`.
    checked: whether its gradients can be used. began: whether it has written a gradient of the attached model.
    issued: whether it has updated anything. alone: whether no other thread ran a backward meanwhile.
    times: how often it has written each gradient. read: that number when the parameter was read last in it. beside: how
        many of `times` it has written to the weight itself, where weights stream: the others are its copy's. All by
        the id of the parameter.
    """

    double: bool
    updates: bool = False
    checked: bool = False
    began: bool = False
    issued: bool = False
    alone: bool = True
    times: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    beside: dict[int, int] = field(default_factory=dict)


class Learned(NamedTuple):
    """The findings of the last backward that was a step.

    times: how often it has written each gradient: the last time it is final. beside: see Run. late: the parameters that
        a module has read after that, which wait for `step()`. All by id: of another parameter with this id a use too
        many raises.
    """

    times: Mapping[int, int]
    beside: Mapping[int, int]
    late: frozenset[int]


_NOTHING = Learned({}, {}, frozenset())
_OF_NO_GROUP: tuple[Group | None, frozenset[str]] = None, frozenset()


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
    """

    def __init__(
        self, registry: Registry, ledger: Ledger, reconciler: Reconciler, guard: Guard, rule: Rule, members: set[int]
    ) -> None:
        self.members = members
        self.run: Run | None = None
        self.held = 0
        self.unended = False
        self.complete: list[tuple[ParameterRecord, Group]] = []
        self.issued: set[Piece] = set()
        self.planned: tuple[Plan, Facts] | None = None
        self._registry, self._ledger, self._reconciler = registry, ledger, reconciler
        self._guard, self._rule = guard, rule
        self._offloads = registry.offloaded.enabled
        self._runs: list[Run] = []
        self._learned = _NOTHING
        self._kept: dict[Tensor, Tensor] = {}
        """Gradients that wait for `step()`, taken from `p.grad` when backward ended; others may wait on the host."""
        self._waits = False
        """Whether any gradients wait."""
        self._parts: Parts | None = None
        self._settings_before: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        """Begin another iteration."""
        self._opened = False
        self._settings: list[Any] = []
        self._known: dict[tuple[int, float], int] = {}
        self._given: list[Input | None] = []
        self._awaited: dict[Subgroup, int] = {}
        self._left: dict[ParameterRecord, int] = {}
        self._callers: dict[Subgroup, set[Caller]] = {}
        self._groups: dict[int, tuple[Group | None, frozenset[str]]] = {}
        self._setting: tuple[Group | None, float, int] = None, 0.0, 0
        self._updated: set[ParameterRecord] = set()
        """The records of which any piece is in `issued`."""
        self.complete, self.issued, self._parts, self._ledger.held = [], set(), None, None
        self.planned = None
        self._waits = False

    # Which backward is a step.

    def begin(self, run: Run) -> None:
        """Begin a backward."""
        run.updates, run.alone = not self.held and not accumulating(), not self._runs
        for other in self._runs:
            other.alone = False
        self._runs.append(run)
        self._count_runs()

    def issue_rest(self) -> None:
        """Issue the updates that wait for others; after this backward none comes until `step()`."""
        if self._parts is not None:
            with self._guard.change():
                self._parts.issue_rest()
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
            if self._registry.record(p) in self._updated:
                raise RuntimeError(UNENDED if self.unended else _READ.format(tuple(p.shape)))
            for run in self._runs:
                if id(p) in run.times:
                    run.read[id(p)] = run.times[id(p)]
        return True

    def has_updated(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the backward that runs has updated any of these."""
        return any(self._registry.record(p) in self._updated for p in parameters)

    def check_whole(self) -> None:
        """Raise RuntimeError if some parameters are updated and others are not."""
        if self.issued and (self._runs or self._waits):
            raise RuntimeError(_PART)

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
        raise RuntimeError(_SPARSE.format(tuple(leaf.shape)))

    def _problem(
        self, parameter: Tensor, run: Run | None, on_device: Backward | None, parameters: Iterable[Tensor]
    ) -> str | None:
        """Return the reason for which no gradient of the backward that runs can be used; None: all can."""
        if on_device is not None and on_device.device.capturing():
            return _CAPTURED
        if self.unended:
            return UNENDED
        if run is not None and run.updates and run.double:
            return _DOUBLE
        if not self.members.isdisjoint(reduced_parameters()):
            return _RANKS.format("DistributedDataParallel")
        if several_ranks():
            return _RANKS.format("a job of several ranks")
        among = (parameter,) if run is None else parameters
        hooked = first_hooked([p for p in among if id(p) in self.members])
        return None if hooked is None else _HOOK.format(tuple(hooked.shape))

    def remember_settings(self, groups: Sequence[Group]) -> None:
        """Note the settings with which this backward updates. Raises ValueError if one cannot be used."""
        for number, group in enumerate(groups):
            self._rule.check(group, f"param group {number}")
        self._settings_before = [self._rule.settings(group, 1.0, 1.0) for group in groups]

    def open(self, groups: Sequence[Group], parts: Parts | None) -> None:
        """Let this backward update, for which all that was learned still holds. parts: issues those on the device."""
        registry, times = self._registry, self._learned.times
        self._opened, self._parts = True, parts
        self._given = [None] * registry.numbered
        extra = [frozenset(self._rule.extra(group)) for group in groups]
        self._groups = {id(p): each for each in zip(groups, extra, strict=True) for p in each[0]["params"]}
        self._awaited = dict.fromkeys((*registry.on_host, *registry.accelerated), 0)
        self._callers = {subgroup: set() for subgroup in self._awaited}
        for key in times:
            record = registry.records.get(key)
            for subgroup, _ in () if record is None else registry.places[record]:
                self._awaited[subgroup] += 1

    @property
    def plan(self) -> Plan | None:
        """The plan of this iteration on the device; None: nothing is updated there in backward."""
        return None if self._parts is None else self._parts.plan

    @property
    def knows(self) -> bool:
        """Whether a backward has shown which gradients come."""
        return bool(self._learned.times)

    def ready(self, run: Run, parameter: Tensor, leaf: Tensor) -> None:
        """Use a gradient that backward has written to `leaf`: update the subgroups that waited for it alone.

        Raises RuntimeError if the parameter was updated already.
        """
        key, learned = id(parameter), self._learned
        record, times = self._registry.records.get(key), run.times.get(key, 0) + 1
        run.times[key] = times
        apart = record is not None and record.leaf is not parameter
        if apart and leaf is parameter:
            run.beside[key] = run.beside.get(key, 0) + 1
        if record in self._updated:
            raise RuntimeError(_AGAIN.format(tuple(parameter.shape), times - 1))
        if record is None or not (self._opened and run.alone and run.updates):
            return
        if times != learned.times.get(key) or key in learned.late:
            return
        # The loss may use a weight that streams beside its block, as a penalty does, for the first time.
        if apart and (run.beside.get(key, 0) != learned.beside.get(key, 0) or self._comes_beside(run, key, parameter)):
            return
        given = self._input(record, key)
        if given is None:
            return
        places = self._registry.places[record]
        self._left[record] = len(places)
        if not places:
            self._completed(record)
        self._given[record.number] = given
        caller = None if self._parts is None else self._parts.device.caller()
        for subgroup, _ in places:
            self._awaited[subgroup] -= 1
            # Autograd runs each node on the stream of its forward: gradients of one subgroup may be written on several.
            self._callers[subgroup].add(caller)
            if not self._awaited[subgroup]:
                self._update(run, subgroup)

    def _comes_beside(self, run: Run, key: int, parameter: Tensor) -> bool:
        """Return whether this backward has yet to write the gradient of a weight itself, beside that of its copy."""
        return key not in run.beside and will_write(parameter)

    def _input(self, record: ParameterRecord, key: int) -> Input | None:
        """Return the gradient as an update takes it; None if `step()` has to look at it, or at the parameter.

        key: the id of the parameter.
        """
        group, extra = self._groups.get(key, _OF_NO_GROUP)
        away = self._offloads and record.arena.accelerated
        if away:
            gradient = self._registry.offloaded.coming(record)
        else:
            gradient = record.gradient if record.wrapped else record.leaf.grad
        if group is None or gradient is None:
            return None
        if record.numel and not record.settled(None if away else gradient):
            return None
        if record.stand_in or record.written_late or record.fresh:
            return None
        if extra and not extra <= record.arena.format.names:
            return None
        reconciler = self._reconciler
        if reconciler.seen and not record.intact(dict.get(reconciler.state, record.parameter) or {}):
            return None
        before, count, setting = self._setting
        if group is not before or count != record.count:  # most often all parameters have the same
            setting = self._known.setdefault((id(group), record.count), len(self._settings))
            self._setting = group, record.count, setting
            if setting == len(self._settings):
                self._settings.append(self._rule.settings(group, record.count + 1, 1.0))
        own = record.arena.whole_masters and record.master_written
        return new_input((gradient, gradient.data_ptr(), setting, False, False, own, None))

    @torch.no_grad()
    def _update(self, run: Run, subgroup: Subgroup) -> None:
        """Update a subgroup, if it has memory for that; else `step()` does."""
        parts, tier = self._parts, None
        if subgroup.arena.accelerated:
            tier = None if parts is None else parts.reserve(subgroup)
            if tier is None:
                return
        away = self._offloads and subgroup.arena.accelerated
        update = SubgroupUpdate(subgroup, self._given, self._settings, offloaded=away, written=False)
        with self._guard.change():
            run.issued = True
            records = [piece.record for piece in update.pieces]
            if away:
                handles = map(self._registry.offloaded.handle, dict.fromkeys(records))
                update.arriving = [ThreadJob(each) for each in handles if each is not None]
            if parts is not None and tier is not None:
                parts.add(update, tier, self._callers.pop(subgroup))
                # At once, even if the update waits: a graph of before this backward, or one that is kept, would compute
                # with the new weights.
                tell_autograd(records)
            else:
                prepare_updates([Placed(update, subgroup.state)])()
                self._registry.written(records)
            self.issued.update(update.pieces)
            self._updated.update(records)
            left = self._left
            for record in records:
                left[record] -= 1
                if not left[record]:
                    self._completed(record)

    def _completed(self, record: ParameterRecord) -> None:
        """Release a gradient whose updates are issued: they refer to its memory as long as they read it."""
        group, _ = self._groups[id(record.parameter)]
        assert group is not None, "a gradient of it was used"
        self.complete.append((record, group))
        record.parameter.grad = self._given[record.number] = None
        if self._offloads:
            self._registry.offloaded.give(record)

    # The step.

    def check_step(self, groups: Sequence[Group], *, scaled: bool) -> None:
        """Raise RuntimeError, with nothing changed, if `step()` comes in a way that these updates do not allow."""
        if scaled:
            raise RuntimeError(_SCALED)
        if not self.unended:
            return
        for number, (group, before) in enumerate(zip(groups, self._settings_before, strict=False)):
            now = self._rule.settings(group, 1.0, 1.0)
            if now != before:
                name, old, new = _first_difference(before, now)
                raise RuntimeError(_CHANGED.format(number, name, old, new))
        # Of those whose update still runs user code cannot have read the module's attribute, as to write to it.
        for record in self._updated.difference(self._ledger.unfinished):
            if version(record.parameter) != record.version:
                raise RuntimeError(_WRITTEN.format(tuple(record.parameter.shape)))

    def restore(self) -> None:
        """Give the gradients that wait for `step()` back to `p.grad`. Raises RuntimeError if user code has set one."""
        for p in self._kept:
            if p.grad is not None:
                raise RuntimeError(_SET.format(tuple(p.shape)))
        for record, _ in self.complete:
            if record.parameter.grad is not None:
                raise RuntimeError(_SET.format(tuple(record.parameter.shape)))
        for p, gradient in self._kept.items():
            p.grad = gradient
        self._kept = {}

    @property
    def offloaded(self) -> list[ParameterRecord]:
        """The records of members whose gradients are on the host."""
        return [r for r in self._registry.offloaded.records if id(r.parameter) in self.members]

    def keeps(self, record: ParameterRecord) -> bool:
        """Return whether the parameter's gradient waits for `step()`, so that user code cannot drop it any more."""
        return self.unended and id(record.parameter) in self.members

    def left(self, updates: Mapping[Subgroup, SubgroupUpdate]) -> dict[Subgroup, SubgroupUpdate]:
        """Return these updates without what backward has updated of parameters that lie in several subgroups."""
        found = {subgroup: update.without(self.issued) for subgroup, update in updates.items()}
        return {subgroup: update for subgroup, update in found.items() if update.items}

    def finish(self, parameters: Iterable[Tensor]) -> None:
        """End the iteration, whose step was issued. parameters: of the optimizer."""
        self.unended = False
        for p in parameters:
            if id(p) in self.members:
                p.grad = None
        self._forget()


def check_updates(model: nn.Module, options: Options) -> None:
    """Raise ValueError if backward cannot update the parameters of this model, with the reason and the way out."""
    problem = None
    if options.max_grad_norm is not None:
        problem = "max_grad_norm= needs the norm of all gradients, known only after backward; leave it out"
    elif options.skip_nonfinite:
        problem = "skip_nonfinite=True needs the norm of all gradients, known only after backward; leave it out"
    parameters = parameters_of(model)
    if problem is None and any(id(p) in reduced_parameters() for p in parameters):
        problem = "DistributedDataParallel reduces gradients after backward's hooks; train in one process"
    if problem is None and (several_ranks() or any(map(is_sharded, parameters))):
        problem = "ranks divide parameters or reduce gradients, which step() updates; train in one process"
    hooked = first_hooked(parameters)
    if problem is None and hooked is not None:
        raise ValueError(_HOOK.format(tuple(hooked.shape)))
    if problem is not None:
        raise ValueError(
            f"attach(updates='backward') updates parameters while backward runs: {problem}, or attach the "
            "model without updates="
        )


def _first_difference(before: Any, now: Any) -> tuple[str, Any, Any]:
    """Return the name of the first setting that differs, with both values."""
    name = next(name for name in vars(before) if getattr(before, name) != getattr(now, name))
    return name, getattr(before, name), getattr(now, name)


def accumulating() -> bool:
    """Return whether Accelerate says that the present backward only adds up gradients, as in `accelerator.accumulate`.

    All its objects share this record of it.
    """
    state = sys.modules.get("accelerate.state")
    return state is not None and not state.GradientState().sync_gradients


_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
"""The sessions that update in backward; weak, because torch's function stays replaced."""


def watch_backwards(session: Any) -> None:
    """Tell this session from now on when a backward begins, ends or raises."""
    _sessions.add(session)
    _wrap_torch()


def stop_watching(session: Any) -> None:
    """Tell this session no more."""
    _sessions.discard(session)


@functools.cache
def _wrap_torch() -> None:
    replace_run_backward(_run)


def _run(
    run_backward: Callable[..., Any],
    outputs: Sequence[Tensor],
    gradients: Any,
    retain_graph: bool,
    create_graph: bool,
    *arguments: Any,
    accumulate_grad: bool,
    **rest: Any,
) -> Any:
    """Run a backward as torch does, between what sessions have to know of it."""

    def run() -> Any:
        given = outputs, gradients, retain_graph, create_graph, *arguments
        return run_backward(*given, accumulate_grad=accumulate_grad, **rest)

    # torch.autograd.grad() writes no p.grad. A backward within another one belongs to that.
    if not accumulate_grad or not _sessions or in_backward():
        return run()
    runs = [(session, Run(create_graph)) for session in list(_sessions)]
    # All are told, even if one raises: a backward that has not ended for a session would stop its updates.
    with contextlib.ExitStack() as ends:
        try:
            for session, each in runs:
                session.runs.run_begins(each)
            found = run()
        except BaseException as error:
            for session, each in runs:
                ends.callback(session.runs.run_failed, each, error)
            raise
        for session, each in runs:
            ends.callback(session.runs.run_ends, each)
    return found
