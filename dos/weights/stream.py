"""Moves the weights of a model's blocks to the device and back: hooks around each block, and in backward."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dos.devices import Device, Job, Mark, memory_of
from dos.devices.pinned import lost
from dos.guard import hook, outer_hook, renewed
from dos.parameters.hooks import module_hook
from dos.parameters.watching import check_hooks, latest_watcher
from dos.torch_internals.callers import running_modules, runs_within_itself
from dos.torch_internals.modes import (
    backward_number,
    check_saved_tensors_hooks,
    in_backward,
    is_compiled,
    when_backward_ends,
)
from dos.torch_internals.module_parameters import (
    end_waiting,
    hidden_tensors,
    let_move,
    own_parameters,
    refuse_to_move,
    tensors_in,
    wait_before_reading,
)
from dos.torch_internals.tensors import converted_from, storage_address
from dos.weights.block import Block, OnDevice
from dos.weights.inputs import serve_inputs
from dos.weights.interrupted import after_interruptions
from dos.weights.lost import SAID, Lost
from dos.weights.parts import know_model
from perfmodel.workload import WEIGHT_WINDOW

_MOST_JOBS = 1000
"""The most transfers and waits that are remembered if no step reads them."""

_MADE_BY = "dos.weights"
"""The key of the mark of a block in the metadata of nodes that made its outputs."""

_metadata: Callable[[Any], dict[str, Any]] = operator.attrgetter("metadata")
"""Returns the metadata of a node, of which torch's types say that it is a method."""

_of_model: weakref.WeakKeyDictionary[nn.Module, WeightStream] = weakref.WeakKeyDictionary()


class WeightStream:
    """The blocks of one model. It lives as long as the model, whose hooks refer to it, even without its optimizer.

    blocks: in the order of the model.
    """

    # A block's way: `_before` its forward fills its copies and starts to fetch the next block; `_after` releases it,
    # unless it is in the last window, which backward needs at once. In backward, `before_use` fetches the block of a
    # saved tensor or a recomputed forward, and the next one, in reverse order. A block is released once the gradient of
    # its input is written, all others when backward ends, except the first window, which the next forward uses unless
    # a step comes before. Forwards within backward release nothing, because their backward follows.
    #
    # Of the nodes that can run, autograd runs the one that was made last. So when it runs the node that has made a
    # block's input, all nodes of the block have run: nodes that write gradients of its copies, and nodes whose saved
    # tensors our hooks do not see, as those of checkpointing and of functions with caches of their own.
    def __init__(
        self,
        device: Device,
        model: nn.Module,
        blocks: Mapping[nn.Module, Block],
        there: OnDevice,
        watcher: Any,
        lock: Any,
    ) -> None:
        """watcher: its `weights_ready` returns the jobs after which homes have their newest values."""
        self.blocks = tuple(blocks.values())
        self._device, self._there = device, there
        # Weak: the model's hooks refer to this, and must keep neither the model nor its optimizer alive.
        self._model = weakref.ref(model)
        self._watcher = weakref.ref(watcher)
        self._lock = lock
        self._of = weakref.WeakKeyDictionary(blocks)
        self._plain = weakref.WeakSet(module for module in blocks if not is_compiled(module))
        """The modules of blocks that were not compiled when they were hooked."""
        self._by_storage = {block.storage: block for block in self.blocks}
        self._next = dict(itertools.pairwise(self.blocks))
        """The block that the last forward used after each block."""
        self._before_that = {after: before for before, after in self._next.items()}
        self._last_run: Block | None = None
        self._late: Block | None = None
        """The block that ran when a block after it still had to be updated on the host."""
        self._order: dict[Block, None] = dict.fromkeys(self.blocks)
        """The blocks in the order in which the forward that runs has used them first."""
        self._first, self._last = self._ends()
        """The first and the last window: the blocks that stream and are used first, and last."""
        self._forwards = 0
        self._backwards: set[int] = set()
        """The numbers of the backwards that run."""
        self._moves: deque[Job] = deque(maxlen=_MOST_JOBS)
        self._stalls: deque[tuple[Mark, Mark]] = deque(maxlen=_MOST_JOBS)
        self._graphs = self._without_graph = 0
        """Forwards that made a graph, and forwards that made none: one in a reentrant checkpoint does in backward."""
        self._evaluated = False
        """Whether no backward has ended since the last forward has begun, or ended."""
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
        self._readings: list[tuple[weakref.ref[nn.Module], _Reading]] = []
        inside = {each: block for block in self.blocks for member in block.members for each, _ in member.places}
        for each in model.modules():
            own = [p for p in own_parameters(each).values() if p is not None]
            if own:
                reading = _Reading(self, own, inside.get(each))
                self._readings.append((weakref.ref(each), reading))
                wait_before_reading(each, reading)  # for good: copies are released before user code writes
        refuse_to_move(model, _refuse_to_move)
        _of_model[model] = self
        know_model(model)
        serve_inputs(_copies_of)
        after_interruptions(_forget_interrupted)
        renewed.add(self)

    def renew(self) -> None:
        """Take the homes that a forked child lacks away from it: touching one would be a segmentation fault."""
        for block in self.blocks:
            for member in block.members:
                if lost(member.parameter):
                    block.lost = True
                    member.parameter.__class__ = Lost  # for references of user code, which ask no module

    def forget_storage(self, block: Block) -> None:
        """Forget the storage of a block's copies, which it is about to leave."""
        del self._by_storage[block.storage]

    def know_storage(self, block: Block) -> None:
        """Know the block by the storage of its copies."""
        self._by_storage[block.storage] = block

    @property
    def model(self) -> nn.Module | None:
        """The model; None if it was deleted."""
        return self._model()

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the blocks."""
        return sorted(self._of, key=lambda module: self._of[module].number)

    def all_copies(self) -> list[Tensor]:
        """Return the copies of all blocks."""
        return [copy for block in self.blocks for copy in block.copies]

    @property
    def homes(self) -> dict[int, Tensor]:
        """The homes by the ids of their copies."""
        return {id(c): m.parameter for b in self.blocks for c, m in zip(b.copies, b.members, strict=True)}

    @property
    def copies(self) -> dict[int, Tensor]:
        """The copies by the ids of their homes."""
        return {id(m.parameter): c for b in self.blocks for c, m in zip(b.copies, b.members, strict=True)}

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
                    end_waiting(module, reading)
            let_move(model)
            _of_model.pop(model, None)

    @property
    def nbytes(self) -> int:
        """Bytes of weights on the device now; may be read from any thread."""
        return self._there.nbytes

    def stalls(self) -> Sequence[tuple[Mark, Mark]]:
        """Return where the caller's waits for weights began and ended since the last call of this."""
        given, self._stalls = self._stalls, deque(maxlen=_MOST_JOBS)
        return given

    def take_forwards(self) -> int:
        """Return the number of forwards that made a graph since the last call of this."""
        count, self._graphs, self._without_graph = self._graphs, 0, 0
        return count

    def moves(self) -> deque[Job]:
        """Return the transfers since the last call of this, in the order of their issue."""
        given, self._moves = self._moves, deque(maxlen=_MOST_JOBS)
        return given

    # Forward.

    @hook
    def _begin(self, model: nn.Module) -> None:
        """Begin a forward of the model."""
        graph = torch.is_grad_enabled()
        if in_backward():  # the model itself is recomputed
            reentrant = graph and self._without_graph > 0
            self._graphs += reentrant
            self._without_graph -= reentrant
            return
        self._graphs += graph
        self._without_graph += not graph
        self._refuse_compiled()
        if self._forwards and not runs_within_itself(model):
            self._forwards = 0  # Ctrl-C has ended the last forward, and torch calls no hook then
        if not self._forwards:
            self._set_homes()
            self._begin_order()
        self._forwards += 1
        self._last_run = None

    def _begin_order(self) -> None:
        """Begin to note the order in which blocks are used."""
        # Copies that an interrupted forward or backward has left would be stale after the next step.
        self._end_backwards()
        for block in self.blocks:
            # After an evaluation user code may put weights back, through references that it has kept and `.data`.
            if block not in self._first or block.stale or self._evaluated:
                self._release_within(block)
        self._order, self._last_run = {}, None
        self._evaluated = True  # from now on: Ctrl-C may end the forward, of which no hook tells

    @hook
    def _end(self, _: nn.Module) -> None:
        """End a forward, even one that raised."""
        if in_backward():
            return
        self._forwards = max(0, self._forwards - 1)
        if self._forwards:  # a handler of a signal has evaluated the model within a forward, whose blocks run on
            self._last_run = None
            return
        self._first, self._last = self._ends()
        self._order, self._last_run = {}, None
        self._evaluated = True
        self._set_homes()
        for block in self.blocks:
            if block not in self._last:
                self._release(block)

    def _refuse_compiled(self) -> None:
        """Raise RuntimeError if a block was compiled after it was hooked."""
        if any(is_compiled(module) for module in self._plain):
            raise RuntimeError(
                "a block whose weights stream was compiled after attach(), so that torch.compile would trace the hooks "
                "that fetch its weights; call optimizer.attach(model, weights=...) again, or compile blocks before it"
            )

    def _ends(self) -> tuple[frozenset[Block], frozenset[Block]]:
        used = [block for block in self._order if block.streams]
        return frozenset(used[:WEIGHT_WINDOW]), frozenset(used[-WEIGHT_WINDOW:])

    @hook
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Fetch a block that is about to run, and set its copies."""
        block = self._of[module]
        if block.lent:
            block.use_homes()
        if not (self._forwards or block.running or in_backward()):
            self._begin_alone(block)
        if not block.running:
            check_homes(block)  # here, as user code may call a block by itself, by torch.func.functional_call
            if not in_backward():
                self._check_optimizer(module, block)
                self.take_replaced(block)
        check_saved_tensors_hooks()
        if self._device.capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and its replays would not fetch weights that stream; capture no block "
                "of the model, or attach it without weights="
            )
        if in_backward():
            self._use_in_backward(block)
        else:
            self._use(block, self._next)
            if self._last_run is not None and self._last_run is not block:
                self._next[self._last_run], self._before_that[block] = block, self._last_run
            self._last_run = block
            self._order[block] = None
        self._finish(block)
        # Read here and not where a tensor is saved: within an operation autocast is always off.
        self._autocast = any(torch.is_autocast_enabled(copy.device.type) for copy in block.copies[:1])
        block.running += 1
        block.thread = threading.get_ident()
        block.use_copies()
        if torch.is_grad_enabled():
            watched = self._watch_inputs(block, (args, kwargs))
            block.due += watched and in_backward()

    def _begin_alone(self, block: Block) -> None:
        """Begin a block that user code runs without the model's forward, as another method of the model does.

        No hook tells where that method begins: it is taken to begin with a block that has run before.
        """
        if block in self._order and block is not self._last_run:
            for each in self.blocks:
                if self.is_interrupted(each):
                    self._end_forwards(each)
            self._begin_order()
        elif block.stale:
            self._release_within(block)
        self._evaluated = True  # no hook tells that the method ends, either

    def _check_optimizer(self, module: nn.Module, block: Block) -> None:
        """Raise RuntimeError if a block is trained whose gradients the optimizer of another attach() would get."""
        trained = next((m.parameter for m in block.members if m.trained), None)
        if trained is None or not (module.training and torch.is_grad_enabled()):
            return
        watcher = self._watcher()
        if watcher is None or latest_watcher(trained) not in (None, watcher):
            raise RuntimeError(
                "the weights of this model stream for an optimizer that was deleted or replaced, which alone gets "
                "their gradients; call attach(model, weights=...) of the new optimizer, before any of its steps, or "
                "build the model anew (evaluating it needs no optimizer)"
            )

    def _finish(self, block: Block) -> None:
        """Finish the updates of all parameters of a block that is about to run."""
        watcher = self._watcher()
        if watcher is not None and block.streams:
            # Some are read without a module that runs, as where attention reads its projection. Their versions rise
            # now: autograd would take a later rise for a write to tensors that a forward, also in backward, has saved.
            watcher.finish_within([m.parameter for m in block.members])

    @hook
    def _after(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Set the homes after a block has run, or has raised, and release the block."""
        block = self._of[module]
        if not block.running:
            return  # torch calls this also where an earlier hook has raised, or `_before`
        block.running -= 1
        if block.running:
            return
        block.use_homes()
        block.check_copies()
        tensors = tensors_in(output)
        if block.streams and any(self._block_of(each) is block for each in tensors):
            raise RuntimeError(
                f"the forward of a block, {type(module).__name__}, returned one of its own parameters or a view of it, "
                "and its weights stream: the memory is released when the block has run; return a copy, such as "
                "self.weight.clone(), or name other blocks with attach(blocks=)"
            )
        if torch.is_grad_enabled():
            made = _with_gradient(tensors, output)
            # By the node, because a checkpoint hands other tensor objects to the forward that it runs in backward.
            for node in (each.grad_fn for each in made):
                if node is not None:
                    _metadata(node)[_MADE_BY] = block.mark
            if not in_backward():
                self._watch_outputs(block, made)
        if in_backward():
            return
        # Where autograd makes no graph, no backward needs the last window.
        if block not in self._last or not torch.is_grad_enabled():
            self._release(block)

    # Backward.

    def _watch_outputs(self, block: Block, made: Iterable[Tensor]) -> None:
        """Fetch the block when the gradient of its output is written: our hooks do not see all its saved tensors.

        User code's hooks on saved tensors within the block replace ours, and there are no hooks of ours where user code
        calls the block, or a part of the model, by itself.
        """

        # The graph keeps the stream: user code may delete the model before it calls backward.
        def begins(_: Tensor) -> None:
            if block.detached:
                raise RuntimeError(
                    "backward reached a block of a model that was attached again after this forward, so that the "
                    "copies of its weights are others now; call attach() before forward, or after backward"
                )
            if block.streams:
                self._use_saved(block)

        for tensor in made:
            tensor.register_hook(begins)

    def on_saving(self, tensor: Tensor) -> None:
        """Fetch blocks ahead that the host has updated since this block began. Called when autograd saves a tensor.

        Raises RuntimeError for a weight that was converted, as by autocast: the converted weights of all blocks would
        stay on the device until backward.
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
        """Fetch the block of a saved tensor, which backward is about to read, if it is a weight that streams."""
        block = self._block_of(tensor)
        if block is not None and block.streams:
            self._use_saved(block)

    def _block_of(self, tensor: Tensor) -> Block | None:
        """Return the block of which this is a copy, or a view of one; None for other tensors."""
        storage = memory_of(tensor)
        return None if storage is None else self._by_storage.get(storage_address(storage))

    @hook
    def _use_saved(self, block: Block) -> None:
        if torch.is_grad_enabled() and in_backward():
            raise RuntimeError(
                "backward with create_graph=True reached a block whose weights stream; the graph that it makes, as for "
                "a gradient penalty or a Hessian, would read weights after their memory was released; let all blocks "
                "stay with attach(model, weights=1.0), or attach the model without weights="
            )
        self._use_in_backward(block)

    @outer_hook
    def lend(self, block: Block) -> None:
        """Set the copies of a block for a part of it that backward recomputes."""
        self._use_in_backward(block)
        if not block.lent:
            self._finish(block)
            block.use_copies()
            block.lent = True

    def _use_in_backward(self, block: Block) -> None:
        number = backward_number()
        # Once for each backward: a nested one, as of reentrant checkpointing, ends before the one around it.
        if number not in self._backwards and number != -1:
            self._backwards.add(number)
            when_backward_ends(functools.partial(self._backward_ends, number))
        self._use(block, self._before_that)
        block.touched = True

    def _watch_inputs(self, block: Block, arguments: Any) -> bool:
        """Release the block in backward when the gradient of its input is written; return whether there is such one."""
        found = _with_gradient(tensors_in(arguments), arguments)
        made = [t for t in found if not t.is_leaf]
        # Where a block runs twice in a row, the gradient of what is between is not the end of its use.
        watched = [t for t in made if t.grad_fn is None or _metadata(t.grad_fn).get(_MADE_BY) is not block.mark]

        def passed(*_: Tensor) -> None:
            self._passed(block)

        def ends(_: Tensor) -> None:
            # A leaf, as the input of a reentrant checkpoint, has its gradient as soon as all nodes that read it have
            # run, which need not be all nodes of the block: others compute gradients of weights.
            when_backward_ends(passed)
            handle.remove()  # user code may keep the leaf, which would get another hook in each iteration

        for tensor in watched:
            tensor.register_hook(passed)
        # Elsewhere the end of the whole backward releases the block.
        if found and not made and in_backward():
            watched = found[:1]
            handle = watched[0].register_hook(ends)
        return bool(watched)

    @hook
    def _passed(self, block: Block) -> None:
        """Release the block, which backward has passed, and fetch the next one."""
        block.due = max(0, block.due - 1)
        if not block.running and not block.due and block not in self._first:
            self._release(block)
            self._fetch_ahead(block, self._before_that)

    @hook
    def _backward_ends(self, number: int) -> None:
        """Release blocks that backward has not passed, such as a block whose input needs no gradient."""
        self._backwards.discard(number)
        if self._backwards:
            return  # this one ran within another one, which still needs them
        self._evaluated = False
        for block in self.blocks:
            if block.touched and not block.running and block not in self._first:
                self._release(block)
            block.end_backward()

    def _end_backwards(self) -> None:
        """Release what backwards that have raised have left: no callback tells that they have ended."""
        self._backwards.clear()
        for block in self.blocks:
            if block.touched:
                block.end_backward()
                self._release_within(block)

    @hook
    def _forget_backwards(self) -> None:
        self._end_backwards()

    def forget_interrupted(self) -> None:
        """Forget what a backward that raised has left: copies in use, and gradients on copies."""
        self._forget_backwards()
        watcher = self._watcher()
        if watcher is not None:
            watcher.forget_interrupted()

    # Transfers.

    def _use(self, block: Block, order: Mapping[Block, Block]) -> None:
        """Order the caller's queue behind the fetch of the block, and fetch the blocks that follow in this order."""
        before = self._device.mark() if block.streams and not block.joined else None
        if not block.filled:
            self._fetch(block)
        self._fetch_ahead(block, order)
        # Last: the join holds the queue back, and later fetches are ordered behind the queue by their fence.
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
            # First blocks that were fetched ahead, which can be fetched again; then state.
            for other in self.blocks:
                self._release_within(other)
            watcher = self._watcher()
            if watcher is not None:
                watcher.give_way(block.nbytes)
            self._moves.append(block.fetch(after))

    def _fetch_ahead(self, block: Block, order: Mapping[Block, Block]) -> None:
        """Start to fetch the blocks after this one, if their updates have ended and the window has room."""
        room = WEIGHT_WINDOW - self._there.streaming
        following: Block | None = block
        for _ in self.blocks:  # bounded, because a forward may use a block again
            following = None if following is None else order.get(following)
            if following is None or room <= 0:
                return
            if following.streams and not following.filled:
                after = self._ready(following, wait=False)
                if after is None:
                    self._late = block
                    return
                with contextlib.suppress(torch.OutOfMemoryError):  # there may be memory when the block runs
                    self._moves.append(following.fetch(after))
                    room -= 1

    @hook
    def _fetch_late(self) -> None:
        """Start to fetch the blocks that `_fetch_ahead` found not updated, while the block before them runs."""
        block, self._late = self._late, None
        if block is not None and block.running and not in_backward():
            self._fetch_ahead(block, self._next)

    def _ready(self, block: Block, *, wait: bool) -> Sequence[Job] | None:
        watcher = self._watcher()
        if watcher is None:
            return ()
        found: Sequence[Job] | None = watcher.weights_ready([m.parameter for m in block.members], wait=wait)
        return found

    def _release(self, block: Block) -> None:
        if block.streams:
            block.release()

    def release_all(self) -> None:
        """Release all blocks that stream. No forward and no backward may run."""
        self._end_backwards()
        self._forwards = 0
        self._set_homes()
        for block in self.blocks:
            self._release(block)

    def _set_homes(self) -> None:
        """Set the homes in blocks whose forward was not ended."""
        for block in self.blocks:
            if block.running:
                self._end_forwards(block)

    def _end_forwards(self, block: Block) -> None:
        block.use_homes()
        block.running = 0

    @hook
    def end_forwards(self, block: Block) -> None:
        """Set the homes in a block whose forward was not ended, and release it."""
        self._end_forwards(block)
        self._release_within(block)

    def is_interrupted(self, block: Block) -> bool:
        """Return whether Ctrl-C in this thread has ended the block's forward, for which torch calls no hook."""
        if not block.running or block.thread != threading.get_ident() or in_backward():
            return False
        return all(self._of.get(module) is not block for module in running_modules())

    def release_homes(self, blocks: Sequence[Block]) -> None:
        """Let user code write to the homes of these: wait until no transfer reads them, and release fetched copies."""
        for block in blocks:
            self._release_unused(block)
            block.finish_reading()

    @hook
    def _release_unused(self, block: Block) -> None:
        self._release_within(block)

    def _release_within(self, block: Block) -> None:
        """Do the same within another call of the optimizer."""
        if not (block.running or block.touched):
            self._release(block)

    def take_replaced(self, block: Block) -> None:
        """Take over the values of parameters of the block whose memory user code has replaced.

        Raises RuntimeError if an update was lost with the former memory, and as `Block.take_replaced`.
        """
        found = block.replaced()
        if found:
            # As `before_reading`, within a call of the optimizer.
            self._release_within(block)
            block.finish_reading()
            watcher = self._watcher()
            if watcher is not None:
                watcher.finish_homes_within(found)
            block.take_replaced()
            if watcher is not None:
                watcher.relocated({id(p): block.places[id(p)] for p in found})

    def before_reading(self, parameters: Sequence[Tensor], block: Block | None) -> None:
        """Finish the updates of parameters that user code is about to read or write."""
        if block is not None and block.lost:
            raise RuntimeError(SAID)
        if block is not None:
            if block.lent:
                block.use_homes()
            self.release_homes([block])  # user code may write: copies would miss that, and a running transfer read half
        watcher = self._watcher()
        if watcher is not None:
            watcher.finish_homes(parameters)
        if block is not None and block.kept:
            self._put_back(block)

    @hook
    def _put_back(self, block: Block) -> None:
        """Take memory over into which other values were written since user code kept it."""
        self.take_replaced(block)


class _Reading:
    """Waits before a module's parameters are read, unless their block runs.

    Backward that recomputes a part of a block, as with a checkpoint of a block's MLP, runs no hook of the block: its
    modules have the copies then until it ends, or until user code reads them otherwise.

    block: the one to which they belong. The stream is referred to weakly, because the module refers to this.
    """

    def __init__(self, stream: WeightStream, parameters: Sequence[Tensor], block: Block | None) -> None:
        self._stream, self._parameters, self._block = weakref.ref(stream), parameters, block

    def before_reading_all(self, parameters: Iterable[Tensor | None]) -> None:
        stream, block = self._stream(), self._block
        # As where user code handles Ctrl-C: what it writes to copies is lost.
        if stream is not None and block is not None and stream.is_interrupted(block):
            stream.end_forwards(block)
        self.before_reading(parameters)

    def before_reading(self, _: Iterable[Tensor | None]) -> None:
        stream, block = self._stream(), self._block
        if stream is None or (block is not None and block.running):
            return
        # Hooks of backward run without a graph, forwards that it recomputes with one.
        if block is not None and torch.is_grad_enabled() and in_backward():
            stream.lend(block)
        else:
            stream.before_reading(self._parameters, block)


def _copies_of(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the copies of those of these parameters that are homes, by the ids of the parameters."""
    wanted, streams = {id(p) for p in parameters}, list(_of_model.values())
    return {home: copy for stream in streams for home, copy in stream.copies.items() if home in wanted}


def _forget_interrupted() -> None:
    for stream in list(_of_model.values()):
        stream.forget_interrupted()


def _with_gradient(known: Sequence[Tensor], arguments: Any) -> list[Tensor]:
    """Return the tensors that require grad, of these; if none does, in objects that torch does not know.

    known: the tensors that torch finds in the arguments.
    """
    return [t for t in known if t.requires_grad] or [t for t in hidden_tensors(arguments) if t.requires_grad]


def stream_of(model: nn.Module) -> WeightStream | None:
    """Return the stream of this model's weights; None if they do not stream."""
    return _of_model.get(model)


def check_homes(block: Block) -> None:
    """Raise RuntimeError if user code has replaced parameters of a block, or has unfrozen some; see `check_hooks`."""
    for member in block.members:
        check_hooks(member.parameter)
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
        "belongs, or convert the model before; Hugging Face's Trainer moves models unless its arguments have "
        "place_model_on_device = False, and Accelerate unless accelerator.device_placement is False"
    )
