"""Gradients that backward has written: counted, and sent to the host, offloaded or used for an update."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dos.backward import Backward
from dos.guard import ANY, Phase, entry, main_thread
from dos.owners.assembly import Assembly
from dos.owners.preparing import Preparing
from dos.owners.runs import Runs
from dos.owners.taking import Taking
from dos.owners.waiting import Waiting
from dos.parameters.watching import hooks_of_others
from dos.sharding.local import local
from dos.torch_internals.modes import backward_number, in_backward


class Gradients:
    """The gradients of one optimizer's parameters as backward writes them. Hooks call this, on any thread."""

    def __init__(self, assembly: Assembly, waiting: Waiting, taking: Taking, runs: Runs, preparing: Preparing) -> None:
        self.guard, self._lock = assembly.guard, assembly.guard.lock
        self._assembly, self._registry, self._ledger = assembly, assembly.registry, assembly.ledger
        self._waiting, self._taking, self._runs, self._preparing = waiting, taking, runs, preparing
        self._uncaptured: int | None = None
        """The number of a backward of which no CUDA graph is made: a graph has all of one, or nothing."""

    def gradient_ready(self, parameter: Tensor, leaf: Tensor) -> None:
        """Count or send a gradient. A hook calls this, on any thread, when backward has written ``leaf.grad``.

        leaf: the parameter, or its copy where weights stream.
        """
        if self._assembly.in_backward is not None:
            if not self._runs.gather(parameter, leaf):
                self._runs.gradient_in_backward(parameter, leaf)
            return
        on_device = self._assembly.on_device
        if on_device is not None:
            if on_device.activations.in_use and leaf.grad is not None:
                on_device.device.count(local(leaf.grad))
            if backward_number() != self._uncaptured and self._is_captured(on_device):
                if self._registry.offloaded.enabled and not hooks_of_others(leaf):
                    leaf.grad = None  # the graph that would compute it will not exist
                    raise RuntimeError(
                        "a CUDA graph that captures backward writes gradients where it has found them, and "
                        "offload_gradients=True takes them away; build the optimizer with offload_gradients=False"
                    )
                on_device.replays = True  # replays run no hooks: only step() finds their gradients
                return
            if on_device.only_counts(parameter):
                return
        self._gradient_ready(parameter, leaf)

    def _is_captured(self, on_device: Backward) -> bool:
        """Return whether this backward is captured in a CUDA graph."""
        captured = on_device.device.capturing()
        self._uncaptured = backward_number() if in_backward() and not captured else None
        return captured

    @entry(*ANY, hook=True)
    def _gradient_ready(self, parameter: Tensor, leaf: Tensor) -> None:
        takes = self._taking.takes(parameter, leaf)
        guard = self.guard
        # Gradients are copied to memory from which the host may still update for the last step.
        if self._ledger.running:
            if self._assembly.on_device is not None:
                self._assembly.on_device.now.first = time.perf_counter()
            self._waiting.end_last_step()
        if (guard.phase is not Phase.BACKWARD and guard.broken) or guard.lost or main_thread.ended:
            return  # the step raises the error
        guard.phase = Phase.BACKWARD
        if self._assembly.on_device is None and self._registry.devices.holds(parameter):
            self._assembly.set_up_device()
        on_device = self._assembly.on_device
        if on_device is None:
            return
        try:
            on_device.count()
            self._taking.know(parameter)
            record, offloaded = self._registry.records.get(id(parameter)), self._registry.offloaded
            if record is None:
                return
            if not on_device.is_final(record) or (offloaded.enabled and not takes):
                if offloaded.enabled:
                    offloaded.left.add(record)
                on_device.now.left += 1
            elif not offloaded.enabled:
                on_device.send(record)
                if on_device.is_last:
                    self._preparing.look_ahead()
            elif leaf.grad is not None:
                on_device.plan_ahead()
                self._taking.take_written(record, leaf)
        except BaseException:
            # A copy that raised may still run in part. All are cancelled, and the step sends the gradients anew.
            on_device.cancel_all()
            raise

    @torch.no_grad()
    @entry(*ANY, hook=True)
    def gradients_reduced(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Send the gradients of a bucket, which DDP sets as `grad` when backward ends. DDP's hook calls this."""
        if self._assembly.on_device is None or self._registry.offloaded.enabled:
            return
        self._waiting.end_last_step()  # DDP reduces a bucket of parameters without gradients before any other hook runs
        if self.guard.broken:
            return  # the step raises the error
        for parameter, gradient in zip(parameters, gradients, strict=True):
            record = self._registry.record(parameter)
            if record is not None and record.arena.accelerated:
                self._assembly.on_device.send(record, gradient)
