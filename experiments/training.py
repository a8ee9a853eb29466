"""Trainings that experiments compare: a model and its optimizer, and where in its iteration a training is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dos import DOSAdam, EmulatedDevice
from experiments.gpt import GPT, GPTConfig
from experiments.harness import Dropped, Limit, all_equal, bits_of, timed

UPDATE = 2.0
"""Where the update begins; backward begins at 1, forward at 0."""


class Position:
    """Follows a model's iterations. Make it before the model's optimizer, whose hooks then find it advanced.

    forward_s, backward_s: seconds that the two take at least; the caller waits in hooks, as it would for a GPU.
    moved: called whenever the position has changed.
    iteration: number of forwards begun, less one. position: in the iteration; see `UPDATE`.
    """

    def __init__(
        self, model: GPT, forward_s: float = 0.0, backward_s: float = 0.0, moved: Callable[[], object] | None = None
    ) -> None:
        self.iteration = -1
        self.position = 0.0
        self._forward_s = forward_s
        self._backward_s = backward_s
        self._moved = moved
        self._began = 0.0
        self._share = 0.0
        model.register_forward_pre_hook(self._forward_begins)
        blocks = len(model.blocks)
        for number, block in enumerate(model.blocks, start=1):
            block.register_forward_hook(lambda *_, share=number / blocks: self._advance(0.0, share))
        model.register_forward_hook(self._backward_begins)
        for parameter in model.parameters():
            # Not after accumulation: the optimizer would leave gradients for such a hook, and offload none in backward.
            parameter.register_hook(lambda gradient: self._gradient(gradient.numel() / model.numel))

    def follow(self, optimizer: Optimizer) -> None:
        """Let the optimizer's steps be the updates."""
        optimizer.register_step_pre_hook(lambda *_: self.move_to(UPDATE))

    def _forward_begins(self, module: nn.Module, inputs: Any) -> None:
        self.iteration += 1
        self._began = time.perf_counter()
        self.move_to(0.0)

    def _backward_begins(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._began, self._share = time.perf_counter(), 0.0

    def _gradient(self, share: float) -> None:
        self._share += share
        self._advance(1.0, self._share)

    def _advance(self, phase: float, share: float) -> None:
        """This share of the phase is over."""
        self.move_to(phase + min(share, 0.999))  # never 1, where the next phase is
        seconds = self._forward_s if phase == 0.0 else self._backward_s
        time.sleep(max(0.0, self._began + share * seconds - time.perf_counter()))

    def move_to(self, position: float) -> None:
        """Training is there from now on."""
        self.position = position
        if self._moved is not None:
            self._moved()


def model_of(config: GPTConfig, dtype: torch.dtype = torch.bfloat16) -> GPT:
    """The model from its start, the same one at each call."""
    torch.manual_seed(0)
    return GPT(config, dtype=dtype)


class Run:
    """A model that trains from its start, by its own optimizer, on a device of its own."""

    def __init__(self, model: GPT, optimizer: DOSAdam, device: EmulatedDevice) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device

    def train(self, batch: Sequence[Tensor]) -> None:
        """One iteration."""
        # Cloned: tensors that autograd saves of a batch count as the device's until the batch is freed.
        self.model(*(tensor.clone() for tensor in batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, batches: Sequence[Sequence[Tensor]]) -> float:
        """Train on the batches: median seconds of the iterations after the first. No work is in flight at the end.

        Raises Dropped if the device has too little memory.
        """
        try:
            _, *seconds = [timed(partial(self.train, batch)) for batch in batches]
            self.optimizer.synchronize()
        except torch.OutOfMemoryError as error:
            raise Dropped from error
        return statistics.median(seconds)

    @property
    def exceeded(self) -> bool:
        """Whether more memory was used than there is."""
        return self.device.peak_bytes > self.device.capacity

    def equals(self, other: Run) -> bool:
        """Whether both have the same bits of parameters and state."""
        return all_equal(bits_of(self.model, self.optimizer), bits_of(other.model, other.optimizer))

    def common(self, first: Run, iteration_s: float) -> dict[str, Any]:
        """The figures that every row has. first: whose bits are expected."""
        return {
            "iteration_s": iteration_s,
            "peak_bytes": self.device.peak_bytes,
            "capacity": self.device.capacity,
            "bits_equal": self.equals(first),
        }


def common_limits(where: str, row: dict[str, Any]) -> list[Limit]:
    """Limits of the figures that every row has."""
    return [
        Limit.at_most(f"{where}: capacity exceeded", row["peak_bytes"], row["capacity"]),
        Limit.at_most(f"{where}: other bits than the first run", not row["bits_equal"], 0),
    ]
