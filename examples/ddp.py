"""DistributedDataParallel: one line lets each bucket's gradients leave for the host when they have been reduced.

torchrun --nproc-per-node 2 examples/ddp.py
torchrun --nproc-per-node 8 examples/ddp.py --device cuda
"""

from __future__ import annotations

from collections.abc import Sequence

import tiny
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dos import DOSAdam


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; this rank's loss in each step."""
    options = tiny.options(arguments, steps=60)
    where, rank, world = tiny.start_rank(options.device)

    ddp = DistributedDataParallel(tiny.model().to(where))
    numel = sum(p.numel() for p in ddp.parameters())  # each rank keeps all of the state
    optimizer = DOSAdam(
        ddp.parameters(),
        lr=3e-3,
        max_grad_norm=1.0,
        subgroup_size=numel // 8,
        device=tiny.accelerator(options.device, numel),  # not needed on a GPU
    )
    optimizer.register_ddp(ddp)  # before the first forward; a communication hook of your own is its second argument
    optimizer.attach(ddp)

    losses = []
    for inputs, targets in tiny.batches(options.steps, where):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs[rank::world]), targets[rank::world])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        print(optimizer.explain())
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
