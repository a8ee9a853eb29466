"""float32 masters of 16-bit parameters: how they follow what users write, and go from one format to another.

A bfloat16 parameter that somebody wrote to keeps the rest of its master, the lower half, in every
format alike: on the device nobody can tell which elements were touched, and a rest is below the
parameter's own precision. So elements that were not touched keep their masters to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dos.kernels.adam import joined, off_ties, rest_of

_INFINITE, TIE = 0x7F80, -0x8000
_CHUNK = 1 << 20  # elements; bounds the memory of intermediates


def follow(master: Tensor, parameter: Tensor) -> None:
    """Give `master` the values of a parameter that was written to; 1-D, of one length, on one device."""
    if master.dtype == parameter.dtype:
        master.copy_(parameter)
        return
    for start in range(0, len(master), _CHUNK):
        mine, now = master[start : start + _CHUNK], parameter[start : start + _CHUNK]
        if now.dtype == torch.bfloat16:
            # One that was loaded may be a tie, whose lower half is of no use beside the parameter.
            rest = rest_of(off_ties(mine))
            settle(rest, now)
            mine.copy_(joined(now, rest))
        else:
            # Where the parameter still is the master rounded, the master knows it better.
            kept = mine.to(now.dtype).view(torch.int16) == now.view(torch.int16)
            mine.copy_(torch.where(kept, mine, now.to(mine.dtype)))


def settle(rest: Tensor, parameter: Tensor) -> None:
    """Let the rests of masters agree with bfloat16 parameters that were written to; 1-D, of one length, on one device.

    They are kept, but for those with which the parameter would become another number: 0 that of the
    other sign, less than 0 in magnitude, and an infinity a finite number or NaN.
    """
    for start in range(0, len(rest), _CHUNK):
        mine, now = rest[start : start + _CHUNK], parameter[start : start + _CHUNK]
        magnitude = now.view(torch.int16) & 0x7FFF
        mine.masked_fill_(((magnitude == 0) & (mine < 0)) | (magnitude == _INFINITE), 0)
        # No update leaves a tie; one that somebody wrote is moved towards the parameter.
        mine.masked_fill_(mine == TIE, TIE + 1)


def whole_master(parameter: Tensor, rest: Tensor, *, written: bool) -> Tensor:
    """The float32 master of a bfloat16 parameter, on the host.

    rest: as in a state dict. written: whether somebody wrote to the parameter.
    """
    upper, lower = parameter.detach().resolve_neg().cpu().reshape(-1), rest.cpu().view(torch.int16).reshape(-1)
    if written:
        lower = lower.clone()
        settle(lower, upper)
    return joined(upper, lower).view(parameter.shape)
