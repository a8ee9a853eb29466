"""Hooks of backward where weights stream: a block is fetched when it is used, and released when it was passed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dos.guard import hook, outer_hook
from dos.torch_internals.modes import backward_number, in_backward, when_backward_ends
from dos.torch_internals.module_parameters import hidden_tensors, tensors_in
from dos.weights.block import Block
from dos.weights.copies import Copies
from dos.weights.fetching import Fetching
from dos.weights.order import UseOrder

_MADE_BY = "dos.weights"
"""The key of the mark of a block in the metadata of nodes that made its outputs."""

_metadata: Callable[[Any], dict[str, Any]] = operator.attrgetter("metadata")
"""Returns the metadata of a node, of which torch's types say that it is a method."""


class BackwardHooks:
    """Hooks on tensors of the graphs of one model whose weights stream.

    any_ended: whether a backward has ended since the last forward has begun, or ended; forwards clear it.
    """

    # Of the nodes that can run, autograd runs the one that was made last. So when it runs the node that has made a
    # block's input, all nodes of the block have run: nodes that write gradients of its copies, and nodes whose saved
    # tensors our hooks do not see, as those of checkpointing and of functions with caches of their own.
    def __init__(self, fetching: Fetching, order: UseOrder, copies: Copies, lock: Any) -> None:
        self.any_ended = True
        self._fetching, self._order, self._copies = fetching, order, copies
        self._lock = lock
        self._running: set[int] = set()
        """The numbers of the backwards that run."""

    def before_use(self, tensor: Tensor) -> None:
        """Fetch the block of a saved tensor, which backward is about to read, if it is a weight that streams."""
        block = self._copies.block_of(tensor)
        if block is not None and block.streams:
            self._use_saved(block)

    @hook
    def _use_saved(self, block: Block) -> None:
        if torch.is_grad_enabled() and in_backward():
            raise RuntimeError(
                "backward with create_graph=True reached a block whose weights stream; the graph that it makes, as for "
                "a gradient penalty or a Hessian, would read weights after their memory was released; let all blocks "
                "stay with attach(model, weights=1.0), or attach the model without weights="
            )
        self.use(block)

    @outer_hook
    def lend(self, block: Block) -> None:
        """Set the copies of a block for a part of it that backward recomputes."""
        self.use(block)
        if not block.lent:
            self._fetching.finish_updates(block)
            block.use_copies()
            block.lent = True

    def use(self, block: Block) -> None:
        """Fetch a block that backward uses now, and the blocks before it."""
        number = backward_number()
        # Once for each backward: a nested one, as of reentrant checkpointing, ends before the one around it.
        if number not in self._running and number != -1:
            self._running.add(number)
            when_backward_ends(functools.partial(self._end, number))
        self._fetching.use(block, self._order.preceding)
        block.touched = True

    def watch_outputs(self, block: Block, output: Any, tensors: Sequence[Tensor]) -> None:
        """Fetch the block when the gradient of its output is written: our hooks do not see all its saved tensors.

        User code's hooks on saved tensors within the block replace ours, and there are no hooks of ours where user code
        calls the block, or a part of the model, by itself.

        tensors: those in `output` that torch finds.
        """
        made = _with_gradient(tensors, output)
        # By the node, because a checkpoint hands other tensor objects to the forward that it runs in backward.
        for node in (each.grad_fn for each in made):
            if node is not None:
                _metadata(node)[_MADE_BY] = block.mark
        if in_backward():
            return  # the block is there, and backward comes to it next

        # The graph keeps this object: user code may delete the model before it calls backward.
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

    def watch_inputs(self, block: Block, arguments: Any) -> None:
        """Release the block in backward when the gradient of its input is written."""
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
        block.due += bool(watched) and in_backward()

    @hook
    def _passed(self, block: Block) -> None:
        """Release the block, which backward has passed, and fetch the next one."""
        block.due = max(0, block.due - 1)
        if not block.running and not block.due and block not in self._order.first:
            self._fetching.release(block)
            self._fetching.fetch_ahead(block, self._order.preceding)

    @hook
    def _end(self, number: int) -> None:
        """Release blocks that backward has not passed, such as a block whose input needs no gradient."""
        self._running.discard(number)
        if self._running:
            return  # this one ran within another one, which still needs them
        self.any_ended = True
        for block in self._fetching.blocks:
            if block.touched and not block.running and block not in self._order.first:
                self._fetching.release(block)
            block.end_backward()

    def end_all(self) -> None:
        """Release what backwards that have raised have left: no callback tells that they have ended."""
        self._running.clear()
        for block in self._fetching.blocks:
            if block.touched:
                block.end_backward()
                self._fetching.release_unused(block)

    @hook
    def forget_interrupted(self) -> None:
        """Release what a backward that raised has left; see `end_all`."""
        self.end_all()


def _with_gradient(known: Iterable[Tensor], arguments: Any) -> list[Tensor]:
    """Return the tensors that require grad, of these; if none does, in objects that torch does not know.

    known: the tensors that torch finds in the arguments.
    """
    return [t for t in known if t.requires_grad] or [t for t in hidden_tensors(arguments) if t.requires_grad]
