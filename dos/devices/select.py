"""Which accelerator a parameter is on."""

from __future__ import annotations

import torch
from torch import Tensor

from dos.devices.base import Device
from dos.devices.cuda import CudaDevice


def device_for(parameter: Tensor, requested: Device | torch.device | str | None) -> Device | None:
    """The accelerator that holds the parameter, None for one on the host.

    requested: what the user passed as `device`; a torch device only confirms where the parameters are.
    Raises TypeError for a parameter on a kind of device that is not supported, ValueError for one elsewhere than
    requested.
    """
    if requested is not None and not isinstance(requested, (torch.device, str)):
        return requested
    if parameter.device.type not in ("cpu", "cuda"):
        raise TypeError(f"expected parameters on cpu or cuda, found {parameter.device}")
    if requested is not None:
        wanted = torch.device(requested)
        if wanted.type != parameter.device.type or wanted.index not in (None, parameter.device.index):
            raise ValueError(f"device is {wanted} but a parameter is on {parameter.device}; move the model there first")
    return CudaDevice(parameter.device) if parameter.device.type == "cuda" else None


class DeviceFinder:
    """The accelerator of an optimizer, which the first parameter that is on one decides.

    requested: what the user passed as `device`. found: None as long as all parameters seen are on the host.
    """

    def __init__(self, requested: Device | torch.device | str | None) -> None:
        self._requested = requested
        self.found: Device | None = None

    def holds(self, parameter: Tensor) -> bool:
        """Whether the parameter is on the accelerator. Raises as `device_for` does."""
        if self.found is None:
            self.found = device_for(parameter, self._requested)
        return self.found is not None and self.found.owns(parameter)


def host_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """1-D zeros in ordinary host memory."""
    return torch.zeros(numel, dtype=dtype, device="cpu")
