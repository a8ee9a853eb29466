"""Moves the blocks of a model to their homes on the host, and blocks between home and device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dos.devices import Device
from dos.machine.host_memory import check_host_memory
from dos.machine.terminal import Pinning
from dos.parameters.registry import Registry
from dos.parameters.watching import check_hooks
from dos.sharding.fingerprint import look_at_bits
from dos.state.arena import Arena, aligned
from dos.state.host_tensor import HostTensor
from dos.state.record import ParameterRecord
from dos.torch_internals.module_parameters import move_buffers, parameters_of
from dos.torch_internals.tensors import share_gradient_hooks
from dos.weights.block import Block, OnDevice, take_replaced
from dos.weights.blocks import Amount, Member, check_streamable, find_blocks, members_of, spread, staying
from dos.weights.host_room import check_host_room
from dos.weights.stream import WeightStream, streams_with
from perfmodel.workload import BlockLoad, Workload

Group = dict[str, Any]
_Frozen = tuple[tuple[int, int], ...]


class WeightHomes:
    """The homes of one model's blocks: of trained parameters in the arenas of their state, of frozen ones apart.

    stream: moves the weights of blocks that stream. amount: how many blocks stay.
    """

    stream: WeightStream

    def __init__(self, device: Device, registry: Registry, amount: Amount, before: WeightHomes | None = None) -> None:
        """amount: how many blocks stay. before: the homes of an earlier `attach`, whose memory is used again."""
        self._device = device
        self._registry = registry
        self.amount = amount
        self._frozen: dict[_Frozen, HostTensor] = {} if before is None else before._frozen
        """The memory of frozen parameters of one block, by ids and sizes, in order."""

    def move_in(
        self,
        model: nn.Module,
        modules: Iterable[nn.Module] | None,
        groups: Sequence[Group],
        watcher: Any,
        lock: Any,
    ) -> None:
        """Move each block to its home, or to the device to stay, and all else to the device. Nothing may be in flight.

        modules: the blocks; None: see `find_blocks`. watcher, lock: see WeightStream.
        Raises ValueError or TypeError, with nothing changed, for a model whose weights cannot stream, and MemoryError
        where `host_memory` is too little for its weights and gradients.
        """
        check_streamable(model, [p for group in groups for p in group["params"]])
        found = find_blocks(model, modules)
        group_of = {id(p): group for group in groups for p in group["params"]}
        before = streams_with(parameters_of(model))
        members = {module: mine for module, mine in zip(found, members_of(model, found), strict=True) if mine}
        self._check(members.values(), group_of)
        self._check_state(model, [[m.parameter for m in mine] for mine in members.values()])
        for each in before:
            each.take_replaced()  # one by one below: the memory of one may be the home of another
        stays = spread(len(members), staying(self.amount, len(members)))
        streams = [mine for number, mine in enumerate(members.values()) if number not in stays]
        self._enrol(members.values(), streams, groups)
        # Hooks of a former stream would set copies that no transfer fills any more. All checks come before this.
        for each in before:
            each.detach()
        self._move_rest(model, {id(m.parameter) for each in members.values() for m in each})
        for key in self._frozen.keys() - {self._frozen_of(mine)[1] for mine in members.values()}:
            del self._frozen[key]  # the parameters have it until they move
        blocks, there, done = {}, OnDevice(), 0
        with Pinning(sum(m.parameter.nbytes for mine in streams for m in mine)) as pinning:
            for number, (module, mine) in enumerate(members.items()):
                pinning.at(done)
                blocks[module] = self._make(number, mine, there, streams=number not in stays)
                done += sum(m.parameter.nbytes for m in mine) * (number not in stays)
        self.stream = WeightStream(self._device, model, blocks, there, watcher, lock)
        inside = {id(m.parameter) for mine in members.values() for m in mine}  # also those that were frozen since
        for record in self._registry.records.values():
            record.arena.weights &= id(record.parameter) in inside  # else it would not go with a block that has gone
        # A block that has been unfrozen since has its new subgroups behind all others.
        order = (id(piece.record.parameter) for s in self._registry.accelerated for piece in s.pieces)
        self._registry.order_by_use(self.together(order))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of all blocks."""
        return sum(block.nbytes for block in self.stream.blocks)

    def workload(self) -> dict[str, Any]:
        """Return the fields of a workload that describe the blocks, in the order in which forward uses them."""
        ordered = self._ordered()
        count = None if self.amount == "auto" else sum(not block.streams for block, _ in ordered)
        limits = {} if count is None else {"blocks_least": count, "blocks_most": count}
        return {"blocks": tuple(load for _, load in ordered), **limits}

    def _ordered(self) -> list[tuple[Block, BlockLoad]]:
        """Return blocks and their loads in the order of subgroups; frozen blocks precede the next trained one."""
        index, found, start = self._registry.index, list[tuple[Block, BlockLoad]](), 0
        for block in self.stream.blocks:
            places = [index[s] for s in self._registry.subgroups_of(m.parameter for m in block.members)]
            first, start = min(places, default=start), max(places, default=start - 1) + 1
            found.append((block, BlockLoad(block.nbytes, first, start)))
        return sorted(found, key=lambda each: each[1][1:])

    def together(self, order: Iterable[int]) -> list[int]:
        """Return `order`, ids of parameters, with all parameters of a block at the place of its first one."""
        block_of = {id(m.parameter): block for block in self.stream.blocks for m in block.members}
        found = dict[int, None]()
        for parameter in order:
            block = block_of.get(parameter)
            found |= dict.fromkeys([parameter] if block is None else [id(m.parameter) for m in block.members])
        return list(found)

    def staying(self) -> frozenset[int]:
        """Return the blocks that stay now, by their places in `workload`."""
        return frozenset(i for i, (block, _) in enumerate(self._ordered()) if not block.streams)

    def may_follow(self, staying: frozenset[int], workload: Workload, room: float) -> bool:
        """Return whether `follow` would move any block, without a look at what the device then denies."""
        there = self.staying()
        comes = min(staying - there, default=None)
        return not there <= staying or (comes is not None and workload.weight_bytes(there | {comes}) <= room)

    def follow(self, staying: frozenset[int], workload: Workload, room: float) -> bool:
        """Move blocks so that these stay, by their places in `workload`; return False if some have to wait.

        room: bytes of device memory for weights now. State that the plan moves home in this step still has its memory,
        and the next forward would run out of memory. Nothing may be in flight.
        """
        ordered = self._ordered()
        try:
            # Home first, because blocks that move to the device need the memory of blocks that leave it.
            for i, (block, _) in enumerate(ordered):
                if i not in staying:
                    self.move(block, streams=True)
            there = set(self.staying())
            for i in sorted(staying - there):
                if workload.weight_bytes(there | {i}) > room:
                    return False
                self.move(ordered[i][0], streams=False)
                there.add(i)
        except (torch.OutOfMemoryError, MemoryError):
            return False
        return True

    def _check(self, members: Iterable[Sequence[Member]], group_of: dict[int, Group]) -> None:
        nbytes = 0
        for member in (m for each in members for m in each):
            p, record = member.parameter, self._registry.record(member.parameter)
            nbytes += p.nbytes
            check_hooks([p])
            if p.requires_grad and id(p) not in group_of:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} in a block requires gradients and is not the optimizer's; "
                    "build the optimizer from model.parameters(), or freeze it with requires_grad_(False)"
                )
            if record is not None and not record.arena.weights:
                raise RuntimeError(
                    "the optimizer has state for parameters of the blocks already, found one of shape "
                    f"{tuple(p.shape)}; call attach(model, weights=...) before the first backward, or save "
                    "optimizer.state_dict(), build a new optimizer, attach the model and load it there"
                )
        check_host_memory(nbytes)

    def _check_state(self, model: nn.Module, blocks: Sequence[Sequence[Tensor]]) -> None:
        """Raise RuntimeError where the model has changed so that a block's state is no longer the block's alone."""
        record, block_of = self._registry.record, dict[Arena, int]()
        for number, parameters in enumerate(blocks):
            for p in parameters:
                mine = record(p)
                if mine is not None and block_of.setdefault(mine.arena, number) != number:
                    raise _changed(p, "has its state beside that of another block's parameters")
        inside = {id(p) for parameters in blocks for p in parameters}
        for p in parameters_of(model):
            mine = record(p)
            if mine is not None and mine.arena.weights and id(p) not in inside:
                raise _changed(p, "was one of a block's weights, and is now used by several blocks or by none")
        for mine in self._registry.records.values():
            if mine.arena in block_of and id(mine.parameter) not in inside:
                raise _changed(mine.parameter, "has its state beside that of a block's weights, and is none of them")

    def _enrol(
        self, blocks: Collection[Sequence[Member]], streaming: Iterable[Sequence[Member]], groups: Sequence[Group]
    ) -> None:
        """Enrol trained parameters of the blocks. Raises MemoryError, with none enrolled, as `check_host_room`.

        streaming: the blocks whose weights are to be on the host. groups: of the optimizer.
        """
        registry, devices = self._registry, self._registry.devices
        group_of = {id(p): group for group in groups for p in group["params"]}
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        streamed, known = devices.streamed, set(registry.records)
        devices.streamed = streamed | ({id(m.parameter) for each in blocks for m in each} & group_of.keys())
        # Blocks are enrolled one by one, and the size of subgroups would follow from the first block alone.
        registry.expected = sum(p.numel() for p in trained)
        try:
            for members in blocks:
                # Each has arenas of its own, so that no subgroup lies in two: a fetch waits only for its own updates.
                registry.enrol([(m.parameter, group_of[id(m.parameter)]) for m in members if m.parameter.requires_grad])
            at_home = [m.parameter for each in streaming for m in each]
            check_host_room(registry, trained, at_home, moves=self.amount == "auto")
        except BaseException:
            devices.streamed = streamed
            registry.forget(
                [record for key, record in registry.records.items() if key not in known],
                [p for group in groups for p in group["params"]],
            )
            raise

    def _move_rest(self, model: nn.Module, streamed: Collection[int]) -> None:
        """Move parameters of no block, and all buffers, to the device."""
        there = getattr(self._device, "torch_device", torch.device("cpu"))
        for parameter in parameters_of(model):
            if id(parameter) in streamed:
                continue
            if parameter.device != there:
                parameter.data = parameter.data.to(there)
            self._device.count(parameter)
        move_buffers(model, there)

    def _make(self, number: int, members: Sequence[Member], there: OnDevice, *, streams: bool) -> Block:
        """Make a block of enrolled parameters, and move all its parameters."""
        registry = self._registry
        trained = [m.parameter for m in members if m.parameter.requires_grad]
        block = Block(number, members, self._device, there)
        block.make_copies(getattr(self._device, "torch_device", torch.device("cpu")))
        for member, copy in zip(members, block.copies, strict=True):
            record = registry.record(member.parameter)
            if record is not None and member.parameter.requires_grad:
                # Backward writes the copy's gradient, and torch refuses one on the device beside a home on the host.
                member.trained, record.leaf = True, copy
                registry.watching.watch_at(member.parameter, copy)
                share_gradient_hooks(member.parameter, copy)
        block.arenas = {record.arena for p in trained if (record := registry.record(p)) is not None}
        self._put(block, streams=streams)
        return block

    def move(self, block: Block, *, streams: bool) -> None:
        """Move a block's weights home, or to the device to stay. Blocks.

        Raises MemoryError or torch.OutOfMemoryError, with nothing moved, if the memory there is too small.
        """
        if block.streams != streams:
            self._put(block, streams=streams)

    def _put(self, block: Block, *, streams: bool) -> None:
        """Move a block's weights home, or into the memory of its copies, from wherever they are."""
        take_replaced([block])
        records = [r for r in (self._registry.record(m.parameter) for m in block.members) if r is not None]
        # First, because the move ends the comparison of bits, which alone shows a write that raises no version.
        look_at_bits((record, record.local) for record in records)
        written = [record.changed() for record in records]
        if streams:
            self._move_home(block, records)
        else:
            self._move_to_device(block)
        block.count(filled=block.filled, streams=streams)
        for arena in {record.arena for record in records}:  # of parameters that are frozen now, too
            arena.streams = streams
        for record, each in zip(records, written, strict=True):
            # `written` was read before the move, because the record would take the new address for a write.
            record.relocate(block.places[id(record.parameter)], written=each)
            self._registry.forget_batches(record)
        self._registry.watch_bits(records)

    def _move_home(self, block: Block, records: Sequence[ParameterRecord]) -> None:
        store = self._registry.host_store
        frozen, key = self._frozen_of(block.members)
        subgroups = self._registry.subgroups_of(record.parameter for record in records)
        store.make([(subgroup.arena.weights_at_home(), subgroup) for subgroup in subgroups])
        for arena in {record.arena for record in records}:
            arena.weights_at_home().join()  # user code copies whole parameters, which span subgroups
        if frozen and key not in self._frozen:
            nbytes = sum(aligned(p.nbytes) for p in frozen)
            room = HostTensor(nbytes, torch.uint8, self._device, nbytes)
            store.hold(room)
            self._frozen[key] = room
        places = {id(r.parameter): r.shaped(r.arena.weights_at_home().tensor[r.offset :][: r.numel]) for r in records}
        start = 0
        for p in frozen:
            flat = self._frozen[key].tensor[start : start + p.nbytes].view(p.dtype)
            places[id(p)] = flat.as_strided(p.size(), p.stride())
            start += aligned(p.nbytes)
        # One parameter after the other, each released once its home has it, so that memory need not hold all twice.
        homes = [places[id(member.parameter)] for member in block.members]
        for member, home in zip(block.members, homes, strict=True):
            home.copy_(member.parameter.detach())
            member.parameter.data = home
        block.use_memory(homes)
        # The copies have no values of their own after this: the next forward fetches them from the homes.
        if block.filled:  # it stayed
            self.stream.copies.leave_memory(block)

    def _move_to_device(self, block: Block) -> None:
        # The wait: the copy reads the parameters' former memory, to which the loop below may drop the last reference.
        block.fetch(()).wait()
        block.join()
        block.use_memory(block.copies)

    def take_replaced(self, parameters: Iterable[Tensor]) -> None:
        """Take over the values of parameters whose memory user code has replaced, of the blocks that have any of these.

        Raises RuntimeError, see the `take_replaced` of blocks.
        """
        known = {id(m.parameter): block for block in self.stream.blocks for m in block.members}
        for block in dict.fromkeys(known[id(p)] for p in parameters if id(p) in known):
            self.stream.fetching.take_replaced(block)

    def _frozen_of(self, members: Iterable[Member]) -> tuple[list[Tensor], _Frozen]:
        """Return the parameters of a block that have no state, and the key of their memory."""
        frozen = [m.parameter for m in members if self._registry.record(m.parameter) is None]
        return frozen, tuple((id(p), p.nbytes) for p in frozen)


def _changed(parameter: Tensor, how: str) -> RuntimeError:
    return RuntimeError(
        f"a parameter of shape {tuple(parameter.shape)} {how}, because modules or blocks= were changed after weights "
        "began to stream; save optimizer.state_dict(), build a new optimizer, attach the model and load it there"
    )
