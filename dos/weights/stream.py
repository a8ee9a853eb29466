"""Moves the weights of a model's blocks to the device and back: hooks around each block, and in backward."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dos.devices import Device, Job, Mark, memory_of
from dos.guard import exclusive
from dos.parameters.hooks import module_hook
from dos.torch_internals.modes import backward_number, in_backward, when_backward_ends
from dos.torch_internals.module_parameters import (
    let_move,
    own_parameters,
    refuse_to_move,
    tensors_in,
    unwatch_parameters,
    watch_parameters,
)
from dos.torch_internals.tensors import converted_from, storage_address
from dos.weights.block import Block
from perfmodel.workload import WEIGHT_WINDOW

_MOST_JOBS = 1000
"""Transfers and waits that are remembered if no step asks for them."""

_of_model: weakref.WeakKeyDictionary[nn.Module, WeightStream] = weakref.WeakKeyDictionary()


class WeightStream:
    """The blocks of one model. It lives as long as the model, whose hooks have it; its optimizer may go before.

    blocks: in the order of the model.
    """

    # A block's way: `_before` its forward gives it copies and starts those of the next block; `_after` frees it, but
    # for the last of the window, which backward needs at once. In backward `before_use` does the same for what a saved
    # tensor or a recomputed forward asks for, in reverse; a block is freed once the gradient of its input is there, and
    # the rest when backward ends, but for the first of the window, which the next forward uses unless a step comes.
    # Forwards within backward free nothing: what they have computed is for the backward to come.
    #
    # Autograd runs, of the nodes that can run, the one that was made last. So when it comes to the node that has made
    # a block's input, all nodes of the block have run, with those that write gradients of its copies, and with those
    # that no saved tensor tells of: checkpointing and functions with caches of their own hide theirs from our hooks.
    def __init__(
        self,
        device: Device,
        model: nn.Module,
        blocks: Mapping[nn.Module, Block],
        watcher: Any,
        lock: Any,
    ) -> None:
        """watcher: whose `weights_ready` says after what homes have their newest values."""
        self.blocks = tuple(blocks.values())
        self._device = device
        self._model = weakref.ref(model)
        self._watcher = weakref.ref(watcher)
        self._lock = lock
        self._of = weakref.WeakKeyDictionary(blocks)
        self._by_storage = {block.storage: block for block in self.blocks}
        self._next = dict(itertools.pairwise(self.blocks))
        """The block that forward used after each, the last time."""
        self._before_that = {after: before for before, after in self._next.items()}
        self._last_run: Block | None = None
        self._late: Block | None = None
        """The block that ran when a block after it had yet to be updated on the host."""
        self._order = list(self.blocks)
        """As the last forward has used them."""
        self._first, self._last = self._ends()
        """The blocks that stream and are used first, and last, as many as the window holds."""
        self._forwards = 0
        self._backwards: set[int] = set()
        """The numbers of the backwards whose end is awaited."""
        self._moves: deque[Job] = deque(maxlen=_MOST_JOBS)
        self._stalls: deque[tuple[Mark, Mark]] = deque(maxlen=_MOST_JOBS)
        self._graphs = 0
        self._autocast = False
        self._handles = [
            model.register_forward_pre_hook(module_hook(model, self._begin), prepend=True),
            model.register_forward_hook(module_hook(model, self._end), always_call=True),
        ]
        for module in blocks:
            self._handles += [
                module.register_forward_pre_hook(
                    module_hook(module, self._before, with_arguments=True), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(module_hook(module, self._after, with_arguments=True), always_call=True),
            ]
        inside = {each: block for block in self.blocks for member in block.members for each, _ in member.places}
        for each in model.modules():
            own = [p for p in own_parameters(each).values() if p is not None]
            if own:
                watch_parameters(each, _Reading(self, own, inside.get(each)))
        refuse_to_move(model, _refuse_to_move)
        _of_model[model] = self

    def all_copies(self) -> list[Tensor]:
        """The copies of all blocks."""
        return [copy for block in self.blocks for copy in block.copies]

    @property
    def homes(self) -> dict[int, Tensor]:
        """The homes by the ids of their copies."""
        return {id(c): m.parameter for b in self.blocks for c, m in zip(b.copies, b.members, strict=True)}

    def detach(self) -> None:
        """Take all hooks away; the parameters stay where they are."""
        self.free_all()
        for handle in self._handles:
            handle.remove()
        model = self._model()
        if model is not None:
            for module in model.modules():
                unwatch_parameters(module)
            let_move(model)
            _of_model.pop(model, None)

    @property
    def nbytes(self) -> int:
        """Bytes of weights on the device now; may be read from any thread."""
        return sum(block.nbytes for block in self.blocks if block.filled)

    def stalls(self) -> Sequence[tuple[Mark, Mark]]:
        """Where the caller's waits for weights began and ended since this was asked last."""
        given, self._stalls = self._stalls, deque(maxlen=_MOST_JOBS)
        return given

    def take_forwards(self) -> int:
        """How many forwards made a graph since this was asked last."""
        count, self._graphs = self._graphs, 0
        return count

    def moves(self) -> deque[Job]:
        """The transfers since this was asked last, in the order of their issue."""
        given, self._moves = self._moves, deque(maxlen=_MOST_JOBS)
        return given

    # Forward.

    @exclusive
    def _begin(self, _: nn.Module) -> None:
        """A forward of the model begins."""
        if in_backward():
            return  # the model itself is recomputed
        # What an interrupted forward or backward has left would be stale after the next step.
        if not self._forwards:
            for block in self.blocks:
                if block not in self._first or block.stale:
                    self._free(block)
            self._order = []
        self._forwards += 1
        self._graphs += torch.is_grad_enabled()
        self._last_run = None
        for block in self.blocks:
            check_homes(block)

    @exclusive
    def _end(self, _: nn.Module) -> None:
        """The forward has ended, however it did."""
        if in_backward():
            return
        self._forwards = max(0, self._forwards - 1)
        self._first, self._last = self._ends()
        for block in self.blocks:
            if block.running:
                block.running = 0
                block.use_homes()
            # Where no graph was made, no backward needs the last ones.
            if block not in self._last or not torch.is_grad_enabled():
                self._free(block)

    def _ends(self) -> tuple[frozenset[Block], frozenset[Block]]:
        used = [block for block in dict.fromkeys(self._order) if block.streams]
        return frozenset(used[:WEIGHT_WINDOW]), frozenset(used[-WEIGHT_WINDOW:])

    @exclusive
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A block is about to run."""
        block = self._of[module]
        if self._device.capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and its replays would not fetch weights that stream; capture no block "
                "of the model, or attach it without weights="
            )
        if in_backward():
            self._use_in_backward(block)
        else:
            self._use(block, self._next)
            watcher = self._watcher()
            if watcher is not None and block.streams:
                # Of some no module says that it runs, as where attention reads the weights of its projection. Autograd
                # is told of their updates now: it would take a later word for a write to what forward has saved.
                watcher.finish_parameters([m.parameter for m in block.members])
            if self._last_run is not None and self._last_run is not block:
                self._next[self._last_run], self._before_that[block] = block, self._last_run
            self._last_run = block
            self._order.append(block)
        # Not where a tensor is saved: within an operation autocast is always off.
        self._autocast = any(torch.is_autocast_enabled(copy.device.type) for copy in block.copies[:1])
        block.running += 1
        block.use_copies()
        if torch.is_grad_enabled():
            self._watch_inputs(block, (args, kwargs))

    @exclusive
    def _after(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """It has run, or has raised."""
        block = self._of[module]
        # It is called where a hook before it has raised, too, and `_before` has not counted.
        block.running = max(0, block.running - 1)
        if block.running:
            return
        block.use_homes()
        block.check_copies()
        if in_backward():
            return
        if torch.is_grad_enabled():
            self._watch_outputs(block, output)
        if block not in self._last or not torch.is_grad_enabled():
            self._free(block)

    # Backward.

    def _watch_outputs(self, block: Block, output: Any) -> None:
        """Fetch the block when the gradient of its output is there: not all that it saves passes our hooks.

        Hooks on saved tensors of user code within the block take the place of ours, and there are none of ours where
        the block, or a part of the model, is called by itself.
        """
        reference = weakref.ref(self)

        def begins(_: Tensor) -> None:
            stream = reference()
            if stream is not None and block.streams:
                stream._use_saved(block)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begins)

    def on_saving(self, tensor: Tensor) -> None:
        """Fetch ahead what the host has updated since the block began. Called when autograd saves a tensor in forward.

        Raises RuntimeError for a weight that was converted, as by autocast: it would stay on the device until backward,
        block after block.
        """
        if self._late is not None:
            self._fetch_late()
        source = converted_from(tensor) if self._autocast else None
        block = None if source is None else self._block_of(source)
        if source is not None and block is not None and block.streams:
            raise RuntimeError(
                f"autocast converts weights of {source.dtype} that stream, and autograd keeps the results on the "
                "device until backward; run each block under torch.utils.checkpoint, or build the model in "
                f"{tensor.dtype}"
            )

    def before_use(self, tensor: Tensor) -> None:
        """Called before backward reads a saved tensor, which may be of a block's weights."""
        block = self._block_of(tensor)
        if block is not None and block.streams:
            self._use_saved(block)

    def _block_of(self, tensor: Tensor) -> Block | None:
        """The block of whose copies this is one, or a view of one."""
        storage = memory_of(tensor)
        return None if storage is None else self._by_storage.get(storage_address(storage))

    @exclusive
    def _use_saved(self, block: Block) -> None:
        self._use_in_backward(block)

    def _use_in_backward(self, block: Block) -> None:
        number = backward_number()
        # Of each backward, for a nested one, as of reentrant checkpointing, ends before the one around it.
        if number not in self._backwards and number != -1:
            self._backwards.add(number)
            when_backward_ends(self._backward_ends)
        self._use(block, self._before_that)
        block.touched = True

    def _watch_inputs(self, block: Block, arguments: Any) -> None:
        """Free the block in backward when the gradient of its input is there."""
        tensors = [t for t in tensors_in(arguments) if t.requires_grad]
        # A leaf has its gradient as soon as all that reads it has run, which need not be all of the block.
        made = [t for t in tensors if not t.is_leaf] or [t for t in tensors if not isinstance(t, nn.Parameter)][:1]
        reference = weakref.ref(self)

        def passed(_: Tensor) -> None:
            stream = reference()
            if stream is not None:
                stream._passed(block)

        for tensor in made:
            tensor.register_hook(passed)

    @exclusive
    def _passed(self, block: Block) -> None:
        """Backward has come past the block."""
        if block.touched and not block.running and block not in self._first:
            self._free(block)
            self._fetch_ahead(block, self._before_that)

    @exclusive
    def _backward_ends(self) -> None:
        """Free what backward has not come past, such as a block whose input needs no gradient."""
        self._backwards.clear()
        for block in self.blocks:
            if block.touched and not block.running and block not in self._first:
                self._free(block)
            block.touched = False

    # Transfers.

    def _use(self, block: Block, order: Mapping[Block, Block]) -> None:
        """Let the caller's queue use the block, and fetch those that follow in this order beside that."""
        before = self._device.mark() if block.streams and not block.joined else None
        if not block.filled:
            self._fetch(block)
        self._fetch_ahead(block, order)
        block.join()
        if before is not None:
            self._stalls.append((before, self._device.mark()))

    def _fetch(self, block: Block) -> None:
        """Start to fetch a block that is needed now. Raises torch.OutOfMemoryError."""
        after = self._ready(block, wait=True)
        assert after is not None, "it has waited"
        try:
            self._moves.append(block.fetch(after))
        except torch.OutOfMemoryError:
            # What was fetched ahead can be fetched again; then state can give way.
            for other in self.blocks:
                if other is not block and not other.running and not other.touched:
                    self._free(other)
            watcher = self._watcher()
            if watcher is not None:
                watcher.give_way(block.nbytes)
            self._moves.append(block.fetch(after))

    def _fetch_ahead(self, block: Block, order: Mapping[Block, Block]) -> None:
        """Start to fetch the blocks that are needed after this one, if their updates have ended and there is room."""
        room = WEIGHT_WINDOW - sum(each.filled and each.streams for each in self.blocks)
        following: Block | None = block
        for _ in self.blocks:  # a block may come again
            following = None if following is None else order.get(following)
            if following is None or room <= 0:
                return
            if following.streams and not following.filled:
                after = self._ready(following, wait=False)
                if after is None:
                    self._late = block
                    return
                with contextlib.suppress(torch.OutOfMemoryError):  # there may be memory when it is needed
                    self._moves.append(following.fetch(after))
                    room -= 1

    @exclusive
    def _fetch_late(self) -> None:
        """Start to fetch what `_fetch_ahead` found not updated yet, while the block before it runs."""
        block, self._late = self._late, None
        if block is not None and block.running and not in_backward():
            self._fetch_ahead(block, self._next)

    def _ready(self, block: Block, *, wait: bool) -> Sequence[Job] | None:
        watcher = self._watcher()
        if watcher is None:
            return ()
        found: Sequence[Job] | None = watcher.weights_ready([m.parameter for m in block.members], wait=wait)
        return found

    def _free(self, block: Block) -> None:
        if block.streams:
            block.free()

    def free_all(self) -> None:
        """Free what streams and is on the device: no forward and no backward runs."""
        self._backwards.clear()
        for block in self.blocks:
            if block.running:
                block.running = 0
                block.use_homes()
            self._free(block)

    def release_homes(self, blocks: Sequence[Block]) -> None:
        """Let user code write to the homes of these: the device neither reads them, nor has fetched them ahead."""
        for block in blocks:
            self._free_unused(block)
            block.finish_reading()

    @exclusive
    def _free_unused(self, block: Block) -> None:
        if not (block.running or block.touched):
            self._free(block)

    def before_reading(self, parameters: Sequence[Tensor], block: Block | None) -> None:
        """User code reads or writes parameters: they have the values of the last step once this returns."""
        if block is not None:
            self.release_homes([block])  # what user code writes is for the forwards to come, and for them alone
        watcher = self._watcher()
        if watcher is not None:
            watcher.finish_homes(parameters)


class _Reading:
    """Called before a module's parameters are read. block: to which they belong; while it runs the module has copies.

    Weak, for a module has this, and the stream has hooks of the module.
    """

    def __init__(self, stream: WeightStream, parameters: Sequence[Tensor], block: Block | None) -> None:
        self._stream, self._parameters, self._block = weakref.ref(stream), parameters, block

    def __call__(self) -> None:
        stream = self._stream()
        if stream is not None and not (self._block is not None and self._block.running):
            stream.before_reading(self._parameters, self._block)


def stream_of(model: nn.Module) -> WeightStream | None:
    """The stream of this model's weights, if they stream."""
    return _of_model.get(model)


def check_homes(block: Block) -> None:
    """Raise RuntimeError if user code has exchanged parameters of a block, or has unfrozen some."""
    for member in block.members:
        if member.parameter.requires_grad and not member.trained:
            raise RuntimeError(
                f"a parameter of shape {tuple(member.parameter.shape)} requires gradients, and did not when its weights"
                " began to stream; call optimizer.attach(model, weights=...) again"
            )
        for module, name in member.places:
            if own_parameters(module).get(name) is not member.parameter:
                raise RuntimeError(
                    f"{type(module).__name__}.{name} is another parameter than when its weights began to stream; load "
                    "weights without assign=True, or build the optimizer anew and call attach(weights=...) again"
                )


def _refuse_to_move() -> None:
    raise RuntimeError(
        "the weights of this model stream between host and device, so it cannot be moved or converted; leave out "
        "model.to(), .cuda() and .half() after optimizer.attach(model, weights=...), which has put everything where it "
        "belongs, or convert the model before"
    )
