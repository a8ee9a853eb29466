"""Lets what is written for torch.cuda run on the simulated accelerator.

Most goes by what torch has for any accelerator. What a vendor must be asked itself is in `_OWN`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from experiments.simdev.accelerator import KIND, lib

_accelerator: Any = torch.accelerator


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device)
    return _accelerator.current_device_index() if found is None or found.index is None else found.index


def _stream(device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:
    return torch.Stream(device=torch.device(KIND, _index(device)), priority=max(priority, 0))


def _event(enable_timing: bool = False, blocking: bool = False, **_: Any) -> torch.Event:
    return torch.Event(device=KIND, enable_timing=enable_timing, blocking=blocking)


@contextlib.contextmanager
def _on_stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = _accelerator.current_stream(stream.device)
    _accelerator.set_stream(stream)
    try:
        yield
    finally:
        _accelerator.set_stream(before)


def _on_device(device: Any) -> AbstractContextManager[Any]:
    return _accelerator.device_index(_index(device))


def _device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    return _accelerator.device_index(tensor.device.index if tensor.device.type == KIND else None)


def _properties(device: Any = None) -> Any:
    total = _accelerator.get_memory_info(_index(device))[1]
    return SimpleNamespace(name="Simulated", uuid="0-1-2-3", total_memory=total, is_integrated=False, major=9, minor=0)


_RUNTIME = SimpleNamespace(
    cudaHostRegister=lambda address, nbytes, flags: lib.orHostRegister(address, nbytes),
    cudaHostUnregister=lambda address: lib.orHostUnregister(address),
    cudaError=SimpleNamespace(success=0),
    cudaGetErrorString=lambda error: f"simulated error {error}",
)

_GENERAL: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": _accelerator.device_count,
    "Stream": _stream,
    "Event": _event,
    "stream": _on_stream,
    "set_stream": _accelerator.set_stream,
    "device": _on_device,
    "device_of": _device_of,
    "current_device": _accelerator.current_device_index,
    "set_device": lambda device: _accelerator.set_device_index(_index(device)),
    "current_stream": lambda device=None: _accelerator.current_stream(torch.device(KIND, _index(device))),
    "synchronize": lambda device=None: _accelerator.synchronize(_index(device)),
    "mem_get_info": lambda device=None: _accelerator.get_memory_info(_index(device)),
    "memory_stats_as_nested_dict": lambda device=None: torch._C._accelerator_getDeviceStats(_index(device)),
    "memory_reserved": lambda device=None: _accelerator.memory_reserved(_index(device)),
    "memory_allocated": lambda device=None: _accelerator.memory_allocated(_index(device)),
    "max_memory_allocated": lambda device=None: _accelerator.max_memory_allocated(_index(device)),
    "max_memory_reserved": lambda device=None: _accelerator.max_memory_reserved(_index(device)),
    "reset_peak_memory_stats": lambda device=None: _accelerator.reset_peak_memory_stats(_index(device)),
}
_OWN: dict[str, Callable[..., Any]] = {
    "empty_cache": lambda: lib.sim_empty_cache(),  # without Python's lock, which a launch that it waits for takes
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: "Simulated",
    "cudart": lambda: _RUNTIME,
    "is_current_stream_capturing": lambda: False,
    "memory_snapshot": lambda include_traces=True: [],  # no segment is cut or private
    "set_sync_debug_mode": lambda mode: lib.sim_sync_debug(int(mode in (2, "error"))),
    "get_sync_debug_mode": lambda: 0,
    "_sleep": lambda cycles: lib.sim_sleep(int(cycles / 1e3)),  # at 1 GHz
}


def install() -> None:
    """Put them in torch.cuda's place, for the rest of the process."""
    for name, replacement in {**_GENERAL, **_OWN}.items():
        setattr(torch.cuda, name, replacement)
    private: Any = torch._C
    private._cuda_getCurrentRawStream = lambda index: private._accelerator_getStream(index).stream_id
