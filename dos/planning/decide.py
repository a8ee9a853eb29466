"""The only author of plans: facts in, plan out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dos.planning.policies import Policy
from dos.state.homes import Homes, housed
from dos.state.subgroup import Subgroup
from dos.step.prepare import Rooms
from perfmodel import Plan, SubgroupLoad, Workload
from perfmodel.plan import Tier
from perfmodel.policies import spilled


@dataclass(frozen=True)
class Facts:
    """Everything from which a plan follows.

    workload: subgroups, memory, pace, saved tensors, and the limits of the host's memory.
    saved_bytes: bytes of saved tensors that have moved to the host in this forward; infinite before its end. State may
        take the memory of tensors only once they have moved, because callers may still refer to them.
    blocks: the blocks whose weights stay on the device, once the device has denied memory to more; None before.
    denied: the subgroups to which the device has denied memory in this step.
    rooms: see `Rooms`; None without a disk, and before a step.
    beside_forward: whether the next forward runs beside the step, so that both must fit in memory.
    """

    workload: Workload
    saved_bytes: float = math.inf
    blocks: frozenset[int] | None = None
    denied: frozenset[int] = frozenset()
    rooms: Rooms | None = None
    beside_forward: bool = False

    def left(self, plan: Plan, resident_bytes: int) -> float:
        """Return the bytes of device memory for more state, or slots, beside the state that is resident now.

        State that moves away in a step keeps its memory until the step ends, while the next forward may peak.
        """
        if not self.beside_forward:
            return math.inf
        moved = min(plan.activation_bytes, max(self.saved_bytes, self.workload.activation_least_bytes))
        room = self.workload.shared_free(int(moved)) - self.workload.weight_bytes(plan.blocks_on_device)
        return room - resident_bytes


def decide(facts: Facts, policy: Policy) -> Plan:
    """Return the plan for these facts; no other function changes a plan.

    policy: the user's. Raises ValueError or TypeError if a policy returns something other than a plan.
    """
    work = facts.workload
    plan = policy(work)
    if plan.on_disk or work.host_free_bytes < math.inf:
        plan = spilled(plan, work)
    # User code may still refer to tensors that should move: state gets only the memory of tensors that have moved.
    if plan.activation_bytes > facts.saved_bytes:
        less = dataclasses.replace(work, activation_host_bytes=max(facts.saved_bytes, work.activation_least_bytes))
        plan = dataclasses.replace(spilled(policy(less), less), activation_bytes=plan.activation_bytes)
    plan = plan.on_host(facts.denied)
    if work.blocks:
        plan = dataclasses.replace(plan, blocks_on_device=_blocks(plan, work) if facts.blocks is None else facts.blocks)
    return plan if facts.rooms is None else _where_there_is_room(plan, facts.rooms)


def _blocks(plan: Plan, work: Workload) -> frozenset[int]:
    """Return the blocks whose weights stay: the plan's, or as many as the workload allows."""
    count = len(plan.blocks_on_device)
    allowed = int(min(max(count, work.blocks_least), work.blocks_most, len(work.blocks)))
    return plan.blocks_on_device if count == allowed else work.staying(allowed)


def _where_there_is_room(plan: Plan, rooms: Rooms) -> Plan:
    """Return the plan with state on disk for which the host has no room, or none until other state has moved."""
    resting = [i for i in rooms.homes if plan.stays(i) is Tier.HOST]
    made, homes = ({i: each[i] for i in resting} for each in (rooms.made, rooms.homes))
    # State that moves home from disk passes through windows, too. If some state does not fit without windows, windows
    # are needed, and take memory from all.
    beside_windows = rooms.room - max(0, rooms.through - rooms.windows)
    passes = bool(plan.on_disk or rooms.from_disk)
    found = housed(made, homes, beside_windows if passes else rooms.room)
    if len(found) < len(resting) and not passes:
        found = housed(made, homes, beside_windows)
    return dataclasses.replace(plan, on_disk=plan.on_disk | {i for i in resting if i not in found})


def host_limits(homes: Homes, subgroups: Sequence[Subgroup], loads: Sequence[SubgroupLoad]) -> dict[str, Any]:
    """Return the fields of a workload that limit state on the host. loads: of these subgroups.

    Raises MemoryError if the host's share is too little even for windows.
    """
    homes.host.lower_share()
    limit = homes.host.limit
    if homes.disk is None or limit is None:
        return {}
    gradients = homes.host.gradient_bytes
    count, window = homes.windows_needed(subgroups)
    # State on disk could move home only through windows.
    fits = not homes.disk.nbytes and gradients + sum(load.host_bytes for load in loads) <= limit
    least = gradients + count * window
    if not fits and least > limit:
        raise MemoryError(
            f"state on disk passes through at least {count} windows of {window} bytes on the host"
            f"{f', beside {gradients} bytes of offloaded gradients' if gradients else ''}, found "
            f"host_memory={limit}; choose {least} or more, or a smaller subgroup_size if that can be"
        )
    return {"host_free_bytes": math.inf if fits else limit - least, "windows": count}
