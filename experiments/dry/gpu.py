"""Puts the dry accelerator of a machine where torch.cuda was, for the rest of the process.

All of `dos` runs as on a GPU, but its kernels, which only take their time, and what asks this machine how much it has.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple

import numpy as np

from experiments.dry.machines import CORES, ROUNDS, Costs, Machine, python_loop
from experiments.simdev.accelerator import KIND, QUERY, holding, lib
from perfmodel.format import CODED, MIXED, SPLIT, Format
from perfmodel.lanes import PIECE_BYTES

HOST_BYTES = 124 << 30
"""Of each of the machines."""
TRITON_S = 80e-6
"""That the host takes to launch an update, with Python's lock."""
BITS_ELEMENTS = 2048 * 16
"""That share a sum of bits, as in `dos.kernels.triton_bits`, which only imports with Triton."""
MOST_HELD = 4
"""Pieces of copies that are queued with Python's lock, as the extension does."""
MOST_UPDATES = 4096
"""On the CPU between two looks."""
PAGES_BYTES = 64 << 20
"""Host memory that all mappings share."""
PART = 20
"""Of `python_loop` that is enough to see how fast Python is."""
SLICE_S = 25e-6
"""In which the host holds Python's lock and lets go of it in turn, as operations of torch do."""


def install(machine: Machine, costs: Costs | None = None, threads: int = 0) -> None:
    """Do it, before anything imports dos, or torch uses a device. threads: of the CPU lane; 0: as dos chooses."""
    costs = costs or Costs()
    if costs.slower is None:
        _compared.append(machine.python_s)
        costs = replace(costs, slower=machine.python_s / min(_python_s() for _ in range(100)))
    figures = machine.all_figures
    lib.sim_dry(_doubles(figures), CORES + 1, _doubles(astuple(costs)))
    lib.sim_capacity(machine.device_bytes)
    from experiments.simdev import as_cuda

    as_cuda.install()
    # In place of the compiled part: nothing here reads or writes memory.
    compiled: Any = types.ModuleType("dos._adam")
    compiled.adam_update = _HostKernel(machine)
    compiled.Order = functools.partial(_Order, compiled.adam_update)
    compiled.Arrivals = _Arrivals
    compiled.Runtime, compiled.Kernel = _Runtime, _Kernel
    compiled.sum_of_squares = lambda *_: 0.0
    compiled.instruction_sets = lambda: ["portable"]
    sys.modules["dos._adam"] = compiled
    import dos
    from dos.devices import cuda, pinned
    from dos.gradients import offload
    from dos.kernels.gpu_update import GpuBatch
    from dos.machine import host_memory
    from dos.machine import threads as machine_threads

    exchanged: dict[Any, dict[str, Any]] = {
        dos: {"_adam": compiled},
        cuda: {
            "TYPE": KIND,
            "HANDLE": "event_id",
            "STREAM": "stream_id",
            "event_query": lambda: QUERY,
            "runtime": lambda: _Runtime(PIECE_BYTES),
        },
        pinned: {"_make_pages": lambda address, nbytes: None, "mmap": _Mmap()},
        host_memory: {
            **dict.fromkeys(("_memory_bytes", "_of_machine"), lambda: HOST_BYTES),  # one of them, by the version
            "_of_container": lambda *_: iter(()),
        },
        machine_threads: {
            "usable_cores": lambda: frozenset(range(CORES)),
            "physical_cores": lambda cpus, *_: len(cpus),
            "torch": types.SimpleNamespace(get_num_threads=lambda: CORES),
        },
        GpuBatch: {"prepare": _device_kernel(machine)},
        offload: {"_add": _addition(machine)},
    }
    with contextlib.suppress(ImportError):  # `--dos` may be older
        from dos.state import bit_sums

        exchanged[bit_sums] = {"bits_kernel": lambda device: _BitsKernel(costs)}
    for owner, names in exchanged.items():
        for name, value in names.items():
            setattr(owner, name, value)
    machine_threads.set_kernel_threads(threads)


_compared: list[float] = []
"""What the machine takes for `python_loop`, if Python's speed here is compared with it."""


def _python_s() -> float:
    """CPU seconds of `python_loop` here and now."""
    begin = time.thread_time()
    python_loop(ROUNDS // PART)
    return (time.thread_time() - begin) * PART


class _Mmap:
    """In place of the module: all mappings have the same few pages, for nothing reads what is there."""

    _NORESERVE, _FIXED = 0x4000, 0x10

    def __init__(self) -> None:
        self._pages = os.memfd_create("dry")
        os.ftruncate(self._pages, PAGES_BYTES)
        self._libc = ctypes.CDLL(None)
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.mmap.restype = ctypes.c_void_p

    def __getattr__(self, name: str) -> Any:
        return getattr(mmap, name)

    def mmap(self, file: int, length: int, flags: int) -> mmap.mmap:
        made = mmap.mmap(file, length, flags=flags | self._NORESERVE)
        address = np.frombuffer(made, dtype=np.uint8).ctypes.data
        shared = mmap.MAP_SHARED | self._FIXED
        for start in range(0, length, PAGES_BYTES):
            nbytes = min(PAGES_BYTES, length - start)
            rights = mmap.PROT_READ | mmap.PROT_WRITE
            place = self._libc.mmap(address + start, nbytes, rights, shared, self._pages, 0)
            assert place == address + start, "the system maps no more"
        return made


def busy(seconds: float) -> None:
    """Queue compute on the current stream."""
    lib.sim_busy(seconds)


@contextlib.contextmanager
def taking(seconds: float) -> Iterator[None]:
    """Let the host take so long, what it does within counted, and with Python's lock half of the time."""
    holding.sim_pay()
    begin = time.perf_counter()
    for machine_s in _compared:  # other programs slow this machine's cores
        lib.sim_compare(machine_s / _python_s())
    yield
    left = seconds - (time.perf_counter() - begin)
    spend, other = lib.sim_spend, holding.sim_spend
    while left > 0:
        spend(min(left, SLICE_S))
        left -= SLICE_S
        spend, other = other, spend
    lib.sim_paid()


class _Aside:
    """What runs within is none of the machine's time, such as what stands here for the extension."""

    def __enter__(self) -> None:
        holding.sim_pay()

    def __exit__(self, *_: object) -> None:
        holding.sim_paid()


def issued_s() -> float:
    """When a copy or update was first issued since this was last asked, as `now_s`; infinite: none was."""
    return lib.sim_issued()


def now_s() -> float:
    """Return the time of the accelerator's clock."""
    return lib.sim_now()


def host_updates() -> list[tuple[float, float]]:
    """When updates on the CPU began and ended since this was last asked."""
    begins, ends = (ctypes.c_double * MOST_UPDATES)(), (ctypes.c_double * MOST_UPDATES)()
    count = lib.sim_host_updates(begins, ends, MOST_UPDATES)
    return list(zip(begins[:count], ends[:count], strict=True))


def _doubles(values: Sequence[float]) -> Any:
    return (ctypes.c_double * len(values))(*values)


def _numel(table: np.ndarray) -> tuple[Format, float]:
    """The format of the runs in a table of dos.kernels.adam, and the parameters that have a gradient."""
    from dos.kernels.adam import EXP_AVG_SCALE, GRAD, NUMEL, REST

    coded, rest = table[0, EXP_AVG_SCALE], table[0, REST]
    return CODED if coded else SPLIT if rest else MIXED, float(table[table[:, GRAD] != 0, NUMEL].sum())


class _HostKernel:
    """In place of the extension's update."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._rate = functools.cache(machine.cpu_rate)  # what this takes is none of the machine's time

    def __call__(self, address: int, rows: int, scalars: object, threads: int, isa: object) -> None:
        lib.sim_host_update(*self.work(address, rows, threads))

    def work(self, address: int, rows: int, threads: int) -> tuple[float, float, float, int]:
        """The arguments of sim_host_update."""
        from dos.kernels.adam import STEP

        with _Aside():
            words = np.ctypeslib.as_array((ctypes.c_int64 * (rows * (STEP + 1))).from_address(address))
            state, numel = _numel(words.reshape(rows, STEP + 1))
            traffic = state.update_traffic * self._machine.profile.cpu_traffic_factor
        return numel, self._rate(state, threads), traffic, threads


class _Order:
    """In place of the extension's, of which it is a part."""

    def __init__(self, kernel: _HostKernel) -> None:
        self._kernel, self._order = kernel, lib.sim_order()
        for name in ("enter", "leave", "await_begin", "await_end", "serve", "stop", "close"):
            setattr(self, name, functools.partial(getattr(lib, f"sim_order_{name}"), self._order))

    def __del__(self) -> None:
        lib.sim_order_delete(self._order)

    def adam_update(
        self, place: int, address: int, rows: int, scalars: object, threads: int, isa: object
    ) -> tuple[float, float] | None:
        times = (ctypes.c_double * 2)()
        ran = lib.sim_order_update(self._order, place, *self._kernel.work(address, rows, threads), times)
        return (times[0], times[1]) if ran else None


class _Arrivals:
    """In place of the extension's, and the same."""

    def __init__(self, query: int) -> None:
        self._arrivals = lib.sim_arrivals()
        for name in ("end", "close", "fail", "wait", "waiting"):
            waits = name in ("wait", "waiting")
            function = getattr(lib if waits else holding, f"sim_arrivals_{name}")
            setattr(self, name, functools.partial(function, self._arrivals))

    def __del__(self) -> None:
        lib.sim_arrivals_delete(self._arrivals)

    def give(self, number: int, rank: int, events: Sequence[int], untold: int) -> None:
        with _Aside():
            holding.sim_arrivals_give(self._arrivals, number, rank, _addresses(events), len(events), untold)

    def tell(self, number: int, events: Sequence[int]) -> None:
        with _Aside():
            holding.sim_arrivals_tell(self._arrivals, number, _addresses(events), len(events))

    def take(self) -> tuple[int, int]:
        place = ctypes.c_long()
        return lib.sim_arrivals_take(self._arrivals, ctypes.byref(place)), place.value


class _Kernel(NamedTuple):
    """In place of the extension's. function: for so many nanoseconds it runs."""

    function: int
    blocks: int
    threads: int
    shared: int
    arguments: Sequence[int]
    answer: tuple[int, int, int]


class _Runtime:
    """In place of the extension's, and the same."""

    def __init__(self, most: int) -> None:
        self._runtime, self._most = lib.sim_runtime(most), most

    def queue(
        self,
        stream: int,
        waits: Sequence[int],
        start: int,
        copies: Sequence[tuple[int, int, int]],
        kind: int,
        end: int,
        moved: int,
        kernel: _Kernel | None = None,
    ) -> tuple[int, int]:
        with _Aside():
            flat = _addresses([word for copy in copies for word in copy])
            behind = ctypes.c_int64(moved)
            few = sum(-(-nbytes // self._most) for _, _, nbytes in copies) <= MOST_HELD
            call = (holding if few else lib).sim_runtime_queue
            events, answer = _addresses(waits), _addresses((0, 0, 0) if kernel is None else kernel.answer)
            function = 0 if kernel is None else kernel.function
        error = call(
            *(self._runtime, stream, events, len(waits), start, flat, len(copies), kind, end, ctypes.byref(behind)),
            *(function, answer),
        )
        return error, behind.value


def _addresses(events: Sequence[int]) -> Any:
    return (ctypes.c_size_t * len(events))(*events)


class _BitsKernel:
    """In place of `dos.kernels.triton_bits`: one launch sums the bits of all parameters of a subgroup."""

    def __init__(self, costs: Costs) -> None:
        self._bandwidth = costs.device_bandwidth

    @staticmethod
    def sums_of(numel: int) -> int:
        return -(-numel // BITS_ELEMENTS)

    def sum_bits(self, rows: np.ndarray, send: object, sums: object, itemsize: int, differs: object = None) -> Any:
        from dos.kernels.native import Entry, Launched

        holding.sim_pay()
        holding.sim_spend(TRITON_S)
        seconds = itemsize * float(rows[:, 1].sum()) / self._bandwidth
        lib.sim_busy(seconds)
        return Launched(Entry(max(1, round(1e9 * seconds)), 0, 0), 0, (), ())


def _addition(machine: Machine) -> Callable[..., None]:
    """In place of the function that adds a micro-batch's gradient to those of others on the host."""
    traffic = 3 * SPLIT.value_bytes  # two are read, one is written
    rate = machine.profile.cpu_update_rate * MIXED.update_traffic / traffic

    def add(incoming: Any, target: object, dtype: object, before: Sequence[Any], addend: object = None) -> None:
        for each in before:
            each.result()
        lib.sim_host_update(float(incoming.numel()), rate, traffic, machine.profile.cpu_threads)

    return add


def _device_kernel(machine: Machine) -> Callable[..., Any]:
    """In place of `GpuBatch.prepare`."""

    def prepare(batch: object, steps: object, table: np.ndarray, held: object = None) -> Callable[[], None]:
        with _Aside():
            state, numel = _numel(table)

        def queue() -> None:
            holding.sim_pay()
            holding.sim_spend(TRITON_S)
            lib.sim_update(numel / machine.gpu_rate(state))

        return queue

    return prepare
