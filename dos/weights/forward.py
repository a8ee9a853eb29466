"""Hooks of forward where weights stream: a block has copies while it runs, and its modules their homes otherwise."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dos.devices import Device
from dos.guard import hook
from dos.parameters.hooks import module_hook
from dos.torch_internals.callers import running_modules, runs_within_itself
from dos.torch_internals.modes import check_saved_tensors_hooks, in_backward, is_compiled
from dos.torch_internals.module_parameters import hidden_tensors, tensors_in
from dos.torch_internals.tensors import converted_from
from dos.weights.backward import BackwardHooks
from dos.weights.block import Block
from dos.weights.checks import check_compiled, check_homes, check_optimizer, check_traced, links_of
from dos.weights.copies import Copies
from dos.weights.fetching import Fetching
from dos.weights.order import UseOrder


class ForwardHooks:
    """Hooks on one model whose weights stream, and on its blocks.

    of: the blocks by their modules.
    """

    # Forwards within backward release nothing, because their backward follows.
    def __init__(
        self,
        device: Device,
        of: Mapping[nn.Module, Block],
        fetching: Fetching,
        order: UseOrder,
        copies: Copies,
        backward: BackwardHooks,
        lock: Any,
    ) -> None:
        self.of = weakref.WeakKeyDictionary(of)
        self._device, self._fetching, self._order = device, fetching, order
        self._copies, self._backward = copies, backward
        self._lock = lock
        self._links = {block: links_of(module, block) for module, block in of.items()}
        self._plain = weakref.WeakSet(module for module in of if not is_compiled(module))
        """The modules of blocks that were not compiled when they were hooked."""
        self._running = 0
        """The number of forwards of the model that run."""
        self._graphs = self._without_graph = 0
        """Forwards that made a graph, and forwards that made none: one in a reentrant checkpoint does in backward."""
        self._autocast = False

    def take_graphs(self) -> int:
        """Return the number of forwards of the model that made a graph since the last call of this."""
        count, self._graphs, self._without_graph = self._graphs, 0, 0
        return count

    def hook_to(self, model: nn.Module) -> list[RemovableHandle]:
        """Register the hooks on the model and its blocks."""
        handles = [
            model.register_forward_pre_hook(module_hook(model, self._begin), prepend=True),
            model.register_forward_hook(module_hook(model, self._end), always_call=True),
        ]
        for module in self.of:
            handles += [
                module.register_forward_pre_hook(
                    module_hook(module, self._before, with_arguments=True), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(module_hook(module, self._after, with_arguments=True), always_call=True),
            ]
        return handles

    @hook
    def _begin(self, model: nn.Module) -> None:
        """Begin a forward of the model."""
        check_traced(any(block.streams for block in self._fetching.blocks))
        graph = torch.is_grad_enabled()
        if in_backward():  # the model itself is recomputed
            reentrant = graph and self._without_graph > 0
            self._graphs += reentrant
            self._without_graph -= reentrant
            return
        self._graphs += graph
        self._without_graph += not graph
        check_compiled(self._plain)
        if self._running and not runs_within_itself(model):
            self._running = 0  # Ctrl-C has ended the last forward, and torch calls no hook then
        if not self._running:
            self.set_homes()
            self._begin_order()
        self._running += 1

    def _begin_order(self) -> None:
        """Begin to note the order in which blocks are used."""
        # Copies that an interrupted forward or backward has left would be stale after the next step.
        self._backward.end_all()
        for block in self._fetching.blocks:
            # After an evaluation user code may put weights back, through references that it has kept and `.data`.
            if block not in self._order.first or block.stale or not self._backward.any_ended:
                self._fetching.release_unused(block)
        self._order.begin()
        self._backward.any_ended = False  # from now on: Ctrl-C may end the forward, of which no hook tells

    @hook
    def _end(self, _: nn.Module) -> None:
        """End a forward, even one that raised."""
        if in_backward():
            return
        self._running = max(0, self._running - 1)
        if self._running:  # a handler of a signal has evaluated the model within a forward, whose blocks run on
            self._order.interrupt()
            return
        self._order.end()
        self._backward.any_ended = False
        self.set_homes()
        for block in self._fetching.blocks:
            if block not in self._order.last:
                self._fetching.release(block)

    @hook
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Fetch a block that is about to run, and set its copies."""
        block = self.of[module]
        check_traced(block.streams)
        if block.lent:
            block.use_homes()
        if not (self._running or block.running or in_backward()):
            self._begin_alone(block)
        if not block.running:
            # Here, as user code may call a block by itself, by torch.func.functional_call.
            self._links[block] = check_homes(module, block, self._links[block])
            if not in_backward():
                check_optimizer(module, block, self._fetching.watcher)
                self._fetching.take_replaced(block)
        check_saved_tensors_hooks()
        if self._device.capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and its replays would not fetch weights that stream; capture no block "
                "of the model, or attach it without weights="
            )
        if in_backward():
            self._backward.use(block)
        else:
            self._fetching.use(block, self._order.following)
            self._order.use(block)
        if block.streams:
            self._fetching.finish_updates(block)
        # Read here and not where a tensor is saved: within an operation autocast is always off.
        self._autocast = any(torch.is_autocast_enabled(copy.device.type) for copy in block.copies[:1])
        block.running += 1
        block.thread = threading.get_ident()
        block.use_copies()
        if torch.is_grad_enabled():
            self._backward.watch_inputs(block, (args, kwargs))

    def _begin_alone(self, block: Block) -> None:
        """Begin a block that user code runs without the model's forward, as another method of the model does.

        No hook tells where that method begins: it is taken to begin with a block that has run before.
        """
        if self._order.is_used_again(block):
            for each in self._fetching.blocks:
                if self.is_interrupted(each):
                    self.end_block(each)
            self._begin_order()
        elif block.stale:
            self._fetching.release_unused(block)
        self._backward.any_ended = False  # no hook tells that the method ends, either

    @hook
    def _after(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Set the homes after a block has run, or has raised, and release the block."""
        block = self.of[module]
        if not block.running:
            return  # torch calls this also where an earlier hook has raised, or `_before`
        block.running -= 1
        if block.running:
            return
        block.use_homes()
        block.check_copies()
        tensors = tensors_in(output)
        hidden = () if isinstance(output, Tensor) or not block.streams else hidden_tensors(output)
        if block.streams and any(self._copies.block_of(each) is block for each in (*tensors, *hidden)):
            raise RuntimeError(
                f"the forward of a block, {type(module).__name__}, returned one of its own parameters or a view of it, "
                "and its weights stream: the memory is released when the block has run; return a copy, such as "
                "self.weight.clone(), or name other blocks with attach(blocks=)"
            )
        if torch.is_grad_enabled():
            self._backward.watch_outputs(block, output, tensors)
        if in_backward():
            return
        # Where autograd makes no graph, no backward needs the last window.
        if block not in self._order.last or not torch.is_grad_enabled():
            self._fetching.release(block)

    def on_saving(self, tensor: Tensor) -> None:
        """Fetch blocks ahead that the host has updated since this block began. Called when autograd saves a tensor.

        Raises RuntimeError for a weight that was converted, as by autocast: the converted weights of all blocks would
        stay on the device until backward.
        """
        if self._fetching.late is not None:
            self._fetch_late()
        source = converted_from(tensor) if self._autocast else None
        block = None if source is None else self._copies.block_of(source)
        if source is not None and block is not None and block.streams:
            raise RuntimeError(
                f"autocast converts weights of {source.dtype} that stream, and autograd keeps the results on the "
                "device until backward; run each block under torch.utils.checkpoint, or build the model in "
                f"{tensor.dtype}"
            )

    @hook
    def _fetch_late(self) -> None:
        """Start to fetch the blocks that were not updated when the block before them began."""
        block, self._fetching.late = self._fetching.late, None
        if block is not None and not in_backward():
            self._fetching.fetch_ahead(block, self._order.following)

    def forget(self) -> None:
        """Set the homes in all blocks. No forward may run."""
        self._running = 0
        self.set_homes()

    def set_homes(self) -> None:
        """Set the homes in blocks whose forward was not ended."""
        for block in self._fetching.blocks:
            if block.running:
                self.end_block(block)

    def end_block(self, block: Block) -> None:
        """Set the homes in a block whose forward was not ended."""
        block.use_homes()
        block.running = 0

    def is_interrupted(self, block: Block) -> bool:
        """Return whether Ctrl-C in this thread has ended the block's forward, for which torch calls no hook."""
        if not block.running or block.thread != threading.get_ident() or in_backward():
            return False
        return all(self.of.get(module) is not block for module in running_modules())
