"""The simulated accelerator as a device of torch, "simdev", and what can be asked of the simulation."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import torch

from experiments.simdev.build import library

KIND = "simdev"

_path = str(library())
torch.utils.rename_privateuse1_backend(KIND)
torch.ops.load_library(_path)
lib = ctypes.CDLL(_path)
"""sim_delays(share, most microseconds) of work, sim_capacity(bytes), sim_others(bytes) that other processes hold,
sim_fail_in(n): the allocation after n others fails, sim_fail_share(share, seed): such a share of them does.
sim_launch(function, number): queue a call. sim_shadow(): from an address to where a call finds what is there."""
lib.orHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
lib.orHostUnregister.argtypes = [ctypes.c_void_p]
lib.sim_delays.argtypes = [ctypes.c_double, ctypes.c_int]
lib.sim_capacity.argtypes = lib.sim_others.argtypes = [ctypes.c_size_t]
lib.sim_fail_in.argtypes = [ctypes.c_long]
lib.sim_fail_share.argtypes = [ctypes.c_double, ctypes.c_uint]
LAUNCHED = ctypes.CFUNCTYPE(None, ctypes.c_long)
lib.sim_launch.argtypes = [LAUNCHED, ctypes.c_long]
lib.sim_shadow.restype = ctypes.c_long
lib.sim_faults()
_DOUBLES: Any = ctypes.POINTER(ctypes.c_double)
lib.sim_dry.argtypes = [_DOUBLES, ctypes.c_int, _DOUBLES]
lib.sim_spend.argtypes = lib.sim_busy.argtypes = lib.sim_update.argtypes = lib.sim_compare.argtypes = [ctypes.c_double]
_UPDATE: list[Any] = [*[ctypes.c_double] * 3, ctypes.c_int]
lib.sim_host_update.argtypes = _UPDATE
lib.sim_order.restype = ctypes.c_void_p
for _name in ("delete", "serve", "stop", "close"):
    getattr(lib, f"sim_order_{_name}").argtypes = [ctypes.c_void_p]
lib.sim_order_enter.argtypes = lib.sim_order_leave.argtypes = [ctypes.c_void_p, ctypes.c_long]
lib.sim_order_await_begin.argtypes = [ctypes.c_void_p, ctypes.c_double]
lib.sim_order_await_end.argtypes = [ctypes.c_void_p, ctypes.c_long]
lib.sim_order_update.argtypes = [ctypes.c_void_p, ctypes.c_long, *_UPDATE, _DOUBLES]
lib.sim_arrivals.restype = ctypes.c_void_p
for _name in ("delete", "end", "close", "fail", "waiting"):
    getattr(lib, f"sim_arrivals_{_name}").argtypes = [ctypes.c_void_p]
_EVENTS: list[Any] = [ctypes.POINTER(ctypes.c_size_t), ctypes.c_long]
lib.sim_arrivals_give.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long, *_EVENTS, ctypes.c_long]
lib.sim_arrivals_tell.argtypes = [ctypes.c_void_p, ctypes.c_long, *_EVENTS]
lib.sim_arrivals_take.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_long)]
lib.sim_arrivals_wait.argtypes = [ctypes.c_void_p, ctypes.c_double]
lib.sim_arrivals_take.restype = lib.sim_arrivals_waiting.restype = ctypes.c_long
lib.sim_runtime.argtypes, lib.sim_runtime.restype = [ctypes.c_size_t], ctypes.c_void_p
lib.sim_runtime_queue.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, *_EVENTS, ctypes.c_size_t),
    *(*_EVENTS, ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int64)),
    *(ctypes.c_size_t, _EVENTS[0]),
]
lib.sim_host_updates.argtypes = [_DOUBLES, _DOUBLES, ctypes.c_int]
lib.sim_issued.restype = lib.sim_now.restype = ctypes.c_double
holding = ctypes.PyDLL(_path)
"""The library, for calls that keep Python's lock."""
holding.sim_arrivals_give.argtypes = lib.sim_arrivals_give.argtypes
holding.sim_arrivals_tell.argtypes = lib.sim_arrivals_tell.argtypes
for _name in ("end", "close", "fail"):
    getattr(holding, f"sim_arrivals_{_name}").argtypes = [ctypes.c_void_p]
holding.sim_runtime_queue.argtypes = lib.sim_runtime_queue.argtypes
holding.sim_spend.argtypes = [ctypes.c_double]

QUERY: int = ctypes.cast(lib.sim_query, ctypes.c_void_p).value or 0
"""The address of the function that asks an event, as `dos.devices.cuda.event_query` returns it."""

_NAMES = "wait", "record", "copy", "pause", "kernel"
FUNCTIONS: tuple[int, ...] = tuple(
    ctypes.cast(getattr(lib, f"sim_{name}"), ctypes.c_void_p).value or 0 for name in _NAMES
)
"""Those of the runtime, as `dos.devices.runtime.runtime_of` takes them."""

_accelerator: Any = torch.accelerator
_module = types.ModuleType(f"torch.{KIND}")
_module.__dict__.update(
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda device: None,
    _device=lambda device: _accelerator.device_index(0),
    device=lambda device: _accelerator.device_index(0),
    manual_seed_all=lambda seed: None,
    manual_seed=lambda seed: None,
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    synchronize=lambda device=None: _accelerator.synchronize(),
    current_stream=lambda device=None: _accelerator.current_stream(),
    Stream=torch.Stream,
    Event=torch.Event,
)
torch._register_device_module(KIND, _module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
