"""Size of subgroups where the user does not choose it."""

from __future__ import annotations

import math

from perfmodel.format import MIXED

LEAST_SIZE = 16_000_000
"""Parameters: each smaller subgroup takes more time of the host, which a GPU waits for."""
SHARE = 1 / 192
"""Share of the device's memory for a subgroup's state, so that a few slots fit beside a full model."""
LEAST_DEVICE_SHARE = 1 / 16
"""The same where the device is so small that LEAST_SIZE is more, as an emulated one may be."""
FEWEST, MOST = 16, 128
"""Subgroups of a large model: enough to balance the lanes, and no more than planning and issuing take quickly."""


def automatic_subgroup_size(numel: int, device_bytes: int) -> int:
    """Parameters of each subgroup, by which DOSAdam and the planner divide a model evenly.

    numel: the parameters whose state one rank owns. device_bytes: all memory of its device; 0 if it is not known.

    Smaller subgroups fit into less memory, and by simulation, in which the host takes no time, 50 of them are up to a
    fifth faster than 20. On an H200 20 were faster than 50 by up to a quarter: each one takes time of the host.
    """
    per_byte = device_bytes / MIXED.state_bytes
    least = min(LEAST_SIZE, LEAST_DEVICE_SHARE * per_byte) if device_bytes else LEAST_SIZE
    size = max(min(numel / FEWEST, SHARE * per_byte), least, numel / MOST, 1)
    return max(1, math.ceil(numel / math.ceil(numel / size))) if numel else 1
