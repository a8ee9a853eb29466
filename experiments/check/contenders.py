"""Who takes part in a contest: DOSAdam under any policy, AdamW on the device, no optimizer at all, and its peers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from dos import DOSAdam, EmulatedDevice
from dos.planning.policies import AdaptivePolicy, Policy
from experiments.check.models import SETTINGS, Batch, Job
from experiments.gpt import GPT
from perfmodel import Plan, Timeline, Workload
from perfmodel.format import SPLIT, Format
from perfmodel.hardware import HardwareProfile

NOTHING, MASTERS, PLAIN = "no optimizer", "AdamW, float32 masters", "AdamW, bfloat16 state"


class Contender:
    """One way to train. `open` and `close` surround each of its turns. learns: whether its first iterations differ."""

    name: str
    learns = False

    def open(self) -> None:
        """Make ready. Raises torch.OutOfMemoryError if it does not fit, Broken if it does not work here."""

    def close(self) -> None:
        """Free the device for the next."""

    def compute(self, batch: Batch) -> None:
        """Forward and backward."""

    def step(self) -> None:
        """Update, and clear the gradients."""

    def metrics(self) -> dict[str, float]:
        """Of the last update, once nothing is in flight; empty if it has none."""
        return {}


class Broken(Exception):  # noqa: N818  (the contender's own error is its cause)
    """A contender does not work here; its text says why."""


class Switch(AdaptivePolicy):
    """The policy of an optimizer that runs under one policy after the other, on the same memory.

    An adaptive policy for the optimizer, which therefore asks for every plan anew.
    """

    def __init__(self, profile: HardwareProfile) -> None:
        super().__init__(profile)
        self.current: Policy = AdaptivePolicy(profile)

    def __call__(self, workload: Workload) -> Plan:
        return self.current(workload)

    def observe(self, *seen: Any) -> None:
        if isinstance(self.current, AdaptivePolicy):
            self.current.observe(*seen)


class Rig:
    """A model and one DOSAdam, which all contenders of that kind share. profile: what adaptive policies begin with."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        emulated: EmulatedDevice | None,
        profile: HardwareProfile,
        size: int,
        state: Format = SPLIT,
    ) -> None:
        self.switch = Switch(profile)
        self.subgroups = -(-job.numel // size)
        self.slot_bytes = state.state_bytes * size
        self.budget = 0
        self.updates: str | None = None
        self.model = job.model(device)
        self.optimizer = DOSAdam(
            self.model.parameters(),
            policy=self.switch,
            subgroup_size=size,
            state_format=None if state is SPLIT else "int8",
            memory_budget=lambda: self.budget,
            device=emulated,
            **SETTINGS,
        )

    def release(self) -> None:
        """Move all optimizer state off the device; a plan that wants it there moves it back."""
        self.optimizer.release_memory()
        # Beside state that stayed, the next contender would not fit, or would have less memory than it is said to have.
        assert self.optimizer.release_memory() == 0, "optimizer state is still on the device"
        self.model.zero_grad()


class Trains(Contender):
    """DOSAdam, and the model that it trains."""

    def __init__(self, name: str, model: GPT, optimizer: DOSAdam) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer

    def close(self) -> None:
        self.optimizer.synchronize()
        self.optimizer.zero_grad()

    def compute(self, batch: Batch) -> None:
        self.model(*batch).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def metrics(self) -> dict[str, float]:
        self.optimizer.synchronize()
        return self.optimizer.metrics()


class Ours(Trains):
    """DOSAdam under one policy.

    share: of the state, for which there is memory. updates: of `attach`, which `open` calls; None: it does not.
    """

    def __init__(self, name: str, rig: Rig, policy: Policy, share: float = 0.0, updates: Any = None) -> None:
        super().__init__(name, rig.model, rig.optimizer)
        self.share, self._updates = share, updates
        self._rig, self._policy, self.learns = rig, policy, isinstance(policy, AdaptivePolicy)

    def open(self) -> None:
        self._rig.switch.current = self._policy
        # Half a subgroup more than the whole ones that fit, so that rounding cannot make them one fewer.
        self._rig.budget = int((round(self.share * self._rig.subgroups) + 0.5) * self._rig.slot_bytes)
        if self._updates is not None and self._updates != self._rig.updates:
            self.optimizer.attach(self.model, updates=self._updates)
            self._rig.updates = self._updates

    def timeline(self) -> Timeline:
        """Of the last update."""
        return self.optimizer.timeline()


@dataclass(frozen=True)
class Kind:
    """An optimizer for a contender's own model: the package that it is of, the precision of its state, what makes it.

    Nothing of the package is imported before it is made.
    """

    name: str
    package: str
    precision: str
    build: Callable[[GPT, Job], Any]


class Own(Contender):
    """A contender with a model of its own.

    before: makes room on the device, where model and optimizer are made anew for each turn; None: they are built
        at the first and kept, as peers are, which take long to set up.
    """

    def __init__(self, kind: Kind, job: Job, device: torch.device, before: Callable[[], object] | None = None) -> None:
        self.name = kind.name
        self._kind, self._job, self._device, self._before = kind, job, device, before
        self._model: GPT | None = None
        self._optimizer: Any = None

    def open(self) -> None:
        if self._before is not None:
            self._before()
        if self._model is None:
            model = self._job.model(self._device)
            self._optimizer = self._try(lambda: self._kind.build(model, self._job))
            self._model = model

    def close(self) -> None:
        if self._before is not None:
            self._model = self._optimizer = None
        elif self._model is not None:
            self._model.zero_grad()

    def compute(self, batch: Batch) -> None:
        model: Any = self._optimizer if callable(self._optimizer) else self._model
        back = getattr(self._optimizer, "backward", torch.Tensor.backward)
        self._try(lambda: back(model(*batch)))

    def step(self) -> None:
        self._try(self._optimizer.step)
        self._try(self._optimizer.zero_grad)

    def _try(self, work: Callable[[], Any]) -> Any:
        """Call it. An error counts as the optimizer's, but for memory that is too small."""
        try:
            return work()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise Broken(f"{self.name} is installed but failed: {type(error).__name__}: {error}") from error


class OnDevice:
    """torch.optim.AdamW(fused=True), wholly on the device.

    masters: whether float32 copies of the parameters are updated, and parameters rounded from them, as DOSAdam does.
    """

    def __init__(self, model: GPT, emulated: EmulatedDevice | None, *, masters: bool) -> None:
        self._parameters: list[Tensor] = list(model.parameters())
        self._emulated = emulated
        self._masters = [p.detach().float() for p in self._parameters] if masters else []
        self._adamw = AdamW(self._masters or self._parameters, fused=True, **SETTINGS)
        self.zero_grad = model.zero_grad

    def step(self) -> None:
        if self._emulated is None:
            self._update()
        else:
            self._emulated.launch(0, self._update, sum(p.numel() for p in self._parameters)).wait()

    @torch.no_grad()
    def _update(self) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=False):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._adamw.step()
        if self._masters:
            self._adamw.zero_grad()
            torch._foreach_copy_(self._parameters, self._masters)


def reference(name: str, emulated: EmulatedDevice | None) -> Kind:
    """A reference for DOSAdam on the device: AdamW in two precisions, or no optimizer at all."""
    builds: dict[str, Callable[[GPT, Job], Any]] = {
        MASTERS: lambda model, job: OnDevice(model, emulated, masters=True),
        PLAIN: lambda model, job: OnDevice(model, emulated, masters=False),
        NOTHING: lambda model, job: SimpleNamespace(step=lambda: None, zero_grad=model.zero_grad),
    }
    return Kind(name, "torch", name, builds[name])


def torchao(model: GPT, job: Job) -> Any:
    """Gradients are copied during backward, each parameter is updated on the host."""
    optimizer = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return optimizer(model.parameters(), torch.optim.AdamW, fused=True, **SETTINGS)


def bitsandbytes(model: GPT, job: Job) -> Any:
    """State in unified memory, which the driver moves when a kernel touches it."""
    return importlib.import_module("bitsandbytes.optim").PagedAdamW32bit(model.parameters(), **SETTINGS)


ZERO_OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}


def deepspeed(model: GPT, job: Job, zero: Mapping[str, Any] = ZERO_OFFLOAD) -> Any:
    """One rank: DeepSpeedCPUAdam on float32 masters on the host. An engine, which runs backward, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    config = {
        "train_micro_batch_size_per_gpu": job.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {**SETTINGS, "betas": [*SETTINGS["betas"]]}},
        "zero_optimization": dict(zero),
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
