"""The update, and sums of bits, on the simulated accelerator: one launch each, as there is one on a GPU.

By torch operations, a hundred of which are queued for each parameter, tests would take several times as long.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dos.devices.runtime import runtime_of
from dos.kernels.adam import AdamArrays, AdamStep
from dos.kernels.extension import load_extension
from dos.kernels.gpu_update import GpuBatch
from dos.kernels.native import Entry, Launched
from experiments.dry.gpu import BITS_ELEMENTS
from experiments.simdev.accelerator import FUNCTIONS, LAUNCHED, lib

_adam = load_extension()
_runtime = runtime_of(FUNCTIONS)
_launches: dict[int, tuple[np.ndarray, list[Any]]] = {}
_numbers = itertools.count()


@LAUNCHED
def _run(number: int) -> None:
    table, scalars = _launches.pop(number)
    _adam.adam_update(table.ctypes.data, len(table), scalars, 1, None)


def prepare(batch: GpuBatch, steps: Sequence[AdamStep], table: np.ndarray) -> Callable[[], None]:
    """In place of `GpuBatch.prepare`."""
    there = table.copy()
    addresses = there[:, : len(AdamArrays._fields)]
    addresses[addresses != 0] += lib.sim_shadow()
    scalars = [(*step.scalars, step.use_l2, step.amsgrad, step.seed) for step in steps]

    def queue() -> None:
        number = next(_numbers)
        _launches[number] = there, scalars
        lib.sim_launch(_run, number)

    return queue


class Bits:
    """In place of `dos.kernels.triton_bits`; native code can launch what this has launched once, as on a GPU."""

    @staticmethod
    def sums_of(numel: int) -> int:
        return -(-numel // BITS_ELEMENTS)

    @staticmethod
    def sum_bits(
        rows: np.ndarray,
        send: object,
        sums: Tensor,
        itemsize: int,
        differs: Tensor | None = None,
    ) -> Launched:
        table = torch.from_numpy(rows.copy()).pin_memory().to(sums.device, non_blocking=True)
        there = 0 if differs is None else differs.data_ptr()
        function = ctypes.cast(lib.sim_sums, ctypes.c_void_p).value or 0
        arguments = table.data_ptr(), len(rows), sums.data_ptr(), there, itemsize
        found = Launched(Entry(function, 0, 0), 0, arguments, [table, sums])
        stream = torch.accelerator.current_stream().stream_id
        error, _ = _runtime.queue(stream, (), 0, (), 0, 0, -1, found.kernel())
        assert not error
        return found
