"""The Adam update of one flat range, on the CPU (C++ extension) or on a GPU (Triton, or torch where that is missing).

The formula is AdamW (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2) as
``torch.optim.AdamW`` writes it, in float32 with round to nearest, fused multiply-adds and IEEE square root and
division in one fixed order. So a result depends, to the bit, on neither instruction set, thread count, device nor on
how a range was split. Against ``torch.optim.AdamW`` it differs by a few units in the last place. Every NaN written is
the same quiet NaN.

The float32 master of a bfloat16 parameter is never a tie: where the lower 16 bits of a new master
come out as exactly 0x8000, halfway between two bfloat16, it moves one unit in the last place towards
the even one, to which the parameter is rounded. So the parameter, which is an upper half, and the
master's lower half together give the master back::

    bits = (upper << 16 | lower) - (lower > 0x8000 ? 0x10000 : 0)

It changes 65,280 of the 2**32 floats, none of them to another bfloat16, and holds wherever state is
kept and whichever processor updates it. A value that user code writes to a master in place is used as it is.

So a master need not be kept beside its parameter: a split one is the parameter and a ``rest`` of 16
bits, the lower half, which every kernel joins, updates and splits again in its one pass over memory,
with the same result. Read as a signed number, the rest is the error of rounding, and the formula
above becomes ``bits = (upper << 16) + rest``. An update then moves 26 bytes per parameter (with a
bfloat16 gradient) and not 28.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dos.kernels.adam import FLOATS, GRAD, GRAD_TYPE, OUT, PARAM, STEP, TAKES_WRITTEN, AdamArrays, AdamStep
from dos.kernels.extension import load_extension
from dos.kernels.gpu_update import GpuBatch
from dos.machine.threads import kernel_threads
from dos.torch_internals.tensors import is_zero_tensor
from perfmodel.format import BLOCK

_adam = load_extension()

Order: Any = _adam.Order
"""Runs prepared updates one at a time, each in its place from 0 on, without Python's lock; see csrc/order.h."""
Arrivals: Any = _adam.Arrivals
"""Work that waits for events and jobs, and is taken once these have ended, without Python's lock; csrc/arrivals.h."""


def instruction_sets() -> list[str]:
    """Return the instruction sets of this machine, best first."""
    return _adam.instruction_sets()


class AdamBatch:
    """Updates of several runs of elements, the same ones step after step: in one native call, or one launch.

    It checks the arrays, and does not refer to them: their memory must last until the update has ended. The next update
    may be of other memory, which :meth:`follow` sets; :meth:`point` sets the addresses of each update's gradients.

    Raises:
        TypeError: an array is not a dense tensor, or of a dtype not listed in :class:`AdamArrays`.
        ValueError: a tensor of another length or device, not 1-D, not contiguous or not in memory as it is (lazily
            negated).
    """

    def __init__(self, runs: Sequence[AdamArrays]) -> None:
        for run in runs:
            _check_run(run, runs[0].param.device)
        self._has_max = np.array([run.max_exp_avg_sq is not None for run in runs], bool)
        self._dtypes: list[torch.dtype] = []
        self._takes_all = False
        rows = [[*map(_address, run), *map(_type, (run.grad, run.param, run.out)), len(run.param), 0] for run in runs]
        self._table = np.array(rows, np.int64).reshape(len(runs), STEP + 1)
        self._gpu = None if not runs or runs[0].param.is_cpu else GpuBatch(runs[0].param.device)

    def follow(self, moves: Iterable[tuple[int, int, int]]) -> None:
        """Follow arrays to other memory. moves: (old address, new address, bytes)."""
        columns = self._table[:, PARAM:GRAD_TYPE]
        before = columns.copy()  # an array may be where another one was
        for source, destination, nbytes in moves:
            columns[(before >= source) & (before < source + nbytes)] += destination - source

    def point(self, addresses: Sequence[int], dtypes: Sequence[torch.dtype] | None = None) -> None:
        """Set the addresses of the gradients of the next update, one for each run; 0: no gradient, and no update.

        Each must have as many elements as the run, in its order, which is not checked. dtypes: None, as before.
        """
        self._check_length("addresses", addresses)
        if dtypes is not None and self._dtypes != list(dtypes):
            self._check_length("dtypes", dtypes)
            for dtype in set(dtypes) - set(FLOATS):
                raise TypeError(f"grad: expected {_any_of(FLOATS)}, found {dtype}")
            self._table[:, GRAD_TYPE] = [FLOATS.index(dtype) for dtype in dtypes]
            self._dtypes = list(dtypes)
        self._table[:, GRAD] = array("q", addresses)

    def take_written(self, which: Sequence[bool] | None = None) -> None:
        """Let masters take over the parameters in ``out`` to which user code has written, in each update from now on.

        A master that is the parameter, once rounded, stays as it is; see :func:`dos.kernels.adam.taken`. So ``out``
        must have the parameters as user code knows them.

        Args:
            which: for each run, whether to do so; None: for all.
        """
        if which is None and self._takes_all:  # in almost every step: to set it again takes longer than small updates
            return
        if which is not None:
            self._check_length("which", which)
        self._takes_all = which is None
        masters = self._table[:, OUT] != 0
        self._table[masters, TAKES_WRITTEN] = 1 if which is None else np.array(which, bool)[masters]

    def update(
        self,
        steps: AdamStep | Sequence[AdamStep],
        which: Sequence[int] | None = None,
        *,
        threads: int = 0,
        isa: str | None = None,
    ) -> None:
        """Update ``param`` and the state of every run that has a gradient in place, in one pass over memory.

        Args:
            which: the index in ``steps`` for each run; None: 0 for all.
            threads: the most threads on the CPU; 0 stands for :func:`dos.machine.threads.kernel_threads`.
            isa: one of :func:`instruction_sets`, None for the best.

        Raises:
            ValueError: ``max_exp_avg_sq`` missing with amsgrad; unknown ``isa``; negative ``threads``; ``which`` of
                another length or not within ``steps``.
        """
        steps = (steps,) if isinstance(steps, AdamStep) else steps
        self.choose(steps, which)
        prepare([self], steps, threads=threads, isa=isa)()

    def choose(self, steps: Sequence[AdamStep], which: Sequence[int] | None = None) -> None:
        """Set the index in ``steps`` for each run, as in :meth:`update`, before batches are updated together."""
        chosen = self._table[:, STEP]
        chosen[:] = first = last = 0
        if which is not None and len(chosen):
            self._check_length("which", which)
            chosen[:] = array("q", which)
            first, last = chosen.min(), chosen.max()
        if len(chosen) and not 0 <= first <= last < len(steps):
            raise ValueError(f"which: expected 0 to {len(steps) - 1}, found {first} to {last}")
        amsgrad = [step.amsgrad for step in steps]
        updated = self._table[:, GRAD] != 0
        if any(amsgrad) and (np.array(amsgrad)[chosen] & ~self._has_max & updated).any():
            raise ValueError("max_exp_avg_sq: expected a tensor with amsgrad=True, found None")

    def _check_length(self, name: str, values: Sequence[object]) -> None:
        if len(values) != len(self._table):
            raise ValueError(f"{name}: expected {len(self._table)}, found {len(values)}")


def prepare(
    batches: Sequence[AdamBatch], steps: Sequence[AdamStep], *, threads: int = 0, isa: str | None = None
) -> Callable[[], None]:
    """Prepare the update of batches on one device as one, after :meth:`AdamBatch.choose` of each.

    Returns the function that updates them, or on a GPU queues the update, with little work for the host.
    """
    first = batches[0]
    table = first._table if len(batches) == 1 else np.concatenate([batch._table for batch in batches])
    if first._gpu is not None:
        return first._gpu.prepare(steps, table)
    scalars = [(*step.scalars, step.use_l2, step.amsgrad, step.seed) for step in steps]
    return HostUpdate(table, scalars, _threads(threads), isa)


class HostUpdate:
    """A prepared update on the CPU: called, it updates at once. It keeps the table, not the memory that this names."""

    def __init__(
        self, table: NDArray[np.int64], scalars: Sequence[tuple[float, ...]], threads: int, isa: str | None
    ) -> None:
        self._table = table
        self._arguments = table.ctypes.data, len(table), scalars, threads, isa

    def __call__(self) -> None:
        _adam.adam_update(*self._arguments)

    def in_order(self, order: Any, place: int) -> tuple[float, float] | None:
        """Let the thread that serves the order update, once all places before this one were left, and leave it.

        Returns when it began and ended, by `time.perf_counter`; None, with nothing updated, if the order was stopped.
        """
        found: tuple[float, float] | None = order.adam_update(place, *self._arguments)
        return found


def adam_update(arrays: AdamArrays, *, step: AdamStep, threads: int = 0, isa: str | None = None) -> None:
    """Update one run; see :class:`AdamBatch`."""
    AdamBatch([arrays]).update(step, threads=threads, isa=isa)


def sum_of_squares(src: Tensor, *, threads: int = 0, isa: str | None = None) -> float:
    """Return the sum of squares of a 1-D contiguous CPU tensor (float32, bfloat16 or float16), in double precision.

    The order of summation is fixed, so that the result depends only on the values. ``threads``, ``isa`` and the errors
    raised are those of :class:`AdamBatch`.
    """
    _check("src", src, FLOATS, src)
    _check_device("src", src, torch.device("cpu"))
    return _adam.sum_of_squares(len(src), src.data_ptr(), _type(src), _threads(threads), isa)


def _threads(threads: int) -> int:
    if threads < 0:
        raise ValueError(f"threads: expected at least 1, or 0 for what dos.machine.threads finds, found {threads}")
    return threads or kernel_threads()


def _address(array: Tensor | None) -> int:
    return 0 if array is None else array.data_ptr()


def _type(array: Tensor | None) -> int:
    return -1 if array is None else FLOATS.index(array.dtype)


def _check_run(run: AdamArrays, device: torch.device) -> None:
    _check("param", run.param, FLOATS, run.param)
    coded = run.exp_avg_scale is not None or run.exp_avg_sq_scale is not None
    moments = (torch.int8, torch.uint8) if coded else (torch.float32,) * 2
    types = {"grad": FLOATS, "exp_avg": moments[:1], "exp_avg_sq": moments[1:], "max_exp_avg_sq": FLOATS[:1]}
    for name, dtypes in (types | {"out": FLOATS}).items():
        found = getattr(run, name)
        if found is not None or name in ("grad", "exp_avg", "exp_avg_sq"):
            _check(name, found, dtypes, run.param)
    if coded:
        if len(run.param) % BLOCK:
            raise ValueError(f"param: expected a multiple of {BLOCK} elements beside scales, found {len(run.param)}")
        if run.max_exp_avg_sq is not None:
            raise ValueError("max_exp_avg_sq: expected None beside scales, found a tensor")
        for name in ("exp_avg_scale", "exp_avg_sq_scale"):
            _check(name, getattr(run, name), FLOATS[:1], run.param[::BLOCK])
    if run.out is not None and run.param.dtype != torch.float32:
        raise TypeError(f"out: expected only beside a float32 param, found {run.param.dtype}")
    if run.rest is not None:
        _check("rest", run.rest, (torch.int16,), run.param)
        if run.param.dtype != torch.bfloat16:
            raise TypeError(f"rest: expected only beside a bfloat16 param, found {run.param.dtype}")
    _check_device("param", run.param, device)


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], like: Tensor) -> None:
    """Raise unless ``tensor`` is dense, 1-D, contiguous, of a dtype listed, of the length and device of ``like``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {_any_of(dtypes)}, found {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, found {tensor.layout}")
    if tensor.ndim != 1:
        raise ValueError(f"{name}: expected 1 dimension, found shape {tuple(tensor.shape)}")
    if tensor.numel() != like.numel():
        raise ValueError(f"{name}: expected {like.numel()} elements, found {tensor.numel()}")
    _check_device(name, tensor, like.device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, found stride {tensor.stride(0)}")
    if tensor.is_neg() or is_zero_tensor(tensor):
        # The kernels read memory, which does not have the values of such a tensor.
        raise ValueError(f"{name}: expected values in memory, found a lazily negated or zero tensor; use .clone()")


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, found {tensor.device}")


def _any_of(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))
