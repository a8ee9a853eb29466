"""attach() under FSDP2: updates run into the next forward, and no layer ever computes with old weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dos import DOSAdam
from perfmodel import Op
from tests.support.devices import Copying, UpdatesAfterStep
from tests.support.ranks import Ranks, on_pair
from tests.support.sharded import assert_equal, batch, dos_adam, mesh_of, model, shard, train, trained, values
from tests.support.training import profile

UPDATE_S = 0.1


def slow() -> UpdatesAfterStep:
    """On which the host takes UPDATE_S for a rank's update: longer by far than forward."""
    numel = sum(p.numel() for p in model().parameters()) // dist.get_world_size()
    return UpdatesAfterStep(profile(cpu_update_rate=numel / UPDATE_S), 1 << 24)


def ways_to_gather(divided: nn.Sequential, way: str) -> None:
    layers: Sequence[nn.Module] = list(divided)[:-1]
    if way == "prefetched":
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    elif way == "unsharded early":

        def gather_all(module: nn.Module, _: object) -> None:
            handles = [layer.unshard(async_op=True) for layer in layers]
            for handle in handles:
                handle.wait()

        divided.register_forward_pre_hook(gather_all, prepend=True)


def old_weights(way: str, reshard: bool | int, policy: str) -> None:
    def build() -> nn.Sequential:
        return shard(model(blocks=3), mesh_of(), reshard_after_forward=reshard)

    late, device = build(), slow()
    ways_to_gather(late, way)
    optimizer = dos_adam(late.parameters(), policy=policy, device=device, subgroup_size=50)
    optimizer.attach(late)
    for step in range(3):
        late(batch(10 * step)).pow(2).mean().backward()
        if policy == "cpu" and step > 0:  # the first step cannot know which layers will wait
            device.returned.clear()
        optimizer.step()
        device.returned.set()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert_equal(values(late), trained(lambda p: dos_adam(p, policy="cpu"), build))


@pytest.mark.parametrize(
    ("way", "reshard", "policy"),
    [
        ("plain", True, "stride:2"),
        ("plain", 2, "cpu"),
        ("prefetched", True, "cpu"),
        ("unsharded early", True, "cpu"),
    ],
)
def test_no_layer_computes_with_old_weights(
    ranks: Ranks, pair: Ranks, way: str, reshard: bool | int, policy: str
) -> None:
    divides = type(reshard) is int  # two of four ranks
    (ranks if divides else pair).run(old_weights, way, reshard, policy)


@on_pair
def test_evaluation_and_saving_wait() -> None:
    late = shard(model(), mesh_of())
    optimizer = dos_adam(late.parameters(), policy="cpu", device=slow())
    optimizer.attach(late)
    quick = shard(model(), mesh_of())
    plain = dos_adam(quick.parameters(), policy="cpu")
    for step in range(2):
        for each, its in ((late, optimizer), (quick, plain)):
            train(each, its, steps=[step])
        saved = {name: value.full_tensor() for name, value in late.state_dict().items()}
        assert_equal(list(saved.values()), values(quick))
        train(late, optimizer, steps=[step + 10])
        train(quick, plain, steps=[step + 10])
        late.eval()
        with torch.no_grad():
            assert torch.equal(late(batch(1)), quick(batch(1)))
        late.train()


@on_pair
def test_attaching_another_model_leaves_nothing_behind() -> None:
    divided = shard(model(), mesh_of())
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in divided.modules() if hasattr(layer, "unshard")]
    before = [set(vars(group)) for group in groups]
    other = shard(model(), mesh_of())
    both = [*divided.parameters(), *other.parameters()]
    one, two = (DOSAdam(both, policy="cpu", device=slow()) for _ in range(2))
    one.attach(divided)
    two.attach(divided)
    for optimizer in (one, two):
        assert [set(vars(group)) for group in groups] != before
        optimizer.attach(other)
    assert [set(vars(group)) for group in groups] == before


def divided_by(way: str) -> nn.Sequential:
    found = model()
    if way == "FSDP2":
        return shard(found, mesh_of())
    plan = {
        "0.up": ColwiseParallel(),
        "0.down": RowwiseParallel(),
        "1.up": ColwiseParallel(),
        "1.down": RowwiseParallel(),
    }
    return parallelize_module(found, mesh_of(), plan)


@pytest.mark.parametrize(("way", "offload"), [("FSDP2", False), ("tensor parallel", True)])
@on_pair
def test_models_move_after_attach(way: str, offload: bool) -> None:
    """torch swaps DTensors in `model.to()`, even where nothing changes, and forgets hooks on what it swaps."""
    ends, early = [], []
    for moves in (False, True):
        divided = divided_by(way)
        device = Copying()
        optimizer = dos_adam(divided.parameters(), policy="cpu", offload_gradients=offload, device=device)
        optimizer.attach(divided)
        for step in range(5):
            if moves and step in (0, 2):
                divided.to("cpu", torch.float32)
            device.asked.clear()
            divided(batch(step)).pow(2).mean().backward()
            early.append(sum(asked.op is Op.GRADIENT for asked in device.asked))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        ends.append(values(divided))
    assert_equal(*ends)
    assert early[9] == early[4] > 0, "gradients leave during backward again"
