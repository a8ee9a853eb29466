"""Clipping and loss scaling over all ranks and meshes, exactly, and torch's own clipping where it is called."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import dos
from tests.support.ranks import on_pair, on_ranks
from tests.support.sharded import (
    Block,
    adamw,
    assert_close,
    batch,
    dos_adam,
    mesh_of,
    model,
    shard,
    train,
    trained,
    values,
    whole,
)
from tests.support.training import leaving_early

NORM = 0.05


def mixed_meshes(head: bool = True) -> nn.Sequential:
    """A block over four ranks, one over two with replicas, one over two alone, and perhaps a head that is whole."""
    torch.manual_seed(0)
    found = nn.Sequential(Block(11), Block(11), Block(11), nn.Linear(11, 3))
    for block, mesh in zip(found[:-1], (mesh_of(4), mesh_of(2, 2), mesh_of(2)), strict=True):
        fully_shard(block, mesh=mesh)
    return found if head else found[:-1]


def exact_norm(model: nn.Module) -> float:
    return math.sqrt(math.fsum(whole(p.grad).double().pow(2).sum().item() for p in model.parameters()))


@pytest.mark.parametrize(("policy", "offload"), [("cpu", True), ("resident", False)])
@on_ranks
def test_norms_are_over_all_meshes(policy: str, offload: bool) -> None:
    divided = mixed_meshes()
    optimizer = dos_adam(divided.parameters(), policy=policy, offload_gradients=offload)
    for step in range(3):
        reference = mixed_meshes()
        for mine, theirs in zip(reference.parameters(), divided.parameters(), strict=True):
            dos.sharding.local.local(mine).data.copy_(dos.sharding.local.local(theirs).detach())
        for each in (divided, reference):
            each(batch(step)).pow(2).mean().backward()
        expected = torch.tensor(exact_norm(reference), dtype=torch.float32)
        if offload:  # which torch cannot find of several meshes at once
            total = torch.nn.utils.clip_grad_norm_(divided.parameters(), math.inf)
            torch.testing.assert_close(total.full_tensor(), expected, rtol=2e-7, atol=0)
            with pytest.raises(ValueError, match=r"norm_type=1\) is not supported .* ranks divide .* use norm_type=2"):
                torch.nn.utils.clip_grad_norm_(divided.parameters(), NORM, norm_type=1)
        torch.testing.assert_close(optimizer.grad_norm(), expected, rtol=2e-7, atol=0)
        torch.testing.assert_close(optimizer.clip_grad_norm_(NORM), expected, rtol=2e-7, atol=0)
        torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(NORM), rtol=1e-4, atol=0)
        found = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(found, optimizer.grad_norm())
        assert len({value.item() for value in found}) == 1
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        ("argument", "stride:2"),
        ("method", "cpu"),
        ("torch", "cpu"),
        ("folded", "cpu"),
        ("folded by its norm", "cpu"),
        ("offloaded", "stride:2"),
        ("offloaded in part", "cpu"),
    ],
)
@on_pair
def test_clipped_training(way: str, policy: str) -> None:
    divided = shard(model(), mesh_of())
    parameters = list(divided.parameters())
    kwargs = {"max_grad_norm": NORM} if way == "argument" else {}
    if way.startswith("offloaded"):
        kwargs["offload_gradients"] = True
    others = parameters[::3] if way == "offloaded in part" else []  # which DOSAdam does not have
    optimizer = dos_adam([p for p in parameters if all(p is not o for o in others)], policy=policy, **kwargs)
    beside = torch.optim.AdamW(others or [torch.zeros(1)], lr=1e-2)

    norms, left = list[Tensor](), list[int]()

    def clip(step: int) -> None:
        left.append(len(early))
        if way == "method":
            optimizer.clip_grad_norm_(NORM)
        elif way == "folded by its norm":  # as torchtitan does
            norm = torch.nn.utils.get_total_norm([p.grad for p in divided.parameters()]).full_tensor()
            torch.nn.utils.clip_grads_with_norm_(divided.parameters(), NORM, norm, foreach=True)
        elif way != "argument":
            norm = torch.nn.utils.clip_grad_norm_(divided.parameters(), NORM, foreach=True)
            norms.append(norm.full_tensor())
        beside.step()
        beside.zero_grad()

    dos.fold_clipping(way.startswith("folded"))
    try:
        with leaving_early() as early:
            train(divided, optimizer, before_step=clip)
    finally:
        dos.fold_clipping(False)
    expected: list[Tensor] = []

    def clip_there(model: nn.Module, step: int) -> None:
        expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM).full_tensor())

    assert_close(values(divided), trained(adamw, before_step=clip_there))
    if norms:
        torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
    if policy == "cpu" and way != "torch":
        assert 2 * (left[-1] - left[-2]) > len(optimizer.plan().placements)


@on_pair
def test_ranks_that_have_no_gradient_yet_clip_with_those_that_have() -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh_of(), [Shard(0)]))
    optimizer = dos_adam([weight], policy="cpu", offload_gradients=True)
    if dist.get_rank() == 0:
        weight.to_local().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert float(whole(norm)) == pytest.approx(4.0)
    optimizer.step()
    assert bool((whole(weight) < 1).any(dim=1).sum() == 4)


@on_ranks
def test_stages_of_a_pipeline() -> None:
    """Two stages of a pipeline, each of two ranks, whose norms are one."""
    torch.manual_seed(0)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    stage = nn.Sequential(Block(11), *([nn.Linear(11, 3)] if rank >= 2 else []))  # stages differ in size
    fully_shard(stage, mesh=dist.device_mesh.DeviceMesh.from_group(pairs[rank // 2], "cpu"))
    optimizer = dos_adam(stage.parameters(), policy="cpu", process_groups=[across[rank % 2]])
    stage(batch(rank // 2)).pow(2).mean().backward()
    mine = torch.tensor(exact_norm(stage) ** 2, dtype=torch.float64)
    dist.all_reduce(mine, group=across[rank % 2])
    torch.testing.assert_close(optimizer.grad_norm().double(), mine.sqrt(), rtol=2e-7, atol=0)
    optimizer.step()


@pytest.fixture
def folding() -> Iterator[None]:
    dos.fold_clipping()
    yield
    dos.fold_clipping(False)


def test_folding_leaves_other_optimizers_alone(folding: None) -> None:
    ends = []
    for ours in (False, True):
        torch.manual_seed(0)
        a, b = nn.Linear(5, 5), nn.Linear(5, 5)
        one = dos_adam(a.parameters()) if ours else torch.optim.AdamW(a.parameters(), lr=1e-2)
        other = torch.optim.SGD(b.parameters(), lr=1e-2)
        for step in range(3):
            b(a(torch.full((2, 5), step + 1.0))).pow(2).sum().backward()
            before = a.weight.grad.clone()
            torch.nn.utils.clip_grad_norm_([*a.parameters(), *b.parameters()], NORM)
            assert torch.equal(before, a.weight.grad) == ours
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
        ends.append([p.detach() for p in (*a.parameters(), *b.parameters())])
    assert_close(*ends)


@pytest.mark.parametrize(
    ("unscale", "known", "block"),
    [(False, True, 2), (True, False, 2), (True, True, 0)],
)
@on_ranks
def test_an_overflow_on_one_rank_skips_the_step_on_all(unscale: bool, known: bool, block: int) -> None:
    """block: 2 is of a mesh of two ranks each, at which GradScaler does not look on the others."""
    divided = mixed_meshes(head=False)  # GradScaler takes no mixture of DTensors and others
    optimizer = dos_adam([*divided[2].parameters(), *divided[0].parameters()], policy="cpu")
    scaler = GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        before = values(divided[0])
        scaler.scale(divided(batch(step)).pow(2).mean()).backward()
        if step == 1 and dist.get_rank() == 0:
            dos.sharding.local.local(divided[block].down.weight.grad).view(-1)[:1] = math.inf
        if unscale:
            scaler.unscale_(optimizer)
        if known:
            scaler.step(optimizer)
        else:  # as a scaler of another library
            state = scaler._per_optimizer_states[id(optimizer)]
            optimizer.found_inf = sum(state["found_inf_per_device"].values())
            apart = step == 1 and dist.get_rank() >= 2
            with pytest.warns(UserWarning, match="infinite on another rank") if apart else contextlib.nullcontext():
                optimizer.step()
            del optimizer.found_inf
        skipped = all(torch.equal(a, b) for a, b in zip(values(divided[0]), before, strict=True))
        assert skipped == (step == 1)
        scaler.update()
        optimizer.zero_grad()
        expected = 8.0 if step < 1 or (not known and dist.get_rank() >= 2) else 4.0
        assert scaler.get_scale() == expected


@on_ranks
def test_scales_that_differ_are_said_on_every_rank() -> None:
    divided = mixed_meshes(head=False)
    optimizer = dos_adam(divided.parameters(), policy="cpu")
    scaler = GradScaler("cpu", init_scale=8.0 if dist.get_rank() else 4.0)
    scaler.scale(divided(batch(0)).pow(2).mean()).backward()
    with pytest.raises(RuntimeError, match="ranks have loss scales from 4 to 8"):
        scaler.step(optimizer)


def test_an_optimizer_that_was_replaced_takes_no_factor_away(folding: None) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    optimizers = [dos_adam(layer.parameters(), policy="cpu") for _ in range(4)]
    before = layer.weight.detach().clone()
    for chosen in optimizers:
        layer.load_state_dict({"weight": before, "bias": torch.zeros(5)})
        layer(torch.ones(1, 5)).sum().backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-12)
        chosen.step()
        chosen.zero_grad()
        assert (layer.weight - before * (1 - 1e-4)).abs().max() < 1e-5, "clipped to nothing, it only decays"


def test_clipping_twice_is_refused(folding: None) -> None:
    layer = nn.Linear(5, 5)
    optimizer = dos_adam(layer.parameters())
    layer(torch.ones(1, 5)).sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), NORM)
    with pytest.raises(RuntimeError, match="clipped twice since the last step"):
        torch.nn.utils.clip_grad_norm_(layer.parameters(), NORM)
    optimizer.step()
    layer(torch.ones(1, 5)).sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), NORM)


@on_pair
def test_dtensors_that_are_written_after_clipping_are_seen() -> None:
    optimizers: list[dos.DOSAdam] = []

    def make(parameters: Any) -> dos.DOSAdam:
        optimizers.append(dos_adam(parameters, policy="cpu"))
        return optimizers[0]

    @torch.no_grad()
    def write(model: nn.Module, step: int) -> None:
        for optimizer in optimizers:
            optimizer.clip_grad_norm_(NORM)
        torch._foreach_add_([p.grad for p in model.parameters()], 0.1)

    expected = trained(adamw, before_step=write)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_close(trained(make, before_step=write), expected)
    assert sum("written to between" in str(w.message) for w in caught) == 1
