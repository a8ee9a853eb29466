"""What the checks train: models of the sizes that fit, batches, machines, and AdamW as the reference."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

from dos.machine.host_memory import available_bytes
from experiments.checks.base import Bench, Settings, Size, Skipped
from experiments.gpt import GPT, GPTConfig
from perfmodel.format import MIXED

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""Of every optimizer."""

HOST_BYTES = int(MIXED.held_bytes)
"""That DOSAdam needs on the host for each 16-bit parameter at most: state, gradient, and new parameter."""
DEVICE_BYTES = MIXED.parameter_bytes + MIXED.gradient_bytes
"""That each 16-bit parameter and its gradient take on the device."""
SHARE_OF_HOST = 0.8
SHARE_OF_DEVICE = 0.85
"""Of memory that is free, for all of that; on the device for activations, too."""
SHARE_FOR_ACTIVATIONS = 0.25
"""Of the device's free memory; sequences are taken out of the batch until they need no more."""

Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained. batch: sequences in a batch; sequences are as long as the model's context."""

    config: GPTConfig
    batch: int

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        c = self.config
        block = 12 * c.width**2 + 13 * c.width
        return c.layers * block + (c.vocabulary + c.context + 2) * c.width

    @property
    def activation_bytes(self) -> int:
        """Device memory for activations with checkpointing, roughly: logits (2, 4, 4 and 4 bytes), blocks' inputs, and
        what is within one block."""
        c = self.config
        return self.batch * c.context * (14 * c.vocabulary + 2 * c.layers * c.width + 80 * c.width)

    def fitting(self, most: float) -> Job:
        """With as many layers as `most` parameters allow, no more than there are."""
        layers = self.config.layers
        block = (self.numel - dataclasses.replace(self, config=self._with(1)).numel) // max(layers - 1, 1)
        rest = self.numel - layers * block
        return dataclasses.replace(self, config=self._with(max(1, min(layers, int((most - rest) // max(block, 1))))))

    def model(self, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> GPT:
        """A new model; the same for the same seed."""
        torch.manual_seed(seed)
        return GPT(self.config, device=device, dtype=dtype)

    def batches(self, count: int, device: torch.device) -> list[Batch]:
        """Random tokens and targets."""
        generator = torch.Generator().manual_seed(1)
        shape = (count, 2, self.batch, self.config.context)
        tokens = torch.randint(self.config.vocabulary, shape, generator=generator).to(device)
        return [(batch[0], batch[1]) for batch in tokens]

    def _with(self, layers: int) -> GPTConfig:
        return dataclasses.replace(self.config, layers=layers)


EXACT = {
    Size.TINY: Job(GPTConfig(1, 32, 2, context=8, vocabulary=64), batch=2),
    Size.SMALL: Job(GPTConfig(2, 48, 4, context=16, vocabulary=64), batch=4),
    Size.FULL: Job(GPTConfig(4, 384, 6, context=128, vocabulary=1024), batch=8),
}
"""For comparing bits: many steps, each soon done."""
PRESSED = {
    Size.TINY: EXACT[Size.TINY],
    Size.SMALL: EXACT[Size.SMALL],
    Size.FULL: Job(GPTConfig(24, 1024, 16, context=256, vocabulary=50304), batch=2),
}
"""For running short of memory: state enough that it matters to a GPU."""
MEDIUM = {
    Size.TINY: Job(GPTConfig(1, 32, 2, context=16, vocabulary=64, checkpointing=True), batch=2),
    Size.SMALL: Job(GPTConfig(3, 128, 4, context=32, vocabulary=256, checkpointing=True), batch=16),
    Size.FULL: Job(GPTConfig(48, 1600, 25, context=2048, vocabulary=50304, checkpointing=True), batch=4),
}
"""1.5B parameters at full size: GPT-2 XL."""
LARGEST = {
    Size.TINY: Job(GPTConfig(2, 32, 2, context=16, vocabulary=64, checkpointing=True), batch=2),
    Size.SMALL: Job(GPTConfig(4, 192, 6, context=32, vocabulary=256, checkpointing=True), batch=10),
    Size.FULL: Job(GPTConfig(96, 4096, 32, context=2048, vocabulary=50304, checkpointing=True), batch=2),
}
"""As many of these layers as memory allows."""

STEPS = {Size.TINY: 3, Size.SMALL: 20, Size.FULL: 20}
"""For which bits are compared."""


def fitted(job: Job, settings: Settings, *, each: int = HOST_BYTES, most: float = math.inf) -> Job:
    """The job with no more layers and sequences than host and device have memory for.

    each: bytes of the host that a parameter needs. most: parameters, at any rate. Raises Skipped if one layer is too
    much.
    """
    host = settings.host_bytes or available_bytes()
    if host is not None:
        most = min(most, SHARE_OF_HOST * host / each)
    if settings.cuda:
        free, _ = torch.cuda.mem_get_info()
        while job.batch > 1 and job.activation_bytes > SHARE_FOR_ACTIVATIONS * free:
            job = dataclasses.replace(job, batch=job.batch // 2)
        most = min(most, (SHARE_OF_DEVICE * free - job.activation_bytes) / DEVICE_BYTES)
    found = job if math.isinf(most) else job.fitting(most)
    if found.numel > most:
        raise Skipped(f"memory here is enough for {most / 1e6:.0f}M parameters, one layer has {found.numel / 1e6:.0f}M")
    return found


def prepare(bench: Bench) -> torch.device:
    """Set torch up for this process; where models are."""
    if bench.cuda:
        torch.cuda.init()
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)  # one core computes for the accelerator, one is the host
    return torch.device("cpu")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Make forward and backward give the same bits each time. Before the first use of cuBLAS."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # see torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Torch would fill new memory, which hides from the check whoever reads memory before writing it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def free_memory(cuda: bool) -> None:
    """Give what nobody uses any more back to the device."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


class Reference:
    """torch.optim.AdamW(fused=True), wholly on the device.

    masters: update float32 copies of the parameters, as DOSAdam does, and round the parameters from them.
    """

    def __init__(self, parameters: Sequence[Tensor], *, masters: bool) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._masters = [p.detach().float() for p in self._parameters] if masters else None
        self.optimizer = AdamW(self._masters or self._parameters, fused=True, **SETTINGS)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters from their gradients."""
        if self._masters is None:
            self.optimizer.step()
            return
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(self._parameters, self._masters)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
