"""Watch the optimizer in TensorBoard: `optimizer.metrics()` is a flat dict of plain numbers.

python examples/tensorboard_metrics.py      # then: tensorboard --logdir out/tensorboard
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tiny
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from dos import DOSAdam

FOLDER = Path("out/tensorboard")
EVERY = 5


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> list[float]:
    """Train and write what happens to `folder`; the loss of each step."""
    options = tiny.options(arguments, steps=60)
    where = tiny.place(options.device)
    model = tiny.model().to(where)
    numel = sum(p.numel() for p in model.parameters())
    optimizer = DOSAdam(
        model.parameters(), lr=3e-3, subgroup_size=numel // 8, device=tiny.accelerator(options.device, numel)
    )
    optimizer.attach(model)

    losses = []
    with SummaryWriter(str(folder)) as writer:
        for step, (inputs, targets) in enumerate(tiny.batches(options.steps, where)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            writer.add_scalar("loss", losses[-1], step)
            if step % EVERY == 0:
                for name, value in optimizer.metrics().items():
                    writer.add_scalar(f"optimizer/{name}", value, step)
        writer.add_text("optimizer", optimizer.explain().replace("\n", "\n\n"))

    timeline = optimizer.timeline()
    if timeline:  # it is empty with all parameters on the host: print(timeline.missing)
        timeline.save(folder / "trace.json")
        print(f"Open {folder / 'trace.json'} in https://ui.perfetto.dev to see the last step, lane by lane.")
    return losses


if __name__ == "__main__":
    main()
