"""Trainer, Accelerate and Lightning with offloaded gradients, which they clip as they always do: AdamW's results."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from dos import DOSAdam, EmulatedDevice
from tests.support.devices import LateDevice
from tests.support.training import FAST, Regression, leaving_early, mlp

pytestmark = [
    pytest.mark.usefixtures("one_core"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
ADAMW: tuple[type[Optimizer], dict[str, Any]] = (AdamW, {"lr": 1e-2})
BATCHES = [torch.randn(8, 24, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]


def dos_adam() -> tuple[type[Optimizer], dict[str, Any]]:
    """Ours, with all gradients on the host."""
    device = EmulatedDevice(FAST, capacity=10**7)
    settings = {"policy": "cpu", "subgroup_size": 500, "device": device, "offload_gradients": True}
    return DOSAdam, {"lr": 1e-2, **settings}


def checked(run: Callable[..., Any]) -> Callable[..., Any]:
    """Fail unless offloaded gradients leave during backward."""

    @functools.wraps(run)
    def with_check(choice: tuple[type[Optimizer], dict[str, Any]], *args: Any, **settings: Any) -> Any:
        with leaving_early() as left:
            found = run(choice, *args, **settings)
        assert left or not choice[1].get("offload_gradients")
        return found

    return with_check


@checked
def by_trainer(choice: tuple[type[Optimizer], dict[str, Any]], folder: Path, **settings: Any) -> tuple[Any, ...]:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(folder), learning_rate=1e-2, weight_decay=0.1, max_steps=3, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, **settings,
    )  # fmt: skip
    data = [{"inputs": batch} for batch in BATCHES]
    trainer = transformers.Trainer(Regression(), arguments, train_dataset=data, optimizer_cls_and_kwargs=choice)
    trainer.train()
    groups = [
        (group["weight_decay"], group["initial_lr"], len(group["params"])) for group in trainer.optimizer.param_groups
    ]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return norms, groups, list(trainer.model.parameters())


@pytest.mark.parametrize("max_grad_norm", [None, 0.01, 0], ids=["by default", "tightly", "not at all"])
def test_trainer(max_grad_norm: float | None, tmp_path: Path) -> None:
    settings = {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
    norms, groups, ends = by_trainer(dos_adam(), tmp_path, **settings)
    expected, their_groups, their_ends = by_trainer(ADAMW, tmp_path, **settings)
    assert norms == pytest.approx(expected, rel=1e-5)
    assert groups == their_groups
    assert {(decay, lr) for decay, lr, _ in groups} == {(0.1, 1e-2), (0.0, 1e-2)}
    torch.testing.assert_close(ends, their_ends, rtol=1e-4, atol=1e-6)


@checked
def by_accelerate(choice: tuple[type[Optimizer], dict[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = mlp()
    kind, settings = choice
    optimizer = kind(model.parameters(), **settings)  # type: ignore[call-arg]
    model, wrapped = accelerator.prepare(model, optimizer)
    norms = []
    for batch in BATCHES:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.01))
            wrapped.step()
            wrapped.zero_grad()
    return norms, list(model.parameters())


def test_accelerate() -> None:
    torch.testing.assert_close(by_accelerate(dos_adam()), by_accelerate(ADAMW), rtol=1e-4, atol=1e-6)


@checked
def by_lightning(choice: tuple[type[Optimizer], dict[str, Any]], **given: Any) -> list[Tensor]:
    lightning = pytest.importorskip("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    kind, settings = choice
    attach = settings.get("attach", False)
    settings = {name: value for name, value in settings.items() if name != "attach"}

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def configure_optimizers(self) -> Optimizer:
            optimizer: Any = kind(self.parameters(), **settings)  # type: ignore[call-arg]
            if attach:
                optimizer.attach(self)
            return optimizer  # type: ignore[no-any-return]

        def training_step(self, batch: Tensor) -> Tensor:
            return self.net(batch).square().mean()

    if scale := given.pop("scale", None):  # Trainer makes no scaler on the CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        given["plugins"] = [lightning.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=4, accumulate_grad_batches=2, enable_model_summary=False, **quiet, **given
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    return list(module.parameters())


OFFLOADS = dos_adam()[1]
STAYS = OFFLOADS | {"offload_gradients": False}


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        (OFFLOADS, {"gradient_clip_val": 0.01}),
        (OFFLOADS, {"gradient_clip_val": 0.01, "precision": "bf16-mixed"}),
        (STAYS, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "precision": "bf16-mixed"}),
        (STAYS, {"scale": 8.0}),
        (STAYS, {"scale": 8.0, "gradient_clip_val": 0.01}),
        (STAYS, {"scale": 2.0**20, "gradient_clip_val": 0.01}),
    ],
    ids=["clips", "bf16", "bf16, by value", "16", "16, clips", "16, infinite at first, clips"],
)
def test_lightning(settings: dict[str, Any], given: dict[str, Any]) -> None:
    torch.testing.assert_close(
        by_lightning((DOSAdam, settings), **given), by_lightning(ADAMW, **given), rtol=1e-4, atol=1e-6
    )


def averages(choice: tuple[type[Optimizer], dict[str, Any]]) -> list[Tensor]:
    """Lightning's average of the weights, of which it reads all right after each step."""
    callbacks = pytest.importorskip("pytorch_lightning.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    average = callbacks.EMAWeightAveraging(decay=0.5)
    by_lightning(choice, callbacks=[average])
    return list(average._average_model.parameters())


def test_lightning_averages_weights_whose_updates_run_on() -> None:
    device = LateDevice(lambda op: 0.01)
    settings = STAYS | {"device": device, "attach": True}
    torch.testing.assert_close(averages((DOSAdam, settings)), averages(ADAMW), rtol=1e-4, atol=1e-6)


def test_lightning_is_told_what_does_not_work() -> None:
    with pytest.raises(RuntimeError, match="clip_grad_value_ cannot clip gradients that DOSAdam"):
        by_lightning(dos_adam(), gradient_clip_val=0.01, gradient_clip_algorithm="value")
    with pytest.raises(RuntimeError, match="GradScaler cannot check gradients that DOSAdam"):
        by_lightning(dos_adam(), scale=8.0)
