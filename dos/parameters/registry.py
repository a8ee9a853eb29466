"""The parameters that have state: enrols them at their first gradient, and forgets the ones that user code replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dos.devices import Device, DeviceFinder
from dos.gradients.offload import OffloadedGradients
from dos.guard import Guard
from dos.machine.host_memory import check_host_memory, check_mapping, host_share
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
from perfmodel.format import MASTER


class Registry:
    """The optimizer's records, arenas and subgroups.

    No reference leads back to the optimizer, so that state is released as soon as the optimizer is.

    records: by the id of the parameter, which the record keeps alive. records_made: the number of records ever made,
        forgotten ones included.
    accelerated: the subgroups whose parameters are on the accelerator; index: their positions, which a Plan uses.
    on_host: the subgroups whose parameters are on the host.
    places: each record's pieces, with the subgroups in which they lie.
    host_store: state on the host; homes: state on the host and on disk.
    devices: says which parameters are on the accelerator. lasting_bytes: device memory of state that never leaves.
    offloaded: the gradients that have been moved to the host.
    meshes: the ranks over which parameters are divided. watching: the hooks on their gradients.
    wrapped: whether any record is `wrapped`.
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
        self._agreed = self._divided = False
        """Whether all ranks have the same parameters and settings, as far as is known."""
        self.records: dict[int, ParameterRecord] = {}
        self.records_made = 0
        self.wrapped = False
        self.accelerated: list[Subgroup] = []
        self.on_host: list[Subgroup] = []
        self.index: dict[Subgroup, int] = {}
        self.places: dict[ParameterRecord, list[tuple[Subgroup, Piece]]] = {}
        self.host_store = HostStore(options.host_memory, keeps_gradients=options.offload_gradients)
        self.homes = Homes(self.host_store)
        self.lasting_bytes = 0
        self.offloaded = OffloadedGradients(self.host_store, enabled=options.offload_gradients)
        self._promised: dict[int, tuple[bool, int]] = {}
        """By parameter: whether it is on the device, and the host bytes of its state; on the host, until it has any."""
        self.watches_host = False
        self._loads: tuple[SubgroupLoad, ...] | None = None
        self.expected = 0
        """The number of parameters on the accelerator that blocks will enrol; sizes of subgroups follow from it."""

    def record(self, parameter: Tensor) -> ParameterRecord | None:
        """Return the parameter's record; None if it has no place in an arena."""
        return self.records.get(id(parameter))

    def leaf(self, parameter: Tensor) -> Tensor:
        """Return the tensor to whose `grad` backward writes the parameter's gradient."""
        record = self.records.get(id(parameter))
        return parameter if record is None else record.leaf

    def subgroups_of(self, parameters: Iterable[Tensor]) -> dict[Subgroup, None]:
        """Return the subgroups in which parameters lie; parameters without a record are left out."""
        found = (self.records.get(id(p)) for p in parameters)
        return {subgroup: None for r in found if r is not None for subgroup, _ in self.places[r]}

    def state_memory(self) -> list[Tensor]:
        """Return the memory of all state at home, 1-D tensors."""
        arenas = {subgroup.arena for subgroup in (*self.accelerated, *self.on_host)}
        return [tensor for arena in arenas for tensor in arena.state.tensors()]

    @property
    def bytes_to_come(self) -> int:
        """Bytes of host memory that state may take in addition to those that it takes now."""
        return max(0, sum(nbytes for _, nbytes in self._promised.values()) - self.host_store.nbytes)

    def loads(self) -> tuple[SubgroupLoad, ...]:
        """Return the accelerated subgroups as the performance model sees them."""
        if self._loads is None:
            loads = (subgroup.load() for subgroup in self.accelerated)
            if self.offloaded.enabled:  # gradients have host memory of their own
                loads = (dataclasses.replace(s, host_bytes=s.host_bytes - s.gradient_bytes) for s in loads)
            self._loads = tuple(loads)
        return self._loads

    def gradient_bytes(self, *, weights: bool) -> int:
        """Return the device memory through which the offloaded gradients of any one subgroup return, in bytes.

        weights: whether its weights may have to be fetched, too.
        """
        if not self.offloaded.enabled:
            return 0
        return max((s.offloaded_gradient_bytes + s.weight_bytes * weights for s in self.accelerated), default=0)

    def admit(self, group: Group) -> None:
        """Take parameters in. Raises TypeError or ValueError for one that cannot be optimised.

        Frozen and uninitialised parameters are checked when they have a gradient.
        Raises MemoryError, or OSError for the disk, if the state of all parameters, of this process and the ranks
        beside it, does not fit.
        """
        ready = [p for p in group["params"] if p.requires_grad and not is_lazy(p)]
        for parameter in ready:
            check_kind(parameter, group, self.devices, self._options.rule)
        there = {p: self.devices.holds(p) for p in group["params"] if not is_lazy(p)}  # raises where it cannot be
        new = [p for p in ready if id(p) not in self.records]
        promised = self._promised | {id(p): (there[p], self._allocation.host_bytes(p, group)) for p in new}
        in_place = sum(nbytes for on_device, nbytes in promised.values() if not on_device)
        taken = self.host_store.nbytes + (self.lasting_bytes if self.devices.shares_host_memory else 0)
        needed = sum(nbytes for _, nbytes in promised.values()) - taken
        if not any(map(is_sharded, ready)):
            needed //= ranks_that_will_divide()
        mapped = sum(
            max(0, tensor.tensor.nbytes - tensor.nbytes)
            for arena in {s.arena for s in self.accelerated}
            for tensor in (*arena.homes, *arena.staging)
        )
        if self._options.disk:
            limit = self._options.host_memory
            beyond = needed - in_place - (host_share() if limit is None else limit)
            check_mapping(needed - mapped)  # of state on disk, too
            check_disk(local_ranks() * beyond // 2, self._options.disk)  # at least half of it is state in any format
        else:
            check_host_memory(needed, processes=local_ranks(), mapped=mapped)  # no rank has taken its part yet
        self._promised = promised
        self.meshes.meet(group["params"])
        for parameter, on_device in there.items():
            # From the first gradient on, because the first peak of memory counts, too; user code may move the parameter
            # until then.
            # No hook where FSDP2 keeps its shards on the host: it copies only gradients without a hook there.
            self.watching.watch(parameter, on_device or not is_sharded(parameter))
        self._agreed = False

    def agree(self, groups: Sequence[Group]) -> None:
        """Look at the parameters when they are first used, because frameworks may have replaced them.

        Raises if the ranks differ, before one of them waits for a collective that another never joins.
        """
        if self._agreed:
            return
        parameters = [p for group in groups for p in group["params"]]
        self._forget_all_but(parameters)  # Accelerate replaces parameters when it shards the model
        self._refuse_replaced(groups)
        self.meshes.meet(parameters)
        if self.meshes:
            counts = {
                "the number of parameters": len(parameters),
                "the elements of all parameters": sum(p.numel() for p in parameters),
            }
            self.meshes.agree(counts, stages=False)  # stages of a pipeline differ in size
            self.meshes.agree(self._options.agreed())
        self._agreed, self._divided = True, bool(self.meshes)

    def _forget_all_but(self, parameters: Iterable[Tensor]) -> None:
        """Watch no other parameters than these and those with a record, and expect no state of others."""
        kept = {*map(id, parameters), *self.records}
        self.watching.keep(kept)
        for gone in self._promised.keys() - kept:
            del self._promised[gone]

    def _refuse_replaced(self, groups: Iterable[Group]) -> None:
        """Raise RuntimeError if DTensors have replaced parameters, and get the gradients instead."""
        members = [(p, group) for group in groups for p in group["params"]]
        found = find_replaced(p for p, _ in members)
        if found:
            name = name_of(*next(member for member in members if member[0] is found[0]))
            raise RuntimeError(
                f"{len(found)} of the optimizer's {len(members)} parameters are in no model any more, the first of "
                f"them {name}: fully_shard or parallelize_module has put DTensors in their place, which this "
                "optimizer does not have; build the optimizer after fully_shard, from model.parameters()"
            )

    def renew_hooks(self) -> None:
        """Hook parameters again where hooks were lost; a gradient that backward wrote without a hook is backward's."""
        for parameter in self.watching.renew():
            record = self.record(parameter)
            if record is not None and self.offloaded.enabled:
                self.offloaded.left.add(record)

    def place_gradients(self, groups: Iterable[Group]) -> None:
        """Redistribute gradients of DTensors with other placements than their parameter's, in one order on all ranks.

        Under sequence parallelism the gradient of a LayerNorm has: each rank's tensor is a part of the sum.
        """
        if not self._divided:
            return
        for parameter in (p for group in groups for p in group["params"]):
            if is_sharded(parameter) and parameter.grad is not None:
                parameter.grad = moved_to_layout(parameter.grad, parameter)

    def forget(self, gone: Sequence[ParameterRecord], parameters: Iterable[Tensor]) -> None:
        """Release the arenas of these records, all records of each. parameters: of all groups."""
        arenas = {record.arena for record in gone}
        # First: the CPU lane may still be adding to memory that goes with the arenas.
        self.offloaded.forget(gone)
        for record in gone:
            del self.records[id(record.parameter)], self.places[record]
        self.accelerated = [s for s in self.accelerated if s.arena not in arenas]
        self.on_host = [s for s in self.on_host if s.arena not in arenas]
        self.reindex()
        self._forget_all_but(parameters)

    def marked(self) -> list[tuple[ParameterRecord, Tensor]]:
        """Return the parameters of which copies are read, or no version counts writes; see `look_at_bits`."""
        if not self.may_mark:
            return []
        return [(record, record.local) for record in self.records.values() if record.bits is not None]

    @property
    def may_mark(self) -> bool:
        """Whether there can be parameters that are `marked`."""
        device = self.devices.device
        return self.wrapped or (device is not None and not device.queues)

    def enrol(self, parameters: Iterable[tuple[Tensor, Group]]) -> None:
        """Allocate the state of parameters, each with its group, that have none yet, and watch their gradients.

        Raises MemoryError, before anything is allocated, if the host has too little memory.
        """
        newcomers = [(p, group) for p, group in parameters if id(p) not in self.records]
        if not newcomers:
            return
        runs = self._allocation.alike(newcomers)
        nbytes = {id(p): self._allocation.host_bytes(p, group) for p, group in newcomers}
        here = [nbytes[id(p)] for p, _ in newcomers if self._allocation.takes_host_memory_at_once(p)]
        check_mapping(sum(nbytes.values()))
        if here:  # all other state takes memory when it is first moved to the host
            check_host_memory(sum(here))
        there = sum(subgroup.numel for subgroup in self.accelerated)
        there += sum(local(p).numel() for p, _ in newcomers if self.devices.holds(p))
        size = self._allocation.size_on_device(max(there, self.expected))
        records: list[ParameterRecord] = []
        subgroups: list[Subgroup] = []
        for run, group in runs:
            made, cut = self._allocation.make_arena(run, group, self.records_made + len(records), size)
            records += made
            subgroups += cut
        with self._guard.change():
            # A parameter that has a record and no subgroup would be updated by no step.
            self.places.update({record: [] for record in records})
            for subgroup in subgroups:
                for piece in subgroup.pieces:
                    self.places[piece.record].append((subgroup, piece))
                (self.accelerated if subgroup.arena.accelerated else self.on_host).append(subgroup)
            self.records_made += len(records)
            self.wrapped |= any(record.wrapped for record in records)
            self.records.update({id(record.parameter): record for record in records})
            for key in nbytes:
                self._promised.pop(key, None)
                if self.records[key].arena.accelerated:
                    self._promised[key] = True, nbytes[key]
            self.reindex()
        for record in records:
            self.watching.watch(record.parameter, record.arena.accelerated or self.watches_host)

    def watch_host(self, parameters: Iterable[Tensor], wanted: bool) -> None:
        """Report gradients of parameters on the host, too, if `wanted`. parameters: of the optimizer."""
        self.watches_host = wanted
        for p in parameters:
            record = self.record(p)
            if wanted or (record is not None and not record.arena.accelerated):
                self.watching.watch(p, wanted)

    def order_by_use(self, first_use: Iterable[int]) -> None:
        """Sort the subgroups by the first use of their parameters, given by id.

        Subgroups without any come first: `step()` itself waits for parameters for which no module was seen to wait.
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
        # After the versions have risen: else the next step would take the rise for a write by user code.
        for record in records:
            if not record.saw(replaced=False):  # the next step takes the values that user code has put there
                record.follow_sharing()
            if record.arena.whole_masters:
                record.saw_master()
        self.watch_bits(records)

    def watch_bits(self, records: Collection[ParameterRecord]) -> None:
        """Let bits be compared where the next update may read a copy of a parameter: a write may raise no version."""
        device = self.devices.device
        if device is None or device.queues:  # where the caller's work is queued, `UnseenWrites` compares
            return
        for record in records:
            if record.bits is None and self._reads_copy(record) and not record.replaced:
                record.saw_bits()

    def _reads_copy(self, record: ParameterRecord) -> bool:
        """Return whether the next update may read a master, or parameters that are staged on the host."""
        arena = record.arena
        if not arena.accelerated or MASTER in arena.format.names:
            return arena.accelerated
        for subgroup, piece in () if arena.streams else self.places[record]:
            if subgroup.newest and piece in subgroup.newest:
                return True
        return False

    def relocated(self, places: Mapping[int, Tensor]) -> None:
        """Follow parameters that have got their memory of `places` back, with values of user code. places: by id."""
        for key, place in places.items():
            record = self.records.get(key)
            if record is not None:
                record.relocate(place, written=True)
                self.forget_batches(record)

    def forget_batches(self, record: ParameterRecord) -> None:
        """Forget the batches of the record's subgroups, because the memory of the parameter is another now."""
        for subgroup, _ in self.places[record]:
            subgroup.forget_memory()

    def reindex(self) -> None:
        """Compute everything anew that follows from the list of subgroups."""
        self.index = {subgroup: i for i, subgroup in enumerate(self.accelerated)}
        self.lasting_bytes = sum(arena.device_bytes for arena in {s.arena for s in self.accelerated})
        if self.offloaded.enabled and self.homes.disk is not None:
            self.host_store.awaited.update(subgroup.arena for subgroup in self.accelerated)
        self._loads = None


def tell_autograd(records: Collection[ParameterRecord]) -> None:
    """Raise the version counters of the parameters, so that backward refuses graphs from before the update."""
    written = []
    for record in records:
        written.append(record.parameter)
        # Autograd may know it as its local part or as another leaf.
        if record.wrapped:
            written.append(record.local)
        if record.leaf is not record.parameter:
            written.append(record.leaf)
    torch.autograd.graph.increment_version(written)
