"""What state rests on the host of one device, and what passes through it on its way from disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dos.state.homes import Homes
from dos.state.subgroup import Subgroup
from perfmodel import Plan, SubgroupLoad, Workload
from perfmodel.windows import ordered


class Rests:
    """Says how much state rests on the host of one device, and in which order what passes through windows is updated.

    steps: that were issued.
    """

    def __init__(self, homes: Homes) -> None:
        self.steps = 0
        self._homes = homes

    def limits(self, subgroups: Sequence[Subgroup], loads: Sequence[SubgroupLoad], *, attached: bool) -> dict[str, Any]:
        """What the workload of these subgroups has of them. loads: theirs.

        Raises MemoryError if the host's share is too little even for windows.
        """
        self._homes.host.lower_share()
        limit = self._homes.host.limit
        if self._homes.disk is None or limit is None:
            return {}
        gradients = self._homes.host.gradient_bytes
        count, window = self._homes.windows_needed(subgroups)
        # What is on disk could only come home through windows.
        nowhere_else = not self._homes.disk.nbytes
        fits = nowhere_else and gradients + sum(load.host_bytes for load in loads) <= limit
        least = gradients + count * window
        if not fits and least > limit:
            raise MemoryError(
                f"state on disk passes through at least {count} windows of {window} bytes on the host"
                f"{f', beside {gradients} bytes of offloaded gradients' if gradients else ''}, found "
                f"host_memory={limit}; choose {least} or more, or a smaller subgroup_size if that can be"
            )
        free = math.inf if fits else limit - least
        return {"host_free_bytes": free, "windows": count, "reverses": not attached}

    def ordered(self, plan: Plan, workload: Workload) -> Plan:
        """The plan in the order of this step."""
        return ordered(plan, workload, reverse=self.steps % 2 == 1)
