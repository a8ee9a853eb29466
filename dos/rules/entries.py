"""One parameter's entry in a state dict of AdamW: names, types, shapes, and how one format's become another's."""

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
"""By the names of codes and scales, in the order of `Codes`."""
MAX_KEY = "max_exp_avg_sq"
"""The name of what amsgrad keeps."""
_ADAMW_KEYS = tuple(key for key in STATE_KEYS if key not in (REST_KEY, *CODE_TYPES))


def in_blocks(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is whole blocks."""
    return len(shape) > 0 and math.prod(shape) % BLOCK == 0


def keeps_blocks(tensor: Tensor) -> bool:
    """Whether each rank has whole blocks of the tensor, the same ones however many ranks there are."""
    if not is_sharded(tensor):
        return in_blocks(tensor.shape)
    last = tensor.ndim - 1
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    # By the attribute, for not all that divide an axis say so when they are asked with `is_shard`.
    over = math.prod(mesh.size(i) for i, placement in enumerate(placements) if getattr(placement, "dim", None) == last)
    return last > 0 and tensor.shape[last] % (BLOCK * over) == 0


def has_codes(entry: Mapping[str, object], moment: str) -> bool:
    """Whether the entry has this moment in codes."""
    return all(entry.get(key) is not None for key in CODED_KEYS[moment])


def empty_for(key: str, like: Tensor) -> Tensor:
    """An uninitialised host tensor for the state of this name of a parameter like this.

    Divided over ranks as that is, except that each rank has all codes and scales where ranks divide a block.
    """
    shape, mine = tuple(like.shape), tuple(local(like).shape)
    if key.endswith("_scales"):
        shape, mine = scale_shape(shape), scale_shape(mine)
    dtype = CODE_TYPES.get(key, torch.bfloat16 if key == REST_KEY else torch.float32)
    if key in CODE_TYPES and not keeps_blocks(like):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return laid_out_as(torch.empty(mine, dtype=dtype, device="cpu"), like, shape)


def write_entry(entry: Mapping[str, Any], parameter: Tensor, views: Mapping[str, Tensor]) -> None:
    """Write what the entry says, in any format and placement, to `views`, which are divided as the parameter is.

    What it does not say becomes 0. A master that is made of a rest alone is right once it has followed the parameter.
    """
    found = _converted(_local_parts(entry, parameter), views.keys())
    for key, view in views.items():
        value = found.get(key)
        if value is None:
            local(view).zero_()
        elif value is not local(view):
            mine = local(view)
            mine.copy_(value.to(mine.device))  # which may lie in several pinned regions


def adamw_form(parameter: Tensor, entry: Mapping[str, Any], *, written: bool) -> dict[str, Tensor]:
    """A copy of what `entry` says beside the step, as AdamW has it: float32, on the host, in the parameter's shape.

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
    """The part of the entry's tensors that this rank needs. A collective where they are divided in another way."""
    parts = {key: entry[key] for key in STATE_KEYS if entry.get(key) is not None}
    codes = {key: value for key, value in parts.items() if key in CODE_TYPES}
    if is_sharded(parameter) and any(
        key.endswith("_codes") and not same_layout(value, parameter) for key, value in codes.items()
    ):  # for others divide the blocks
        exact = {key: value for key, value in parts.items() if key not in codes}
        parts = _decoded({key: whole(value) for key, value in codes.items()}) | exact
    return {key: local(moved_to_layout(value, parameter)) for key, value in parts.items()}


def _converted(parts: Mapping[str, Tensor], keys: Collection[str]) -> dict[str, Tensor]:
    """Convert one parameter's state tensors to these keys; keys that cannot be derived are omitted.

    Where they say it twice, in the format of `keys` and in another one, the former counts; of moments AdamW's form.
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
    """The rest unless its bits are lost: they are there as bfloat16, and torch's optimizers cast what they load."""
    return None if rest is None or rest.dtype != torch.bfloat16 else rest


def _decoded(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moments as AdamW has them, of whole blocks where they are in codes."""
    found = {key: value for key, value in parts.items() if key not in CODE_TYPES}
    for (name, keys), decode in zip(CODED_KEYS.items(), (decode_mean, decode_square), strict=True):
        if name not in found and has_codes(parts, name):
            codes, scales = (parts[key] for key in keys)
            found[name] = decode(codes.contiguous().view(-1), scales.contiguous().view(-1)).view(codes.shape)
    return found


def _encoded(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moments in codes, of whole blocks."""
    if parts.keys().isdisjoint(CODED_KEYS):
        return dict(parts)
    found = _decoded(parts)
    exp_avg, exp_avg_sq = (found.pop(name) for name in CODED_KEYS)
    codes = encode(_flat(exp_avg), _flat(exp_avg_sq))
    shapes = (exp_avg.shape, scale_shape(exp_avg.shape)) * 2
    return found | {key: value.view(shape) for key, value, shape in zip(CODE_TYPES, codes, shapes, strict=True)}


def _flat(moment: Tensor) -> Tensor:
    return moment.detach().to(torch.float32).resolve_neg().contiguous().view(-1)
