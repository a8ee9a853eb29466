"""What cannot stream says so, before anything has changed, with the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

from dos import DOSAdam, EmulatedDevice
from dos.sharding.local import local
from tests.support.blocks import RUNS, inputs, loss, net, start, train
from tests.support.fake_ranks import fake_ranks
from tests.support.training import FAST, bits, everything, mlp


def float32(*_: Any) -> nn.Module:
    return net(torch.float32)


REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = [
    (net, {"weights": True}, TypeError, "weights must be the number of blocks"),
    (net, {"weights": "some"}, TypeError, "weights must be the number of blocks"),
    (net, {"weights": -1}, ValueError, "weights must be 0 or more blocks"),
    (net, {"weights": 1.5}, ValueError, "weights must be 0 or more blocks"),
    (net, {"blocks": [1]}, TypeError, "blocks must be modules"),
    (net, {"blocks": []}, ValueError, "blocks must be modules within the model"),
    (net, {"blocks": [nn.Linear(2, 2)]}, ValueError, "blocks must be modules within the model"),
    (mlp, {}, ValueError, "Sequential has no ModuleList of modules of one type; name them"),
    (lambda: torch.compile(net()), {}, ValueError, "compiled as a whole; compile its blocks instead"),
    (lambda: DistributedDataParallel(float32()), {}, ValueError, "found DistributedDataParallel; .*FSDP2"),
    (lambda: distribute_module(float32(), init_device_mesh("cpu", (2,))), {}, ValueError, "found DTensors; .*FSDP2"),
]


@pytest.mark.parametrize(("build", "arguments", "kind", "message"), REFUSED)
def test_what_cannot_stream_is_refused_and_changes_nothing(
    build: Callable[[], nn.Module], arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with fake_ranks(2):
        model = build()
        optimizer = offloading(model.parameters())
        before = bits(local(p) for p in model.parameters())
        with pytest.raises(kind, match=message):
            optimizer.attach(model, **{"weights": 0, **arguments})
        assert bits(local(p) for p in model.parameters()) == before
    if build is net:
        optimizer.attach(model, weights=0)
        train(model, optimizer, 1)


def offloading(parameters: Any) -> DOSAdam:
    return DOSAdam(parameters, device=EmulatedDevice(FAST, 10**8), offload_gradients=True)


def test_blocks_that_are_named_stream_and_must_not_be_parts_of_each_other() -> None:
    model = net()
    with pytest.raises(ValueError, match="a block must not be part of another one"):
        offloading(model.parameters()).attach(model, weights=0, blocks=[model.blocks[0], model.blocks[0].both])
    model = mlp()
    optimizer = offloading(model.parameters())
    optimizer.attach(model, weights=0, blocks=[model[0], model[3]])
    model(torch.randn(8, 24)).sum().backward()
    optimizer.step()


def test_settings_of_the_optimizer() -> None:
    model = net()
    with pytest.raises(ValueError, match="needs offload_gradients=True"):
        start(model, 0, offload_gradients=False)
    optimizer = DOSAdam(model.parameters(), offload_gradients=True)
    with pytest.raises(ValueError, match="this optimizer has none; build it with device='cuda'"):
        optimizer.attach(model, weights=0)


def test_state_that_is_there_already() -> None:
    model = net()
    optimizer = start(model, None)
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"has state for parameters of the blocks already"):
        optimizer.attach(model, weights=0)
    train(model, optimizer, 1)


def test_the_weights_of_an_attached_model_go_on_streaming() -> None:
    model = net()
    optimizer = start(model, 0)
    with pytest.raises(ValueError, match="pass weights= again"):
        optimizer.attach(model)
    train(model, optimizer, 1)


def test_parameters_that_are_not_the_optimizers() -> None:
    model = net()
    with pytest.raises(ValueError, match="requires gradients and is not the optimizer's"):
        offloading(model.first.parameters()).attach(model, weights=0)


def test_autocast_without_checkpointing() -> None:
    """Each converted weight would stay until backward. Under checkpointing it does not."""
    for run in RUNS:
        model = net(torch.float32, run=run)
        optimizer = start(model, 0)
        with torch.autocast("cpu", torch.bfloat16):
            if run is RUNS[0]:
                with pytest.raises(RuntimeError, match=r"autocast converts weights of torch.float32 that stream"):
                    model(inputs(0, model).requires_grad_())
                continue
            found = model(inputs(0, model).requires_grad_()).float().sum()
        found.backward()
        optimizer.step()
    model = net(torch.float32)
    optimizer = start(model, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss(model, 0).backward()
    optimizer.step()


def test_a_captured_graph() -> None:
    class Captures(EmulatedDevice):
        captures = False

        def capturing(self) -> bool:
            return self.captures

    device = Captures(FAST, 10**8)
    model = net()
    optimizer = start(model, 0, device=device)
    device.captures = True
    with pytest.raises(RuntimeError, match="its replays would not fetch weights that stream"):
        model(inputs(0, model))
    device.captures = False
    train(model, optimizer, 1)


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda layer: layer.weight.clamp_(-0.1, 0.1),
    "replaced": lambda layer: setattr(layer.weight, "data", layer.weight.data.clamp(-0.1, 0.1)),
}


@pytest.mark.parametrize("weights", [0, 2])
@pytest.mark.parametrize("write", WRITES)
def test_a_block_whose_forward_writes_to_its_weights(write: str, weights: int) -> None:
    """Homes are trained, and what is written to the copies while a block computes would be lost."""
    model = net(blocks=2)
    optimizer = start(model, weights)
    train(model, optimizer, 1)

    @torch.no_grad()
    def writes(layer: nn.Module, _: object) -> None:
        WRITES[write](layer)

    handle = model.blocks[0].both.register_forward_pre_hook(writes)
    before = bits(model.parameters())
    with pytest.raises(RuntimeError, match="the forward of a block wrote to its own parameter of shape"):
        loss(model, 1)
    handle.remove()
    if weights == 0:
        assert bits(model.parameters()) == before


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(("weights", "dtype"), [(0, torch.bfloat16), ("auto", torch.bfloat16), (3, torch.float32)])
def test_host_memory_that_is_too_small_for_weights_and_gradients(
    weights: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With state on disk. What the error says is enough for any step, and one byte less is refused."""

    def large() -> nn.Module:
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))).to(dtype)
        model[1][1].requires_grad_(False)
        return model

    def begin(model: nn.Module, host_memory: int) -> DOSAdam:
        options = {"disk": tmp_path, "host_memory": host_memory, "subgroup_size": 4096, "policy": "cpu"}
        optimizer = DOSAdam(
            model.parameters(), lr=1e-2, device=EmulatedDevice(FAST, 10**8), offload_gradients=True, **options
        )
        optimizer.attach(model, weights=weights, blocks=list(model[1]))
        return optimizer

    model, other = large(), large()
    before, found = bits(model.parameters()), 60_000
    with pytest.raises(MemoryError, match=r"weights that stream take \d+ bytes of host memory, gradients \d+") as error:
        begin(model, found)
    assert bits(model.parameters()) == before
    least = int(re.search(r"host_memory=(\d+) or more", str(error.value)).group(1))
    with pytest.raises(MemoryError, match=f"found host_memory={least - 1}; build .* host_memory={least} or more"):
        begin(model, least - 1)
    optimizer, reference = begin(model, least), begin(other, 10**8)
    train(model, optimizer)
    train(other, reference)
    assert everything(model, optimizer) == everything(other, reference)
    assert optimizer.metrics()["disk_held_bytes"] > 0


def test_sparse_gradients() -> None:
    """Also of weights that no `p.grad` shows."""
    model = nn.Sequential(nn.ModuleList(nn.Embedding(8, 16, sparse=True) for _ in range(2)))
    optimizer = start(model, 0)
    x = torch.arange(4)
    sum(block(x).sum() for block in model[0]).backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
