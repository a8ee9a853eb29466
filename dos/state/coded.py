"""Which parameters can have their moments in codes, and how those pass from AdamW's form and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dos.kernels.codes import Codes, decode, encode
from dos.sharding.local import is_sharded, local
from perfmodel.format import BLOCK, CODED_KEYS

LEAST = 4096
"""Elements of a parameter from which its moments are kept in codes, as in torchao and bitsandbytes."""

CODE_TYPES = {"exp_avg_codes": torch.int8, "exp_avg_sq_codes": torch.uint8}
"""By the names of codes in a state dict."""
_KEYS = tuple(key for keys in CODED_KEYS.values() for key in keys)
"""In the order of `Codes`."""


def can_be_coded(parameter: Tensor) -> bool:
    """Whether the parameter is whole blocks of elements that lie in a row.

    One that is divided over ranks must be so on each of them, and with blocks that are within a row of its last axis,
    so that they are the same however many ranks there are.
    """
    if parameter.numel() < LEAST or not local(parameter).is_contiguous():
        return False
    if not is_sharded(parameter):
        return parameter.numel() % BLOCK == 0
    last = parameter.ndim - 1
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    over = math.prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_shard(last))
    return last > 0 and parameter.shape[last] % (BLOCK * over) == 0


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a parameter's codes: blocks for elements on the last axis, else on the only one."""
    if shape[-1] % BLOCK == 0:
        return (*shape[:-1], shape[-1] // BLOCK)
    return (math.prod(shape) // BLOCK,)


def has_codes(entry: Mapping[str, object]) -> bool:
    """Whether the entry of a state dict has moments in codes."""
    return all(entry.get(key) is not None for key in _KEYS)


def decoded(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entry with moments as AdamW has them, if it has codes; its tensors are whole, or all of one rank."""
    if not has_codes(entry):
        return dict(entry)
    flat = Codes(*(entry[key].contiguous().view(-1) for key in _KEYS))
    moments = zip(CODED_KEYS, (moment.view(entry[_KEYS[0]].shape) for moment in decode(flat)), strict=True)
    return {key: value for key, value in entry.items() if key not in _KEYS} | dict(moments)


def coded(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entry with moments in codes, if it has AdamW's. Those count where it has both."""
    if not all(entry.get(key) is not None for key in CODED_KEYS):
        return dict(entry)
    shape = entry["exp_avg"].shape
    flat = (entry[key].detach().to(torch.float32).resolve_neg().contiguous().view(-1) for key in CODED_KEYS)
    codes = encode(*flat)
    shapes = shape, scale_shape(shape), shape, scale_shape(shape)
    views = {key: code.view(size) for key, code, size in zip(_KEYS, codes, shapes, strict=True)}
    return {key: value for key, value in entry.items() if key not in CODED_KEYS} | views
