"""Work in flight as a value: one transfer of a subgroup's gradients or state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from dos.devices import Job
from dos.state.subgroup import Subgroup
from perfmodel import Op
from perfmodel.plan import Move, Tier
from perfmodel.tasks import GRADIENT, MOVES, Task


@dataclass(frozen=True, eq=False, slots=True)
class Transit:
    """A transfer that was issued.

    number: rises in the order of issue. op: GRADIENT, or the operation of the state's move. nbytes: the bytes copied.
    subgroup: None for gradients without elements.
    job: ends with the transfer. Until then the device, or the disk's thread, keeps the memory of both sides.
    slot: the staging slot that it fills; None: it fills the subgroup's room.
    """

    number: int
    op: Op
    subgroup: Subgroup | None
    source: Tier
    to: Tier
    job: Job
    nbytes: int
    slot: int | None = None

    def task(self, index: int) -> Task:
        """Return the transit as a task of a schedule. index: of the subgroup now; backward may have had another."""
        if self.op is Op.GRADIENT:
            return Task(*GRADIENT, index, self.nbytes)
        move = Move(self.source, self.to)
        return Task(*MOVES[move], index, self.nbytes, (), self.slot, (), move)


def wait_for_all(transits: Iterable[Transit]) -> None:
    """Block until these have ended. Failures do not matter: a step that needs one copies again, or raises."""
    for transit in transits:
        with contextlib.suppress(Exception):
            transit.job.wait()
