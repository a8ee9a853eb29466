"""The update on the simulated accelerator: one launch, of the CPU's kernel, as there is one on a GPU.

By torch operations, a hundred of which are queued for each parameter, tests would take several times as long.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dos.kernels.adam import AdamArrays, AdamStep
from dos.kernels.extension import load_extension
from dos.kernels.gpu_update import GpuBatch
from experiments.simdev.accelerator import LAUNCHED, lib

_adam = load_extension()
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
