"""Compiled kernels of Triton that native code launches, without Triton's launcher, which takes the host longer than the
kernel takes the device. No GPU has run this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dos.kernels.extension import load_extension

_PARAMETER = re.compile(r"\.param\s+\.(\w+)")
_SCRATCH = "global_scratch_size", "profile_scratch_size"
"""Memory for which Triton's launcher adds arguments behind the kernel's own, which may be null where there is none."""
_MOST_ADDED = 2
Answer = tuple[int, int, int]
"""A copy to the host behind a kernel: to, from, bytes."""
NO_ANSWER: Answer = 0, 0, 0


class Entry(NamedTuple):
    """A compiled kernel as the driver knows it. threads: of a block. shared: bytes of memory that these share."""

    function: int
    threads: int
    shared: int


class Launched(NamedTuple):
    """A launch that native code can repeat. keeps: the memory of its arguments."""

    entry: Entry
    blocks: int
    arguments: Sequence[int]
    keeps: Sequence[Tensor]

    def kernel(self, answer: Answer = NO_ANSWER) -> Any:
        """Return it as a job of `dos.devices.runtime` takes it. answer: a copy behind it."""
        function, threads, shared = self.entry
        words = [*self.arguments, *[0] * _MOST_ADDED]
        return load_extension().Kernel(function, self.blocks, threads, shared, words, answer)


def entry_of(compiled: Any, types: Sequence[str]) -> Entry | None:
    """Return what Triton has compiled and launched once; None if its own launcher has to launch it.

    types: of the arguments, as in PTX.
    """
    found = getattr(compiled, "metadata", None)  # None under Triton's interpreter
    if found is None or found.target.backend != "cuda" or found.num_ctas != 1:
        return None
    special = "launch_cooperative_grid", "launch_pdl", *_SCRATCH
    if any(getattr(found, name, False) for name in special):
        return None
    head = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0]
    known = tuple(_PARAMETER.findall(head))
    added = known[len(types) :]
    if known[: len(types)] != tuple(types) or len(added) > _MOST_ADDED or set(added) - {"u64"}:
        return None  # another version of Triton passes others
    return Entry(compiled.function, found.num_warps * found.target.warp_size, found.shared)
