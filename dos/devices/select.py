"""Finds the accelerator that has the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from dos.devices import cuda
from dos.devices.base import Device


class DeviceFinder:
    """The accelerator of an optimizer: the one that has the first parameter on any.

    requested: the argument `device`; a torch device confirms where the parameters are, or will be.
    found: the accelerator; None as long as all parameters seen are on the host.
    streamed: the ids of parameters that are on the device while they are used, and else at home on the host.
    """

    def __init__(self, requested: Device | torch.device | str | None) -> None:
        self.requested = requested
        self.found: Device | None = None
        self.streamed: set[int] = set()

    def holds(self, parameter: Tensor) -> bool:
        """Return whether the parameter is on the accelerator when it is used.

        Raises TypeError for a parameter on a kind of device that is not supported, ValueError for one elsewhere than
        requested, or a request that is no device.
        """
        if self.found is None:
            self.found = self._device_of(parameter)
        return self.found is not None and (id(parameter) in self.streamed or self.found.owns(parameter))

    def awaits(self, parameter: Tensor) -> bool:
        """Return whether the parameter is on the host, although the user has asked for an accelerator."""
        wanted = self.requested
        there = isinstance(wanted, torch.device | str) and torch.device(wanted).type == cuda.TYPE
        return there and parameter.device.type == "cpu" and id(parameter) not in self.streamed

    def open(self) -> Device | None:
        """Return the accelerator, even before any parameter is there; None if the user has asked for none."""
        wanted = self.requested
        if self.found is None and wanted is not None:
            if not isinstance(wanted, torch.device | str):
                self.found = wanted
            elif torch.device(wanted).type == cuda.TYPE:
                self.found = cuda.CudaDevice(torch.device(wanted))
        return self.found

    @property
    def shares_host_memory(self) -> bool:
        """Whether the accelerator has no memory of its own."""
        return self.found is not None and self.found.shares_host_memory

    def _device_of(self, parameter: Tensor) -> Device | None:
        """Return the accelerator that has the parameter; None for one on the host."""
        requested, there = self.requested, parameter.device
        if requested is not None and not isinstance(requested, (torch.device, str)):
            return requested
        if there.type not in ("cpu", cuda.TYPE):
            raise TypeError(f"expected parameters on cpu or cuda, found {there}")
        if requested is not None:
            try:
                wanted = torch.device(requested)
            except RuntimeError as error:
                raise ValueError(
                    "device must be the torch device of the parameters, or a dos.EmulatedDevice(profile, capacity), "
                    f"which has an accelerator's memory and speed on the CPU; found {requested!r}"
                ) from error
            if there.type == "cpu" and wanted.type == cuda.TYPE:
                return None  # until user code or `attach(weights=...)` moves it there
            if wanted.type != there.type or wanted.index not in (None, there.index):
                raise ValueError(f"device is {wanted} but a parameter is on {there}; move the model there first")
        return cuda.CudaDevice(there) if there.type == cuda.TYPE else None
