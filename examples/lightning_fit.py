"""PyTorch Lightning: return DOSAdam from `configure_optimizers`, attach the module there, leave clipping to DOSAdam.

python examples/lightning_fit.py
"""

from __future__ import annotations

from collections.abc import Sequence

import pytorch_lightning as lightning
import tiny
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dos import DOSAdam, EmulatedDevice


class Predictor(lightning.LightningModule):
    """Predicts a number from the two before it."""

    def __init__(self, device: EmulatedDevice | None = None) -> None:
        super().__init__()
        self.network = tiny.model()
        self._emulated = device
        self.losses: list[float] = []

    def configure_optimizers(self) -> DOSAdam:
        """Called when the module is on its device already."""
        numel = sum(p.numel() for p in self.parameters())
        optimizer = DOSAdam(
            self.parameters(), lr=3e-3, max_grad_norm=1.0, subgroup_size=numel // 8, device=self._emulated
        )
        optimizer.attach(self)
        return optimizer

    def training_step(self, windows: Tensor) -> Tensor:
        """Lightning calls this, backward and step() in a closure, as with any optimizer."""
        loss = nn.functional.cross_entropy(self.network(windows[:, :2]), windows[:, 2])
        self.losses.append(loss.item())
        return loss


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; the loss of each step."""
    options = tiny.options(arguments, steps=60)
    numel = sum(p.numel() for p in tiny.model().parameters())
    module = Predictor(tiny.accelerator(options.device, numel))
    trainer = lightning.Trainer(
        accelerator="gpu" if options.device == "cuda" else "cpu",
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(tiny.windows(8 * options.steps), batch_size=112))
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, DOSAdam)
    print(optimizer.explain())
    return module.losses


if __name__ == "__main__":
    main()
