"""A model larger than the GPU: FSDP2 keeps parameters and gradients on the host, DOSAdam updates them there.

python examples/larger_than_the_gpu.py                    # on a laptop: what a GPU would hold is counted
python examples/larger_than_the_gpu.py --device cuda
torchrun --nproc-per-node 2 examples/larger_than_the_gpu.py

One GPU is enough; under torchrun each rank has its share. A layer's weights are on the GPU while it runs, so the GPU
needs memory for some layers and for activations, the host 16 bytes for each parameter in float32, 14 in bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dos import DOSAdam

LAYERS = 12
DEVICE_BYTES = 200_000
"""Of the GPU that is thought of where there is none: a quarter of the model."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(tiny.VOCABULARY, 64), nn.Flatten(), nn.Linear(128, 64))
    last = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, tiny.VOCABULARY))
    return nn.Sequential(first, *(Layer() for _ in range(LAYERS)), last)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; this rank's loss in each step."""
    options = tiny.options(arguments, steps=60)
    cuda = options.device == "cuda"
    if "RANK" not in os.environ and not dist.is_initialized():  # not under torchrun
        dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        rank, world = 0, 1
    else:
        _, rank, world = tiny.start_rank(options.device)
    net = model()
    mesh = init_device_mesh("cuda" if cuda else "cpu", (world,))
    policy = CPUOffloadPolicy(pin_memory=cuda)
    for layer in net:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(net, mesh=mesh, offload_policy=policy)

    optimizer = DOSAdam(net.parameters(), lr=3e-3, max_grad_norm=1.0)
    optimizer.attach(net)  # a layer waits for its own update, while others are still being updated

    gathered = Gathered(net)
    losses = []
    for inputs, targets in tiny.batches(options.steps, torch.device("cuda" if cuda else "cpu")):
        loss = nn.functional.cross_entropy(net(inputs[rank::world]), targets[rank::world])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.synchronize()
    whole = sum(p.numel() * p.element_size() for p in net.parameters())
    peak = torch.cuda.max_memory_allocated() if cuda else gathered.peak
    if not cuda:
        assert peak <= DEVICE_BYTES < whole
    if rank == 0:
        held = "of GPU memory" if cuda else "of them gathered at once"
        print(f"{whole} bytes of parameters; at most {peak} bytes {held}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


class Gathered:
    """Counts the bytes of parameters that FSDP2 has gathered, which would be on the GPU. peak: the most so far."""

    def __init__(self, model: nn.Sequential) -> None:
        self.layers = {layer: sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in model}
        self.peak = 0
        for layer in model:
            layer.register_forward_pre_hook(lambda *_: self.look())
            layer.register_full_backward_pre_hook(lambda *_: self.look())

    def look(self) -> None:
        """A layer's parameters are DTensors but while they are gathered."""
        now = [size for layer, size in self.layers.items() if not isinstance(next(layer.parameters()), DTensor)]
        self.peak = max(self.peak, sum(now))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
