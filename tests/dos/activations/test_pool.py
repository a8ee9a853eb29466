"""The pool on the host: which memory blocks get, and calls for a saved tensor that do not grow with their number."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dos import EmulatedDevice
from dos.activations.pool import Block, HostPool
from dos.state.arena import ALIGNMENT, aligned
from tests.support.activations import BATCH, WIDTH, Layers, start
from tests.support.training import FAST

SIZES = st.integers(1, 6 * ALIGNMENT)


def place(pool: HostPool, block: Block) -> tuple[int, int]:
    first = block.tensor.data_ptr() - pool._region.data_ptr()
    return first, first + aligned(block.tensor.nbytes)


def first_gap(pool: HostPool, blocks: list[Block], nbytes: int) -> int | None:
    """Where a block goes, found by looking at every gap."""
    end = 0
    for start_of_next, its_end in [*sorted(place(pool, each) for each in blocks), (pool.nbytes, pool.nbytes)]:
        if start_of_next - end >= aligned(nbytes):
            return end
        end = its_end
    return None


@given(st.lists(st.tuples(SIZES, st.integers(0, 8)), max_size=40))
def test_blocks_get_the_first_gap_and_return_what_they_had(asked: list[tuple[int, int]]) -> None:
    pool = HostPool(EmulatedDevice(FAST, 10**9))
    pool.resize(20 * ALIGNMENT)
    blocks: list[Block] = []
    for nbytes, lost in asked:
        expected = first_gap(pool, blocks, nbytes)
        block = pool.take(nbytes)
        assert (None if block is None else place(pool, block)[0]) == expected
        if block is not None:
            assert block.tensor.nbytes == nbytes
            blocks.append(block)
        del block, blocks[lost : lost + 1]
        assert pool.used == sum(aligned(each.tensor.nbytes) for each in blocks)
    blocks.clear()
    assert pool.take(pool.nbytes) is not None, "all gaps are one again"


def test_a_block_of_a_region_that_was_replaced_is_no_memory_of_the_new_one() -> None:
    pool = HostPool(EmulatedDevice(FAST, 10**9))
    pool.resize(2 * ALIGNMENT)
    old = pool.take(ALIGNMENT)
    pool.resize(4 * ALIGNMENT)
    assert old is not None
    old.tensor.fill_(1)  # its region is still there
    new = pool.take(4 * ALIGNMENT)
    del old
    assert new is not None
    assert (pool.used, pool.take(1)) == (4 * ALIGNMENT, None)


@pytest.mark.parametrize("room", [1.0, 0.25], ids=["all fit", "most are denied"])
def test_calls_for_a_saved_tensor_do_not_grow_with_their_number(room: float) -> None:
    few, many = (calls(layers, room) / layers for layers in (20, 80))
    assert many < 1.1 * few


def calls(layers: int, room: float) -> int:
    """How often a forward and backward call a function of dos/activations, in an iteration after others."""
    model, optimizer, offload = start(1.0, model=Layers(layers), subgroup_size=10**6)
    found = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call" and "dos/activations" in frame.f_code.co_filename

    def iteration(model: nn.Module) -> None:
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()

    iteration(model)
    optimizer.step()
    offload.pool.resize(int(room * offload.pool.nbytes))
    sys.setprofile(count)
    try:
        iteration(model)
    finally:
        sys.setprofile(None)
    return found
