"""Where in its iteration a training is, and forward and backward that last as long as on another machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from experiments.gpt import GPT

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
            parameter.register_post_accumulate_grad_hook(lambda p: self._gradient(p.numel() / model.numel))

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
