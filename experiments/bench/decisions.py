"""The pictures and the tables of docs/how-it-decides.md: one machine, one model, simulated.

    python -m experiments.decisions             # draws docs/images/decide_*.png and prints the tables

Nothing is measured: simulations of one iteration by `perfmodel.simulate`, which always come out the same.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.command import Parser, markdown
from experiments.plots import can_draw, save_timelines
from perfmodel import Placement, Plan, Timeline, Workload
from perfmodel.adaptive import adaptive
from perfmodel.format import SPLIT
from perfmodel.hardware import HardwareProfile
from perfmodel.planner.machine import GPUS
from perfmodel.policies import cpu_only, stride
from perfmodel.simulate import Phase, Scope, simulate

MACHINE = "rtx_4090_desktop"
SUBGROUPS = 12
SUBGROUP_SIZE = 100_000_000
TOKENS = 8192
"""Of one iteration."""
FORWARD_SHARE = 1 / 3
"""Backward computes two gradients for each product of forward."""
ROOMS = (0, 2, 4, 8, 12)
"""Free memory for state, in subgroups."""
ROOM = 4
"""Of those, for the comparison of policies."""
OVERLAPPED = Scope(Phase.OVERLAPPED, Phase.OVERLAPPED)
SERIAL = Scope(Phase.SERIAL, Phase.SERIAL)


def workload(room: int) -> Workload:
    """bfloat16 parameters, with free device memory for the state of `room` subgroups, which staging slots share."""
    flops = 6 * SUBGROUPS * SUBGROUP_SIZE * TOKENS  # Kaplan et al. 2020
    compute_s = flops / (GPUS[MACHINE].utilisation * GPUS[MACHINE].peak("bf16"))
    work = Workload.of_sizes(
        [SUBGROUP_SIZE] * SUBGROUPS,
        SPLIT,
        forward_s=compute_s * FORWARD_SHARE,
        backward_s=compute_s * (1 - FORWARD_SHARE),
    )
    free = room * work.slot_bytes
    return dataclasses.replace(work, peak_free_bytes=free, shared_free_bytes=free)


def iteration(plan: Plan, room: int, scope: Scope = OVERLAPPED) -> Timeline:
    """Backward, update and the next forward."""
    return simulate(plan, workload(room), HardwareProfile.builtin(MACHINE), scope)


def by_policy() -> dict[str, Timeline]:
    """One iteration of each policy with memory for ROOM subgroups, and of all on the CPU with nothing overlapped."""
    work = workload(ROOM)
    planned = adaptive(work, HardwareProfile.builtin(MACHINE))
    return {
        "all on the CPU, one thing after the other": iteration(cpu_only(work), ROOM, SERIAL),
        'policy="cpu"': iteration(cpu_only(work), ROOM),
        'policy="stride:2"': iteration(stride(work, 2), ROOM),
        f'policy="adaptive", memory for {ROOM} of {SUBGROUPS} subgroups': iteration(planned, ROOM),
    }


def by_room() -> dict[int, tuple[Plan, Timeline]]:
    """The adaptive plan and one iteration of it, by free memory in subgroups."""
    plans = {room: adaptive(workload(room), HardwareProfile.builtin(MACHINE)) for room in ROOMS}
    return {room: (plan, iteration(plan, room)) for room, plan in plans.items()}


def policy_table() -> str:
    """Iterations by policy, in Markdown."""
    rows = [[name, *_times(timeline)] for name, timeline in by_policy().items()]
    return markdown([["", "iteration", "exposed"], *rows]) + "\n"


def room_table() -> str:
    """The adaptive plan and its iteration by free memory, in Markdown."""
    lines = [["memory for state", "resident", "streamed", "cpu", "slots", "iteration", "exposed"]]
    for room, (plan, timeline) in by_room().items():
        gib = workload(room).peak_free_bytes / 2**30
        counts = [len(plan.served(p)) for p in (Placement.GPU_RESIDENT, Placement.GPU_STREAMED, Placement.CPU)]
        lines.append([f"{gib:.1f} GiB", *map(str, [*counts, plan.slots]), *_times(timeline)])
    return markdown(lines) + "\n"


def draw(folder: Path) -> None:
    """Write decide_policies.png and decide_memory.png."""
    save_timelines(by_policy(), folder / "decide_policies.png", title="One iteration: backward, update, next forward")
    rooms = {f"memory for {room} of {SUBGROUPS} subgroups": timeline for room, (_, timeline) in by_room().items()}
    save_timelines(rooms, folder / "decide_memory.png", title='policy="adaptive" by free memory')


def _times(timeline: Timeline) -> tuple[str, str]:
    exposed = max(0.0, timeline.makespan - OVERLAPPED.compute_s(workload(ROOM)))
    return f"{timeline.makespan * 1e3:.0f} ms", f"{exposed * 1e3:.0f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and print the table."""
    parser = Parser("decisions", __doc__, json=False)
    parser.add_out("docs/images", "folder for the pictures")
    options = parser.parse_args(arguments)
    if not can_draw():
        return 2
    draw(options.out)
    print(policy_table(), room_table(), sep="\n", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
