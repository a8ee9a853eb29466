"""Finds the accelerator that has the parameters."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from dos.arguments import is_number
from dos.devices import cuda
from dos.devices.base import Device
from perfmodel.hardware import HardwareProfile


def checked_device(device: object) -> Device | torch.device | None:
    """Return the argument `device`: a device of the engine, a torch device, also by its name or index, or None.

    Raises TypeError or ValueError for anything else, and for a CUDA device that torch does not find.
    """
    if device is None or _is_device(device):
        return device  # type: ignore[return-value]
    if isinstance(device, HardwareProfile):
        raise TypeError(
            f"device: found the profile {device.name!r}, which has rates and no memory; pass "
            "dos.EmulatedDevice(profile, capacity), with the capacity in bytes"
        )
    named = device
    if is_number(device) and isinstance(device, numbers.Integral):
        named = f"{cuda.TYPE}:{device}"  # as torch takes an index
    if not isinstance(named, str | torch.device):
        raise TypeError(f"{_EXPECTED}; found {device!r}")
    try:
        wanted = torch.device(named)
    except RuntimeError as error:
        raise ValueError(f"{_EXPECTED}; found {device!r}") from error
    if wanted.type not in ("cpu", cuda.TYPE):
        raise ValueError(f"{_EXPECTED}, on cpu or cuda; found {device!r}")
    count = torch.cuda.device_count() if wanted.type == cuda.TYPE else 0
    if wanted.type == cuda.TYPE and (wanted.index or 0) >= count:
        raise ValueError(
            f"device is {device!r}, and torch.cuda.device_count() is {count} here; leave device= out for parameters on "
            "the host, or pass a dos.EmulatedDevice(profile, capacity)"
        )
    return wanted


def _is_device(device: object) -> bool:
    """Return whether this is a device of the engine, by its methods: of ours, or one of the user's own."""
    return not isinstance(device, type) and all(
        hasattr(device, name) for name in ("owns", "allocate", "copy", "launch")
    )


_EXPECTED = (
    "device must be the torch device of the parameters, or a dos.EmulatedDevice(profile, capacity), "
    "which has an accelerator's memory and speed on the CPU"
)


class DeviceFinder:
    """The accelerator of an optimizer: the one that has the first parameter on any.

    requested: the argument `device`; a torch device confirms where the parameters are, or will be.
    device: the accelerator; None as long as all parameters seen are on the host.
    streamed: the ids of parameters that are on the device while they are used, and else at home on the host.
    """

    def __init__(self, requested: Device | torch.device | str | None) -> None:
        self.requested = requested
        self.device: Device | None = None
        self.streamed: set[int] = set()

    def holds(self, parameter: Tensor) -> bool:
        """Return whether the parameter is on the accelerator when it is used.

        Raises TypeError for a parameter on a kind of device that is not supported, ValueError for one elsewhere than
        requested.
        """
        if self.device is None:
            self.device = self._device_of(parameter)
        return self.device is not None and (id(parameter) in self.streamed or self.device.owns(parameter))

    def awaits(self, parameter: Tensor) -> bool:
        """Return whether the parameter is on the host, although the user has asked for an accelerator."""
        wanted = self.requested
        there = isinstance(wanted, torch.device | str) and torch.device(wanted).type == cuda.TYPE
        return there and parameter.device.type == "cpu" and id(parameter) not in self.streamed

    def open(self) -> Device | None:
        """Return the accelerator, even before any parameter is there; None if the user has asked for none."""
        wanted = self.requested
        if self.device is None and wanted is not None:
            if not isinstance(wanted, torch.device | str):
                self.device = wanted
            elif torch.device(wanted).type == cuda.TYPE:
                self.device = cuda.CudaDevice(torch.device(wanted))
        return self.device

    @property
    def shares_host_memory(self) -> bool:
        """Whether the accelerator has no memory of its own."""
        return self.device is not None and self.device.shares_host_memory

    def _device_of(self, parameter: Tensor) -> Device | None:
        """Return the accelerator that has the parameter; None for one on the host."""
        requested, there = self.requested, parameter.device
        if requested is not None and not isinstance(requested, (torch.device, str)):
            return requested
        if there.type not in ("cpu", cuda.TYPE):
            raise TypeError(f"expected parameters on cpu or cuda, found {there}")
        if requested is not None:
            wanted = torch.device(requested)
            if there.type == "cpu" and wanted.type == cuda.TYPE:
                return None  # until user code or `attach(weights=...)` moves it there
            if wanted.type != there.type or wanted.index not in (None, there.index):
                raise ValueError(f"device is {wanted} but a parameter is on {there}; move the model there first")
        return cuda.CudaDevice(there) if there.type == cuda.TYPE else None
