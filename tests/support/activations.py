"""A network whose saved tensors are of every kind, and an optimizer that lets them leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dos import DOSAdam
from perfmodel import Op
from tests.support.devices import Copying
from tests.support.inside import device_of, offload_of

WIDTH, BATCH, LAYERS = 64, 256, 16
EACH = 4 * WIDTH * BATCH
"""Bytes that a layer saves."""


class Block(nn.Module):
    """What transformers are made of: a residual, a fused projection that is cut, a buffer, an expanded tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8 * width).view(8, width))
        self.bias = nn.Parameter(torch.zeros(1, width))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        mixed = torch.sigmoid(gate) * value.t().contiguous().t() * self.scale
        return x + torch.tanh(self.out(mixed) * self.bias.expand(len(x), -1).exp())


class Net(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first = nn.Linear(24, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 7)
        self.run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.last(x)


def optimizer_of(model: nn.Module, activations: Any = None, device: Copying | None = None) -> DOSAdam:
    """Small tensors leave, too."""
    optimizer = DOSAdam(model.parameters(), lr=1e-2, device=device or Copying(), policy="cpu")
    offload_of(optimizer).least_bytes = 64
    if activations is not None:
        optimizer.attach(model, activations=activations)
    return optimizer


def later() -> Tensor:
    """Enough that is saved after something else for that to leave the device."""
    y = torch.ones(40, 30, requires_grad=True)
    for _ in range(4):
        y = y.sin()
    return 0 * y.sum()


class Writes(torch.autograd.Function):
    """sin, whose backward writes to what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return slopes[0] * x.cos_()


def transfers(optimizer: DOSAdam, op: Op = Op.SAVE) -> list[int]:
    """Bytes of each so far; SAVE: to the host."""
    return [asked.nbytes for asked in device_of(optimizer).asked if asked.op is op]


def saved(optimizer: DOSAdam) -> int:
    """Bytes that have left so far."""
    return sum(transfers(optimizer))


class Layers(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x


def saves(optimizer: DOSAdam) -> list[int]:
    """Bytes of each transfer of the last forward to the host."""
    found = transfers(optimizer)
    device_of(optimizer).asked.clear()
    return found


def start(activations: Any = "auto", *, model: nn.Module | None = None, **options: Any) -> Any:
    """An attached model, its optimizer, and what lets its larger tensors leave. options: of the optimizer."""
    torch.default_generator.manual_seed(0)
    model = model or Layers()
    optimizer = DOSAdam(model.parameters(), **{"device": Copying(), "policy": "cpu", "subgroup_size": 5000, **options})
    optimizer.attach(model, activations=activations)
    offload = offload_of(optimizer)
    offload.least_bytes = 4096
    return model, optimizer, offload
