"""What a newcomer gets wrong with several ranks: a clear message on every rank, and no rank waits for ever."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.ranks import on_pair
from tests.support.sharded import (
    assert_equal,
    batch,
    dos_adam,
    mesh_of,
    model,
    shard,
    train,
    trained,
    values,
)

BUILT_TOO_EARLY = (
    r"parameters are in no model any more, the first of them parameter 0 .* build the optimizer after fully_shard"
)


@pytest.mark.parametrize("how", ["fully_shard", "blocks alone", "parallelize_module"])
@on_pair
def test_an_optimizer_that_was_built_before_its_model_was_divided(how: str) -> None:
    if how == "parallelize_module":
        divided: nn.Module = nn.Sequential(nn.Linear(8, 8))
        optimizer = dos_adam(divided.parameters())
        parallelize_module(divided, mesh_of(), {"0": ColwiseParallel()})
    else:
        divided = model()
        chosen = divided[:-1] if how == "blocks alone" else divided
        optimizer = dos_adam(divided.parameters())
        for block in divided[:-1] if chosen is not divided else ():
            shard(nn.Sequential(block, nn.Identity()), mesh_of())
        if chosen is divided:
            shard(divided, mesh_of())
    rows = torch.randn(4, 8) if how == "parallelize_module" else batch(0)
    divided(rows).pow(2).mean().backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=BUILT_TOO_EARLY):
            optimizer.step()
    with pytest.raises(RuntimeError, match=BUILT_TOO_EARLY):
        optimizer.clip_grad_norm_(1.0)


@on_pair
def test_a_step_without_gradients_only_warns() -> None:
    """A step without gradients is harmless: before the first backward, of another model, of parameters in no module."""
    divided, plain = shard(model(), mesh_of()), model()
    loose = nn.Parameter(torch.ones(99))
    divided(batch(0)).pow(2).mean().backward()
    for parameters in (shard(model(), mesh_of()).parameters(), plain.parameters(), [loose]):
        kept = list(parameters)
        with pytest.warns(UserWarning, match="found no gradient on any of its parameters"):
            dos_adam(kept).step()


@on_pair
def test_parameters_that_a_framework_exchanges() -> None:
    """As Accelerate does when it prepares: the parameters of an optimizer that is there become DTensors."""
    divided = model()
    before = weakref.ref(divided[0].up.weight)
    optimizer = dos_adam(divided.parameters(), policy="cpu", max_grad_norm=0.05)
    names = [name for name, _ in divided.named_parameters()]
    optimizer.param_groups[0]["params"] = []
    shard(divided, mesh_of())
    named = dict(divided.named_parameters())
    optimizer.param_groups[0]["params"] = [named[name] for name in names]
    train(divided, optimizer, steps=range(2))
    gc.collect()
    assert before() is None, "the undivided parameters are kept alive"
    plain = trained(lambda p: dos_adam(p, policy="cpu", max_grad_norm=0.05), steps=range(2))
    assert_equal(values(divided), plain)


@pytest.mark.parametrize(
    ("setting", "values", "message"),
    [
        (
            "max_grad_norm",
            (1.0, None),
            r"disagree on max_grad_norm: this one \(rank {rank}\) has {mine}, and others have",
        ),
        ("policy", ("cpu", "adaptive"), r"disagree on policy: this one \(rank {rank}\) has {mine}, and others have"),
        (
            "state_format",
            (None, "int8"),
            r"disagree on state_format: this one \(rank {rank}\) has {mine}, and others have",
        ),
        ("offload_gradients", (True, False), r"on offload_gradients: this one \(rank {rank}\) has {mine}, and others"),
        ("", (16, 15), r"the number of parameters: this one \(rank {rank}\) has {mine}, and from 15 to 16 were found"),
    ],
)
@on_pair
def test_ranks_that_disagree(setting: str, values: tuple[Any, Any], message: str) -> None:
    first = dist.get_rank() == 0
    divided = shard(model(), mesh_of())
    parameters = list(divided.parameters())
    kwargs = {setting: values[not first]} if setting else {}
    optimizer = dos_adam(parameters if setting or first else parameters[1:], **kwargs)
    divided(batch(0)).pow(2).mean().backward()
    mine = message.format(rank=dist.get_rank(), mine=values[not first])
    with pytest.raises(RuntimeError, match=mine):
        optimizer.step()
    dist.barrier()  # no rank is waiting in another collective


@on_pair
def test_state_on_another_mesh() -> None:
    elsewhere, divided = shard(model(), mesh_of(1)), shard(model(), mesh_of())
    first, second = dos_adam(elsewhere.parameters()), dos_adam(divided.parameters())
    train(elsewhere, first, steps=range(2))
    train(divided, second, steps=range(2))
    with pytest.raises(
        ValueError, match=r"parameter 0 .* its state 'exp_avg' is divided over .*, the parameter over .*"
    ):
        second.load_state_dict(first.state_dict())
    alone = model()
    with pytest.raises(ValueError, match=r"'exp_avg' is divided over .*, the parameter over nothing; load it with"):
        dos_adam(alone.parameters()).load_state_dict(first.state_dict())
    train(divided, second, steps=range(2, 4))
    assert_equal(values(divided), trained(dos_adam, steps=range(4)))
