"""float32 masters of 16-bit parameters: they follow user code's writes, and are converted between formats.

A bfloat16 parameter that user code wrote to keeps the rest of its master, the lower half, in every format: it is not
known which of its elements were written, and a rest is below the parameter's own precision. So elements that were not
written keep their masters to the bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from dos.kernels.adam import PART, joined, off_ties, rest_of, where_there_is_memory

_INFINITE, TIE = 0x7F80, -0x8000
_memory = threading.local()


def follow(master: Tensor, parameter: Tensor) -> None:
    """Set `master` to the values of a parameter that was written to; 1-D, of one length, on one device."""
    _write(_followed, master, parameter)


def correct_rest(rest: Tensor, parameter: Tensor) -> None:
    """Let the rests of masters agree with bfloat16 parameters that were written to; 1-D, of one length, on one device.

    Rests are kept unless the joined master would not round to the parameter: with a negative rest 0 would become a
    number of the other sign, and with any rest an infinity a finite number or NaN.
    """
    _write(_correct, rest, parameter)


def _write(formula: Callable[[Tensor, Tensor], Tensor], mine: Tensor, parameter: Tensor) -> None:
    for part, now in zip(mine.split(PART), parameter.split(PART), strict=True):
        part.copy_(where_there_is_memory(formula, part, now))


def _followed(master: Tensor, parameter: Tensor) -> Tensor:
    if parameter.dtype == torch.bfloat16:
        # A loaded master may be a tie, whose lower half cannot be joined with the parameter.
        return joined(parameter, _correct(rest_of(off_ties(master)), parameter))
    # Where the parameter still is the rounded master, the master has more bits.
    kept = master.to(parameter.dtype).view(torch.int16) == parameter.view(torch.int16)
    return torch.where(kept, master, parameter.to(master.dtype))


def _correct(rest: Tensor, parameter: Tensor) -> Tensor:
    """Correct a rest of up to PART elements, and return it."""
    bits, wrong, also = _intermediates(len(rest)) if rest.device.type == "cpu" else (None, None, None)
    magnitude = torch.bitwise_and(parameter.view(torch.int16), 0x7FFF, out=bits)
    wrong = torch.lt(rest, 0, out=wrong).logical_and_(torch.eq(magnitude, 0, out=also))
    rest.masked_fill_(wrong.logical_or_(torch.eq(magnitude, _INFINITE, out=also)), 0)
    # No update leaves a tie; one that user code wrote is moved towards the parameter.
    return rest.masked_fill_(torch.eq(rest, TIE, out=wrong), TIE + 1)


def _intermediates(numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory of this thread for an int16 and two booleans for each element.

    If each subgroup allocated it anew, malloc would keep much of it, in addition to the memory that state may take.
    """
    if not hasattr(_memory, "bytes"):
        with torch.inference_mode(False):  # a tensor of that mode may not be written to outside of it
            _memory.bytes = torch.empty(4 * PART, dtype=torch.uint8, device="cpu")
    found: Tensor = _memory.bytes
    bits, wrong, also = found[: 2 * PART].view(torch.int16), found[2 * PART : 3 * PART], found[3 * PART :]
    return bits[:numel], wrong[:numel].view(torch.bool), also[:numel].view(torch.bool)


def whole_master(parameter: Tensor, rest: Tensor, *, written: bool) -> Tensor:
    """Return the float32 master of a bfloat16 parameter, on the host.

    rest: as in a state dict. written: whether user code wrote to the parameter.
    """
    upper, lower = parameter.detach().resolve_neg().cpu().reshape(-1), rest.cpu().view(torch.int16).reshape(-1)
    if written:
        lower = lower.clone()
        correct_rest(lower, upper)
    return joined(upper, lower).view(parameter.shape)
