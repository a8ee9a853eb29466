"""One parameter's entry in a state dict of AdamW: names, types, shapes, and conversion between formats."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dos.kernels.adam import off_ties, rest_of
from dos.kernels.codes import decode_mean, decode_square, encode
from dos.kernels.masters import TIE, follow, whole_master
from dos.sharding.local import is_sharded, laid_out_as, local, moved_to_layout, same_layout, whole
from perfmodel.format import BLOCK, CODED, CODED_KEYS, MASTER_KEY, REST_KEY, STATE_KEYS, scale_shape

_TYPES = {field.key: getattr(torch, field.type) for field in CODED.fields}
CODE_TYPES = {key: _TYPES[key] for keys in CODED_KEYS.values() for key in keys}
"""The dtypes of codes and scales by name, in the order of `Codes`."""
MAX_KEY = "max_exp_avg_sq"
"""The name of the maximum that amsgrad stores."""
_ADAMW_KEYS = tuple(key for key in STATE_KEYS if key not in (REST_KEY, *CODE_TYPES))


def in_blocks(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape consists of whole blocks."""
    return len(shape) > 0 and math.prod(shape) % BLOCK == 0


def keeps_blocks(tensor: Tensor) -> bool:
    """Return whether each rank has whole blocks of the tensor, the same blocks for any number of ranks."""
    if not is_sharded(tensor):
        return in_blocks(tensor.shape)
    last = tensor.ndim - 1
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    # By the attribute, because `is_shard` returns False for some placements that divide an axis.
    over = math.prod(mesh.size(i) for i, placement in enumerate(placements) if getattr(placement, "dim", None) == last)
    return last > 0 and tensor.shape[last] % (BLOCK * over) == 0


def has_codes(entry: Mapping[str, object], moment: str) -> bool:
    """Return whether the entry has this moment in codes."""
    return all(entry.get(key) is not None for key in CODED_KEYS[moment])


def empty_for(key: str, like: Tensor) -> Tensor:
    """Return an uninitialised host tensor for the state of this name of a parameter like this.

    It is divided over ranks as the parameter is, except that each rank has all codes and scales where ranks divide a
    block.
    """
    shape, mine = tuple(like.shape), tuple(local(like).shape)
    if key.endswith("_scales"):
        shape, mine = scale_shape(shape), scale_shape(mine)
    dtype = CODE_TYPES.get(key, torch.bfloat16 if key == REST_KEY else torch.float32)
    if key in CODE_TYPES and not keeps_blocks(like):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return laid_out_as(torch.empty(mine, dtype=dtype, device="cpu"), like, shape)


def write_entry(entry: Mapping[str, Any], parameter: Tensor, views: Mapping[str, Tensor]) -> None:
    """Write the entry's values, in any format and placement, to `views`, which are divided as the parameter is.

    Views without a value become 0. A master that is made of a rest alone is right once it has followed the parameter.
    """
    found = _converted(_local_parts(entry, parameter), views.keys())
    for key, view in views.items():
        value = found.get(key)
        if value is None:
            local(view).zero_()
        elif value is not local(view):
            mine = local(view)
            mine.copy_(value.to(mine.device))  # first to its device: no transfer may span pinned regions


def adamw_form(parameter: Tensor, entry: Mapping[str, Any], *, written: bool) -> dict[str, Tensor]:
    """Return a copy of the entry without the step in AdamW's form: float32, on the host, in the parameter's shape.

    Changes nothing.
    written: whether user code wrote to the parameter since its last update, so that its master has to follow.
    """
    mine, parts = local(parameter).detach(), _local_parts(entry, parameter)
    rest = _valid_rest(parts.pop(REST_KEY, None))
    found = _converted(parts, _ADAMW_KEYS)
    state = {key: value.to("cpu", torch.float32, copy=True) for key, value in found.items()}
    if parameter.dtype == torch.float32:
        state.pop(MASTER_KEY, None)
    elif MASTER_KEY in state and written:
        master = state[MASTER_KEY].reshape(-1)
        follow(master, mine.resolve_neg().cpu().reshape(-1))
        state[MASTER_KEY] = master.view(mine.shape)
    elif rest is not None and MASTER_KEY not in state and parameter.dtype == torch.bfloat16:
        state[MASTER_KEY] = whole_master(mine, rest, written=written)
    return {key: laid_out_as(value, parameter) for key, value in state.items()}


def _local_parts(entry: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return this rank's part of the entry's tensors. A collective where they are divided in another way."""
    parts = {key: entry[key] for key in STATE_KEYS if entry.get(key) is not None}
    codes = {key: value for key, value in parts.items() if key in CODE_TYPES}
    if is_sharded(parameter) and any(
        key.endswith("_codes") and not same_layout(value, parameter) for key, value in codes.items()
    ):  # codes of another layout cannot be moved, because it divides blocks
        exact = {key: value for key, value in parts.items() if key not in codes}
        parts = _decoded({key: whole(value) for key, value in codes.items()}) | exact
    return {key: local(moved_to_layout(value, parameter)) for key, value in parts.items()}


def _converted(parts: Mapping[str, Tensor], keys: Collection[str]) -> dict[str, Tensor]:
    """Convert one parameter's state tensors to these keys; keys that cannot be derived are omitted.

    Where they have a value in two formats, the format of `keys` counts; of moments, AdamW's form.
    """
    found = _decoded(parts) if CODE_TYPES.keys().isdisjoint(keys) else _encoded(parts)
    rest, master = _valid_rest(found.pop(REST_KEY, None)), found.get(MASTER_KEY)
    if rest is None and master is not None and REST_KEY in keys:
        rest = rest_of(off_ties(master.float().resolve_neg())).view(torch.bfloat16)
    elif master is None and rest is not None and MASTER_KEY in keys:
        bits = rest.view(torch.int16).to(torch.int32)
        found[MASTER_KEY] = (bits.masked_fill(bits == TIE, TIE + 1) & 0xFFFF).view(torch.float32)
    if rest is not None:
        found[REST_KEY] = rest
    return {key: value for key, value in found.items() if key in keys}


def _valid_rest(rest: Tensor | None) -> Tensor | None:
    """Return the rest if it still has its bits, as bfloat16: torch's optimizers cast the tensors that they load."""
    return None if rest is None or rest.dtype != torch.bfloat16 else rest


def _decoded(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts with moments in AdamW's form; codes must be whole blocks."""
    found = {key: value for key, value in parts.items() if key not in CODE_TYPES}
    for (name, keys), decode in zip(CODED_KEYS.items(), (decode_mean, decode_square), strict=True):
        if name not in found and has_codes(parts, name):
            codes, scales = (parts[key] for key in keys)
            found[name] = decode(codes.contiguous().view(-1), scales.contiguous().view(-1)).view(codes.shape)
    return found


def _encoded(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts with moments in codes; moments must be whole blocks."""
    if parts.keys().isdisjoint(CODED_KEYS):
        return dict(parts)
    found = _decoded(parts)
    exp_avg, exp_avg_sq = (found.pop(name) for name in CODED_KEYS)
    codes = encode(_flat(exp_avg), _flat(exp_avg_sq))
    shapes = (exp_avg.shape, scale_shape(exp_avg.shape)) * 2
    return found | {key: value.view(shape) for key, value, shape in zip(CODE_TYPES, codes, shapes, strict=True)}


def _flat(moment: Tensor) -> Tensor:
    return moment.detach().to(torch.float32).resolve_neg().contiguous().view(-1)
