"""FSDP2 in a plain loop: shard, build the optimizer, attach; checkpoints of torch.distributed, resumed from the newest.

torchrun --nproc-per-node 2 examples/fsdp2.py          # on a laptop: gloo, and an emulated accelerator for each rank
torchrun --nproc-per-node 8 examples/fsdp2.py --device cuda
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dos import DOSAdam

FOLDER = Path("out/fsdp2")
EVERY = 20


def states(model: nn.Module, optimizer: DOSAdam) -> dict[str, Any]:
    """What a checkpoint has: each rank its own shards. Any number of ranks can load it."""
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def resume(folder: Path, model: nn.Module, optimizer: DOSAdam) -> int:
    """Load the newest checkpoint that is complete; the steps that it had done."""
    complete = sorted(folder.glob("step*/.metadata"))  # which is written last
    if not complete:
        return 0
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=complete[-1].parent)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return int(complete[-1].parent.name.removeprefix("step"))


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> list[float]:
    """Train from the newest checkpoint on; this rank's loss in each step."""
    options = tiny.options(arguments, steps=60)
    where, rank, world = tiny.start_rank(options.device)

    model = tiny.model().to(where)
    mesh = init_device_mesh(where.type, (world,))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    numel = sum(p.numel() for p in model.parameters()) // world
    optimizer = DOSAdam(
        model.parameters(),  # after fully_shard, which has replaced them
        lr=3e-3,
        max_grad_norm=1.0,  # of all ranks together
        subgroup_size=numel // 8,  # for so small a model; the default suits billions of parameters
        device=tiny.accelerator(options.device, numel),  # not needed on a GPU
    )
    optimizer.attach(model)  # step() returns early; each all-gather waits for its own shards

    losses = []
    done = resume(folder, model, optimizer)
    batches = itertools.islice(tiny.batches(options.steps, where), done, None)
    for step, (inputs, targets) in enumerate(batches, start=done + 1):
        loss = nn.functional.cross_entropy(model(inputs[rank::world]), targets[rank::world])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % EVERY == 0 or step == options.steps:
            dcp.save(states(model, optimizer), checkpoint_id=folder / f"step{step:06}")
            if rank == 0:
                print(f"step {step}: loss {losses[-1]:.3f}")
    if rank == 0:
        print(optimizer.explain())
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
