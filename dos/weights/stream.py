"""The weights of one model's blocks that move to the device and back: what is hooked, and what user code may touch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dos.devices import Device
from dos.devices.pinned import lost
from dos.guard import hook, renewed
from dos.torch_internals.modes import in_backward
from dos.torch_internals.module_parameters import (
    end_waiting,
    let_move,
    own_parameters,
    refuse_to_move,
    wait_before_reading,
)
from dos.weights import checks
from dos.weights.backward import BackwardHooks
from dos.weights.block import Block, OnDevice
from dos.weights.copies import Copies
from dos.weights.fetching import Fetching
from dos.weights.forward import ForwardHooks
from dos.weights.inputs import after_interruptions, serve_inputs
from dos.weights.lost import SAID, Lost
from dos.weights.order import UseOrder
from dos.weights.parts import know_model

_of_model: weakref.WeakKeyDictionary[nn.Module, WeightStream] = weakref.WeakKeyDictionary()


class WeightStream:
    """The blocks of one model. It lives as long as the model, even without its optimizer.

    blocks: in the order of the model. updates: whether the watcher updates weights in backward.
    """

    # A block's way: `ForwardHooks` fills its copies before its forward, starts to fetch the next block, and releases it
    # after, unless it is in the last window, which backward needs at once. `BackwardHooks` fetches the block of a saved
    # tensor or a recomputed forward, and the next one, in reverse order. A block is released once the gradient of its
    # input is written, all others when backward ends, except the first window, which the next forward uses unless a
    # step comes before.
    def __init__(
        self,
        device: Device,
        model: nn.Module,
        blocks: Mapping[nn.Module, Block],
        there: OnDevice,
        watcher: Any,
        lock: Any,
    ) -> None:
        """watcher: the session, whose `waiting` knows the jobs after which homes have their newest values."""
        self.blocks = tuple(blocks.values())
        self.updates = False
        self._there = there
        # Weak: `_of_model` has this as long as the model lives.
        self._model = weakref.ref(model)
        self._lock = lock
        order = UseOrder(self.blocks)
        self.copies = Copies(self.blocks)
        self.fetching = Fetching(device, self.blocks, there, watcher)
        self.backward = BackwardHooks(self.fetching, order, self.copies, lock)
        self.forward = ForwardHooks(device, blocks, self.fetching, order, self.copies, self.backward, lock)
        self.on_saving, self.before_use = self.forward.on_saving, self.backward.before_use
        self._handles = self.forward.hook_to(model)
        self._readings: list[tuple[weakref.ref[nn.Module], _Reading]] = []
        inside = {each: block for block in self.blocks for member in block.members for each, _ in member.places}
        for each in model.modules():
            own = [p for p in own_parameters(each).values() if p is not None]
            if own:
                reading = _Reading(self, own, inside.get(each))
                self._readings.append((weakref.ref(each), reading))
                wait_before_reading((each,), reading)  # for good: copies are released before user code writes
        refuse_to_move(model, checks.refuse_to_move)
        _of_model[model] = self
        know_model(model)
        serve_inputs(_copies_of)
        after_interruptions(_forget_interrupted)
        renewed.add(self)

    def __repr__(self) -> str:
        """Say which blocks are in use or in transit, without a wait."""
        at_home = [block for block in self.blocks if not (block.filled or block.running)]
        found = [f"{self.nbytes} bytes on the device", f"{len(at_home)} of {len(self.blocks)} blocks at home"]
        late = self.fetching.late
        found += [] if late is None else [f"block {late.number} ran ahead of an update of the blocks behind it"]
        found += [f"{block}" for block in self.blocks if block not in at_home]
        return f"<WeightStream: {'; '.join(found)}>"

    def renew(self) -> None:
        """Take the homes that a forked child lacks away from it: touching one would be a segmentation fault."""
        for block in [each for each in self.blocks if not each.lost]:  # in a child of a child they are no tensors
            for member in block.members:
                if lost(member.parameter):
                    block.lost = True
                    member.parameter.__class__ = Lost  # for references of user code, which ask no module

    @property
    def model(self) -> nn.Module | None:
        """The model; None if it was deleted."""
        return self._model()

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the blocks."""
        of = self.forward.of
        return sorted(of, key=lambda module: of[module].number)

    def all_copies(self) -> list[Tensor]:
        """Return the copies of all blocks."""
        return [copy for block in self.blocks for copy in block.copies]

    @property
    def nbytes(self) -> int:
        """Bytes of weights on the device now; may be read from any thread."""
        return self._there.nbytes

    def detach(self) -> None:
        """Remove all hooks; the parameters stay where they are."""
        self.release_all()
        for block in self.blocks:
            block.detached = True
        for handle in self._handles:
            handle.remove()
        model = self._model()
        if model is not None:
            for reference, reading in self._readings:
                module = reference()
                if module is not None:
                    end_waiting((module,), reading)
            let_move(model)
            _of_model.pop(model, None)

    def release_all(self) -> None:
        """Release all blocks that stream. No forward and no backward may run."""
        self.backward.end_all()
        self.forward.forget()
        for block in self.blocks:
            self.fetching.release(block)

    def take_replaced(self) -> None:
        """Take over the values of all parameters whose memory user code has replaced; see `Fetching.take_replaced`."""
        for block in self.blocks:
            self.fetching.take_replaced(block)

    def forget_interrupted(self) -> None:
        """Forget what a backward that raised has left: copies in use, and gradients on copies."""
        self.backward.forget_interrupted()
        watcher = self.fetching.watcher
        if watcher is not None:
            watcher.edits.forget_interrupted()

    # User code reads and writes homes.

    @hook
    def end_forwards(self, block: Block) -> None:
        """Set the homes in a block whose forward was not ended, and release it."""
        self.forward.end_block(block)
        self.fetching.release_unused(block)

    def release_homes(self, blocks: Sequence[Block]) -> None:
        """Let user code write to the homes of these: wait until no transfer reads them, and release fetched copies."""
        for block in blocks:
            self._release_unused(block)
            block.finish_reading()

    @hook
    def _release_unused(self, block: Block) -> None:
        self.fetching.release_unused(block)

    def note_use(self, parameters: Sequence[Tensor]) -> None:
        """Note that a backward which updates reads these, if one does. Raises as `InBackward.check_use`."""
        watcher = self.fetching.watcher
        if watcher is not None:
            watcher.waiting.reads_in_backward(parameters)

    def before_reading(self, parameters: Sequence[Tensor], block: Block | None) -> None:
        """Finish the updates of parameters that user code is about to read or write."""
        if block is not None and block.lost:
            raise RuntimeError(SAID)
        if block is not None:
            if block.lent:
                block.use_homes()
            self.release_homes([block])  # user code may write: copies would miss that, and a running transfer read half
        watcher = self.fetching.watcher
        if watcher is not None:
            watcher.waiting.finish_homes(parameters)
        if block is not None and block.kept:
            self._put_back(block)

    @hook
    def _put_back(self, block: Block) -> None:
        """Take memory over into which other values were written since user code kept it."""
        self.fetching.take_replaced(block)


class _Reading:
    """Waits before a module's parameters are read, unless their block runs and streams.

    Backward that recomputes a part of a block, as with a checkpoint of a block's MLP, runs no hook of the block: its
    modules have the copies then until it ends, or until user code reads them otherwise.

    block: the one to which they belong. The stream is referred to weakly, because the module refers to this.
    """

    def __init__(self, stream: WeightStream, parameters: Sequence[Tensor], block: Block | None) -> None:
        self._stream, self._parameters, self._block = weakref.ref(stream), parameters, block

    def before_reading_all(self, parameters: Iterable[Tensor | None]) -> dict[int, Tensor] | None:
        stream, block = self._stream(), self._block
        # As where user code handles Ctrl-C: what it writes to copies is lost.
        if stream is not None and block is not None and stream.forward.is_interrupted(block):
            stream.end_forwards(block)
        self.before_reading(parameters)
        if block is None or block.thread == threading.get_ident() or in_backward():
            return None
        # Copies that another thread lists, which saves or logs, lose their memory when the block has run.
        return {id(copy): member.parameter for copy, member in zip(block.copies, block.members, strict=True)}

    def before_reading(self, parameters: Iterable[Tensor | None]) -> None:
        stream, block = self._stream(), self._block
        if stream is None or (block is not None and block.exchanging):
            return
        if stream.updates:
            stream.note_use(self._parameters)
        if block is not None and block.running:
            # Where it stays its modules wait one by one as they run, and the block may read their weights before.
            watcher = None if block.streams else stream.fetching.watcher
            if watcher is not None:
                watcher.waiting.finish_parameters(self._parameters, captured=False)
            return
        # Hooks of backward run without a graph, forwards that it recomputes with one.
        if block is not None and torch.is_grad_enabled() and in_backward():
            stream.backward.lend(block)
        else:
            # Those that the module has now, too: parametrizations that are removed move parameters.
            stream.before_reading([*self._parameters, *(p for p in parameters if p is not None)], block)


def _copies_of(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the copies of those of these parameters that are homes, by the ids of the parameters."""
    wanted, streams = {id(p) for p in parameters}, list(_of_model.values())
    return {home: copy for stream in streams for home, copy in stream.copies.of_homes.items() if home in wanted}


def _forget_interrupted() -> None:
    for stream in list(_of_model.values()):
        stream.forget_interrupted()


def stream_of(model: nn.Module) -> WeightStream | None:
    """Return the stream of this model's weights; None if they do not stream."""
    return _of_model.get(model)


def streams_with(parameters: Iterable[Tensor]) -> list[WeightStream]:
    """Return the streams that have any of these among their blocks' weights, of a model or of one within or around."""
    known = set(map(id, parameters))
    every = list(_of_model.values())
    return [s for s in every if any(id(m.parameter) in known for block in s.blocks for m in block.members)]
