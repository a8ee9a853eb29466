"""Who takes part in a contest: AdamW on the device, no optimizer at all, DOSAdam under any policy, and its peers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from dos import DOSAdam, EmulatedDevice
from dos.deciding.policies import AdaptivePolicy, Policy
from experiments.check.contest import Broken, Contender
from experiments.check.models import SETTINGS, Batch, Job, free_memory
from experiments.gpt import GPT
from perfmodel import Plan, Timeline, Workload
from perfmodel.format import SPLIT
from perfmodel.hardware import HardwareProfile
from perfmodel.schedule import Schedule


class OnDevice(Contender):
    """A model of its own, made anew for each turn, with torch.optim.AdamW wholly on the device, or with nothing.

    masters: whether float32 copies of the parameters are updated, as DOSAdam does; None for no optimizer at all.
    """

    def __init__(
        self,
        name: str,
        job: Job,
        device: torch.device,
        emulated: EmulatedDevice | None,
        *,
        masters: bool | None,
        before: Callable[[], object],
    ) -> None:
        self.name = name
        self._job, self._device, self._emulated = job, device, emulated
        self._masters, self._before = masters, before
        self._model: GPT | None = None
        self._step: Callable[[], None] | None = None

    def open(self) -> None:
        self._before()
        self._model = self._job.model(self._device)
        if self._masters is not None:
            self._step = adamw_step(list(self._model.parameters()), masters=self._masters)

    def close(self) -> None:
        self._model = self._step = None
        free_memory(self._emulated is None)

    def compute(self, batch: Batch) -> None:
        assert self._model is not None
        self._model(*batch).backward()

    def step(self) -> None:
        assert self._model is not None
        if self._step is not None and self._emulated is not None:
            self._emulated.launch(0, self._step, self._job.numel).wait()
        elif self._step is not None:
            self._step()
        self._model.zero_grad()


def adamw_step(parameters: Sequence[Tensor], *, masters: bool) -> Callable[[], None]:
    """What a user of torch.optim.AdamW(fused=True) calls. masters: update float32 copies, and round from them."""
    if not masters:
        plain = AdamW(parameters, fused=True, **SETTINGS)
        return lambda: (plain.step(), None)[1]
    copies = [p.detach().float() for p in parameters]
    optimizer = AdamW(copies, fused=True, **SETTINGS)

    @torch.no_grad()
    def step() -> None:
        for master, parameter in zip(copies, parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_(list(parameters), copies)

    return step


class Switch(AdaptivePolicy):
    """The policy of an optimizer that runs under one policy after the other, on the same memory.

    An adaptive policy for the optimizer, which therefore asks for every plan anew.
    """

    def __init__(self, profile: HardwareProfile) -> None:
        super().__init__(profile)
        self.current: Policy = AdaptivePolicy(profile)

    def __call__(self, workload: Workload) -> Plan:
        return self.current(workload)

    def observe(self, schedule: Schedule, workload: Workload, timeline: Timeline) -> None:
        if isinstance(self.current, AdaptivePolicy):
            self.current.observe(schedule, workload, timeline)


class Rig:
    """A model and one DOSAdam, which all contenders of that kind share. profile: what adaptive policies begin with."""

    def __init__(
        self, job: Job, device: torch.device, emulated: EmulatedDevice | None, profile: HardwareProfile, size: int
    ) -> None:
        self.switch = Switch(profile)
        self.subgroups = -(-job.numel // size)
        self.slot_bytes = SPLIT.state_bytes * size
        self.budget = 0
        self.model = job.model(device)
        self.optimizer = DOSAdam(
            self.model.parameters(),
            policy=self.switch,
            subgroup_size=size,
            memory_budget=lambda: self.budget,
            device=emulated,
            **SETTINGS,
        )

    def leave(self) -> None:
        """Take all optimizer state off the device; it comes back when a plan wants it."""
        self.optimizer.synchronize()
        self.optimizer.state  # noqa: B018  (reading it brings state home)
        self.model.zero_grad()


class Ours(Contender):
    """DOSAdam under one policy. share: of the state, for which there is memory."""

    def __init__(self, name: str, rig: Rig, policy: Policy, share: float = 0.0) -> None:
        self.name, self.share = name, share
        self._rig, self._policy = rig, policy

    def open(self) -> None:
        self._rig.switch.current = self._policy
        # Half a subgroup more than the whole ones that fit, so that rounding cannot make them one fewer.
        self._rig.budget = int((round(self.share * self._rig.subgroups) + 0.5) * self._rig.slot_bytes)

    def close(self) -> None:
        self._rig.optimizer.synchronize()
        self._rig.optimizer.zero_grad()

    def compute(self, batch: Batch) -> None:
        self._rig.model(*batch).backward()

    def step(self) -> None:
        self._rig.optimizer.step()
        self._rig.optimizer.zero_grad()

    def metrics(self) -> dict[str, float]:
        self._rig.optimizer.synchronize()
        return self._rig.optimizer.metrics()

    def timeline(self) -> Timeline:
        """Of the last update."""
        return self._rig.optimizer.timeline()


@dataclass(frozen=True)
class Kind:
    """A peer: the package to be installed, the precision of its state, and what makes its optimizer for a model.

    Nothing of it is imported before it is made.
    """

    name: str
    package: str
    precision: str
    build: Callable[[GPT, Job], Any]


class Peer(Contender):
    """A contender with a model of its own, built at its first turn and kept, since peers take long to set up."""

    def __init__(self, kind: Kind, job: Job, device: torch.device) -> None:
        self.name, self.precision = kind.name, kind.precision
        self._kind, self._job, self._device = kind, job, device
        self._model: GPT | None = None
        self._optimizer: Any = None

    def open(self) -> None:
        def build() -> None:
            model = self._job.model(self._device)
            self._optimizer = self._kind.build(model, self._job)
            self._model = model

        if self._model is None:
            self._try(build)

    def close(self) -> None:
        if self._model is not None:
            self._model.zero_grad()

    def compute(self, batch: Batch) -> None:
        assert self._model is not None
        model = self._optimizer if callable(self._optimizer) else self._model
        back = getattr(self._optimizer, "backward", torch.Tensor.backward)
        self._try(lambda: back(model(*batch)))

    def step(self) -> None:
        self._try(self._optimizer.step)
        self._try(self._optimizer.zero_grad)

    def _try(self, work: Callable[[], object]) -> None:
        """What goes wrong is the peer's, but for memory that is too small."""
        try:
            work()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise Broken(f"{self.name} is installed but failed: {type(error).__name__}: {error}") from error


def torchao(model: GPT, job: Job) -> Any:
    """Gradients leave during backward, each parameter is updated on the host."""
    optimizer = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return optimizer(model.parameters(), torch.optim.AdamW, fused=True, **SETTINGS)


def bitsandbytes(model: GPT, job: Job) -> Any:
    """State in unified memory, which the driver moves when a kernel touches it."""
    return importlib.import_module("bitsandbytes.optim").PagedAdamW32bit(model.parameters(), **SETTINGS)


def deepspeed(model: GPT, job: Job) -> Any:
    """Stage 2, one rank: DeepSpeedCPUAdam on float32 masters on the host. An engine, which runs backward, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    config = {
        "train_micro_batch_size_per_gpu": job.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {**SETTINGS, "betas": [*SETTINGS["betas"]]}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    parameters = list(model.parameters())
    engine, *_ = importlib.import_module("deepspeed").initialize(
        model=model, model_parameters=parameters, config=config
    )
    return engine


PEERS = (
    Kind("torchao CPUOffloadOptimizer", "torchao", "bfloat16 state and parameters, no float32 masters", torchao),
    Kind("bitsandbytes PagedAdamW32bit", "bitsandbytes", "float32 moments, no float32 masters", bitsandbytes),
    Kind("DeepSpeed ZeRO-Offload", "deepspeed", "float32 masters and moments", deepspeed),
)


def installed() -> list[Kind]:
    """The peers that are there."""
    return [peer for peer in PEERS if importlib.util.find_spec(peer.package) is not None]
