"""State of the parameters of blocks: how it is divided, counted and moved, and that nothing is left of a refusal."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from dos import DOSAdam, EmulatedDevice
from dos.parameters.allocation import Allocation
from tests.support.blocks import loss, net, start, train
from tests.support.inside import session_of
from tests.support.training import FAST, everything

pytestmark = pytest.mark.usefixtures("one_core")


def test_subgroups_have_the_size_that_all_parameters_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though blocks are enrolled one by one."""
    found, plain = list[int](), Allocation.size_on_device
    monkeypatch.setattr(Allocation, "size_on_device", lambda self, numel: (found.append(numel), plain(self, numel))[1])
    model = net()
    start(model, 0)
    assert set(found) == {sum(p.numel() for p in model.parameters())}


def test_subgroups_of_a_block_that_is_unfrozen_in_part_lie_together() -> None:
    """A plan takes all that lies between a block's first subgroup and its last one for the block's."""
    model = net()
    model.blocks[0].out.requires_grad_(False)
    optimizer = start(model, 0)
    train(model, optimizer, 1)
    model.blocks[0].out.requires_grad_()
    optimizer.attach(model, weights=0)
    loads = session_of(optimizer).assembly.weights.workload()["blocks"]
    assert all(block.stop <= after.start for block, after in itertools.pairwise(loads))


def test_an_attach_that_is_refused_leaves_no_state(tmp_path: Path) -> None:
    model = net()
    optimizer = DOSAdam(
        model.parameters(),
        device=EmulatedDevice(FAST, 10**8),
        offload_gradients=True,
        disk=tmp_path,
        host_memory=1000,
    )
    with pytest.raises(MemoryError, match="weights that stream take"):
        optimizer.attach(model, weights=0)
    registry = session_of(optimizer).registry
    assert not registry.records
    assert not registry.devices.streamed


def test_frozen_weights_at_home_are_counted() -> None:
    def held(weights: Any) -> int:
        model = net()
        model.blocks.requires_grad_(False)
        optimizer = start(model, weights)
        return session_of(optimizer).registry.host_store.nbytes

    assert held(0) - held(1.0) >= sum(p.nbytes for p in net().blocks.parameters())


def test_memory_of_weights_that_were_frozen_goes_when_they_are_trained() -> None:
    model = net()
    model.blocks.requires_grad_(False)
    optimizer = start(model, 0)
    model.blocks.requires_grad_()
    optimizer.attach(model, weights=0)
    other = net()
    reference = start(other, 0)
    held = [session_of(each).registry.host_store.nbytes for each in (optimizer, reference)]
    assert held[0] == held[1] > 0


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("weights", [0, 1.0])
def test_writes_of_which_no_version_tells_count_beside_a_move(weights: Any, before: bool) -> None:
    def end(weights: Any) -> list[bytes]:
        model = net(torch.float16)
        optimizer = start(model, None if weights is None else 2)
        train(model, optimizer, 1)

        def write() -> None:
            for p in model.parameters():
                p.data.mul_(0.5)

        if before:
            write()
        if weights is not None:
            optimizer.attach(model, weights=weights)
        if not before:
            write()
        train(model, optimizer, 1, first=1)
        return everything(model, optimizer)

    assert end(weights) == end(None)


def test_a_weight_of_a_frozen_block_that_is_replaced_before_a_step_that_moves_the_block() -> None:
    """A step looks for other memory in blocks that it updates, and in no others."""

    def end(weights: Any) -> list[bytes]:
        model = net()
        model.blocks[1].requires_grad_(False)
        frozen = model.blocks[1].out.weight
        optimizer = start(model, weights)
        loss(model, 0).backward()
        frozen.data = torch.full_like(frozen, 0.25)
        optimizer.step()
        optimizer.zero_grad()
        if weights is not None:
            assert not session_of(optimizer).assembly.weights.stream.blocks[1].streams
        train(model, optimizer, 1, first=1)
        return everything(model, optimizer)

    assert end("auto") == end(None)
