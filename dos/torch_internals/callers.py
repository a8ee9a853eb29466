"""Callers' frames: functions of torch that call the optimizer, and do not say what for. Torch 2.6 to 2.13.

torch.distributed.checkpoint.state_dict calls `step`, `state_dict` and `state` as user code does. GradScaler would pass
itself to a `step` with an argument `grad_scaler`, and warns that it is going to stop that.
"""

from __future__ import annotations

import sys
from traceback import walk_stack
from typing import NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler


class ScalerStep(NamedTuple):
    """A `GradScaler.step()` that has called the optimizer's. found_inf: what it has found, by device."""

    scaler: GradScaler
    found_inf: dict[torch.device, Tensor]

    def set_found_inf(self, infinite: bool) -> None:
        """Let the scaler's `update()` find this."""
        for each in self.found_inf.values():
            each.fill_(infinite)
        if not self.found_inf:  # without any gradient here
            device = torch.device(self.scaler._device)
            self.found_inf[device] = torch.full((1,), float(infinite), dtype=torch.float32, device=device)


def calling_scaler() -> ScalerStep | None:
    """The step of a scaler that this thread is in; None: it is in none.

    What a scaler sets on the optimizer are sums, of which it takes no notice itself.
    """
    for frame, _ in walk_stack(sys._getframe()):
        scaler = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(scaler, GradScaler):
            states = scaler._per_optimizer_states[id(frame.f_locals["optimizer"])]
            return ScalerStep(scaler, states["found_inf_per_device"])
    return None


def makes_state() -> bool:
    """Whether the step that calls this is that by which torch.distributed.checkpoint makes a fresh optimizer's state.

    It gives all parameters zeros for gradients, and lr is 0. Counted, it would leave every step that a checkpoint does
    not overwrite at 1, and the next update's bias correction wrong. Values do not tell it from the first step of a
    warm-up, which may be the same on some ranks, so the caller is looked up.
    """
    return _called_by("_init_optim_state")


def loads_full_state() -> bool:
    """Whether the state dict that the caller makes is what torch merges with the full one that it is loading.

    What only one of them has would stay: moments in one format beside fresh ones in the other, and with
    `broadcast_from_rank0` on rank 0 alone.
    """
    return _called_by("_load_optim_state_dict")


def _called_by(function: str) -> bool:
    """Whether this function of torch.distributed.checkpoint.state_dict is running on this thread."""
    return any(
        frame.f_code.co_name == function
        and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        for frame, _ in walk_stack(sys._getframe())
    )


def unflattens_state() -> bool:
    """Whether the caller's caller is what takes from a flattened state dict the names that an entry of state has.

    It is asked at each read of an entry, so the other frames are not looked at.
    """
    return sys._getframe(2).f_code.co_name == "_unflatten_optim_state_dict"
