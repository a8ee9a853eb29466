"""Takes over state that users, checkpoints or other formats bring into `optimizer.state`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dos.kernels.masters import brought
from dos.sharding.local import local, moved_to_layout, same_layout, whole
from dos.state.coded import coded, decoded
from dos.state.record import ParameterRecord
from perfmodel.format import STATE_KEYS


def step_of(entry: Mapping[str, Any]) -> Tensor:
    """The step that the entry has, as a float32 scalar on the host; 0 if it has none."""
    step = entry.get("step", 0.0)
    if not isinstance(step, Tensor) or step.device.type != "cpu" or step.dtype != torch.float32 or step.ndim:
        step = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    return step


def fill(record: ParameterRecord, entry: Mapping[str, Any]) -> None:
    """Write what the entry has, in any format and placement, to the record's state at home."""
    parts = {key: entry[key] for key in STATE_KEYS if entry.get(key) is not None}
    if record.sharded and any(
        key.endswith("_codes") and not same_layout(value, record.parameter) for key, value in parts.items()
    ):
        parts = decoded({key: whole(value) for key, value in parts.items()})  # for others divide the blocks
    parts = {key: local(moved_to_layout(value, record.parameter)) for key, value in parts.items()}
    parts = coded(parts) if record.arena.format.block > 1 else decoded(parts)
    for key, view in record.views.items():
        value = brought(key, parts)
        if value is None:
            local(view).zero_()
        elif value is not local(view):
            mine = local(view)
            mine.copy_(value.to(mine.device))  # which may lie in several pinned regions
