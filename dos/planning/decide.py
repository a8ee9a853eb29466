"""The one author of plans: facts in, plan out."""

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
from perfmodel.policies import off_cpu, spilled
from perfmodel.windows import ordered


@dataclass(frozen=True)
class Facts:
    """Everything from which a plan follows.

    workload: subgroups, memory, pace, saved tensors, and the limits of the host's memory.
    saved_bytes: saved tensors that moved to the host in this forward; infinite before its end is known. State comes to
        the room that they make in the next backward, once that was seen: callers may still hold what moved.
    blocks: those whose weights stay on the device, once the device has denied memory to others; None before.
    denied: the subgroups for which the device had no memory when this step asked for it.
    rooms: see there; None without a disk, and before a step.
    reverse: whether what passes through windows goes in the reverse order of the last step.
    beside_forward: whether the next forward runs beside the step, and memory for both is looked after.
    """

    workload: Workload
    saved_bytes: float = math.inf
    blocks: frozenset[int] | None = None
    denied: frozenset[int] = frozenset()
    rooms: Rooms | None = None
    reverse: bool = False
    beside_forward: bool = False

    def left(self, plan: Plan, resident_bytes: int) -> float:
        """Bytes of device memory for more state, or slots, beside the state that is resident now.

        State that moves away in a step takes its memory until that ends, in which the next forward may peak.
        """
        if not self.beside_forward:
            return math.inf
        moved = min(plan.activation_bytes, max(self.saved_bytes, self.workload.activation_least_bytes))
        room = self.workload.shared_free(int(moved)) - self.workload.weight_bytes(plan.blocks_on_device)
        return room - resident_bytes


def decide(facts: Facts, policy: Policy, meanwhile: Policy) -> Plan:
    """The plan that these facts call for; no other function changes a plan.

    policy: of the user. meanwhile: the same for a workload with less memory, after which `policy` goes on as before.
    Raises ValueError or TypeError for what a policy returns that is no plan.
    """
    work = facts.workload
    plan = spilled(policy(work), work)
    # User code may still hold what is to leave: state gets the room of what has left, and no more yet.
    if plan.activation_bytes > facts.saved_bytes:
        less = dataclasses.replace(work, activation_host_bytes=max(facts.saved_bytes, work.activation_least_bytes))
        plan = dataclasses.replace(spilled(meanwhile(less), less), activation_bytes=plan.activation_bytes)
    plan = off_cpu(ordered(plan, work, reverse=facts.reverse).on_host(facts.denied), work)
    if work.blocks:
        plan = dataclasses.replace(plan, blocks_on_device=_blocks(plan, work) if facts.blocks is None else facts.blocks)
    return plan if facts.rooms is None else _where_there_is_room(plan, facts.rooms)


def _blocks(plan: Plan, work: Workload) -> frozenset[int]:
    """The blocks whose weights stay: the plan's, or as many as there may be."""
    count = len(plan.blocks_on_device)
    allowed = int(min(max(count, work.blocks_least), work.blocks_most, len(work.blocks)))
    return plan.blocks_on_device if count == allowed else work.staying(allowed)


def _where_there_is_room(plan: Plan, rooms: Rooms) -> Plan:
    """The plan with the state on disk for which the host has no room, or has none until other state has moved."""
    on_disk = plan.on_disk | {i for i in rooms.in_windows if plan.placements[i].stays is not Tier.DEVICE}
    resting = [i for i in rooms.homes if i not in on_disk and plan.stays(i) is Tier.HOST]
    made, homes = ({i: each[i] for i in resting} for each in (rooms.made, rooms.homes))
    # What comes home passes through windows, too; and so does all if not everything has room without them.
    beside_windows = rooms.room - max(0, rooms.through - rooms.windows)
    passes = bool(on_disk or rooms.from_disk)
    found = housed(made, homes, beside_windows if passes else rooms.room)
    if len(found) < len(resting) and not passes:
        found = housed(made, homes, beside_windows)
    return dataclasses.replace(plan, on_disk=on_disk | {i for i in resting if i not in found})


def host_limits(
    homes: Homes, subgroups: Sequence[Subgroup], loads: Sequence[SubgroupLoad], *, attached: bool
) -> dict[str, Any]:
    """The fields of a workload that say how much state may rest on the host. loads: of these subgroups.

    Raises MemoryError if the host's share is too little even for windows.
    """
    homes.host.lower_share()
    limit = homes.host.limit
    if homes.disk is None or limit is None:
        return {}
    gradients = homes.host.gradient_bytes
    count, window = homes.windows_needed(subgroups)
    # State on disk could only come home through windows.
    fits = not homes.disk.nbytes and gradients + sum(load.host_bytes for load in loads) <= limit
    least = gradients + count * window
    if not fits and least > limit:
        raise MemoryError(
            f"state on disk passes through at least {count} windows of {window} bytes on the host"
            f"{f', beside {gradients} bytes of offloaded gradients' if gradients else ''}, found "
            f"host_memory={limit}; choose {least} or more, or a smaller subgroup_size if that can be"
        )
    return {"host_free_bytes": math.inf if fits else limit - least, "windows": count, "reverses": not attached}
