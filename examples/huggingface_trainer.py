"""Hugging Face's Trainer: pass `optimizers=(DOSAdam(...), scheduler)`. The rest is as with any optimizer.

python examples/huggingface_trainer.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import tiny
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
    set_seed,
)

from dos import DOSAdam


class Progressions(Dataset[dict[str, Tensor]]):
    """What `Trainer` wants for a causal language model."""

    def __init__(self, count: int) -> None:
        self._tokens = tiny.progressions(count)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train a small Llama; the mean loss of every five steps."""
    options = tiny.options(arguments, steps=40)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(tiny.place(options.device))
    numel = sum(p.numel() for p in model.parameters())
    optimizer = DOSAdam(
        model.parameters(), lr=3e-3, subgroup_size=numel // 8, device=tiny.accelerator(options.device, numel)
    )
    optimizer.attach(model)  # step() returns early; each module waits for its own parameters
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=options.steps)
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=options.device != "cuda",
        )
        data = Progressions(16 * options.steps)
        trainer = Trainer(model, training, train_dataset=data, optimizers=(optimizer, scheduler))
        # Trainer clips to max_grad_norm=1.0. Done by DOSAdam, gradients can leave during backward; the result is equal.
        trainer.accelerator.clip_grad_norm_ = lambda parameters, max_norm, **_: optimizer.clip_grad_norm_(max_norm)
        trainer.train()
    print(optimizer.explain())
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
