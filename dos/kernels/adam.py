"""The arguments of an Adam update: the settings of the step, and the arrays."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from perfmodel.format import BLOCK

logger = logging.getLogger(__name__)

PART = 1 << 19
"""The most elements that torch operations update at once: intermediates take some 100 bytes for each."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The floating types of the kernels, in the order of ``DType`` in csrc/adam.h."""

GRAD, PARAM, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, OUT, REST, EXP_AVG_SCALE, EXP_AVG_SQ_SCALE = range(9)
GRAD_TYPE, PARAM_TYPE, OUT_TYPE, NUMEL, STEP = range(9, 14)
"""The columns of a table of runs: the words of ``AdamRun`` in csrc/adam.h. A missing array is 0, and its type -1."""
TAKES_WRITTEN = PARAM_TYPE
"""The column that says, of a run with `out`, whose `param` is float32, whether masters take over what was written."""


@dataclass(frozen=True)
class AdamStep:
    """The settings of one step, as plain Python numbers.

    ``step`` counts this step too, so it is at least 1. The gradient is multiplied by ``grad_scale`` (loss scale,
    clipping) before anything else.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: float
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = True
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.step >= 1:
            raise ValueError(f"step: expected at least 1 (the count includes this step), found {self.step}")

    @property
    def use_l2(self) -> bool:
        """Whether the weight decay is added to the gradient."""
        return not self.decoupled_weight_decay and self.weight_decay != 0

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        """The factors of the formula, in double precision, in the order of ``AdamScalars`` in csrc/adam.h."""
        return (
            -self.grad_scale if self.maximize else self.grad_scale,
            self.weight_decay if self.use_l2 else 0.0,
            1 - self.lr * self.weight_decay if self.decoupled_weight_decay else 1.0,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            1 / math.sqrt(1 - self.beta2**self.step),
            self.eps,
            self.lr / (1 - self.beta1**self.step),
        )

    @cached_property
    def seed(self) -> int:
        """The number of the step, hashed to 32 bits (the end of MurmurHash3), which seeds the rounding of codes."""
        bits = int(self.step) & 0xFFFFFFFF
        bits = (bits ^ bits >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return bits ^ bits >> 16

    @cached_property
    def float32_scalars(self) -> tuple[float, ...]:
        """``scalars`` rounded to float32, as the extension rounds them."""
        return tuple(ctypes.c_float(scalar).value for scalar in self.scalars)


class AdamArrays(NamedTuple):
    """The arrays that one update reads and writes: 1-D, contiguous, of one length, on one device, no overlaps.

    The order is that of the columns.

    grad: float32, bfloat16 or float16. Read only.
    param: the master weights, float32; or bfloat16 or float16 where there are none. With ``rest`` the bfloat16
        parameters, which are the masters' upper halves.
    exp_avg, exp_avg_sq, max_exp_avg_sq: float32; the last one is needed with amsgrad, and left alone without.
        With scales the first two are codes, int8 and uint8; see :mod:`dos.kernels.codes`.
    out: receives the new ``param``, rounded if it is bfloat16 or float16; only with a float32 ``param``, which is
        kept off ties where this is bfloat16. Read only with :meth:`AdamBatch.take_written`.
    rest: the masters' lower halves, int16; only with a bfloat16 ``param`` and without ``out``.
    exp_avg_scale, exp_avg_sq_scale: float32, one for each BLOCK elements, of which there are whole blocks then; not
        with amsgrad.
    """

    grad: Tensor
    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    out: Tensor | None = None
    rest: Tensor | None = None
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None

    def slice(self, start: int, stop: int) -> AdamArrays:
        """Return a view of the elements from start to stop, which must be whole blocks where there are scales."""
        return self._replace(
            **{
                name: a[start // BLOCK : stop // BLOCK] if name.endswith("scale") else a[start:stop]
                for name, a in self._asdict().items()
                if a is not None
            }
        )


_T = TypeVar("_T")


def where_there_is_memory(formula: Callable[..., _T], *arrays: Tensor | None) -> _T:
    """Return the arrays after the formula: on their device, or on the host if intermediates do not fit there."""
    try:
        return formula(*arrays)
    except torch.OutOfMemoryError as error:
        _warn_of_the_host(str(error))
    # Outside of except: the error refers to intermediates on the device, which must be released first.
    return formula(*(None if array is None else array.cpu() for array in arrays))


@functools.cache
def _warn_of_the_host(error: str) -> None:
    logger.warning("no device memory for part of an update, which is computed on the host, slowly: %s", error)


def off_ties(master: Tensor) -> Tensor:
    """Return a copy of float32 values, each tie moved as the update does in masters of bfloat16 parameters."""
    bits = master.view(torch.int32)
    return torch.where(bits & 0xFFFF == 0x8000, bits + (bits >> 15 & 2) - 1, bits).view(torch.float32)


def rest_of(master: Tensor) -> Tensor:
    """Return a copy of the lower halves of float32 masters, int16."""
    return master.view(torch.int32).to(torch.int16)


def joined(upper: Tensor, rest: Tensor) -> Tensor:
    """Return the float32 masters whose halves are bfloat16 parameters and int16 rests."""
    rounded = upper.view(torch.int16).to(torch.int32) << 16
    bits = rounded + rest
    return torch.where(bits ^ rounded < 0, rounded, bits).view(torch.float32)


def taken(master: Tensor, parameter: Tensor) -> Tensor:
    """Return float32 masters, each that is not the parameter, once rounded, replaced by that.

    A master of a bfloat16 parameter keeps its lower half, because it cannot be known which elements were written where
    masters are split.
    """
    integers = torch.int32 if parameter.dtype == torch.float32 else torch.int16
    kept = master.to(parameter.dtype).view(integers) == parameter.view(integers)
    halves = parameter.dtype == torch.bfloat16
    return torch.where(kept, master, joined(parameter, rest_of(master)) if halves else parameter.float())
