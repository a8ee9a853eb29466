"""Does the engine do what the simulator says? Plans of all policies run on emulated machines, against the clock.

    python -m experiments.emulation [--json]

The engine moves and updates real tensors on real threads; the emulated device only makes each operation last as long
as on the machine emulated. The same plan is simulated with the same rates. What is compared is the update alone, from
the call of `step()` with all gradients on the device to the last transfer.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from experiments.command import Parser, table_of
from experiments.harness import Limit, Progress, finish, measuring
from experiments.miniature import UPDATE_S, equal_subgroups, measured_update_s, slowed
from perfmodel import Placement, Plan, Workload
from perfmodel.adaptive import adaptive
from perfmodel.bounds import lower_bound
from perfmodel.format import MIXED, float32
from perfmodel.hardware import LINK_RATES, HardwareProfile
from perfmodel.policies import cpu_only, static_ratio, stride
from perfmodel.simulate import makespan

MEDIAN_ERROR, MAX_ERROR = 0.05, 0.10
"""Of measured against simulated updates, as shares."""


@dataclass(frozen=True)
class Machine:
    """An emulated machine with a model on it. slots: of the device memory that is not resident."""

    name: str
    profile: HardwareProfile
    numel: int
    subgroups: int
    dtype: torch.dtype = torch.bfloat16

    def workload(self, resident_share: float = 0.0, slots: int = 3) -> Workload:
        size = -(-self.numel // self.subgroups)
        return equal_subgroups(
            self.numel,
            size,
            state=float32(str(self.dtype).removeprefix("torch.")),
            peak_free_bytes=int(resident_share * MIXED.state_bytes * self.numel),
            update_free_bytes=slots * MIXED.state_bytes * size,
        )


def machines() -> list[Machine]:
    """Published and data-sheet machines, a starved and a one-sided link, large and small subgroups, two dtypes."""
    h100, a100, desktop, gh200 = map(HardwareProfile.builtin, ("h100", "a100_bound", "rtx_4090_desktop", "gh200"))
    one_sided = h100.replace(d2h_bandwidth=h100.d2h_bandwidth / 4, d2h_bandwidth_duplex=h100.d2h_bandwidth / 4)
    starved = h100.replace(**{r: getattr(h100, r) / 4 for r in LINK_RATES})
    return [
        dataclasses.replace(machine, profile=slowed(machine.profile, machine.workload(), UPDATE_S))
        for machine in (
            Machine("h100", h100, 4_000_000, 16),
            Machine("a100_bound", a100, 3_000_000, 24),
            Machine("rtx_4090_desktop", desktop, 2_000_000, 10),
            Machine("gh200, float32", gh200, 2_000_000, 20, torch.float32),
            Machine("h100, D2H a quarter", one_sided, 3_000_000, 12),
            Machine("h100, links a quarter", starved, 3_000_000, 30),
        )
    ]


def plans(machine: Machine) -> dict[str, Plan]:
    """The policies' plans, in the order of the table."""
    work = machine.workload()
    third = machine.workload(resident_share=1 / 3)
    return {
        "cpu": cpu_only(work),
        "ratio 0.6": static_ratio(work, 0.6),
        "stride 1, 2 slots": stride(work, 1, slots=2),
        "stride 2, 1 slot": stride(work, 2, slots=1),
        "stride 3, 3 slots": stride(work, 3, slots=3),
        "stride 2, ratio 0.7": stride(work, 2, ratio=0.7),
        "adaptive": adaptive(work, machine.profile),
        "adaptive, a third resident": adaptive(third, machine.profile),
    }


def run(machine: Machine, rounds: int, on_progress: Progress) -> list[dict[str, str | float]]:
    """Every policy on one machine: measured, simulated, and bounds for the memory that its plan uses."""
    rows: list[dict[str, str | float]] = []
    parameter, work = nn.Parameter(torch.randn(machine.numel, dtype=machine.dtype)), machine.workload()
    for name, plan in plans(machine).items():
        on_progress(f"{machine.name}: {name}")
        held = work.state_bytes_of(plan.served(Placement.GPU_RESIDENT))
        size = work.subgroups[0].numel
        rows.append(
            {
                "machine": machine.name,
                "policy": name,
                "measured_s": measured_update_s([parameter], plan, size, machine.profile, rounds),
                "simulated_s": makespan(plan, work, machine.profile),
                "bound_s": lower_bound(machine.workload(held / work.state_bytes, plan.slots), machine.profile).seconds,
            }
        )
    return rows


def errors(rows: Sequence[dict[str, str | float]]) -> list[float]:
    """Of the measured against the simulated seconds, as fractions."""
    return [abs(float(row["measured_s"]) / float(row["simulated_s"]) - 1) for row in rows]


def misordered(rows: Sequence[dict[str, str | float]], tolerance: float) -> list[str]:
    """Pairs of policies on one machine that the simulator puts apart by more than `tolerance`, the other way round."""
    found = []
    for a, b in itertools.permutations(rows, 2):
        predicted = float(a["simulated_s"]) * (1 + tolerance) < float(b["simulated_s"])
        if a["machine"] == b["machine"] and predicted and float(a["measured_s"]) > float(b["measured_s"]):
            found.append(f"{a['machine']}: {a['policy']} before {b['policy']}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object with --json. Exit status 1 if the two disagree."""
    parser = Parser("emulation", __doc__)
    parser.add_count("rounds", 3, "steps measured for each plan")
    arguments = parser.parse_args(argv)
    with measuring(arguments.json) as (console, progress):
        rows = [row for machine in machines() for row in run(machine, arguments.rounds, progress)]
    off = errors(rows)
    shown = [{**row, "relative_error": error} for row, error in zip(rows, off, strict=True)]
    title = "Seconds of an update: engine on the emulated accelerator, simulator, bound"
    console.print(table_of(title, shown, left=2))
    wrong = misordered(rows, tolerance=0.05)
    median, most = statistics.median(off), max(off)
    console.print(f"median error {median:.1%}, maximum {most:.1%}; misordered: {wrong or 'none'}")
    limits = [
        Limit.at_most("median error", median, MEDIAN_ERROR),
        Limit.at_most("maximum error", most, MAX_ERROR),
        Limit.at_most("misordered", len(wrong), 0),
    ]
    return finish({"rows": rows, "median_error": median, "max_error": most}, console, arguments.json, limits)


if __name__ == "__main__":
    sys.exit(main())
