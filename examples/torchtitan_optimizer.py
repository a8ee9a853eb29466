"""torchtitan: a container of optimizers that knows DOSAdam, to be named in a training configuration.

Written after torchtitan 0.3.0, in whose configurations (`torchtitan/models/*/config_registry.py`) it replaces
`default_adamw(lr=...)`:  `optimizer=dos_adam(lr=8e-4)`. For a try by itself, with torchtitan installed:

torchrun --nproc-per-node 2 examples/torchtitan_optimizer.py
torchrun --nproc-per-node 8 examples/torchtitan_optimizer.py --device cuda
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tiny
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.utils import clip_grad_norm_

import dos


class DOSAdamContainer(OptimizersContainer):
    """torchtitan's, with optimizers by the name "DOSAdam", each attached to its part of the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan's; `implementation` is of no meaning to DOSAdam."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        dos.fold_clipping()  # torchtitan clips in each step by torch's function
        for part in model_parts:
            mine = {id(p) for p in part.parameters()}
            for optimizer in self.optimizers:
                if isinstance(optimizer, dos.DOSAdam) and id(optimizer.param_groups[0]["params"][0]) in mine:
                    optimizer.attach(part)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        return dos.DOSAdam if name == "DOSAdam" else OptimizersContainer._resolve_optimizer_factory(name)


def dos_adam(lr: float = 8e-4, settings: dict[str, Any] | None = None, **group: Any) -> DOSAdamContainer.Config:
    """What `default_adamw` is for AdamW. settings: of DOSAdam as a whole, such as policy; group: as weight_decay."""
    group = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **group}
    return DOSAdamContainer.Config(
        param_groups=[ParamGroupConfig(pattern=r".*", optimizer_name="DOSAdam", optimizer_kwargs=group)],
        optimizer_factory_kwargs_by_name={"DOSAdam": settings or {}},
    )


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train as torchtitan's trainer does; this rank's loss in each step."""
    options = tiny.options(arguments, steps=60)
    where, rank, world = tiny.start_rank(options.device)
    model = fully_shard(tiny.model().to(where), mesh=init_device_mesh(where.type, (world,)))

    numel = sum(p.numel() for p in model.parameters()) // world
    settings = {"subgroup_size": numel // 8, "device": tiny.accelerator(options.device, numel)}
    optimizers = dos_adam(lr=3e-3, settings=settings).build(model_parts=[model])

    losses = []
    for inputs, targets in tiny.batches(options.steps, where):
        optimizers.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[rank::world]), targets[rank::world])
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()
        losses.append(loss.item())
    if rank == 0:
        print(optimizers.optimizers[0].explain())
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
