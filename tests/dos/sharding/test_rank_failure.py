"""A rank that dies or hangs: the others say so, nothing is half written, and a checkpoint resumes to the bit."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dos import DOSAdam
from tests.support.ranks import DIED, Ranks, needs_fsdp2
from tests.support.sharded import assert_equal, batch, dos_adam, load, model, save, shard, train, values

WORLD = 2


def build() -> tuple[nn.Module, DOSAdam]:
    found = shard(model(), init_device_mesh("cpu", (WORLD,)))  # of the group that there is now
    return found, dos_adam(found.parameters(), policy="stride:2", max_grad_norm=1.0)


def saves_and_goes_on(folder: str) -> list[Tensor]:
    module, optimizer = build()
    train(module, optimizer, steps=range(2))
    save(folder, module, optimizer, "save")
    train(module, optimizer, steps=range(2, 5))
    return values(module)


def before_the_step() -> tuple[nn.Module, DOSAdam]:
    module, optimizer = build()
    train(module, optimizer, steps=range(3))
    module(batch(30)).pow(2).mean().backward()
    return module, optimizer


def fails_whole(module: nn.Module, optimizer: DOSAdam, match: str) -> None:
    """A step without the other rank says so and changes nothing."""
    before = [p.to_local().clone() for p in module.parameters()]
    with pytest.raises(Exception, match=match):
        optimizer.step()
    for p, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), value)
    assert all(float(entry["step"]) == 3 for entry in optimizer.state.values())


def loses_a_rank() -> None:
    module, optimizer = before_the_step()
    if dist.get_rank() == 1:
        os._exit(1)
    fails_whole(module, optimizer, r"(?i)connection|peer|closed|timed out")


def waits_for_a_rank(said: str) -> None:
    """The second rank hangs until the first one has said so."""
    module, optimizer = before_the_step()
    if dist.get_rank() == 1:
        while not Path(said).exists():
            time.sleep(0.01)
        return
    # From here on, so that nothing else is late on a busy machine.
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=1234))
    fails_whole(module, optimizer, r"(?i)timed out.* 1234 ?ms")
    Path(said).touch()


def resumes_in_a_new_group(folder: str, store: str) -> list[Tensor]:
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    module, optimizer = build()
    load(folder, module, optimizer)
    train(module, optimizer, steps=range(2, 5))
    return values(module)


@needs_fsdp2
def test_a_rank_that_hangs_and_one_that_dies(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    ranks = Ranks(WORLD)
    try:
        expected, _ = ranks.run(saves_and_goes_on, checkpoint)
        ranks.run(waits_for_a_rank, str(tmp_path / "said"))
        for found in ranks.run(resumes_in_a_new_group, checkpoint, str(tmp_path / "store")):
            assert_equal(found, expected)
        _, died = ranks.run(loses_a_rank)
        assert died == DIED
    finally:
        ranks.stop()
