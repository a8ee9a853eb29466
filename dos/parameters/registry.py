"""Which parameters have state, and where: enrols them at their first gradient and follows what users do to them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dos.devices import DeviceFinder
from dos.gradients.offload import OffloadedGradients
from dos.guard import Guard
from dos.kernels.adam import AdamStep
from dos.machine.host_memory import reserve
from dos.machine.process import local_ranks, ranks_that_will_divide
from dos.options import Options, check_settings
from dos.parameters.admission import Admission, Group, check_overlaps, name_of
from dos.parameters.allocation import Allocation, explain_oom
from dos.sharding.local import count_write, is_sharded, laid_out_as, local, moved_to_layout
from dos.sharding.meshes import Meshes
from dos.sharding.replaced import replaced
from dos.state.arena import Arena
from dos.state.entries import step_of, write_entry
from dos.state.record import ParameterRecord, in_logical_order
from dos.state.stores import HostStore
from dos.state.subgroup import Piece, Subgroup
from dos.step.work import Given, SubgroupUpdate
from perfmodel import SubgroupLoad
from perfmodel.format import STATE_KEYS

StateDict = MutableMapping[Tensor, Any]


class Active(NamedTuple):
    """What takes part in a step.

    members: the records of parameters with a gradient, with their groups.
    settled: how many of them, first of all, are as the last step left them.
    """

    members: list[tuple[ParameterRecord, Group]]
    settled: int


class Look(NamedTuple):
    """What a step finds of the parameters that have a gradient, with their groups.

    settled: are as the last step left them; others: about these something is new, or they are.
    gone: records of arenas none of whose parameters is in a group any more, or has an entry in the state.
    """

    settled: list[tuple[ParameterRecord, Group]]
    others: list[tuple[Tensor, Group]]
    gone: list[ParameterRecord]


class Registry:
    """The optimizer's records, arenas and subgroups.

    Holds nothing that leads back to the optimizer, so that state is freed as soon as that goes.

    accelerated: those subgroups whose parameters are on the accelerator; index: their positions, which a Plan uses.
    local: those whose parameters are on the host.
    places: each record's pieces, with the subgroups in which they lie.
    host_store: what holds state on the host. lasting_bytes: device memory of state that never leaves.
    offloaded: the gradients that have been moved to the host; None unless the user chose that.
    meshes: the ranks over which parameters are divided.
    """

    def __init__(self, options: Options, devices: DeviceFinder, guard: Guard, meshes: Meshes) -> None:
        self._options = options
        self.meshes = meshes
        self._devices = devices
        self._guard = guard
        self._admission = Admission(devices)
        self._allocation = Allocation(options, devices)
        self._records: dict[int, ParameterRecord] = {}
        """By the id of the parameter, which the record keeps alive."""
        self._numbered = 0
        """Records so far, those that are gone included."""
        self.accelerated: list[Subgroup] = []
        self.local: list[Subgroup] = []
        self.index: dict[Subgroup, int] = {}
        self.places: dict[ParameterRecord, list[tuple[Subgroup, Piece]]] = {}
        self._newcomers: list[ParameterRecord] = []
        self.host_store = HostStore()
        self.lasting_bytes = 0
        self.offloaded = OffloadedGradients(self.host_store) if options.offload_gradients else None
        self._promised = {True: 0, False: 0}
        """Host bytes of parameters on the accelerator, and of those on the host that have none yet."""
        self._beginners: list[ParameterRecord] = []
        """Whose entries are of a first step that has not been counted."""
        self._loads: tuple[SubgroupLoad, ...] | None = None

    def record(self, parameter: Tensor) -> ParameterRecord | None:
        """The parameter's record, if it has had a gradient."""
        return self._records.get(id(parameter))

    def loads(self) -> tuple[SubgroupLoad, ...]:
        """The accelerated subgroups as the performance model sees them."""
        if self._loads is None:
            self._loads = tuple(subgroup.load() for subgroup in self.accelerated)
        return self._loads

    def gradient_bytes(self) -> int:
        """Device memory through which any one subgroup's offloaded gradients come up again for its update there."""
        if self.offloaded is None:
            return 0
        return max((s.offloaded_gradient_bytes for s in self.accelerated), default=0)

    def admit(self, group: Group) -> None:
        """Remember what the parameters are now. Raises TypeError or ValueError for one that cannot be optimised.

        Frozen and uninitialised ones are looked at when they have a gradient.
        Raises MemoryError if the host could not hold the state of all, wherever it is at first.
        """
        ready = [p for p in group["params"] if p.requires_grad and not is_lazy(p)]
        for parameter in ready:
            self._admission.check_kind(parameter, group)
        promised = dict(self._promised)
        for run in self._allocation.alike(ready):
            promised[self._devices.holds(run[0])] += self._allocation.host_bytes(run, group)
        needed = sum(promised.values()) - self.host_store.nbytes
        if not any(map(is_sharded, ready)):
            needed //= ranks_that_will_divide()
        reserve(needed, "optimizer state (DOSAdam)", processes=local_ranks())  # none of which has taken its part yet
        self._promised = promised
        self._admission.admit(ready)
        self.meshes.meet(group["params"])

    def refuse_replaced(self, groups: Iterable[Group]) -> None:
        """Raise RuntimeError if parameters were replaced by DTensors, which get the gradients instead."""
        members = [(p, group) for group in groups for p in group["params"]]
        found = replaced(p for p, _ in members)
        if found:
            name = name_of(*next(member for member in members if member[0] is found[0]))
            raise RuntimeError(
                f"{len(found)} of the optimizer's {len(members)} parameters are in no model any more, the first of "
                f"them {name}: fully_shard or parallelize_module has put DTensors in their place, which this "
                "optimizer does not have; build the optimizer after fully_shard, from model.parameters()"
            )

    def forget_all_but(self, known: Collection[int]) -> None:
        """Hold no parameter but those with these ids, and those that have state."""
        self._admission.forget_all_but({*known, *self._records})

    def place_gradients(self, groups: Iterable[Group]) -> None:
        """Give gradients of DTensors their parameters' placements where they have others. Every rank in one order.

        Such is the gradient of a LayerNorm under sequence parallelism: each rank's is a part of the sum.
        """
        if not self.meshes:
            return
        for parameter in (p for group in groups for p in group["params"]):
            if is_sharded(parameter) and parameter.grad is not None:
                parameter.grad = moved_to_layout(parameter.grad, parameter)

    def look(self, groups: Sequence[Group], state: StateDict, *, seen: bool) -> Look:
        """Look at all parameters with a gradient: those of `others` are to be `checked` and settled.

        seen: whether users may have changed `state`.
        Raises before anything is changed if a parameter, a gradient, a setting or a state cannot be used.
        """
        if self.offloaded is not None:
            self.offloaded.check()
        settled: list[tuple[ParameterRecord, Group]] = []
        others: list[tuple[Tensor, Group]] = []
        records, known = self._records, 0
        for number, group in enumerate(groups):
            checked = False
            amsgrad = group["amsgrad"]
            for p in group["params"]:
                gradient = p.grad
                record = records.get(id(p))
                known += record is not None
                if gradient is None and (self.offloaded is None or record not in self.offloaded):
                    continue
                if not checked:
                    check_settings(group, f"param group {number}", self._options.state_format)
                    checked = True
                if record is not None and record.sharded:
                    gradient = record.gradient
                if (
                    record is not None
                    and record.settled(gradient)
                    and (record.arena.amsgrad or not amsgrad)
                    and not (seen and not record.intact(state.get(p) or {}))
                ):
                    settled.append((record, group))
                else:
                    others.append((p, group))
        return Look(settled, others, self._replaced(groups, state) if known < len(records) else [])

    def _replaced(self, groups: Sequence[Group], state: StateDict) -> list[ParameterRecord]:
        """The records of arenas none of whose parameters is in a group any more, or has an entry in `state`."""
        members = {id(p) for group in groups for p in group["params"]}
        used = {r.arena for key, r in self._records.items() if key in members or r.parameter in state}
        return [record for record in self._records.values() if record.arena not in used]

    def forget(self, gone: Sequence[ParameterRecord], groups: Sequence[Group]) -> None:
        """Free the arenas of these records, which are all of theirs."""
        arenas = {record.arena for record in gone}
        if self.offloaded is not None:
            self.offloaded.forget(gone)
        for record in gone:
            del self._records[id(record.parameter)], self.places[record]
        self.accelerated = [s for s in self.accelerated if s.arena not in arenas]
        self.local = [s for s in self.local if s.arena not in arenas]
        self.forget_all_but({id(p) for group in groups for p in group["params"]})
        self._reindex()

    def need_home(self, found: Iterable[tuple[ParameterRecord, Group]], state: StateDict) -> bool:
        """Whether `settle` takes state of these from the host, or changes its shape or order: it must be there then.

        State that came home later would overwrite it.
        """
        for record, group in found:
            entry = state.get(record.parameter) or {}
            foreign = not record.is_adopted(entry) if entry or not record.fresh else False  # a newcomer's is nowhere
            if foreign or record.layout_changed() or (group["amsgrad"] and not record.arena.amsgrad):
                return True
        return False

    def marked(self) -> list[tuple[Tensor, Tensor]]:
        """See `Remembers`: what this rank has of DTensors, as after our last write."""
        records = self._records.values() if self.meshes else ()
        return [(record.bits, record.local) for record in records if record.bits is not None]

    def heed(self, rewritten: Collection[int]) -> None:
        """See `Remembers`."""
        for record in self._records.values() if rewritten else ():
            record.rewritten |= id(record.bits) in rewritten

    def settle(self, found: Sequence[tuple[ParameterRecord, Group]], groups: Sequence[Group], state: StateDict) -> None:
        """Make these fit for the step: their state is what `state` says, and everything lies as it is used.

        What of it is on the device has come home if they `need_home`.
        """
        for record, _ in found:
            record.write_step()
        if any(record.moved() for record, _ in found):
            check_overlaps([(p, group) for group in groups for p in group["params"] if id(p) in self._records])
        for record, _ in found:
            self.settle_layout(record, state)
        for record, _ in found:
            # A state that is another parameter's live view, as when two are exchanged, must not change under our hands.
            entry = state.get(record.parameter) or {}
            for key, value in entry.items():
                if isinstance(value, Tensor) and value is not record.views.get(key) and local(value)._base is not None:
                    entry[key] = laid_out_as(local(value).clone(), value)
        for record, group in found:
            if group["amsgrad"] and not record.arena.amsgrad:
                self._add_amsgrad(record.arena)
            gradient = record.gradient
            if gradient is not None:
                record.arena.stage_gradients_as(gradient.dtype)
            self._adopt(record, state.setdefault(record.parameter, {}))
            flat = record.flat
            record.locate()
            if record.flat is not flat:
                self._forget_batches(record)
            record.settle(gradient)

    def _forget_batches(self, record: ParameterRecord) -> None:
        """The memory of the parameter, or of its state, is another than that for which batches were made."""
        for subgroup, _ in self.places[record]:
            subgroup.batches.clear()

    def with_gradients(
        self, groups: Iterable[Group], state: Mapping[Tensor, Any]
    ) -> list[tuple[ParameterRecord, Group]]:
        """The records of all parameters with a gradient, enrolled if new. Raises as `active` does."""
        if self.offloaded is not None:
            self.offloaded.check()
        found: list[tuple[Tensor, Group]] = []
        for number, group in enumerate(groups):
            parameters = [p for p in group["params"] if p.grad is not None or self._is_offloaded(p)]
            if parameters:
                check_settings(group, f"param group {number}", self._options.state_format)
            found += [(p, group) for p in parameters]
        return self.checked(found, state)

    def checked(
        self, parameters: Iterable[tuple[Tensor, Group]], state: Mapping[Tensor, Any]
    ) -> list[tuple[ParameterRecord, Group]]:
        """The records of parameters that have a gradient, enrolled if new. Raises as `active` does."""
        found = list(parameters)
        for parameter, group in found:
            entry = state.get(parameter) or {}
            self._admission.check(parameter, group, entry, enrolled=id(parameter) in self._records)
        self.enrol(found)
        return [(self._records[id(p)], group) for p, group in found]

    def count(self, active: Active, *, seen: bool) -> None:
        """Count the step. seen: in what `optimizer.state` has, too, because users have that."""
        for record in self._beginners:
            record.fresh = False
        self._beginners = []
        for record, _ in active.members:
            record.count += 1
        if seen and active.members:
            torch._foreach_add_([record.step for record, _ in active.members], 1)
            for record, _ in active.members:
                record.saw_step()

    def let_masters_follow(self) -> None:
        """Have all masters follow their parameters in the next step, because state was loaded."""
        for record in self._records.values():
            record.version = -1

    def write_steps(self) -> None:
        """Bring what was counted to what `optimizer.state` has."""
        for record in self._records.values():
            record.write_step()

    def take_newcomers(self) -> list[ParameterRecord]:
        """The records made since the last call."""
        newcomers, self._newcomers = self._newcomers, []
        return newcomers

    def enrol(self, parameters: Iterable[tuple[Tensor, Group]]) -> None:
        """Make room for the state of parameters, each with its group, that have none yet.

        Raises MemoryError, before anything is allocated, if the host has not enough memory.
        """
        newcomers = [(p, group) for p, group in parameters if id(p) not in self._records]
        if not newcomers:
            return
        runs: list[tuple[list[Tensor], Group]] = []
        for _, members in itertools.groupby(newcomers, key=lambda member: id(member[1])):
            group_members = list(members)
            runs += [(run, group_members[0][1]) for run in self._allocation.alike(p for p, _ in group_members)]
        here = [(run, group) for run, group in runs if not self._devices.holds(run[0])]
        if here:  # all other state takes memory when it first comes to the host
            nbytes = sum(self._allocation.host_bytes(run, group) for run, group in here)
            reserve(nbytes, "optimizer state (DOSAdam)")
            self._promised[False] = max(0, self._promised[False] - nbytes)
        made: list[tuple[list[ParameterRecord], list[Subgroup]]] = []
        there = sum(subgroup.numel for subgroup in self.accelerated)
        there += sum(local(p).numel() for p, _ in newcomers if self._devices.holds(p))
        size = self._allocation.size_on_device(there)
        for run, group in runs:
            made.append(self._allocation.make_room(run, group, self._numbered + sum(len(r) for r, _ in made), size))
        if made:
            with self._guard.change():
                self._publish(made)

    def order_by_use(self, first_use: Iterable[int]) -> None:
        """Put the subgroups in the order in which their parameters, by id, are first used; others come last."""
        rank = {parameter: i for i, parameter in enumerate(first_use)}
        last = len(rank)
        for subgroups in (self.accelerated, self.local):
            subgroups.sort(key=lambda s: min(rank.get(id(piece.record.parameter), last) for piece in s.pieces))
        self._reindex()

    def updates(self, active: Active, scales: Iterable[float]) -> dict[Subgroup, SubgroupUpdate]:
        """What the step does to each subgroup that has a gradient. scales: what each gradient is multiplied by."""
        given = Given(self._numbered)
        before: tuple[Group | None, float, float] = None, 0.0, 0.0
        known: dict[tuple[int, float, float], int] = {}
        setting = 0
        for number, ((record, group), scale) in enumerate(zip(active.members, scales, strict=False)):
            # Most often all have the same.
            if group is not before[0] or record.count != before[1] or scale != before[2]:
                before = group, record.count, scale
                setting = known.setdefault((id(group), record.count, scale), len(known))
                if setting == len(given.settings):
                    given.settings.append(_adam_step(group, record.count + 1, scale))
            given.which[record.number] = setting
            away = self.offloaded is not None and record in self.offloaded
            gradient = self.offloaded.flat(record) if self.offloaded is not None and away else record.gradient
            assert gradient is not None, "each record has one"
            if number >= active.settled:
                if not away:
                    gradient = record.flat_gradient(gradient)
                if record.changed():
                    given.follows.add(record)
            given.add(record, gradient)
        updates = {}
        for subgroup in itertools.chain(self.local, self.accelerated):
            offloaded = self.offloaded is not None and subgroup.arena.accelerated
            update = SubgroupUpdate(subgroup, given, offloaded=offloaded)
            if update.pieces:
                updates[subgroup] = update
        return updates

    def written(self, records: Collection[ParameterRecord]) -> None:
        """Tell autograd and the records that the step has written to the parameters."""
        for record in records:
            record.write_back()
        count_write([record.parameter for record in records])
        for record in records:
            record.saw()

    def _add_amsgrad(self, arena: Arena) -> None:
        at_home = [s for s in self.accelerated if s.arena is arena and self.host_store.has(s)]
        with explain_oom():
            arena.add_amsgrad(lambda tensor: self.host_store.take_field(tensor, at_home))
        for record in self._records.values():
            if record.arena is arena:
                record.views = record.make_views()
                record.version = -1  # its entry gets the new view when it takes part again
                self._forget_batches(record)
        self._reindex()

    def settle_layout(self, record: ParameterRecord, state: StateDict) -> None:
        """Reorder state and offloaded gradients of a parameter whose elements lie in another order than before.

        Its state is at home.
        """
        if not record.layout_changed():
            return
        if record.arena.format.block > 1 and not in_logical_order(record.local):
            raise RuntimeError(
                f"a parameter of shape {tuple(record.parameter.shape)} has its elements in another order in memory "
                "than before, and state_format='int8' keeps its state by blocks of neighbours; bring the model into "
                "its memory format before the first step, or leave state_format out"
            )
        total = self.offloaded.flat(record) if self.offloaded is not None and record in self.offloaded else None
        like = local(next(iter(record.views.values())))
        added = None if total is None else total.as_strided(like.size(), like.stride(), total.storage_offset()).clone()
        entry = state.get(record.parameter, {})
        self.host_store.take([subgroup for subgroup, _ in self.places[record]])
        before = {key: local(value).clone() for key, value in record.views.items()}
        mine = {key: entry.get(key) is view for key, view in record.views.items()}

        with self._guard.change():
            record.remember_layout()
            self._forget_batches(record)
            if total is not None and added is not None:
                record.shaped(total).copy_(added)
            for key, view in record.views.items():
                local(view).copy_(before[key])
                if mine[key]:
                    entry[key] = view

    def _adopt(self, record: ParameterRecord, entry: dict[str, Any]) -> None:
        """Make `entry`, empty, or filled by user code or a checkpoint, the live view of this record's state."""
        step = step_of(entry)
        record.renew_views()
        if record.is_adopted(entry):
            entry["step"] = step
            record.adopt_step(step)
            return
        # State that was never written is zero wherever it will be, and takes no memory here until then.
        if any(key in entry for key in STATE_KEYS):
            record.fresh = False
        if record.fresh:
            self._beginners.append(record)
        else:
            self.host_store.take(subgroup for subgroup, _ in self.places[record])
            write_entry(entry, record.parameter, record.views)
        # In an order that can be interrupted: what the entry says is lost at no point.
        for key in STATE_KEYS:
            if key not in record.views:
                entry.pop(key, None)
        entry.update({"step": step.clone(), **record.views})
        record.adopt_step(entry["step"])
        record.version = -1  # whatever the master was, it must agree with the parameter

    def withdraw(self, state: StateDict) -> None:
        """Take back entries of parameters whose first step does not come to be, so that they have no state."""
        begun = [record.parameter for record in self._beginners]
        for parameter in (*begun, *(p for p, entry in list(state.items()) if not entry)):
            state.pop(parameter, None)
        self._beginners = []

    def keep_beginners(self) -> None:
        """Let the state of parameters that have had no step be there, for torch to fill."""
        self.host_store.take(subgroup for record in self._beginners for subgroup, _ in self.places[record])
        for record in self._beginners:
            record.fresh = False
        self._beginners = []

    def _is_offloaded(self, parameter: Tensor) -> bool:
        return self.offloaded is not None and self._records.get(id(parameter)) in self.offloaded

    def _publish(self, made: Iterable[tuple[list[ParameterRecord], list[Subgroup]]]) -> None:
        """Let new parameters count as enrolled."""
        for records, subgroups in made:
            self.places.update({record: [] for record in records})
            for subgroup in subgroups:
                for piece in subgroup.pieces:
                    self.places[piece.record].append((subgroup, piece))
                (self.accelerated if subgroup.arena.accelerated else self.local).append(subgroup)
            self._newcomers += records
            self._numbered += len(records)
            self._records.update({id(record.parameter): record for record in records})
        self._reindex()

    def _reindex(self) -> None:
        self.index = {subgroup: i for i, subgroup in enumerate(self.accelerated)}
        self.lasting_bytes = sum(arena.device_bytes for arena in {s.arena for s in self.accelerated})
        self._loads = None


def _adam_step(group: Group, count: float, grad_scale: float) -> AdamStep:
    beta1, beta2 = group["betas"]
    return AdamStep(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=count,
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        grad_scale=grad_scale,
    )
