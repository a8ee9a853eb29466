"""One parameter's state as AdamW has it: float32, on the host, whatever the format that keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dos.kernels.masters import brought, follow, whole_master
from dos.sharding.local import laid_out_as, local
from dos.state.coded import CODE_TYPES, decoded, has_codes
from perfmodel.format import MASTER_KEY, REST_KEY


def adamw_form(parameter: Tensor, entry: Mapping[str, Any], *, written: bool) -> dict[str, Tensor]:
    """A copy of what `entry` says, in the parameter's shape. Changes nothing.

    written: whether somebody wrote to the parameter since its last update, so that its master has to follow.
    """
    if has_codes(entry):
        codes = {key: value for key, value in entry.items() if key in CODE_TYPES}
        like = next(iter(codes.values()))
        moments = decoded({key: local(value) for key, value in codes.items()})
        others = {key: value for key, value in entry.items() if key not in codes}
        entry = {key: laid_out_as(moment, like) for key, moment in moments.items()} | others
    state = {key: torch.as_tensor(value).to("cpu", torch.float32, copy=True) for key, value in entry.items()}
    rest = brought(REST_KEY, entry) if state.pop(REST_KEY, None) is not None else None
    mine = local(parameter)
    if rest is not None and parameter.dtype == torch.bfloat16:
        state[MASTER_KEY] = laid_out_as(whole_master(mine, local(rest), written=written), parameter)
    elif MASTER_KEY in state and written:
        master = local(state[MASTER_KEY]).reshape(-1)
        follow(master, mine.detach().resolve_neg().cpu().reshape(-1))
        state[MASTER_KEY] = laid_out_as(master.view(mine.shape), parameter)
    return state
