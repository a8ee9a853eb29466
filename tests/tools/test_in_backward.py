"""Updates during backward in the loops of others, which say themselves when they only add up gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dos import DOSAdam
from tests.support.training import Regression, assert_close_ulp, batch, everything, loss_of, mlp


def test_accelerates_accumulation_needs_no_code() -> None:
    accelerate = pytest.importorskip("accelerate")
    found = []
    for updates in ("step", "backward"):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        model = mlp()
        optimizer = DOSAdam(model.parameters(), lr=0.01)
        prepared, stepped = accelerator.prepare(model, optimizer)
        optimizer.attach(model, updates=updates)
        for i in range(8):
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_of(prepared, i))
                stepped.step()
                stepped.zero_grad()
        assert float(optimizer.state_dict()["state"][0]["step"]) == 4
        found.append(everything(model, optimizer))
    assert found[0] == found[1]


def by_trainer(kind: Any, folder: Path, resume: Path | None = None) -> tuple[list[float], list[Tensor]]:
    """The norms that were logged, and the parameters after training, or after going on from a checkpoint."""
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(folder), learning_rate=1e-2, max_steps=4, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        logging_steps=1, save_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, max_grad_norm=0,
    )  # fmt: skip
    data = [{"inputs": batch(seed)} for seed in range(8)]
    trainer = transformers.Trainer(
        Regression(), arguments, train_dataset=data, optimizer_cls_and_kwargs=(kind, {"lr": 1e-2})
    )
    optimizer = trainer.create_optimizer()
    if kind is DOSAdam:
        optimizer.attach(trainer.model, updates="backward")
    trainer.train(resume_from_checkpoint=resume and str(resume))
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return norms, list(trainer.model.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_trainer_asks_for_norms_that_nobody_knows(tmp_path: Path) -> None:
    """For its log alone, with `max_grad_norm=0`; it trains as with AdamW, and goes on from what it has saved."""
    norms, expected = by_trainer(torch.optim.AdamW, tmp_path / "adamw")
    for resume in (None, tmp_path / "dos" / "checkpoint-2"):
        found, ends = by_trainer(DOSAdam, tmp_path / "dos", resume)
        assert_close_ulp(ends, expected)
        assert len(norms) == 4
        assert torch.tensor(found).isnan().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_lightning_needs_no_code(automatic: bool) -> None:
    """It calls `step(closure)` in both forms; and a module is fitted again, by another optimizer than before."""
    lightning = pytest.importorskip("pytorch_lightning")
    optimizers: list[Any] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.net, self.kind, self.automatic_optimization = mlp(), kind, automatic

        def configure_optimizers(self) -> Any:
            optimizer = self.kind(self.parameters(), lr=0.01)
            if self.kind is DOSAdam:
                optimizer.attach(self, updates="backward")
            optimizers.append(optimizer)
            return optimizer

        def training_step(self, inputs: Tensor) -> Tensor:
            loss: Tensor = self.net(inputs).square().mean()
            if not automatic:
                optimizer = self.optimizers()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return loss

    ends = []
    for kind in (DOSAdam, torch.optim.AdamW):
        module = Module(kind)
        for _ in range(2):
            lightning.Trainer(
                accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(module, torch.utils.data.DataLoader([batch(seed) for seed in range(4)], batch_size=None))  # fmt: skip
        ends.append(list(module.parameters()))
    assert_close_ulp(*ends, 256)
