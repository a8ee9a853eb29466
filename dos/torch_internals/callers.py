"""Callers' frames: functions of torch that call the optimizer without saying for which purpose. Torch 2.6 to 2.13.

torch.distributed.checkpoint.state_dict calls `step`, `state_dict` and `state` as user code does. GradScaler would pass
itself to a `step` with an argument `grad_scaler`, and warns that it will stop doing so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from traceback import walk_stack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler


class ScalerStep(NamedTuple):
    """A `GradScaler.step()` that has called the optimizer's. found_inf: its flags of infinite gradients, by device."""

    scaler: GradScaler
    found_inf: dict[torch.device, Tensor]

    def set_found_inf(self, infinite: bool) -> None:
        """Set the flag that the scaler's `update()` will read."""
        for each in self.found_inf.values():
            each.fill_(infinite)
        if not self.found_inf:  # without any gradient here
            device = torch.device(self.scaler._device)
            self.found_inf[device] = torch.full((1,), float(infinite), dtype=torch.float32, device=device)


class TrueForScaler:
    """An attribute of an optimizer's class that is true within `GradScaler.step()`, and else false.

    `GradScaler.step()` reads `_step_supports_amp_scaling` to leave unscaling and skipping to the optimizer's step.
    Lightning reads it, too, to refuse gradient clipping, with or without a scaler. User code may set it.
    """

    def __get__(self, optimizer: object, owner: type) -> bool:
        return calling_scaler() is not None


def calling_scaler() -> ScalerStep | None:
    """Return the scaler's step within which this thread runs; None if there is none.

    The tensors that a scaler sets on the optimizer are sums, which the scaler itself does not read again.
    """
    for frame, _ in walk_stack(sys._getframe()):
        scaler = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(scaler, GradScaler):
            states = scaler._per_optimizer_states[id(frame.f_locals["optimizer"])]
            return ScalerStep(scaler, states["found_inf_per_device"])
    return None


def runs_within_itself(module: nn.Module) -> bool:
    """Return whether a call of the module runs in this thread within another one, as in the handler of a signal."""
    return sum(each is module for each in running_modules()) > 1


def running_modules() -> Iterator[nn.Module]:
    """Return the modules whose calls run in this thread, from the innermost one."""
    call = nn.Module.__call__.__code__
    # Another library's call in the place of torch's, as of fx's tracer, may name its module otherwise.
    return (f.f_locals["self"] for f, _ in walk_stack(sys._getframe()) if f.f_code is call and "self" in f.f_locals)


def makes_state() -> bool:
    """Return whether torch.distributed.checkpoint calls this step, to make a fresh optimizer's state.

    It sets all gradients to zeros, and lr to 0. If the step counted, every step that a checkpoint does not overwrite
    would be 1, and the next update's bias correction wrong. Values do not distinguish it from the first step of a
    warm-up, which may be the same on some ranks, so the caller is looked up.
    """
    return _called_by("_init_optim_state")


def loads_full_state() -> bool:
    """Return whether torch will merge the state dict that the caller makes with a full one that it is loading.

    Keys of only one of them would stay: moments in one format beside fresh ones in the other, and with
    `broadcast_from_rank0` only on rank 0.
    """
    return _called_by("_load_optim_state_dict")


def _called_by(function: str) -> bool:
    """Return whether this function of torch.distributed.checkpoint.state_dict runs on this thread."""
    return any(
        frame.f_code.co_name == function
        and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        for frame, _ in walk_stack(sys._getframe())
    )


def unflattens_state() -> bool:
    """Return whether the caller's caller reads an entry's names, to take these from a flattened state dict.

    Each read of an entry calls this, so it looks at no other frame.
    """
    return sys._getframe(2).f_code.co_name == "_unflatten_optim_state_dict"
