"""Which parameters have state, and where: enrols them at their first gradient, and forgets those that are gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dos.devices import Device, DeviceFinder
from dos.gradients.offload import OffloadedGradients
from dos.guard import Guard
from dos.machine.host_memory import check_host_memory, host_share
from dos.machine.process import local_ranks, ranks_that_will_divide
from dos.options import Options
from dos.parameters.admission import Group, check_kind, name_of
from dos.parameters.allocation import Allocation
from dos.parameters.watching import Watching
from dos.sharding.local import is_sharded, local, moved_to_layout
from dos.sharding.meshes import Meshes
from dos.sharding.replaced import find_replaced
from dos.state.disk.files import check_disk
from dos.state.homes import Homes
from dos.state.host_store import HostStore
from dos.state.record import ParameterRecord
from dos.state.subgroup import Piece, Subgroup
from perfmodel import SubgroupLoad


class Registry:
    """The optimizer's records, arenas and subgroups.

    Holds nothing that leads back to the optimizer, so that state is freed as soon as that goes.

    records: by the id of the parameter, which the record keeps alive. numbered: how many there were, those that are
        gone included.
    accelerated: those subgroups whose parameters are on the accelerator; index: their positions, which a Plan uses.
    on_host: those whose parameters are on the host.
    places: each record's pieces, with the subgroups in which they lie.
    host_store: what holds state on the host; homes: that, and the disk.
    devices: says which parameters are on the accelerator. lasting_bytes: device memory of state that never leaves.
    offloaded: the gradients that have been moved to the host.
    meshes: the ranks over which parameters are divided. watching: the hooks on their gradients.
    """

    def __init__(
        self,
        options: Options,
        device: Device | torch.device | str | None,
        guard: Guard,
        meshes: Meshes,
        watching: Watching,
    ) -> None:
        self._options = options
        self.meshes = meshes
        self.watching = watching
        self.devices = DeviceFinder(device)
        self._guard = guard
        self._allocation = Allocation(options, self.devices)
        self._agreed = False
        """Whether all ranks have the same parameters and settings, as far as is known."""
        self.records: dict[int, ParameterRecord] = {}
        self.numbered = 0
        self.accelerated: list[Subgroup] = []
        self.on_host: list[Subgroup] = []
        self.index: dict[Subgroup, int] = {}
        self.places: dict[ParameterRecord, list[tuple[Subgroup, Piece]]] = {}
        self.host_store = HostStore(options.host_memory, keeps_gradients=options.offload_gradients)
        self.homes = Homes(self.host_store)
        self.lasting_bytes = 0
        self.offloaded = OffloadedGradients(self.host_store, enabled=options.offload_gradients)
        self._promised: dict[bool, dict[int, int]] = {True: {}, False: {}}
        """Host bytes by parameter: of all on the accelerator, and of those on the host that have none yet."""
        self._loads: tuple[SubgroupLoad, ...] | None = None
        self.expected = 0
        """Parameters on the accelerator that are enrolled one after another; sizes of subgroups follow from all."""

    def record(self, parameter: Tensor) -> ParameterRecord | None:
        """The parameter's record, if it has a place in an arena."""
        return self.records.get(id(parameter))

    def leaf(self, parameter: Tensor) -> Tensor:
        """Where backward writes the parameter's gradient."""
        record = self.records.get(id(parameter))
        return parameter if record is None else record.leaf

    def subgroups_of(self, parameters: Iterable[Tensor]) -> dict[Subgroup, None]:
        """The subgroups in which parameters lie; some may have no place yet."""
        found = (self.records.get(id(p)) for p in parameters)
        return {subgroup: None for r in found if r is not None for subgroup, _ in self.places[r]}

    @property
    def bytes_to_come(self) -> int:
        """Of the host's memory that state may take yet."""
        return max(0, sum(sum(each.values()) for each in self._promised.values()) - self.host_store.nbytes)

    def loads(self) -> tuple[SubgroupLoad, ...]:
        """The accelerated subgroups as the performance model sees them."""
        if self._loads is None:
            loads = (subgroup.load() for subgroup in self.accelerated)
            if self.offloaded.enabled:  # gradients have room of their own there
                loads = (dataclasses.replace(s, host_bytes=s.host_bytes - s.gradient_bytes) for s in loads)
            self._loads = tuple(loads)
        return self._loads

    def gradient_bytes(self, *, weights: bool) -> int:
        """Device memory through which any one subgroup's offloaded gradients come up again for its update there.

        weights: whether its weights may have to come up, too.
        """
        if not self.offloaded.enabled:
            return 0
        return max((s.offloaded_gradient_bytes + s.weight_bytes * weights for s in self.accelerated), default=0)

    def admit(self, group: Group) -> None:
        """Take parameters in. Raises TypeError or ValueError for one that cannot be optimised.

        Frozen and uninitialised ones are looked at when they have a gradient.
        Raises MemoryError, or OSError for the disk, if there is no room for the state of all, in this process and its
        neighbours, wherever it is at first.
        """
        ready = [p for p in group["params"] if p.requires_grad and not is_lazy(p)]
        for parameter in ready:
            check_kind(parameter, group, self.devices, self._options.rule)
        there = {p: self.devices.holds(p) for p in group["params"] if not is_lazy(p)}  # raises where it cannot be
        promised = {on_device: dict(each) for on_device, each in self._promised.items()}
        for p in ready:
            if id(p) not in self.records:
                promised[there[p]][id(p)] = self._allocation.host_bytes(p, group)
        in_place = sum(promised[False].values())
        taken = self.host_store.nbytes + (self.lasting_bytes if self.devices.shares_host_memory else 0)
        needed = in_place + sum(promised[True].values()) - taken
        if not any(map(is_sharded, ready)):
            needed //= ranks_that_will_divide()
        if self._options.disk:
            limit = self._options.host_memory
            beyond = needed - in_place - (host_share() if limit is None else limit)
            check_disk(local_ranks() * beyond // 2, self._options.disk)  # at least half of it is state in any format
        else:
            check_host_memory(needed, processes=local_ranks())  # none has taken its part yet
        self._promised = promised
        self.meshes.meet(group["params"])
        for parameter, on_device in there.items():
            # From the first gradient on, for the first peak of memory is one, too; it may be moved until then.
            # Not where FSDP2 keeps its shards on the host: it copies gradients there only while they have no hook.
            self.watching.watch(parameter, on_device or not is_sharded(parameter))
        self._agreed = False

    def agree(self, groups: Sequence[Group]) -> None:
        """Look at the parameters as they are when they are first used, which frameworks may have exchanged.

        Ranks that are not alike hear of it, before one of them waits for another that never comes.
        """
        if self._agreed:
            return
        parameters = [p for group in groups for p in group["params"]]
        self._let_go_of_others(parameters)  # Accelerate exchanges them when it shards the model
        self._refuse_replaced(groups)
        self.meshes.meet(parameters)
        if self.meshes:
            counts = {
                "the number of parameters": len(parameters),
                "the elements of all parameters": sum(p.numel() for p in parameters),
            }
            self.meshes.agree(counts, stages=False)  # stages of a pipeline differ in size
            self.meshes.agree(self._options.agreed())
        self._agreed = True

    def _let_go_of_others(self, parameters: Iterable[Tensor]) -> None:
        """Neither watch parameters that are none of these and have no record, nor leave memory for them."""
        kept = {*map(id, parameters), *self.records}
        self.watching.keep(kept)
        for each in self._promised.values():
            for gone in each.keys() - kept:
                del each[gone]

    def _refuse_replaced(self, groups: Iterable[Group]) -> None:
        """Raise RuntimeError if parameters were replaced by DTensors, which get the gradients instead."""
        members = [(p, group) for group in groups for p in group["params"]]
        found = find_replaced(p for p, _ in members)
        if found:
            name = name_of(*next(member for member in members if member[0] is found[0]))
            raise RuntimeError(
                f"{len(found)} of the optimizer's {len(members)} parameters are in no model any more, the first of "
                f"them {name}: fully_shard or parallelize_module has put DTensors in their place, which this "
                "optimizer does not have; build the optimizer after fully_shard, from model.parameters()"
            )

    def place_gradients(self, groups: Iterable[Group]) -> None:
        """Give gradients of DTensors their parameters' placements where they have others. Every rank in one order.

        Such is the gradient of a LayerNorm under sequence parallelism: each rank's is a part of the sum.
        """
        if not self.meshes:
            return
        for parameter in (p for group in groups for p in group["params"]):
            if is_sharded(parameter) and parameter.grad is not None:
                parameter.grad = moved_to_layout(parameter.grad, parameter)

    def forget(self, gone: Sequence[ParameterRecord], parameters: Iterable[Tensor]) -> None:
        """Free the arenas of these records, which are all of theirs. parameters: of all groups."""
        arenas = {record.arena for record in gone}
        # First: the CPU lane may still be adding to memory that goes with the arenas.
        self.offloaded.forget(gone)
        for record in gone:
            del self.records[id(record.parameter)], self.places[record]
        self.accelerated = [s for s in self.accelerated if s.arena not in arenas]
        self.on_host = [s for s in self.on_host if s.arena not in arenas]
        self.reindex()
        self._let_go_of_others(parameters)

    def marked(self) -> list[tuple[ParameterRecord, Tensor]]:
        """This rank's parts of DTensors, which may have been written to without being counted; see `look_at_bits`."""
        return [(record, record.local) for record in self.records.values()] if self.meshes else []

    def enrol(self, parameters: Iterable[tuple[Tensor, Group]]) -> None:
        """Make room for the state of parameters, each with its group, that have none yet, and watch their gradients.

        Raises MemoryError, before anything is allocated, if the host has not enough memory.
        """
        newcomers = [(p, group) for p, group in parameters if id(p) not in self.records]
        if not newcomers:
            return
        runs = self._allocation.alike(newcomers)
        nbytes = {id(p): self._allocation.host_bytes(p, group) for p, group in newcomers}
        here = [nbytes[id(p)] for p, _ in newcomers if self._allocation.takes_host_memory_at_once(p)]
        if here:  # all other state takes memory when it first comes to the host
            check_host_memory(sum(here))
        there = sum(subgroup.numel for subgroup in self.accelerated)
        there += sum(local(p).numel() for p, _ in newcomers if self.devices.holds(p))
        size = self._allocation.size_on_device(max(there, self.expected))
        records: list[ParameterRecord] = []
        subgroups: list[Subgroup] = []
        for run, group in runs:
            made, cut = self._allocation.make_arena(run, group, self.numbered + len(records), size)
            records += made
            subgroups += cut
        with self._guard.change():
            # What has a record and no subgroup would be updated by no step.
            self.places.update({record: [] for record in records})
            for subgroup in subgroups:
                for piece in subgroup.pieces:
                    self.places[piece.record].append((subgroup, piece))
                (self.accelerated if subgroup.arena.accelerated else self.on_host).append(subgroup)
            self.numbered += len(records)
            self.records.update({id(record.parameter): record for record in records})
            for key in nbytes:
                self._promised[False].pop(key, None)
                if self.records[key].arena.accelerated:
                    self._promised[True][key] = nbytes[key]
            self.reindex()
        for record in records:
            self.watching.watch(record.parameter, record.arena.accelerated)

    def order_by_use(self, first_use: Iterable[int]) -> None:
        """Put the subgroups in the order in which their parameters, by id, are first used.

        Others come before them: `step()` itself waits for parameters of which no module was seen to wait.
        """
        rank = {parameter: i for i, parameter in enumerate(first_use)}
        for subgroups in (self.accelerated, self.on_host):
            subgroups.sort(key=lambda s: min(rank.get(id(piece.record.parameter), -1) for piece in s.pieces))
        self.reindex()

    def written(self, records: Collection[ParameterRecord]) -> None:
        """Tell autograd and the records that the step has written to the parameters."""
        for record in records:
            if record.stand_in:
                record.write_back()
        tell_autograd(records)
        # After the versions have risen: the next step would take that for a write of user code's.
        for record in records:
            if not record.replaced:  # else the next step takes the values that user code has put there
                record.saw()

    def forget_batches(self, record: ParameterRecord) -> None:
        """The parameter's memory is another than that for which batches were made."""
        for subgroup, _ in self.places[record]:
            subgroup.batches.clear()

    def reindex(self) -> None:
        """Subgroups are others: what is known of all of them is made anew."""
        self.index = {subgroup: i for i, subgroup in enumerate(self.accelerated)}
        self.lasting_bytes = sum(arena.device_bytes for arena in {s.arena for s in self.accelerated})
        if self.offloaded.enabled and self.homes.disk is not None:
            self.host_store.awaited.update(subgroup.arena for subgroup in self.accelerated)
        self._loads = None


def tell_autograd(records: Collection[ParameterRecord]) -> None:
    """Have backward refuse graphs in which the parameters have other values than from now on."""
    # Through whichever name autograd knows them.
    parts = [record.local for record in records if record.sharded]
    parts += [record.leaf for record in records if record.leaf is not record.parameter]
    torch.autograd.graph.increment_version([*(record.parameter for record in records), *parts])
