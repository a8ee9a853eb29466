"""Ways to reach a weight of a block: what blocks are, and how they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.support.blocks import RUNS, whole


class Stack(nn.Module):
    """Four blocks of a kind. run: how each runs."""

    def __init__(self, kind: Callable[[], nn.Module], run: Callable[..., Any] = whole) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first = nn.Linear(24, 16)
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.last = nn.Linear(16, 7)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        found: Any = self.first(x)
        for block in self.blocks:
            found = self.run(block, found)
        return self.last(getattr(found, "x", found))


class Parts(nn.Module):
    """Its second part reads weights past their module, and may be checkpointed alone."""

    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.other = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(self.norm(x), self.other.weight, self.other.bias))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x))
        return x + (self.part(y) if self.reentrant is None else checkpoint(self.part, y, use_reentrant=self.reentrant))


class PartAgain(Parts):
    reentrant = False


class PartReentrant(Parts):
    reentrant = True


class Recurrent(Parts):
    """Has a recurrent layer, which reads its weights as these are set, and a part that is checkpointed alone."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.recurrent(x)[0])


class Merged(nn.Module):
    """Computes its weight, as merged LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = (nn.Parameter(torch.randn(n, 16) / 8) for n in (16, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.base + self.down.t() @ self.up))


def normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(16, 16)), nn.Tanh())


class Unsaved(torch.autograd.Function):
    """Keeps the weight itself: no hook on saved tensors sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        return slopes[0] @ ctx.weight.t(), ctx.x.t() @ slopes[0]


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return Unsaved.apply(torch.tanh(Unsaved.apply(x, self.one)), self.other)


class Around(Keeps):
    """Runs another block between its halves, and in backward; no hook sees that it then reads its first weight."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]  # not a part of this one

    def forward(self, x: Tensor) -> Any:
        y = checkpoint(self.inner[0], torch.tanh(Unsaved.apply(x, self.one)), use_reentrant=True)
        return Unsaved.apply(torch.tanh(y), self.other)


@dataclasses.dataclass
class Output:
    x: Tensor


@dataclasses.dataclass(slots=True)
class SlottedOutput:
    x: Tensor


class Wraps(Keeps):
    output: type = Output

    def forward(self, x: Any) -> Any:
        return self.output(super().forward(getattr(x, "x", x)))


class WrapsInSlots(Wraps):
    output = SlottedOutput


class Slope(Parts):
    """Runs a backward within its forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x))
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y + self.part(slope.detach())


class Within(Parts):
    """Runs once more within itself."""

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        y = torch.tanh(self.one(x))
        return x + self.part(self(y, again=False) if again else y)


def compiled() -> nn.Module:
    block = Parts()
    block.compile(backend="eager")
    return block


def by_functional_call(block: nn.Module, x: Tensor) -> Tensor:
    """With the parameters that it has."""
    return torch.func.functional_call(block, dict(block.named_parameters()), (x,))


def twice_in_a_row(block: nn.Module, x: Tensor) -> Tensor:
    return block(block(x))


def checkpointed_twice(block: nn.Module, x: Tensor) -> Any:
    """A part is recomputed for one, and then the whole for the other."""
    return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)


def twice_within(use_reentrant: bool) -> Callable[..., Any]:
    return lambda block, x: checkpoint(lambda y: block(block(y).sin()), x, use_reentrant=use_reentrant)


def unhooked(block: nn.Module, x: Tensor) -> Any:
    """User code's hooks take the place of ours."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return block(x)


WAYS: list[tuple[Callable[[], nn.Module], Callable[..., Any]]] = [
    *((kind, run) for kind in (PartAgain, PartReentrant) for run in RUNS),
    *((kind, checkpointed_twice) for kind in (PartAgain, Keeps)),
    (Recurrent, whole),
    *((kind, run) for kind in (Merged, normed) for run in RUNS[1:]),
    *((Merged, twice_within(each)) for each in (False, True)),
    *((Keeps, run) for run in (*RUNS, twice_in_a_row)),
    (Parts, unhooked),
    (Wraps, unhooked),
    (WrapsInSlots, whole),
    (Slope, whole),
    *((Within, run) for run in RUNS),
    (compiled, whole),
    (compiled, RUNS[2]),
    (Parts, by_functional_call),
]
