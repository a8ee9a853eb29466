"""The stages of an iteration, and a step that is ready to be committed."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from dos.parameters.active import Active
from dos.state.subgroup import Subgroup
from dos.step.room import Prepared
from dos.step.work import SubgroupUpdate
from perfmodel import Plan


class Stage(enum.Enum):
    """Where an iteration is.

    IDLE -> BACKWARD (gradients leave) -> PREPARED (all is checked, there is memory, and nothing has changed) ->
    COMMITTED (the step is issued, and may run on when `step()` has returned) -> IDLE.
    """

    IDLE = enum.auto()
    BACKWARD = enum.auto()
    PREPARED = enum.auto()
    COMMITTED = enum.auto()


class Ready(NamedTuple):
    """A prepared step. plan, room: None without parameters on the accelerator."""

    active: Active
    updates: Mapping[Subgroup, SubgroupUpdate]
    plan: Plan | None
    room: Prepared | None
