"""A model of blocks whose weights may stream, and how it is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dos import DOSAdam, EmulatedDevice
from dos.torch_internals.tensors import storage_address
from tests.support.activations import Net
from tests.support.training import FAST, everything


def whole(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


RUNS = (whole, reentrant, recomputed)
"""How a block runs: with all that it saves, or again in backward, in both forms."""


WIDE = 48
"""A width of blocks with which state exceeds what two windows for a disk take, and so cannot all be at home."""


def net(dtype: torch.dtype = torch.bfloat16, blocks: int = 6, run: Any = whole, width: int = 16) -> Net:
    """The same parameters each time."""
    model = Net(blocks, width).to(dtype)
    model.run = run
    return model


def start(
    model: nn.Module,
    weights: Any,
    capacity: int = 10**8,
    activations: Any = None,
    updates: str = "step",
    **options: Any,
) -> DOSAdam:
    """An optimizer with the model attached. weights, updates: as in `attach`. options: of the optimizer."""
    options = {"device": EmulatedDevice(FAST, capacity), "policy": "cpu", "subgroup_size": 400, **options}
    optimizer = DOSAdam(model.parameters(), lr=1e-2, **{"offload_gradients": True, **options})
    optimizer.attach(model, weights=weights, activations=activations, updates=updates)
    return optimizer


def inputs(seed: int, model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss(model: nn.Module, seed: int) -> Tensor:
    return model(inputs(seed, model)).float().square().mean()


def train(
    model: nn.Module,
    optimizer: DOSAdam,
    steps: int = 3,
    first: int = 0,
    micro_batches: int = 2,
    clip: Callable[[nn.Module, DOSAdam], object] = lambda model, optimizer: None,
) -> None:
    """On batches that depend on the step alone."""
    for step in range(first, first + steps):
        with optimizer.no_update():  # but for the last one, where backward updates
            for micro_batch in range(micro_batches - 1):
                loss(model, 100 * step + micro_batch).backward()
        loss(model, 100 * step + micro_batches - 1).backward()
        clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def trained(model: nn.Module, weights: Any, *, activations: Any = None, **options: Any) -> list[bytes]:
    """Parameters and state after a training, to the bit. options: of `train`, and of the optimizer."""
    of_train = {name: options.pop(name) for name in ("steps", "micro_batches", "clip") if name in options}
    optimizer = start(model, weights, activations=activations, **options)
    train(model, optimizer, **of_train)
    return everything(model, optimizer)


class HomesTouched(TorchDispatchMode):
    """Notes operations that read or write homes while a block runs, forward or backward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.found: list[Any] = []
        self._inside = 0
        self._homes = {storage_address(p.untyped_storage()) for block in model.blocks for p in block.parameters()}
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: self._enter(1))
            block.register_forward_hook(lambda *_: self._enter(-1))

    def _enter(self, change: int) -> None:
        self._inside += change

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Of blocks alone, and of what is between them."""
        self._inside = 1
        with self:
            yield
        self._inside = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A view reads nothing, and updates in backward make some of homes.
        if (
            self._inside
            and not function.is_view
            and any(storage_address(t.untyped_storage()) in self._homes for t in tensors)
        ):
            self.found.append(function)
        return function(*args, **(kwargs or {}))
