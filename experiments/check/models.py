"""Models of the sizes that fit, batches, and the devices on which checks train."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dos import EmulatedDevice
from dos.machine.host_memory import available_bytes
from experiments.check.base import Bench, Size, Skipped
from experiments.gpt import GPT, GPTConfig
from experiments.miniature import equal_subgroups, fastest_s, slowed
from perfmodel.format import MIXED
from perfmodel.hardware import HardwareProfile
from perfmodel.planner.machine import UNKNOWN
from perfmodel.planner.question import Question
from perfmodel.planner.transformer import Transformer

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""Of every optimizer."""
HOST_BYTES = int(MIXED.held_bytes)
"""That DOSAdam needs on the host for each 16-bit parameter at most: state, gradient, and new parameter."""
DEVICE_BYTES = 2 * MIXED.value_bytes
"""That each 16-bit parameter and its gradient take on the device."""
SHARE_OF_HOST = 0.8
SHARE_OF_DEVICE = 0.85
"""Of memory that is free, for all of that; on the device for activations, too."""
SHARE_FOR_ACTIVATIONS = 0.25
"""Of the device's free memory; sequences are taken out of the batch until they need no more."""
UPDATE_OVER_COMPUTE = 2.0
"""Seconds of an update on the CPU over those of forward and backward, on emulated machines."""

Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Job:
    """A model and its batch. batch: sequences in a batch; sequences are as long as the model's context."""

    config: GPTConfig
    batch: int

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        c = self.config
        return c.layers * self.block_numel + (c.vocabulary + c.context + 2) * c.width

    @property
    def block_numel(self) -> int:
        """Parameters of one layer."""
        return 12 * self.config.width**2 + 13 * self.config.width

    @property
    def activation_bytes(self) -> int:
        """Device memory for activations with checkpointing, roughly: logits (2, 4, 4 and 4 bytes), blocks' inputs, and
        what is within one block."""
        c = self.config
        return self.batch * c.context * (14 * c.vocabulary + 2 * c.layers * c.width + 80 * c.width)

    def fitting(self, most: float) -> Job:
        """With as many layers as `most` parameters allow, no more than there are and one at least."""
        return self if most >= self.numel else self.sized(most)

    def sized(self, parameters: float) -> Job:
        """With as many layers as so many parameters allow, one at least."""
        rest = self.numel - self.config.layers * self.block_numel
        layers = max(1, int((parameters - rest) / self.block_numel))
        return dataclasses.replace(self, config=dataclasses.replace(self.config, layers=layers))

    def model(self, device: torch.device) -> GPT:
        """A new model in bfloat16; the same each time."""
        torch.manual_seed(0)
        return GPT(self.config, device=device, dtype=torch.bfloat16)

    def on_host(self, device: torch.device) -> GPT:
        """A model in host memory; the GPU draws its weights, for which the host would need minutes."""
        model = GPT(self.config, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    drawn: Tensor = torch.randn(parameter.shape, device=device).mul_(0.02)
                    parameter.copy_(drawn)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return model

    def question(self, device_bytes: int, **settings: Any) -> Question:
        """What the planner is asked about training it. settings: of a Question."""
        c = self.config
        sizes = {"n_embd": c.width, "n_layer": c.layers, "n_head": c.heads, "n_positions": c.context}
        defaults: dict[str, Any] = {
            "profile": HardwareProfile.builtin(UNKNOWN),
            "batch": self.batch,
            "sequence": c.context,
            "checkpointing": True,
        }
        model = Transformer.from_config({**sizes, "vocab_size": c.vocabulary})
        return Question(model, device_bytes=device_bytes, **{**defaults, **settings})

    def batches(self, count: int, device: torch.device) -> list[Batch]:
        """Random tokens and targets."""
        generator = torch.Generator().manual_seed(1)
        shape = (count, 2, self.batch, self.config.context)
        tokens = torch.randint(self.config.vocabulary, shape, generator=generator).to(device)
        return [(batch[0], batch[1]) for batch in tokens]


MEDIUM = {
    Size.TINY: Job(GPTConfig(1, 32, 2, context=16, vocabulary=64, checkpointing=True), batch=2),
    Size.SMALL: Job(GPTConfig(3, 128, 4, context=32, vocabulary=256, checkpointing=True), batch=16),
    Size.FULL: Job(GPTConfig(48, 1600, 25, context=2048, vocabulary=50304, checkpointing=True), batch=4),
}
"""1.5B parameters at full size: GPT-2 XL."""


def fitted(job: Job, bench: Bench, *, each: int = HOST_BYTES, most: float = 1e18) -> Job:
    """The job with no more layers and sequences than host and device have memory for.

    each: bytes of the host that a parameter needs. most: parameters, at any rate. Raises Skipped if one layer is too
    much.
    """
    host = bench.settings.host_bytes or available_bytes()
    if host is not None:
        most = min(most, SHARE_OF_HOST * host / each)
    if bench.cuda:
        free, _ = torch.cuda.mem_get_info()
        while job.batch > 1 and job.activation_bytes > SHARE_FOR_ACTIVATIONS * free:
            job = dataclasses.replace(job, batch=job.batch // 2)
        most = min(most, (SHARE_OF_DEVICE * free - job.activation_bytes) / DEVICE_BYTES)
    found = job.fitting(most)
    if found.numel > most:
        raise Skipped(f"memory here is enough for {most / 1e6:.0f}M parameters, one layer has {found.numel / 1e6:.0f}M")
    bench.say(f"{found.numel / 1e6:,.1f}M parameters")
    return found


def prepare(bench: Bench) -> torch.device:
    """Set torch up for this process; where models are."""
    if bench.cuda:
        torch.cuda.init()
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)  # one core computes for the accelerator, one is the host
    return torch.device("cpu")


def emulated_device(job: Job, subgroup_size: int) -> EmulatedDevice:
    """An H100 node, slowed down in proportion to this job, with memory for its state and more."""
    host = torch.device("cpu")
    model, (batch,) = job.model(host), job.batches(1, host)
    compute_s = fastest_s(lambda: model(*batch).backward(), 5)
    node, work = HardwareProfile.builtin("h100"), equal_subgroups(job.numel, subgroup_size)
    return EmulatedDevice(slowed(node, work, UPDATE_OVER_COMPUTE * compute_s), 20 * job.numel)
