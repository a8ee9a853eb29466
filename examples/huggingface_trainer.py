"""Hugging Face's Trainer: pass `optimizer_cls_and_kwargs=(DOSAdam, {...})`. The rest is as with any optimizer.

python examples/huggingface_trainer.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import tiny
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

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
    settings = {
        "lr": 3e-3,
        "offload_gradients": True,  # gradients are freed in backward; Trainer clips them by torch, to 1.0
        "subgroup_size": numel // 8,
        "device": tiny.accelerator(options.device, numel),
    }
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            folder,
            max_steps=options.steps,
            learning_rate=settings["lr"],
            weight_decay=0.1,
            lr_scheduler_type="cosine",
            per_device_train_batch_size=16,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=options.device != "cuda",
        )
        data = Progressions(16 * options.steps)
        trainer = Trainer(model, training, train_dataset=data, optimizer_cls_and_kwargs=(DOSAdam, settings))
        optimizer = trainer.create_optimizer()  # with Trainer's groups: no weight decay for biases and norms
        optimizer.attach(model)  # step() returns early; each module waits for its own parameters
        trainer.train()
    print(optimizer.explain())
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
