"""Schedules as text, and states that a step finds."""

from perfmodel.plan import Tier
from perfmodel.tasks import Schedule, SubgroupState


def lines(made: Schedule) -> list[str]:
    """One for each task: number, operation, stream, size, tasks that it waits for, slot."""
    names = []
    for number, task in enumerate(made.tasks):
        subgroup = "" if task.subgroup is None else f" {task.subgroup}"
        subgroup += "".join(f"+{other}" for other in task.others)
        slot = "" if task.slot is None else f" slot {task.slot}"
        after = " after " + " ".join(map(str, task.after)) if task.after else ""
        names.append(f"{number} {task.op.value}{subgroup} {task.stream.name} {task.size}{slot}{after}")
    return names


def found(
    state: Tier,
    gradient: Tier | None = Tier.DEVICE,
    numel: int = 12,
    gradient_bytes: int | None = 24,
    stale_bytes: int = 0,
) -> SubgroupState:
    return SubgroupState(state, gradient, numel, gradient_bytes, 2 * numel, stale_bytes)
