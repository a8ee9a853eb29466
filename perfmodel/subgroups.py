"""Size of subgroups where the user does not choose it."""

from __future__ import annotations

import math

from perfmodel.format import MIXED

LEAST_SIZE = 8_000_000
"""Parameters for whose updates a GPU takes about as long as the host takes to issue them."""
SHARE = 1 / 512
"""Share of the device's memory for a subgroup's state, so that a few slots fit beside a full model."""
LEAST_DEVICE_SHARE = 1 / 16
"""The same where the device is so small that LEAST_SIZE is more, as an emulated one may be."""
FEWEST, MOST = 16, 128
"""Subgroups of a large model: enough to balance the lanes, and no more than planning and issuing take quickly."""


def automatic_subgroup_size(numel: int, device_bytes: int) -> int:
    """Parameters of each subgroup, by which DOSAdam and the planner divide a model evenly.

    numel: the parameters whose state one rank owns. device_bytes: all memory of its device; 0 if it is not known.

    The constants were found by simulating models of 10 million to 7 billion parameters on built-in
    machines: smaller subgroups fit into less memory, and each one takes time of the host.
    """
    per_byte = device_bytes / MIXED.state_bytes
    least = min(LEAST_SIZE, LEAST_DEVICE_SHARE * per_byte) if device_bytes else LEAST_SIZE
    size = max(min(numel / FEWEST, SHARE * per_byte), least, numel / MOST, 1)
    return max(1, math.ceil(numel / math.ceil(numel / size))) if numel else 1
