"""FSDP2's CPUOffloadPolicy: shards, gradients and state on the host, updated in place."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.step import host_lane
from dos.step.work import SubgroupUpdate
from tests.support.ranks import on_pair
from tests.support.sharded import adamw, assert_close, assert_equal, batch, on_host, train, trained, values

UPDATE_S = 0.02


def in_place_adam(parameters: Iterable[Tensor], **settings: Any) -> DOSAdam:
    return DOSAdam(parameters, lr=1e-2, subgroup_size=100, **settings)


def no_hooks(model: nn.Module, step: int) -> None:
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters()), "their presence makes copies blocking"


@on_pair
def test_updates_in_place() -> None:
    def clipped(model: nn.Module, step: int) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    for dtype in (torch.float32, torch.bfloat16):
        build, make = functools.partial(on_host, dtype=dtype), functools.partial(in_place_adam, max_grad_norm=0.05)
        found = trained(make, build, micro_batches=2, before_step=no_hooks)
        assert_equal(trained(make, build, attach=True, micro_batches=2), found)
        if dtype == torch.float32:
            assert_close(found, trained(adamw, build, micro_batches=2, before_step=clipped))


@contextmanager
def applied_by(apply: Callable[[Callable[..., None], SubgroupUpdate], None]) -> Iterator[None]:
    """Updates are done by this, which gets what does them otherwise."""
    plain = host_lane.apply_in_place
    host_lane.apply_in_place = functools.partial(apply, plain)
    try:
        yield
    finally:
        host_lane.apply_in_place = plain


@on_pair
def test_updates_run_into_the_next_forward() -> None:
    late = on_host(blocks=3)
    optimizer = in_place_adam(late.parameters())
    optimizer.attach(late)
    entered = threading.Event()
    late[0].register_forward_pre_hook(lambda *_: entered.set())
    last_block = {id(p) for p in late[2].parameters()}
    awaited = []

    def slow_apply(apply: Callable[..., None], update: SubgroupUpdate) -> None:
        if last_block.issuperset(id(piece.record.parameter) for piece in update.pieces):
            # It would not, if `step` waited for the last block's updates, or the first layer did.
            assert entered.wait(60), "the next forward did not begin"
            awaited.append(update)
        time.sleep(UPDATE_S)
        apply(update)

    with applied_by(slow_apply):
        for step in range(4):
            late(batch(10 * step)).pow(2).mean().backward()
            if step > 0:  # the first step cannot know which layers will wait
                entered.clear()
            optimizer.step()
            optimizer.zero_grad()
        entered.set()
        optimizer.synchronize()
    assert_equal(values(late), trained(in_place_adam, functools.partial(on_host, blocks=3), steps=range(4)))
    assert awaited


@on_pair
def test_a_failure_is_said_before_state_is_read() -> None:
    def breaks(apply: Callable[..., None], update: SubgroupUpdate) -> None:
        raise OSError("the memory is broken")

    for wait in (DOSAdam.synchronize, DOSAdam.state_dict):
        late = on_host()
        optimizer = in_place_adam(late.parameters())
        optimizer.attach(late)
        train(late, optimizer, steps=[0, 1])
        optimizer.synchronize()
        with applied_by(breaks):
            train(late, optimizer, steps=[2])
            with pytest.raises(RuntimeError, match="the memory is broken"):
                wait(optimizer)
        with pytest.raises(RuntimeError, match="undefined state: step 2 was the last complete one"):
            optimizer.step()
