"""Hugging Face Accelerate with FSDP2: `prepare` shards the model and puts its shards into DOSAdam; attach after that.

torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py
torchrun --nproc-per-node 8 examples/accelerate_fsdp2.py --device cuda    # or: accelerate launch --num_processes 8 ...
"""

from __future__ import annotations

from collections.abc import Sequence

import tiny
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import nn
from torch.utils.data import DataLoader

import dos


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; this rank's loss in each step."""
    options = tiny.options(arguments, steps=60)
    tiny.check_launched()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",  # "transformer_based_wrap" for a Hugging Face model
        min_num_params=50_000,
        cpu_ram_efficient_loading=False,
    )
    on_gpu = options.device == "cuda"
    accelerator = Accelerator(cpu=not on_gpu, fsdp_plugin=plugin if on_gpu else None)
    if not on_gpu:  # Accelerate shards on GPUs alone unless it is told otherwise
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin

    model = tiny.model()
    numel = sum(p.numel() for p in model.parameters()) // accelerator.num_processes
    optimizer = dos.DOSAdam(
        model.parameters(), lr=3e-3, subgroup_size=numel // 8, device=tiny.accelerator(options.device, numel)
    )
    data = DataLoader(tiny.windows(8 * options.steps * accelerator.num_processes), batch_size=112)
    model, wrapped, data = accelerator.prepare(model, optimizer, data)  # model and optimizer in one call
    optimizer.attach(model)  # which only now has the parameters that will be gathered
    dos.fold_clipping()  # accelerator.clip_grad_norm_ leaves the gradients alone; step() multiplies by its factor

    losses = []
    for batch in data:
        loss = nn.functional.cross_entropy(model(batch[:, :2]), batch[:, 2])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        wrapped.step()
        wrapped.zero_grad()
        losses.append(loss.item())
    accelerator.print(optimizer.explain())
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
