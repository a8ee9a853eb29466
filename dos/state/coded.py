"""Which parameters can have their moments in codes, and how those pass from AdamW's form and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dos.kernels.codes import decode_mean, decode_square, encode
from dos.sharding.local import is_sharded, local
from perfmodel.format import BLOCK, CODED, CODED_KEYS

LEAST = 4096
"""Elements of a parameter from which its moments are kept in codes, as in torchao and bitsandbytes."""

_TYPES = {field.key: getattr(torch, field.type) for field in CODED.fields}
CODE_TYPES = {key: _TYPES[key] for keys in CODED_KEYS.values() for key in keys}
"""By the names of codes and scales in a state dict, in the order of `Codes`."""


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
    # By the attribute, for not all that divide an axis say so when they are asked with `is_shard`.
    over = math.prod(mesh.size(i) for i, placement in enumerate(placements) if getattr(placement, "dim", None) == last)
    return last > 0 and parameter.shape[last] % (BLOCK * over) == 0


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a parameter's codes: blocks for elements on the last axis, else on the only one."""
    if shape[-1] % BLOCK == 0:
        return (*shape[:-1], shape[-1] // BLOCK)
    return (math.prod(shape) // BLOCK,)


def in_blocks(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is whole blocks."""
    return len(shape) > 0 and math.prod(shape) % BLOCK == 0


def has_codes(entry: Mapping[str, object], moment: str | None = None) -> bool:
    """Whether the entry of a state dict has codes: of one moment, or of any."""
    return any(
        all(entry.get(key) is not None for key in keys) for name, keys in CODED_KEYS.items() if moment in (None, name)
    )


def decoded(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entry with moments as AdamW has them. Where it has both, AdamW's count; its tensors are of whole blocks."""
    found = {key: value for key, value in entry.items() if key not in CODE_TYPES}
    for (name, keys), decode in zip(CODED_KEYS.items(), (decode_mean, decode_square), strict=True):
        if name not in found and has_codes(entry, name):
            codes, scales = (entry[key] for key in keys)
            found[name] = decode(codes.contiguous().view(-1), scales.contiguous().view(-1)).view(codes.shape)
    return found


def coded(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entry with moments in codes. Where it has both, AdamW's count."""
    if not any(entry.get(name) is not None for name in CODED_KEYS):
        return dict(entry)
    found = decoded(entry)
    exp_avg, exp_avg_sq = (found.pop(name) for name in CODED_KEYS)
    codes = encode(_flat(exp_avg), _flat(exp_avg_sq))
    shapes = (exp_avg.shape, scale_shape(exp_avg.shape)) * 2
    return found | {key: value.view(shape) for key, value, shape in zip(CODE_TYPES, codes, shapes, strict=True)}


def _flat(moment: Tensor) -> Tensor:
    return moment.detach().to(torch.float32).resolve_neg().contiguous().view(-1)
