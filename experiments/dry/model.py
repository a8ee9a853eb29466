"""A GPT whose layers compute nothing: they queue their time on the device, and take the host's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.dry import gpu
from experiments.dry.machines import BACKWARD_S, BLOCKS, FORWARD_S
from experiments.gpt import GPT, GPTConfig

CONFIG = GPTConfig(BLOCKS, 1600, 25, context=2048, vocabulary=50304, checkpointing=True)
"""Of the contest that the machines have run: 1.19 billion parameters in 436 tensors."""
HOST_FORWARD_S, HOST_BACKWARD_S = 0.9e-3, 1.4e-3
"""That a block takes the host."""


@dataclass(frozen=True)
class Times:
    """Seconds of a block: on the device and on the host."""

    forward_s: float = FORWARD_S
    backward_s: float = BACKWARD_S
    host_forward_s: float = HOST_FORWARD_S
    host_backward_s: float = HOST_BACKWARD_S

    def scaled(self, device: float, host: float) -> Times:
        """Return a share of each."""
        return Times(
            self.forward_s * device, self.backward_s * device, self.host_forward_s * host, self.host_backward_s * host
        )


class _Layer(torch.autograd.Function):
    """One layer; its gradients come as far apart as its parameters are large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: Times, *parameters: Tensor) -> Tensor:
        with gpu.taking(times.host_forward_s):
            ctx.save_for_backward(*parameters)
            ctx.times = times
            gpu.busy(times.forward_s)
            return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with gpu.taking(ctx.times.host_backward_s):
            gpu.busy(ctx.times.backward_s)
            return torch.empty_like(grad), None, *map(torch.empty_like, ctx.saved_tensors)


def _run(times: Times, layer: nn.Module, x: Tensor) -> Tensor:
    return _Layer.apply(x, times, *layer._parameters.values())  # which are others where weights stream


def _in_turn(layers: tuple[nn.Module, ...], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _forward(model: GPT, *batch: Tensor) -> Tensor:
    x = model.tokens(torch.empty(1, device=torch.device(gpu.KIND, 0)))
    x = model.positions(x)
    for block in model.blocks:
        x = block(x)
    return _run(_NOTHING, model.tokens, model.norm(x))  # tied: its gradient comes last


_NOTHING = Times(0.0, 0.0, 0.0, 0.0)
"""Of embeddings and the last norm. Their time is in that of the blocks, so that all of them make the iteration."""


def dry_gpt(device: torch.device, config: GPTConfig = CONFIG, times: Times | None = None) -> GPT:
    """A GPT with its real modules and parameters, in bfloat16. Called with or without a batch, it returns the loss.

    times: of a block. On the host its values are whatever is there.
    """
    times = times or Times()
    if device.type == "cpu":
        model = GPT(config, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    else:
        model = GPT(config, device=device, dtype=torch.bfloat16)
    for block in model.blocks:
        layers = tuple(block.children())
        numel = sum(p.numel() for p in block.parameters())
        for layer in layers:
            share = sum(p.numel() for p in layer.parameters()) / numel
            layer.forward = partial(_run, times.scaled(share, 1 / len(layers)), layer)
        block.forward = partial(_in_turn, layers)
    ends: tuple[nn.Module, ...] = (model.norm, model.tokens, model.positions)
    for layer in ends:
        layer.forward = partial(_run, _NOTHING, layer)
    whole: nn.Module = model
    whole.forward = partial(_forward, model)
    return model
