"""A model of many kinds of parameters with its optimizer, for the random machine of `test_stateful.py`."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dos import DOSAdam
from tests.support.inside import offload_of


class Kind(NamedTuple):
    """Types of parameters and state. formats: of the optimizers of the second variant, in turn."""

    dtype: torch.dtype
    formats: tuple[str | None, ...] = (None,)
    master_weights: bool = True

    @property
    def coded(self) -> bool:
        return self.formats == ("int8",)

    @property
    def as_adamw(self) -> bool:
        """Whether AdamW computes the same."""
        return self.dtype == torch.float32 and not self.coded


KINDS = [
    *[Kind(torch.float32)] * 4,
    *[Kind(torch.bfloat16, formats) for formats in ((None, "float32"), ("float32", None))],
    Kind(torch.bfloat16, master_weights=False),
    Kind(torch.float16),
    *[Kind(dtype, ("int8",)) for dtype in (torch.bfloat16, torch.float32)],
]


class Net(nn.Module):
    """Parameters of all shapes, of the root and of modules that are called twice, never, or not by name.

    Some micro-batches use an expert, and a part joins the optimizer later.
    """

    def __init__(self, seed: int = 0, width: int = 9) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack trace of each call
        self.first = nn.Linear(6, width)
        self.first.weight.data = self.first.weight.data.t().contiguous().t()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.tied = nn.Linear(6, width, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.LayerNorm(width)
        self.never = nn.Linear(2, 2)
        self.expert = nn.Linear(width, width)
        self.late = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor, expert: bool) -> Tensor:
        x = self.norm(self.norm(self.first(x) * self.scale + self.tied(x.cos()) + self.empty.sum())).tanh()
        if expert:
            x = x + self.expert(x)
        return self.last(x + nn.functional.linear(x, self.late.weight).sigmoid())

    @property
    def blocks(self) -> list[nn.Module]:
        """Those whose weights may stream: `late` is read past its module."""
        return [self.first, self.norm, self.never, self.expert, self.last]


MicroBatch = tuple[int, bool]
"""A seed, and whether the expert is used."""


class Amp(enum.Enum):
    """What GradScaler has done to the gradients that are there."""

    OFF = "not scaled"
    SCALED = "scaled"
    UNSCALED = "scaled and unscaled again"


class Run:
    """A model and an optimizer, with all that belongs to them.

    make: builds the optimizer from param groups. activations: how much of what is saved leaves. weights: how many
        blocks stay on the device; None: no weights stream.
    """

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], Any],
        model: Net,
        attached: bool = False,
        activations: Any = None,
        weights: Any = None,
    ) -> None:
        self.make = make
        self.attached = attached
        self.activations = activations
        self.weights = weights
        self.model = model
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        self.scaler.scale(torch.ones(()))  # it begins with the first use
        self.use(make([self.group(late=False)]))

    def use(self, optimizer: Any) -> None:
        """Go on with another optimizer of the same model."""
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if self.attached:
            self.attach()
        if self.activations is not None:
            offload_of(optimizer).least_bytes = 16

    def attach(self) -> None:
        blocks = {} if self.weights is None else {"weights": self.weights, "blocks": self.model.blocks}
        self.optimizer.attach(self.model, activations=self.activations, **blocks)

    def group(self, late: bool) -> dict[str, Any]:
        """The parameters that are given to the optimizer at first, or later."""
        return {"params": [p for name, p in self.model.named_parameters() if name.startswith("late") is late]}

    def rebuild(self) -> None:
        """A new optimizer with the old one's groups and no state."""
        self.synchronize()  # the new one does not wait for the old one
        late = len(self.optimizer.param_groups) > 1
        self.use(self.make([self.group(late) for late in ([False, True] if late else [False])]))

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def optimized(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.optimized() if p.grad is not None and p.numel()]

    def moments(self) -> list[Tensor]:
        """Views of the state, which is read."""
        entries = (self.optimizer.state[p] for p in self.optimized() if p in self.optimizer.state)
        return [entry["exp_avg"] for entry in entries if "exp_avg" in entry]

    def loss(self, micro_batch: MicroBatch, amp: Amp, penalty: bool = False) -> Tensor:
        """penalty: of weights that forward uses once: sums of more than two terms have another order with copies."""
        seed, expert = micro_batch
        in_context = self.activations is not None and not self.attached
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(self.model.scale.dtype)
        with self.optimizer.offload_activations(self.activations) if in_context else contextlib.nullcontext():
            loss = self.model(inputs, expert).float().square().mean()
        if penalty:
            parts = self.model.expert, self.model.last
            loss = loss + sum(1e-2 * p.float().square().sum() for part in parts for p in part.parameters())
        return self.scaler.scale(loss) if amp is Amp.SCALED else loss

    def synchronize(self) -> None:
        if isinstance(self.optimizer, DOSAdam):
            self.optimizer.synchronize()

    def state(self) -> dict[int, dict[str, Tensor]]:
        """As AdamW has it, by the parameters' numbers; reading it waits."""
        read = self.optimizer.state
        if isinstance(self.optimizer, DOSAdam):
            return {i: self.optimizer.adamw_state(p) for i, p in enumerate(self.optimized()) if p in read}
        return {i: read[p] for i, p in enumerate(self.optimized()) if p in read}
