"""State and saved tensors on the same links: none move to the host, all do, or as planned.

    python -m experiments.activations [--json]

Trains a small GPT on the emulated accelerator with the proportions of an H100 node whose host has half the memory
bandwidth. Beside weights, gradients and all saved tensors there is room for all of the state, half of it, or none.
Iterations are measured, and predicted by simulating the plans that were run; the best plan's are simulated, too.
Exits with 1 if a limit is missed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dos import DOSAdam, EmulatedDevice
from experiments.command import Parser, table_of
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.harness import Limit, Progress, finish, measuring, medians, take_turns
from experiments.miniature import equal_subgroups, least_iteration_s, without_fixed_costs
from experiments.training import Position, Run, common_limits, model_of
from perfmodel import Plan, Workload
from perfmodel.adaptive import adaptive
from perfmodel.format import format_of
from perfmodel.hardware import HardwareProfile
from perfmodel.simulate import Scope, makespan
from perfmodel.workload import SavedTensors, peak_room

CONFIG = GPTConfig(layers=8, width=128, heads=4, context=32)
BATCH = 13
"""Sequences; their saved tensors are about as large as the state."""
DTYPE = torch.bfloat16
SUBGROUPS = 24
GROUPS = 24
"""Of saved tensors, in the simulation."""
BLOCK = 6
"""Iterations of one run before the next has its turn; the first does not count."""
WARM_UP = 2
"""Blocks that do not count: in the first steps memory and the pace become known."""
WAYS: dict[str, float | str] = {"stay": 0.0, "all leave": 1.0, "auto": "auto"}
"""By the name of the row: `activations` of `DOSAdam.attach`."""
MOST_OVER_BEST = 1.03
"""Times the better of nothing and all that "auto" takes at most."""
MOST_OFF = 0.1
"""Between a measured iteration and the prediction for its plan, as a share of the prediction."""


class Setting(NamedTuple):
    """One machine, model and batch.

    state_share: of the state, that fits beside all saved tensors. forward_s: seconds, half as long as backward.
    link_s: seconds that all of the state would take on a link.
    """

    state_share: float
    forward_s: float
    link_s: float


SETTINGS = {
    "all": Setting(1.0, 0.30, 0.15),
    "half": Setting(0.5, 0.15, 0.30),
    "none": Setting(0.0, 0.15, 0.30),
}
"""Fixed by simulation, before anything was measured. Where half fits, state and saved tensors compete."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A setting for the model.

    most_free: bytes for state when backward ends, beside all gradients and the saved tensors that are copied back.
    """

    profile: HardwareProfile
    workload: Workload
    capacity: int
    occupied: int
    most_free: int

    @classmethod
    def of(cls, setting: Setting, model: GPT, saved: Sequence[int]) -> Case:
        """saved: sizes of saved tensors, in the order of their birth."""
        workload = equal_subgroups(
            model.numel,
            -(-model.numel // SUBGROUPS),
            state=format_of("bfloat16"),
            forward_s=setting.forward_s,
            backward_s=2 * setting.forward_s,
        )
        free = int(setting.state_share * workload.state_bytes)
        workload = dataclasses.replace(
            workload, peak_free_bytes=free, shared_free_bytes=free, activations=grouped(saved)
        )
        node = without_fixed_costs(HardwareProfile.builtin("h100"))
        node = node.replace(host_bandwidth=node.host_bandwidth / 2)
        occupied = model.numel * DTYPE.itemsize
        profile = node.scaled(workload.state_bytes / setting.link_s / node.h2d_bandwidth)
        # The optimizer does not use 2% of the device, and notices what is free in whole subgroups and a quarter.
        needed = occupied + sum(saved) + free + workload.subgroups[0].state_bytes // 2
        gradients, back = occupied, sum(saved) - peak_room(workload.activations, sum(saved))
        most_free = max(free, sum(saved) + free - gradients - back)
        return cls(profile, workload, int(needed / 0.98), occupied, most_free)

    def allowed(self, way: str) -> Workload:
        """The workload whose saved tensors move in this way."""
        everything = sum(each.nbytes for each in self.workload.activations)
        least = everything if way == "all leave" else 0
        most = {"stay": 0, "all leave": everything}.get(way, self.most_free - int(self.workload.peak_free_bytes))
        free = min(self.workload.peak_free(least), self.most_free)
        return dataclasses.replace(
            self.workload,
            peak_free_bytes=free,
            shared_free_bytes=free,
            activation_least_bytes=least,
            activation_host_bytes=most,
        )

    def simulated_s(self, way: str) -> float:
        """Seconds of an iteration of the adaptive plan."""
        work = self.allowed(way)
        return makespan(adaptive(work, self.profile), work, self.profile, Scope.beside(work))

    def predicted_s(self, plan: Plan) -> float:
        """Seconds of an iteration of a plan that was run."""
        return makespan(plan, self.workload, self.profile, Scope.beside(self.workload))

    def bound_s(self, way: str) -> float:
        """Seconds of an iteration that no plan could beat."""
        return least_iteration_s(self.allowed(way), self.profile)


def grouped(saved: Sequence[int]) -> tuple[SavedTensors, ...]:
    """Saved tensors a few together, born evenly in forward and due evenly in backward."""
    groups: list[list[int]] = [[] for _ in range(GROUPS)]
    ends = list(accumulate(saved))
    for nbytes, end in zip(saved, ends, strict=True):
        groups[min(int(GROUPS * (end - nbytes / 2) / ends[-1]), GROUPS - 1)].append(nbytes)
    shares = [count / len(saved) for count in accumulate(map(len, groups))]
    return tuple(SavedTensors(sum(g), share, 1 - share) for g, share in zip(groups, shares, strict=True) if g)


def saved_sizes(model: GPT, batch: Sequence[Tensor]) -> list[int]:
    """Bytes that autograd saves in a forward, each storage once, without parameters."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes.setdefault(storage.data_ptr(), storage.nbytes())
            kept.append(tensor)  # so that no other tensor has its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*batch)
    return list(sizes.values())


def started(case: Case, way: str) -> Run:
    """Start training in one way."""
    model = model_of(CONFIG)
    position = Position(model, case.workload.forward_s, case.workload.backward_s)
    device = EmulatedDevice(case.profile, case.capacity, case.occupied)
    optimizer = DOSAdam(model.parameters(), subgroup_size=case.workload.subgroups[0].numel, device=device)
    position.follow(optimizer)
    optimizer.attach(model, activations=WAYS[way])  # type: ignore[arg-type]
    return Run(model, optimizer, device)


def ran(run: Run) -> Plan:
    """The last plan, with the bytes of saved tensors that were moved to the host."""
    plan = run.optimizer.plan()
    assert plan is not None, "it has trained"
    return dataclasses.replace(plan, activation_bytes=int(run.optimizer.metrics()["activation_bytes"]))


def measure(rounds: int, on_progress: Progress) -> list[dict[str, Any]]:
    """All rows. In each round the ways take turns, a block of iterations each."""
    model = model_of(CONFIG)
    batches = Corpus(standard_library(), CONFIG.context).batches(BLOCK * (WARM_UP + rounds), BATCH, seed=0)
    blocks = [batches[i : i + BLOCK] for i in range(0, len(batches), BLOCK)]
    saved = saved_sizes(model, batches[0])
    rows: list[dict[str, Any]] = []
    first: Run | None = None
    for state_fits, setting in SETTINGS.items():
        case = Case.of(setting, model, saved)
        runs = {way: started(case, way) for way in WAYS}
        first = first or runs["stay"]
        contestants = {way: run.turn for way, run in runs.items()}
        on_progress(f"{state_fits} of the state fits")
        seconds = medians(take_turns(contestants, blocks, warm_up=WARM_UP))
        for way, run in runs.items():
            rows.append(
                {
                    "state_fits": state_fits,
                    "activations": way,
                    **run.common(first, seconds[way]),
                    "simulated_s": case.simulated_s(way),
                    "predicted_s": case.predicted_s(ran(run)),
                    "bound_s": case.bound_s(way),
                    "compute_s": 3 * setting.forward_s,
                }
            )
    return rows


def limits(rows: Sequence[dict[str, Any]]) -> list[Limit]:
    """Limits of all rows, by what is wrong if they are missed."""
    found = []
    for row in rows:
        where = f"{row['state_fits']} of the state fits, {row['activations']}"
        off = abs(row["iteration_s"] / row["predicted_s"] - 1)
        found += [
            *common_limits(where, row),
            Limit.at_most(f"{where}: off the prediction by more than {MOST_OFF:.0%}", off, MOST_OFF),
        ]
        if row["activations"] == "auto":
            alike = [r for r in rows if r["state_fits"] == row["state_fits"] and r is not row]
            over = row["iteration_s"] / min(r["iteration_s"] for r in alike)
            found.append(Limit.at_most(f"{where}: slower than the better of nothing and all", over, MOST_OVER_BEST))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object with --json. Exit status 1 if a limit is missed."""
    parser = Parser("activations", __doc__)
    parser.add_count("rounds", 5, "of all ways in turn")
    arguments = parser.parse_args(argv)
    with measuring(arguments.json) as (console, progress):
        rows = measure(arguments.rounds, progress)
    console.print(table_of("Seconds of an iteration on the emulated accelerator", rows, left=2))
    return finish({"rows": rows}, console, arguments.json, limits(rows))


if __name__ == "__main__":
    sys.exit(main())
