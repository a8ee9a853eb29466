"""A plain training loop: one line differs from torch.optim.AdamW, two more make updates overlap and clip.

python examples/plain.py                    # on a laptop: the accelerator is emulated
python examples/plain.py --device cuda
"""

from __future__ import annotations

from collections.abc import Sequence

import tiny
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from dos import DOSAdam


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; the loss of each step."""
    options = tiny.options(arguments, steps=60)
    where = tiny.place(options.device)
    model = tiny.model().to(where)
    numel = sum(p.numel() for p in model.parameters())

    optimizer = DOSAdam(
        model.parameters(),
        lr=3e-3,
        max_grad_norm=1.0,  # instead of torch.nn.utils.clip_grad_norm_: gradients leave during backward
        subgroup_size=numel // 16,  # for so small a model; the default suits billions of parameters
        device=tiny.accelerator(options.device, numel),  # not needed on a GPU
    )
    optimizer.attach(model)  # step() returns early; each module waits for its own parameters
    scheduler = OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps)

    losses = []
    for inputs, targets in tiny.batches(options.steps, where):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if len(losses) % 10 == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.3f}")
    print(optimizer.explain())
    return losses


if __name__ == "__main__":
    main()
