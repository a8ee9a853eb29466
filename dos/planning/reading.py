"""Reads device memory from NVML, the runtime and the caching allocator."""

from __future__ import annotations

import enum
import logging
import math
import time
from typing import Any, NamedTuple

from dos.devices import Device, Memory
from dos.guard import warn

logger = logging.getLogger(__name__)

OF_THIS_DEVICE = 0.1
"""The share of the device's memory by which NVML and the runtime may differ: the driver reserves some."""


AGAIN_S = 1.0
"""Seconds until NVML's library is looked for again."""


class Source(enum.Enum):
    """The source of a figure of free memory, and the reason if it is not NVML."""

    NVML = "NVML"
    NO_NVML = "the runtime, because NVML is not installed or has no driver"
    NOT_PERMITTED = "the runtime, because NVML may not be read here"
    NOT_FOUND = "the runtime, because NVML does not know the device"
    LOST = "the runtime, because NVML has lost the device"
    FAILED = "the runtime, because NVML fails"
    NONSENSE = "the runtime, because NVML's figures cannot be those of this device"
    DEVICE = "the device itself"
    UNREADABLE = "no source, because the runtime's figures cannot be read or cannot be"


_ADVICE = {
    Source.NO_NVML: "Install nvidia-ml-py; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    Source.NOT_PERMITTED: "Let this user read it, as nvidia-smi does",
    Source.NOT_FOUND: "Compare CUDA_VISIBLE_DEVICES with `nvidia-smi -L`",
    Source.LOST: "Look for Xid messages in the kernel's log: the device may need a reset",
    Source.FAILED: "See whether nvidia-smi works; if it does, upgrade nvidia-ml-py",
    Source.NONSENSE: "Compare with nvidia-smi (where MPS limits this process's memory, that is as it must be)",
    Source.UNREADABLE: "Optimizer state stays on the host meanwhile. See whether nvidia-smi works",
}
"""Advice where the source is not NVML, by source."""


class Reading(NamedTuple):
    """Device memory in bytes.

    source: of the figures. others: bytes of other processes; 0 if not known.
    lowest: the free bytes when this process had most in use since the last reading; None if not known.
    """

    memory: Memory
    source: Source
    others: int = 0
    lowest: int | None = None


class Nvml:
    """Free memory of one device as the driver sees it, other processes included.

    uuid: of the device, as NVML writes it: `GPU-...` or, for a slice of one, `MIG-...`. Unlike an index it does not
        change with CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._handle: Any = None
        self._absent_until = -math.inf
        """The time.perf_counter() until which its library is not looked for: it was not found."""

    def read(self) -> Memory | Source:
        """Return the memory, or the reason why there is no figure."""
        if time.perf_counter() < self._absent_until:
            return Source.NO_NVML
        try:
            import pynvml
        except ImportError:
            return Source.NO_NVML
        try:
            if self._handle is None:
                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            info = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            return Memory(int(info.free), int(info.total))
        except Exception as error:  # NVMLError, or any error of a library that does not fit the driver
            self._handle = None  # the driver may come back
            logger.debug("NVML: %s", repr(error))
            found = _REASONS.get(type(error).__name__.removeprefix("NVMLError_"), Source.FAILED)
            if found is Source.NO_NVML:  # looking for it takes half a millisecond, in backward and step()
                self._absent_until = time.perf_counter() + AGAIN_S
            return found


_REASONS = {
    "LibraryNotFound": Source.NO_NVML,
    "DriverNotLoaded": Source.NO_NVML,
    "LibRmVersionMismatch": Source.NO_NVML,
    "NoPermission": Source.NOT_PERMITTED,
    "InsufficientResources": Source.NOT_PERMITTED,
    "NotFound": Source.NOT_FOUND,
    "InvalidArgument": Source.NOT_FOUND,
    "NotSupported": Source.NOT_FOUND,
    "GpuNotFound": Source.LOST,
    "GpuIsLost": Source.LOST,
    "ResetRequired": Source.LOST,
}
"""Sources by the name of NVML's error. https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html"""


class MemoryReader:
    """Reads one device's memory. Warns once of each source that may know less than NVML."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._nvml = None if device.uuid is None else Nvml(device.uuid)
        self._total = 0
        self._expected = 0
        """The total memory by the runtime, with which NVML's figure is compared."""
        self._warned: set[Source] = set()

    def read(self) -> Reading:
        """Read the memory, from NVML where possible; unused memory of the caching allocator counts as free."""
        try:
            (reserved, unused, least), (memory, source) = self._device.cached(), self._look()
        except Exception as error:  # no error of a reading may end training
            logger.debug("device memory: %s", repr(error))
            memory, reserved, least = Memory(0, 0), 0, None
        if not _can_be(memory):
            memory, unused, least, source = Memory(0, self._total), 0, None, Source.UNREADABLE
            reserved = self._total  # so that no other process is blamed
        self._total = memory.total
        if source in _ADVICE and source not in self._warned:
            self._warned.add(source)
            warn(
                f"DOSAdam takes free device memory from {source.value}; what other processes take may be seen late. "
                f"{_ADVICE[source]}, or choose memory_budget="
            )
        return Reading(
            Memory(memory.free + unused, memory.total),
            source,
            max(0, memory.total - memory.free - reserved),
            None if least is None else max(0, memory.free + least),
        )

    def _look(self) -> tuple[Memory, Source]:
        """Return free and total memory, and their source.

        The runtime is read once, and where NVML has no figure: its call was reported to take 8 ms on one machine.
        """
        found = Source.DEVICE if self._nvml is None else self._nvml.read()
        if not isinstance(found, Source):
            if self._expected <= 0:
                self._expected = self._device.memory().total
            if _can_be(found) and abs(found.total - self._expected) <= OF_THIS_DEVICE * self._expected:
                return found, Source.NVML
            found = Source.NONSENSE
        return self._device.memory(), found


def _can_be(memory: Memory) -> bool:
    return 0 <= memory.free <= memory.total and memory.total > 0
