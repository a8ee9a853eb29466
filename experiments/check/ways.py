"""The models of `experiments.headline`, and the ways to train them: with DOSAdam, and with its peers at their best."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.check.base import Size
from experiments.check.contenders import MASTERS, NOTHING, PEERS, PLAIN, Kind, deepspeed, reference
from experiments.check.models import SETTINGS, Job
from experiments.check.streaming import LARGE as STREAMED
from experiments.gpt import GPTConfig

LARGE, MEDIUM, STREAMING = "6.6B", "1.2B", "8B"
JOBS = {
    LARGE: Job(GPTConfig(32, 4096, 32, context=2048, vocabulary=32000, checkpointing=True), batch=4),
    MEDIUM: Job(GPTConfig(36, 1600, 25, context=2048, vocabulary=50304, checkpointing=True), batch=4),
    STREAMING: Job(GPTConfig(39, 4096, 32, context=2048, vocabulary=32000, checkpointing=True), batch=4),
}
TINY = {
    **dict.fromkeys(JOBS, Job(GPTConfig(2, 32, 2, context=16, vocabulary=64, checkpointing=True), batch=2)),
    STREAMING: STREAMED[Size.TINY],
}


@dataclass(frozen=True)
class Way:
    """One way to train.

    options: of DOSAdam. attach: options of `DOSAdam.attach`; None: it is not called. share: of the state, for which
    DOSAdam has memory; None: whatever is free. sliced: in a slice of the GPU's memory. kind: another optimizer's.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    attach: Mapping[str, Any] | None = field(default_factory=dict)
    share: float | None = None
    sliced: bool = False
    kind: Kind | None = None

    @property
    def streams(self) -> bool:
        """Whether weights stream."""
        return "weights" in (self.attach or {})


DEFAULT = Way("DOSAdam")


def others(*kinds: Kind) -> list[Way]:
    """Ways with other optimizers."""
    return [Way(kind.name, kind=kind) for kind in kinds]


IN_BACKWARD, STREAM = {"updates": "backward"}, {"weights": "auto"}
BACKWARD = Way("DOSAdam, updates in backward", attach=IN_BACKWARD)
OFFLOADS = {"offload_gradients": True}
CPU, INT8, CLIPS = {"policy": "cpu"}, {"state_format": "int8"}, {"max_grad_norm": 1.0}


def ways(model: str) -> list[Way]:
    """Those of a model, the ceiling first."""
    ceiling, plain = (reference(name, None) for name in (NOTHING, PLAIN))
    if model == STREAMING:
        return [
            *others(ceiling),
            Way("DOSAdam, weights stream", OFFLOADS, STREAM),
            Way("DOSAdam, weights stream, in the slice", OFFLOADS, STREAM, sliced=True),
            Way("DOSAdam int8, weights stream, in the slice", OFFLOADS | INT8, STREAM, sliced=True),
        ]
    if model == LARGE:
        ours = [
            DEFAULT,
            Way("DOSAdam, clipping", CLIPS),
            BACKWARD,
        ]
        return [*others(ceiling), *ours, *others(plain, *PEERS, FSDP2, *BEST)]
    ours = [
        Way("DOSAdam, memory for half", share=0.5),
        Way("DOSAdam, memory for half, clipping", CLIPS, share=0.5),
        Way("DOSAdam, memory for half, not attached", attach=None, share=0.5),
        Way("DOSAdam, memory for half, updates in backward", attach=IN_BACKWARD, share=0.5),
        Way("DOSAdam, memory for a tenth", share=0.1),
        Way("DOSAdam, CPU only", CPU),
        Way("DOSAdam, CPU only, updates in backward", CPU, IN_BACKWARD),
        Way("DOSAdam int8, memory for a tenth", INT8, share=0.1),
        Way("DOSAdam int8, CPU only", INT8 | CPU),
    ]
    return [*others(ceiling, reference(MASTERS, None), plain), *ours, *others(*PEERS, FSDP2, *BEST)]


def torchao_offloading(model: Any, job: Job) -> Any:
    """torchao's optimizer, which takes gradients away in backward, too: one micro-batch a step."""
    optimizer = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return optimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **SETTINGS)


def torchao_8bit(model: Any, job: Job) -> Any:
    """AdamW with moments in 8 bits, all on the GPU."""
    return importlib.import_module("torchao.optim").AdamW8bit(model.parameters(), **SETTINGS)


def bitsandbytes_8bit(model: Any, job: Job) -> Any:
    """The same of bitsandbytes."""
    return importlib.import_module("bitsandbytes.optim").AdamW8bit(model.parameters(), **SETTINGS)


def fsdp2(model: Any, job: Job) -> Any:
    """Parameters, gradients and float32 state on the host, updated there by fused AdamW."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29514")
    torch.distributed.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    model.cpu().float()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=mixed, offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()))
    return torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)


FSDP2 = Kind("FSDP2 CPUOffloadPolicy, fused AdamW", "torch", "float32 parameters on the host", fsdp2)
OVERLAPPING = {"overlap_comm": True, "contiguous_gradients": True}
OFFLOADED = {"device": "cpu", "pin_memory": True}
BEST = (
    Kind("torchao, offload_gradients", "torchao", "bfloat16 state", torchao_offloading),
    Kind("torchao AdamW8bit", "torchao", "8-bit moments, no masters", torchao_8bit),
    Kind("bitsandbytes AdamW8bit", "bitsandbytes", "8-bit moments, no masters", bitsandbytes_8bit),
    Kind(
        "DeepSpeed ZeRO-Offload, overlap_comm",
        "deepspeed",
        "float32 masters and moments",
        functools.partial(deepspeed, zero={"stage": 2, "offload_optimizer": OFFLOADED, **OVERLAPPING}),
    ),
    Kind(
        "DeepSpeed Twin-Flow, ratio 0.5",
        "deepspeed",
        "float32 masters and moments",
        functools.partial(
            deepspeed, zero={"stage": 3, "offload_optimizer": {**OFFLOADED, "ratio": 0.5}, **OVERLAPPING}
        ),
    ),
    Kind(
        "DeepSpeed SuperOffload",
        "deepspeed",
        "float32 masters and moments",
        functools.partial(
            deepspeed,
            zero={
                "stage": 3,
                "offload_optimizer": {**OFFLOADED, "super_offload": True, "cpuadam_cores_perc": 0.9},
                **OVERLAPPING,
            },
        ),
    ),
)
"""Peers with other settings, which are better for some models."""
