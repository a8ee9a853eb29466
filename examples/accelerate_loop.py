"""Hugging Face Accelerate, with accumulation over micro-batches: `prepare` wraps DOSAdam as any optimizer.

python examples/accelerate_loop.py          # or: accelerate launch examples/accelerate_loop.py
python examples/accelerate_loop.py --device cuda
"""

from __future__ import annotations

from collections.abc import Sequence

import tiny
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from dos import DOSAdam

MICRO_BATCHES = 2


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; the loss of each micro-batch."""
    options = tiny.options(arguments, steps=60)
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, cpu=options.device != "cuda")
    model = tiny.model().to(accelerator.device)  # before the optimizer is built
    numel = sum(p.numel() for p in model.parameters())
    optimizer = DOSAdam(
        model.parameters(), lr=3e-3, subgroup_size=numel // 8, device=tiny.accelerator(options.device, numel)
    )
    optimizer.attach(model)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=options.steps)
    data = DataLoader(tiny.windows(8 * options.steps * MICRO_BATCHES), batch_size=112)
    model, wrapped, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch[:, :2]), batch[:, 2])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                optimizer.clip_grad_norm_(1.0)  # instead of accelerator.clip_grad_norm_
            wrapped.step()
            scheduler.step()
            wrapped.zero_grad()
        losses.append(loss.item())
    accelerator.print(optimizer.explain())
    return losses


if __name__ == "__main__":
    main()
