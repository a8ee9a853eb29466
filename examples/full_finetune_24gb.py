"""Full fine-tuning of models of any size on one GPU: exact AdamW, clipping, accumulation; a loop, or Trainer.

python examples/full_finetune_24gb.py --model meta-llama/Llama-3.1-8B --text corpus.txt             # a plain loop
python examples/full_finetune_24gb.py --model meta-llama/Llama-3.1-8B --text corpus.txt --trainer   # Hugging Face's
python examples/full_finetune_24gb.py --model Qwen/Qwen2.5-14B --text corpus.txt --weights auto --batch 16
python examples/full_finetune_24gb.py --tiny                                     # on a laptop, with an emulated GPU

Without --weights the weights have to fit on the GPU, 16 GB for 8B. It takes 105 GiB of host memory for 8B, 60 GiB with
--state-format int8; with --disk FOLDER, on a local drive, less. docs/any-size.md has more. Run it again with --resume
to go on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dos import DOSAdam, EmulatedDevice
from perfmodel.hardware import HardwareProfile

CHUNK = 512
"""Tokens of which logits are there at once."""
SHARD = "2GB"
CHECKPOINTING = "activation" if hasattr(LlamaForCausalLM, "activation_checkpointing_enable") else "gradient"
"""The word that this version of transformers has for it."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or a folder, as from_pretrained takes them")
    parser.add_argument("--text", type=Path, help="a text file to train on")
    parser.add_argument("--tiny", action="store_true", help="a random Llama of 0.5 million parameters, emulated GPU")
    parser.add_argument("--trainer", action="store_true", help="Hugging Face's Trainer, not a plain loop")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches in each step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--state-format", choices=("split", "int8"), default="split", help="int8 is not exact")
    parser.add_argument("--weights", choices=("auto",), help="layers that the GPU has no room for stream to it")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="for state that the host has no room for")
    parser.add_argument("--output", type=Path, default=Path("out"))
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="10 bytes a parameter, beside 2")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    options = parser.parse_args(arguments)
    if not options.tiny and (options.model is None or options.text is None):
        parser.error("pass --model and --text, or --tiny")
    if options.resume and not any(options.output.glob("checkpoint*")):
        parser.error(f"there is no checkpoint in {options.output}; leave --resume out, or pass its --output")
    return options


def tiny_model(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 160, "intermediate_size": 320, "num_hidden_layers": layers, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=tiny.VOCABULARY, **shape)).to(torch.bfloat16)


def tiny_gpu(numel: int) -> EmulatedDevice:
    """Has as many bytes for each parameter as 24 GB are for those of a 7B model, 3.75; the weights take 2 of them.

    An update of this model takes about as long on it as two micro-batches.
    """
    machine = HardwareProfile.builtin("rtx_4090_desktop").scaled(4e-3)
    return EmulatedDevice(machine, capacity=15 * numel // 4, occupied=2 * numel)


def tiny_gpu_for_streaming(numel: int) -> EmulatedDevice:
    """Has 1.7 bytes for each parameter, as 24 GB are for those of a 14B model; the weights take 2."""
    return EmulatedDevice(HardwareProfile.builtin("rtx_4090_desktop").scaled(4e-3), capacity=17 * numel // 10)


def rows_of_tokens(options: argparse.Namespace) -> Tensor:
    """int64 of shape (sequences, length)."""
    if options.tiny:
        return tiny.progressions(64)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = tokenizer(options.text.read_text(), return_tensors="pt", verbose=False).input_ids[0]
    return tokens[: len(tokens) // options.length * options.length].view(-1, options.length)


class WithLoss(nn.Module):
    """Gives the mean loss of a causal language model, with logits of CHUNK tokens at a time.

    Llama 3 has 128,256 of them for each token, which with their loss take 14 bytes each: 3.4 GiB for 2,048 tokens, and
    0.9 GiB for 512. The last layer is computed again in backward, which is 2% of the work. Liger-Kernel's loss, where
    it is installed, does the same faster.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 of shape (sequences, length)."""
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        return sum(checkpoint(self.summed, *chunk, use_reentrant=False) for chunk in chunks) / len(targets)

    def summed(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model.lm_head(hidden).float(), targets, reduction="sum")


def train_in_a_loop(model: LlamaForCausalLM, rows: Tensor, settings: dict[str, Any], options: argparse.Namespace):
    optimizer = DOSAdam(model.parameters(), max_grad_norm=1.0, **settings)
    with_loss = WithLoss(model)
    # step() returns early; each module waits for its own parameters. What autograd saves leaves if that pays. With
    # weights, layers whose weights are on the host have them on the GPU while they compute.
    optimizer.attach(with_loss, activations="auto", weights=options.weights)
    device = model.device  # of the embedding, which is there now
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.steps)
    getattr(model, f"{CHECKPOINTING}_checkpointing_enable")({"use_reentrant": False})
    model.train()
    file = options.output / "checkpoint.pt"
    done = 0
    if options.resume:
        # mmap: read as it is used; otherwise all state would be in memory twice.
        saved = torch.load(file, map_location="cpu", mmap=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        done = saved["step"]
        del saved
    losses = []
    for step in range(done, options.steps):
        loss = torch.zeros((), device=device)
        for tokens in micro_batches(rows, step, options):
            part = with_loss(tokens.to(device)) / options.accumulation
            part.backward()  # each gradient leaves for the host as soon as it is complete
            loss += part.detach()
        optimizer.step()  # clips to the norm of 1.0 first
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}")
        if options.save_every and (step + 1) % options.save_every == 0:
            checkpointed = {"model": model, "optimizer": optimizer, "schedule": schedule}
            state = {name: part.state_dict() for name, part in checkpointed.items()}
            torch.save({**state, "step": step + 1}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)  # the old one stays whole until then
    return optimizer, losses


def micro_batches(rows: Tensor, step: int, options: argparse.Namespace) -> Iterator[Tensor]:
    """Those of one step: int64 of shape (batch, length) each."""
    for i in range(step * options.accumulation, (step + 1) * options.accumulation):
        yield rows[torch.arange(i * options.batch, (i + 1) * options.batch) % len(rows)]


class KeepsPlaces(TrainingArguments):
    """Arguments with which Trainer moves no model: `attach` has put all weights where they belong."""

    place_model_on_device = False


class LargeModelTrainer(Trainer):
    """Trainer with the loss above, and state that is read as it is used when training resumes."""

    loss_is_scaled_for_ga = False
    with_loss: WithLoss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        return self.with_loss(inputs["input_ids"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Trainer's own reads optimizer.pt whole, so that all state would be in memory twice."""
        if checkpoint is not None:
            state = torch.load(Path(checkpoint, "optimizer.pt"), map_location="cpu", mmap=True)
            self.optimizer.load_state_dict(state)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt")))


def train_by_trainer(model: LlamaForCausalLM, rows: Tensor, settings: dict[str, Any], options: argparse.Namespace):
    kind = TrainingArguments if options.weights is None else KeepsPlaces
    arguments = kind(
        str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation,
        **{f"{CHECKPOINTING}_checkpointing": True, f"{CHECKPOINTING}_checkpointing_kwargs": {"use_reentrant": False}},
        learning_rate=options.lr,  # of the log; the optimizer's is in `settings`
        logging_steps=1,
        save_strategy="steps" if options.save_every else "no",
        save_steps=options.save_every or 500,
        save_total_limit=2,
        report_to="none",
        use_cpu=options.tiny,
    )
    # Weights are saved and loaded in shards, of which the host has one at a time.
    model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size=SHARD)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = LargeModelTrainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=(DOSAdam, settings))
    trainer.with_loss = WithLoss(model)
    trainer.accelerator.device_placement = arguments.place_model_on_device
    optimizer = trainer.create_optimizer()
    optimizer.attach(trainer.with_loss, activations="auto", weights=options.weights)
    trainer.train(resume_from_checkpoint=options.resume)  # clips to the norm of 1.0 by default
    return optimizer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; the loss of each step."""
    options = parse(arguments)
    settings = {
        "lr": options.lr,
        "offload_gradients": True,
        "state_format": options.state_format,
        "disk": options.disk,
    }
    if options.tiny:
        tiny.compute_in_one_thread()
        model = tiny_model() if options.weights is None else tiny_model(layers=6)
        numel = sum(p.numel() for p in model.parameters())
        device = tiny_gpu(numel) if options.weights is None else tiny_gpu_for_streaming(numel)
        settings |= {"device": device, "subgroup_size": numel // 40, "lr": 1e-3}
    elif options.weights is None:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, device_map="cuda")
    else:  # on the host, from which `attach` moves what belongs on the GPU
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
        settings["device"] = "cuda"
    options.output.mkdir(parents=True, exist_ok=True)
    train = train_by_trainer if options.trainer else train_in_a_loop
    optimizer, losses = train(model, rows_of_tokens(options), settings, options)
    print(optimizer.explain())  # of the last step but one: no forward ran beside the update of the last
    optimizer.synchronize()
    return losses


if __name__ == "__main__":
    main()
