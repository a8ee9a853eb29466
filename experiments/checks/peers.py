"""Other ways to train with optimizer state off the GPU, each as its own users would. Nothing is imported before use."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from experiments.checks.contest import Probe
from experiments.checks.training import SETTINGS, Batch, Job
from experiments.gpt import GPT


class PeerError(Exception):
    """A peer that is installed does not work here; what it raised is the cause."""


class Peer:
    """A contender with a model of its own, built at its first turn and kept, since peers take long to set up.

    package: to be installed. precision: of its state, for who compares.
    """

    name = ""
    package = ""
    precision = ""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job, self._device = job, device
        self._model: GPT | None = None
        self._optimizer: Any = None

    @classmethod
    def installed(cls) -> bool:
        return importlib.util.find_spec(cls.package) is not None

    def build(self, model: GPT) -> Any:
        """The peer's optimizer for the model."""
        raise NotImplementedError

    def open(self) -> None:
        if self._model is None:
            with self._blamed():
                model = self._job.model(self._device)
                self._optimizer = self.build(model)
                self._model = model

    def close(self) -> None:
        if self._model is not None:
            self._model.zero_grad()

    def compute(self, batch: Batch) -> None:
        with self._blamed():
            assert self._model is not None
            self._model(*batch).backward()

    def step(self) -> None:
        with self._blamed():
            self._optimizer.step()
            self._optimizer.zero_grad()

    def probe(self) -> Probe | None:
        return None

    def finish(self) -> None:
        pass

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """What goes wrong is the peer's, but for memory that is too small."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise PeerError(f"{self.name} is installed but failed: {type(error).__name__}: {error}") from error


class TorchAo(Peer):
    """torchao's CPUOffloadOptimizer: gradients leave during backward, each parameter is updated on the host."""

    name = "torchao CPUOffloadOptimizer"
    package = "torchao"
    precision = "bfloat16 state and parameters, no float32 masters"

    def build(self, model: GPT) -> Any:
        try:
            module = importlib.import_module("torchao.optim")
        except ImportError:  # before 0.10
            module = importlib.import_module("torchao.prototype.low_bit_optim")
        return module.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **SETTINGS)


class BitsAndBytes(Peer):
    """bitsandbytes' paged AdamW: state in unified memory, which the driver moves when a kernel touches it."""

    name = "bitsandbytes PagedAdamW32bit"
    package = "bitsandbytes"
    precision = "float32 moments, no float32 masters"

    def build(self, model: GPT) -> Any:
        return importlib.import_module("bitsandbytes.optim").PagedAdamW32bit(model.parameters(), **SETTINGS)


class DeepSpeed(Peer):
    """DeepSpeed's ZeRO-Offload (stage 2, one rank): DeepSpeedCPUAdam on float32 masters on the host."""

    name = "DeepSpeed ZeRO-Offload"
    package = "deepspeed"
    precision = "float32 masters and moments"

    def build(self, model: GPT) -> Any:
        rendezvous = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(rendezvous, MASTER_PORT=str(_free_port()))
        engine, *_ = importlib.import_module("deepspeed").initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": self._job.batch,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {**SETTINGS, "betas": [*SETTINGS["betas"]]}},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
            },
        )
        return engine

    def compute(self, batch: Batch) -> None:
        with self._blamed():
            self._optimizer.backward(self._optimizer(*batch))

    def step(self) -> None:
        with self._blamed():
            self._optimizer.step()  # forgets the gradients, too


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
