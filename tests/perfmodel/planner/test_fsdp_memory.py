"""Device memory that FSDP2 holds beside activations: the planner's count against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from perfmodel.hardware import HardwareProfile
from perfmodel.planner.question import Question
from perfmodel.planner.situation import device_footprint
from perfmodel.planner.transformer import Transformer
from tests.support.fake_ranks import fake_ranks
from tests.support.ranks import needs_fsdp2


class Block(nn.Module):
    """A feed-forward network; its activations are nothing beside its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


def held_at_peak(layers: int, width: int, vocabulary: int, ranks: int) -> tuple[int, int]:
    """Bytes that forward and backward hold at their peak with FSDP2, and the model's parameters."""
    tracker = pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
    with fake_ranks(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        blocks = [Block(width) for _ in range(layers)]
        model = nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary, bias=False))
        numel = sum(p.numel() for p in model.parameters())
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        tokens = torch.arange(2)
        memory = tracker.FSDPMemTracker(model)
        memory.track_inputs((tokens,))
        with memory:
            model(tokens).sum().backward()
        return memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], numel


@needs_fsdp2
@pytest.mark.parametrize(("layers", "width", "vocabulary", "ranks"), [(8, 256, 1000, 8), (16, 128, 400, 4)])
def test_weights_and_gradients_of_fsdp2(layers: int, width: int, vocabulary: int, ranks: int) -> None:
    """Not less than PyTorch counts, and a quarter more at most: the planner is cautious about the root's gradients."""
    held, numel = held_at_peak(layers, width, vocabulary, ranks)
    model = Transformer(
        numel,
        layers,
        width,
        query_width=0,
        key_width=0,
        heads=1,
        inner=4 * width,
        gated=False,
        vocabulary=vocabulary,
        block_weights=layers * 8 * width**2,
        head_weights=vocabulary * width,
    )
    profile = HardwareProfile.builtin("h100")
    asked = Question(model, profile, 2**36, dtype="fp32", sequence=2, ranks=ranks, fsdp=True)
    device = device_footprint(asked)
    counted = device.peak_bytes() - device.reserved - 2 * model.block_bytes(2, 4)
    assert held <= counted <= 1.25 * held
