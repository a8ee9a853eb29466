"""Extent of a schedule: the update alone, or with the compute of an iteration beside it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from perfmodel.workload import Workload


class Phase(enum.Enum):
    """Part that the compute beside the update takes in a schedule."""

    ABSENT = "absent"
    """No part: the schedule has the update alone."""
    SERIAL = "serial"
    """In the schedule; no transfer of the optimizer runs beside it."""
    OVERLAPPED = "overlapped"
    """Transfers run beside it."""
    UPDATED = "updated"
    """Of backward: updates run beside it, too, each once its gradients are complete."""


@dataclass(frozen=True)
class Scope:
    """Extent of a plan; by default the update alone, with all gradients still on the device.

    backward: overlapped, each gradient leaves when backward has made it (the last subgroup's first), and prefetches
        start as backward frees memory. The device updates after backward; the CPU updates what has arrived once the
        host has issued the step (`Workload.ahead_s`). But for `Phase.UPDATED`, where a subgroup is fetched and updated
        when its gradients are complete.
    forward: of the next iteration; overlapped, each subgroup's share of it waits for its own parameters only.
    """

    backward: Phase = Phase.ABSENT
    forward: Phase = Phase.ABSENT

    @classmethod
    def beside(cls, workload: Workload) -> Scope:
        """Return the scope with all compute that the workload knows of, overlapped."""
        beside = Phase.UPDATED if workload.in_backward else Phase.OVERLAPPED
        return cls(
            beside if workload.backward_s else Phase.ABSENT,
            Phase.OVERLAPPED if workload.forward_s else Phase.ABSENT,
        )

    def compute_s(self, workload: Workload) -> float:
        """Seconds of compute in the scope."""
        backward = 0.0 if self.backward is Phase.ABSENT else workload.backward_s
        return backward + (0.0 if self.forward is Phase.ABSENT else workload.forward_s)


UPDATE_ALONE = Scope()
