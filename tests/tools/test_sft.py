"""TRL's SFTTrainer, full and LoRA, trains with DOSAdam as with AdamW, saves, and goes on from what it saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from dos import DOSAdam, EmulatedDevice
from tests.support.installed import needs
from tests.support.training import FAST

pytestmark = [
    needs("trl", "peft", "transformers", "datasets", "tokenizers"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "<pad>", "<eos>"]
Choice = tuple[type[Optimizer], dict[str, Any]]
ADAMW: Choice = (AdamW, {"lr": 1e-2})
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def dos_adam(**settings: Any) -> Choice:
    device = EmulatedDevice(FAST, capacity=10**7)
    return DOSAdam, {"lr": 1e-2, "device": device, "policy": "cpu", "subgroup_size": 2000, **settings}


def tokenizer() -> Any:
    import tokenizers
    import transformers

    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="a", pad_token="<pad>", eos_token="<eos>"
    )


def llama() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(LETTERS), **shape))
    return model


def trainer(choice: Choice, folder: Path, *, lora: bool, attach: bool, **settings: Any) -> Any:
    import datasets
    import peft
    import trl

    rows = [" ".join(LETTERS[(start + step * i) % 26] for i in range(12)) for start in range(8) for step in (1, 2)]
    arguments = trl.SFTConfig(
        str(folder), learning_rate=1e-2, weight_decay=0.1, per_device_train_batch_size=2, logging_steps=1,
        gradient_accumulation_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, seed=0, max_length=16,
        gradient_checkpointing=False, bf16=False, **{"max_steps": 4, "save_strategy": "no", **settings},
    )  # fmt: skip
    made = trl.SFTTrainer(
        llama(), arguments, train_dataset=datasets.Dataset.from_dict({"text": rows}), processing_class=tokenizer(),
        peft_config=peft.LoraConfig(**LORA) if lora else None, optimizer_cls_and_kwargs=choice,
    )  # fmt: skip
    if attach:
        made.create_optimizer().attach(made.model)
    return made


def losses(made: Any) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def trained(made: Any, resume: str | None = None) -> tuple[list[float], list[torch.Tensor]]:
    made.train(resume_from_checkpoint=resume)
    optimizer = getattr(made.optimizer, "optimizer", made.optimizer)
    if isinstance(optimizer, DOSAdam):
        optimizer.synchronize()
        assert optimizer.metrics()
    return losses(made), [p.detach().clone() for p in made.model.parameters()]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("attach", [False, True], ids=["plain", "attached"])
def test_it_trains_as_with_adamw(lora: bool, attach: bool, tmp_path: Path) -> None:
    expected, ends = trained(trainer(ADAMW, tmp_path, lora=lora, attach=False))
    for offload in (False, True):
        found, mine = trained(trainer(dos_adam(offload_gradients=offload), tmp_path, lora=lora, attach=attach))
        assert found == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(mine, ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("first", ["dos", "adamw"])
def test_it_goes_on_from_what_was_saved(lora: bool, first: str, tmp_path: Path) -> None:
    """With the bits of a run that was not interrupted; also from AdamW's checkpoint, to rounding."""
    ours = dos_adam(offload_gradients=True)
    whole, ends = trained(trainer(ours, tmp_path / "whole", lora=lora, attach=True))
    saves = {"save_strategy": "steps", "save_steps": 2}
    trained(trainer(ours if first == "dos" else ADAMW, tmp_path / "cut", lora=lora, attach=first == "dos", **saves))
    resumed = trainer(dos_adam(offload_gradients=True), tmp_path / "cut", lora=lora, attach=True)
    found, mine = trained(resumed, str(tmp_path / "cut" / "checkpoint-2"))
    if first == "dos":
        assert found == whole
        assert all(map(torch.equal, mine, ends))
    else:
        assert found == pytest.approx(whole, rel=1e-4)
        torch.testing.assert_close(mine, ends, rtol=1e-4, atol=1e-5)
