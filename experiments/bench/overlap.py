"""How much of an update hides: serial, with gradients leaving during backward, and with updates in the next forward.

    python -m experiments.overlap [--json]

Trains the demo's transformer on the emulated accelerator with the proportions of an H100 node, slowed so that the
update is a third of the forward, as long as it, and three times as long. The floor is what exactness leaves: an update
starts after backward and reaches a layer before its forward, so no iteration is shorter than backward plus the longer
of forward and update.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from dos import DOSAdam, EmulatedDevice
from experiments.command import Parser, seconds, table
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.miniature import equal_subgroups, without_fixed_costs
from experiments.training import all_equal
from perfmodel import Workload
from perfmodel.adaptive import adaptive
from perfmodel.bounds import lower_bound
from perfmodel.format import MIXED, float32
from perfmodel.hardware import HardwareProfile
from perfmodel.simulate import Phase, Scope

UPDATE_OVER_FORWARD = (1 / 3, 1.0, 3.0)
SUBGROUPS = 32
SLOTS = 6
BLOCK = 4
"""Iterations of one schedule before the next has its turn."""
CONFIG = GPTConfig(layers=3, width=512, heads=8, context=64)

Batch = tuple[Tensor, Tensor]
SCHEDULES = ("serial", "grad_overlap", "full_overlap")


@dataclass
class Run:
    """One schedule: a model and its optimizer, None for compute alone."""

    model: GPT
    optimizer: DOSAdam | None

    def iterate(self, batches: Sequence[Batch]) -> tuple[list[float], list[float]]:
        """Train on the batches: seconds of forward, and of whole iterations. No work is in flight at the end."""
        forward, whole = [], []
        for batch in batches:
            begin = time.perf_counter()
            loss = self.model(*batch)
            forward.append(time.perf_counter() - begin)
            loss.backward()
            if self.optimizer is None:
                self.model.zero_grad()
            else:
                self.optimizer.step()
                self.optimizer.zero_grad()
            whole.append(time.perf_counter() - begin)
        if self.optimizer is not None:
            self.optimizer.synchronize()
        return forward, whole


def main() -> int:
    """Measure and print; the last line is one JSON object with --json."""
    parser = Parser(prog="python -m experiments.overlap", description=__doc__.partition("\n")[0])
    parser.add_json()
    parser.add_count("rounds", 2, "of all schedules in turn, for each size of update")
    parser.add_count("batch", 32, f"sequences of {CONFIG.context} bytes")
    arguments = parser.parse_args()

    # The host of a GPU is idle during forward and backward; here one core computes for the GPU, one is the host.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = GPT(CONFIG).state_dict()
    corpus = Corpus(standard_library(), CONFIG.context)
    batches = corpus.batches(BLOCK * (1 + arguments.rounds), arguments.batch, seed=0)
    rows = [measure(start, batches, ratio) for ratio in UPDATE_OVER_FORWARD]
    show(rows)
    if arguments.json:
        print(json.dumps({"rows": rows}))
    return 0


def measure(start: dict[str, Tensor], batches: Sequence[Batch], ratio: float) -> dict[str, float | bool]:
    """One row: compute alone and all schedules in turn, a block of iterations each, so that noise falls on all alike.

    ratio: of the update's bound to the forward. The first block warms up, and so does the first iteration of each.
    """
    alone = Run(loaded(start), None)
    forward, whole = alone.iterate(batches[:BLOCK])
    profile, workload, bound_s = slow_machine(ratio, min(forward), min(whole) - min(forward))
    runs = {schedule: trained(loaded(start), schedule, profile, workload) for schedule in SCHEDULES}
    seconds: dict[str, list[float]] = {name: [] for name in ("forward", "backward", *SCHEDULES)}
    for first in range(0, len(batches), BLOCK):
        block = batches[first : first + BLOCK]
        forward, whole = alone.iterate(block)
        times = {
            "forward": forward,
            "backward": [w - f for w, f in zip(whole, forward, strict=True)],
            **{schedule: run.iterate(block)[1] for schedule, run in runs.items()},
        }
        if first:
            for name, values in times.items():
                seconds[name] += values[1:]
    parameters = [[p.detach() for p in run.model.parameters()] for run in runs.values()]
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "forward_s": median["forward"],
        "backward_s": median["backward"],
        "update_bound_s": bound_s,
        **{f"{schedule}_s": median[schedule] for schedule in SCHEDULES},
        "bits_equal": all(all_equal(parameters[0], others) for others in parameters[1:]),
    }


def loaded(start: dict[str, Tensor]) -> GPT:
    """The model at its start."""
    model = GPT(CONFIG)
    model.load_state_dict(start)
    return model


def trained(model: GPT, schedule: str, profile: HardwareProfile, workload: Workload) -> Run:
    """A model with an optimizer that overlaps as the schedule says."""
    forward_s = workload.forward_s if schedule == "full_overlap" else 0.0
    known = {f.name: getattr(workload, f.name) for f in dataclasses.fields(Workload) if f.name != "subgroups"}
    optimizer = DOSAdam(
        model.parameters(),
        policy=lambda work: adaptive(dataclasses.replace(work, **{**known, "forward_s": forward_s}), profile),
        subgroup_size=workload.subgroups[0].numel,
        device=EmulatedDevice(profile, capacity=10 * workload.slot_bytes * len(workload.subgroups)),
    )
    if schedule == "serial":
        optimizer._session.gradient_ready = lambda parameter: None  # type: ignore[method-assign]  # nothing leaves early
    if schedule == "full_overlap":
        optimizer.attach(model)
    return Run(model, optimizer)


def slow_machine(ratio: float, forward_s: float, backward_s: float) -> tuple[HardwareProfile, Workload, float]:
    """An H100 node so slow that this model's update takes `ratio` forwards by its bound, a workload, and that bound.

    It is in seconds, of the update after backward. No state is resident, SLOTS are free.
    """
    numel = GPT(CONFIG).numel
    size = -(-numel // SUBGROUPS)
    workload = equal_subgroups(
        numel,
        size,
        state=float32("float32"),
        forward_s=forward_s,
        backward_s=backward_s,
        peak_free_bytes=0,
        update_free_bytes=SLOTS * MIXED.state_bytes * size,
    )
    node = without_fixed_costs(HardwareProfile.builtin("h100"))
    after_backward = Scope(Phase.OVERLAPPED, Phase.ABSENT)
    slowdown, bound_s, wanted_s = 1.0, 0.0, ratio * forward_s
    while not math.isclose(bound_s, wanted_s, rel_tol=1e-5):
        # What leaves during backward makes the bound not quite proportional to the slowdown.
        slowdown *= (wanted_s / bound_s) ** 0.8 if bound_s > 0 else 10.0
        bound_s = lower_bound(workload, node.scaled(1 / slowdown), after_backward).seconds
    return node.scaled(1 / slowdown), workload, bound_s


def show(rows: Sequence[dict[str, float | bool]]) -> None:
    """A table for people."""
    keys = ("forward_s", "backward_s", "update_bound_s", *(f"{schedule}_s" for schedule in SCHEDULES))
    headings = (
        "forward",
        "backward",
        "update bound",
        "serial",
        "gradients early",
        "full overlap",
        "over floor",
        "bits",
    )
    cells = []
    for row in rows:
        over_floor = row["full_overlap_s"] / (row["backward_s"] + max(row["forward_s"], row["update_bound_s"]))
        bits = "equal" if row["bits_equal"] else "DIFFERENT"
        cells.append([*seconds(*(row[key] for key in keys), over_floor), bits])
    title = "Seconds per iteration (medians) on the emulated accelerator"
    Console().print(table(title, headings, cells, left=0))


if __name__ == "__main__":
    sys.exit(main())
