"""Models that have much to move and little to compute, trained on a GPU: what races shows in their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dos import DOSAdam
from tests.support.gpu import DEVICE, SHRINK
from tests.support.inside import StoppedError
from tests.support.training import bits

LARGE = 600_000
"""Elements of 16 bits that are more than what stays because it is small."""
ROOM = 64 << 20
"""Bytes of what a forward saves that may leave: all."""


def stop(*_: object) -> None:
    """A hook that ends what calls it."""
    raise StoppedError


class Scales(nn.Module):
    """As much state to move for as little computation as possible: what reads a parameter comes soon after its update.

    The gradient depends on the parameter, so a stale or half-written one shows in all later steps.
    """

    def __init__(self, layers: int, numel: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        # Of different sizes, so that some are cut by subgroups and others share one.
        sizes = [numel // SHRINK if i % 3 else 1000 + i for i in range(layers)]
        self.layers = nn.ModuleList(self.layer(torch.randn(size, generator=generator).to(dtype)) for size in sizes)

    def layer(self, weight: Tensor) -> nn.Module:
        return Scale(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum()


class Scale(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.to(DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.weight * x).float().sum()


class Sine(Scale):
    """Saves what it computes on the way, which nothing but its backward reads."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sin().float().sum()


class Sines(Scales):
    """As much to save for as little computation as possible."""

    def layer(self, weight: Tensor) -> nn.Module:
        return Sine(weight)


class Beside(Scales):
    """Computes on a stream of its own, too."""

    side: torch.cuda.Stream | None = None

    def streams(self, x: Tensor) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The present stream, and one beside it, which may read x from now on."""
        side = self.side = self.side or torch.cuda.Stream()
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        x.record_stream(side)
        return current, side


class OnTwoStreams(Beside):
    """Every other layer on a stream of its own; autograd runs its backward, and hooks, there too."""

    def forward(self, x: Tensor) -> Tensor:
        current, side = self.streams(x)
        outputs = []
        for i, layer in enumerate(self.layers):
            with torch.cuda.stream(side if i % 2 else current):
                outputs.append(layer(x))
        current.wait_stream(side)
        for output in outputs[1::2]:
            output.record_stream(current)
        return torch.stack(outputs).sum()


class SinesOnTwoStreams(OnTwoStreams, Sines):
    pass


def run(
    optimizer_of: Callable[[nn.Module], DOSAdam],
    *,
    steps: int = 8,
    layers: int = 24,
    numel: int = 300_000,
    attached: bool = False,
    activations: int | float | Literal["auto"] | None = None,
    updates: Literal["step", "backward"] = "step",
    micro_batches: int = 1,
    captured: bool = False,
    model_class: type[Scales] = Scales,
    before: Callable[[DOSAdam], None] = lambda optimizer: None,
    between: Callable[[DOSAdam, int], None] = lambda optimizer, step: None,
    ended: Callable[[DOSAdam], None] = lambda optimizer: None,
) -> list[bytes]:
    """Parameters and state after some steps, to the bit.

    activations, updates: as for `attach`. captured: whether forward and backward are replayed by a CUDA graph, but for
    the first steps; the current stream must not be the default one. before: called between backward and step. between:
    called after each step is issued. ended: called when the last has ended.
    """
    model = model_class(layers, numel)
    optimizer = optimizer_of(model)
    if attached or activations is not None:
        optimizer.attach(model, activations=activations, updates=updates)
    x = torch.tensor(1.0, dtype=torch.bfloat16, device=DEVICE)

    def compute(x: Tensor) -> None:
        model(x).backward()

    for step in range(steps):
        if captured and step == 2:
            optimizer.synchronize()
            optimizer.zero_grad()
            compute = replayed(compute, x)
        if not captured or step < 2:
            optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            compute(x * (1 + step + micro_batch))
        before(optimizer)
        optimizer.step()
        between(optimizer, step)
    optimizer.synchronize()
    ended(optimizer)
    state = [t.cpu() for s in optimizer.state_dict()["state"].values() for t in s.values()]
    return bits([*(p.detach().cpu() for p in model.parameters()), *state])


def replayed(compute: Callable[[Tensor], None], x: Tensor) -> Callable[[Tensor], None]:
    """What computes the same by a graph, from inputs like x."""
    graph, given = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        compute(given)

    def replay(x: Tensor) -> None:
        given.copy_(x)
        graph.replay()

    return replay


def with_policy(policy: Any, subgroup_size: int = 500_000, **options: Any) -> Callable[[nn.Module], DOSAdam]:
    for name in {"host_memory", "memory_budget"} & options.keys():
        options[name] //= SHRINK

    def make(model: nn.Module) -> DOSAdam:
        return DOSAdam(model.parameters(), lr=1e-2, policy=policy, subgroup_size=subgroup_size // SHRINK, **options)

    return make
