"""What dos/torch_internals/dtensors.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dos.torch_internals.dtensors import dtensor_as, local_tensor, set_local_tensor
from tests.support.ranks import on_pair
from tests.support.sharded import mesh_of

CHANGED = "torch has changed what dos/torch_internals/dtensors.py relies on"


@on_pair
def test_a_part_is_read_and_replaced_without_a_copy() -> None:
    divided = distribute_tensor(torch.arange(5.0), mesh_of(), [Shard(0)])
    part = local_tensor(divided)
    with torch.no_grad():
        assert divided.to_local() is part, CHANGED
    other = torch.zeros_like(part)
    set_local_tensor(divided, other)
    assert local_tensor(divided) is other, CHANGED
    assert not divided.full_tensor().any(), CHANGED


@on_pair
def test_one_is_made_as_another_is_laid_out() -> None:
    """Of shards that are not even, at an offset, of another dtype and shape."""
    like = distribute_tensor(torch.arange(5.0), mesh_of(), [Shard(0)])
    numel = local_tensor(like).numel()
    memory = torch.arange(2 * numel + 1, dtype=torch.bfloat16)
    made = dtensor_as(like, memory[1 : 1 + numel])
    assert isinstance(made, DTensor), CHANGED
    assert (made.shape, made.placements, made.device_mesh) == (like.shape, like.placements, like.device_mesh), CHANGED
    assert local_tensor(made).data_ptr() == memory.data_ptr() + memory.itemsize, CHANGED
    assert made.data_ptr() == 0, CHANGED
    assert made.full_tensor().tolist() == [*range(1, 4), *range(1, 3)], CHANGED
    wide = dtensor_as(like, memory[1:].view(numel, 2), (5, 2))
    assert wide.full_tensor().shape == (5, 2), CHANGED


class MovedError(Exception):
    pass


def test_from_local_moves_the_part_to_the_device_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails it may serve in dtensors.py: a part on the host of a parameter on a device must stay there."""

    def move(*_: object) -> None:
        raise MovedError

    monkeypatch.setattr(Tensor, "to", move)
    mesh: Any = SimpleNamespace(device_type="cuda")
    with pytest.raises(MovedError):
        DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
