"""A model to shard, how it is trained, saved and loaded, and what came out, whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dos import DOSAdam, EmulatedDevice
from tests.support.training import FAST


class Block(nn.Module):
    """Sizes that divide by no number of ranks, or by all, and a parameter that is smaller than their number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def model(width: int = 11, blocks: int = 2, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(width, 3)
    return nn.Sequential(*(Block(width) for _ in range(blocks)), head).to(dtype)


def batch(step: int, width: int = 11, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(step)).to(dtype)


def mesh_of(size: int | None = None, replicas: int = 1) -> DeviceMesh:
    """Of `size` ranks or all, or of `replicas` times as many; the other ranks have such meshes, too."""
    return _mesh(dist.get_world_size() if size is None else size, replicas)


@functools.cache  # each group of a mesh takes threads for good, of which gloo's wakes up 100 times a second
def _mesh(size: int, replicas: int) -> DeviceMesh:
    shape = {"copies": dist.get_world_size() // (size * replicas), "replicate": replicas, "shard": size}
    shape = {name: ranks for name, ranks in shape.items() if ranks > 1 or name == "shard"}
    whole = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    return whole["replicate", "shard"] if replicas > 1 else whole["shard"]


def shard(model: nn.Sequential, mesh: DeviceMesh, **kwargs: Any) -> nn.Sequential:
    for block in model[:-1]:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def dos_adam(parameters: Iterable[Tensor], **kwargs: Any) -> DOSAdam:
    settings = {"lr": 1e-2, "subgroup_size": 100, "device": EmulatedDevice(FAST, 1 << 24), **kwargs}
    return DOSAdam(parameters, **settings)


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def on_host(size: int | None = None, **kwargs: Any) -> nn.Sequential:
    """Sharded, and all of it on the host. kwargs: of `model`."""
    return shard(model(**kwargs), mesh_of(size), offload_policy=CPUOffloadPolicy(pin_memory=False))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: Iterable[int] = range(3),
    micro_batches: int = 1,
    before_step: Callable[[int], None] = lambda step: None,
) -> None:
    width = next(m.normalized_shape[0] for m in model.modules() if isinstance(m, nn.LayerNorm))
    dtype = next(model.parameters()).dtype
    for step in steps:
        for micro_batch in range(micro_batches):
            model(batch(10 * step + micro_batch, width, dtype)).float().pow(2).mean().backward()
        before_step(step)
        optimizer.step()
        optimizer.zero_grad()


def trained(
    make: Callable[[Any], Any],
    build: Callable[[], nn.Module] | None = None,
    attach: bool = False,
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None,
    **how: Any,
) -> list[Tensor]:
    """Whole parameters of a new model, sharded by default, after training with what `make` gives of its parameters."""
    module = shard(model(), mesh_of()) if build is None else build()
    optimizer = make(module.parameters())
    if attach:
        optimizer.attach(module)
    train(module, optimizer, before_step=lambda step: before_step(module, step), **how)
    if isinstance(optimizer, DOSAdam):
        optimizer.synchronize()
    return values(module)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def values(model: nn.Module) -> list[Tensor]:
    return [whole(p) for p in model.parameters()]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-6) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def save(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if how == "async":
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
