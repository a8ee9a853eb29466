"""Gradients under FSDP2 in all the ways in which they come, or do not come."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from dos import DOSAdam
from perfmodel import Op
from tests.support.clock import eventually
from tests.support.devices import Copying, Pinning
from tests.support.ranks import Ranks, on_pair
from tests.support.sharded import adamw, assert_close, batch, dos_adam, mesh_of, model, shard, values

STEPS, MICRO_BATCHES = 3, 2


class Sometimes(nn.Sequential):
    """Whose second block runs only when it is `wanted`."""

    wanted = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self):
            if i != 1 or self.wanted:
                x = layer(x)
        return x


def prepared(kind: str) -> nn.Sequential:
    found = model(blocks=3)
    if kind == "checkpointed":
        found = nn.Sequential(*(checkpoint_wrapper(layer) for layer in found))
    if kind in ("unused", "sometimes", "filled in"):
        found = Sometimes(*found)
    if kind == "frozen":
        found[0].requires_grad_(False)
        found[1].up.requires_grad_(False)
    more = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if kind == "mixed" else {}
    divided = shard(found, mesh_of(2, 2) if kind == "not all-reduced" else mesh_of(), **more)
    if kind == "filled in":  # with zeros where a block is not used
        for layer in divided.modules():
            if isinstance(layer, FSDPModule):
                layer.set_reduce_scatter_unused_params(True)
    return divided


USED: dict[str, Callable[[int], bool]] = {
    "unused": lambda step: False,
    "sometimes": lambda step: step != 1,
    "filled in": lambda step: step != 1,
}


def gradients(kind: str, make: Callable[[Any], torch.optim.Optimizer]) -> list[torch.Tensor]:
    divided = prepared(kind)
    optimizer = make(divided.parameters())
    for step in range(STEPS):
        if isinstance(divided, Sometimes):
            divided.wanted = USED[kind](step)
        for micro_batch in range(MICRO_BATCHES):
            if kind == "unsynchronised":
                divided.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
            elif kind == "not all-reduced":
                divided.set_requires_all_reduce(micro_batch == MICRO_BATCHES - 1)
            divided(batch(10 * step + micro_batch)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(divided)


def as_adamw(kind: str, offload: bool) -> None:
    if kind != "filled in" or hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        settings = {"policy": "stride:2" if offload else "cpu", "offload_gradients": offload}
        assert_close(gradients(kind, lambda p: dos_adam(p, **settings)), gradients(kind, adamw))


@pytest.mark.parametrize(
    ("kind", "offload"),
    [
        ("unsynchronised", True),
        ("not all-reduced", False),
        ("checkpointed", False),
        ("frozen", True),
        ("unused", False),
        ("sometimes", False),
        ("sometimes", True),
        ("filled in", True),
        ("mixed", False),
    ],
)
def test_all_ways_in_which_gradients_come(ranks: Ranks, pair: Ranks, kind: str, offload: bool) -> None:
    (ranks if kind == "not all-reduced" else pair).run(as_adamw, kind, offload)


@on_pair
def test_neighbours_in_the_buffer_leave_together() -> None:
    """FSDP2's reduced gradients lie one after the other, as their staging does."""
    divided = shard(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(3))), mesh_of())
    device = Copying()
    optimizer = DOSAdam(divided.parameters(), policy="cpu", subgroup_size=10**6, device=device)
    for step in range(3):
        device.asked.clear()
        divided(batch(step, width=16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    jobs = [asked.pieces for asked in device.asked if asked.op is Op.GRADIENT]
    assert sum(jobs) <= 3, jobs


class CountsFlags(TorchDispatchMode):
    """How often it is read whether something is so, for which a device must be waited for."""

    read = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, name = torch.ops.aten, func.overloadpacket
        self.read += name is aten.equal or (name is aten._local_scalar_dense and args[0].dtype is torch.bool)
        return func(*args, **(kwargs or {}))


@on_pair
def test_a_step_waits_once_to_see_what_was_rewritten() -> None:
    """Parameters, gradients that left and those that were clipped."""
    divided = shard(model(dtype=torch.bfloat16), mesh_of())
    optimizer = dos_adam(divided.parameters(), policy="cpu")
    for step in range(3):
        divided(batch(step, dtype=torch.bfloat16)).float().pow(2).mean().backward()
        optimizer.clip_grad_norm_(1.0)
        with CountsFlags() as flags:
            optimizer.step()
        optimizer.zero_grad()
    assert flags.read == 1


@on_pair
def test_nothing_is_pinned_in_backward() -> None:
    divided = shard(model(), mesh_of())
    device = Pinning()
    settings = {"policy": "stride:2", "subgroup_size": 50, "offload_gradients": True}
    optimizer = DOSAdam(divided.parameters(), device=device, **settings)
    for step in range(3):
        for micro_batch in range(2):
            loss = divided(batch(10 * step + micro_batch)).pow(2).mean()
            before = device.made
            loss.backward()
            assert device.made == before
        optimizer.step()
        optimizer.zero_grad()
        assert device.made > 0


@on_pair
def test_gradients_that_left_leave_nothing_behind() -> None:
    divided = shard(model(), mesh_of())
    optimizer = dos_adam(divided.parameters(), policy="cpu")
    alive: list[weakref.ref[torch.Tensor]] = []
    counts: list[tuple[int, int]] = []

    def count() -> tuple[int, int]:
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects()), threading.active_count()

    def nothing_alive() -> bool:
        gc.collect()
        return not any(reference() is not None for reference in alive)

    def no_more_than_before() -> bool:
        return all(now <= most for now, most in zip(count(), map(max, zip(*counts, strict=True)), strict=True))

    for step in range(4):
        divided(batch(step)).pow(2).mean().backward()
        alive += [weakref.ref(p.grad._local_tensor) for p in divided.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        assert eventually(nothing_alive)
        if step < 3:
            counts.append(count())
    assert eventually(no_more_than_before), "neither tensors nor threads"
