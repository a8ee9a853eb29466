"""How much of an update hides: serial, with gradients copied in backward, updates in the next forward, or in backward.

    python -m experiments.overlap [--json]

Trains the demo's transformer on the emulated accelerator with the proportions of an H100 node, slowed so that the
update is a third of the forward, as long as it, three times as long, and as long as forward and backward together. The
bound of updates in step follows from exactness: an update starts after backward and reaches a layer before its forward,
so no iteration is shorter than backward plus the longer of forward and update. With updates in backward, without
clipping, a parameter is updated between its gradient and its next use, and so are, within that time, all that forward
uses before it and whose gradients come after it. So no iteration is shorter than compute from the parameter's use to
its gradient and these updates together, whichever parameter it is: `least_in_backward`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from experiments.command import Parser, table_of
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.harness import Progress, all_equal, bits_of, finish, measuring, medians, take_turns
from experiments.miniature import equal_subgroups, without_fixed_costs
from perfmodel import Workload
from perfmodel.adaptive import adaptive
from perfmodel.bounds import lower_bound
from perfmodel.format import MIXED, float32
from perfmodel.hardware import HardwareProfile
from perfmodel.simulate import Phase, Scope

UPDATE_OVER_FORWARD = (1 / 3, 1.0, 3.0, None)
"""Of its bound; None: it is as long as forward and backward together."""
SUBGROUPS = 32
SLOTS = 6
BLOCK = 4
"""Iterations of one schedule before the next has its turn; the first of them does not count."""
CONFIG = GPTConfig(layers=3, width=512, heads=8, context=64)

Batch = tuple[Tensor, Tensor]
ALONE = "compute alone"
SCHEDULES = ("serial", "grad_overlap", "full_overlap")
IN_BACKWARD = "in_backward"


class Uses:
    """The times at which compute first uses each parameter of a model, and has its gradient, by iteration."""

    def __init__(self, model: nn.Module) -> None:
        self.iterations: list[dict[int, tuple[float, float]]] = []
        self.numel = {id(p): p.numel() for p in model.parameters()}
        self._used: dict[int, float] = {}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._use)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self._have)

    def _use(self, module: nn.Module, _: object) -> None:
        for p in module.parameters(recurse=False):
            if id(p) not in self._used:
                self._used[id(p)] = time.perf_counter()

    def _have(self, p: Tensor) -> None:
        if len(self._used) == len(self.numel):
            self.iterations.append({})
        self.iterations[-1][id(p)] = self._used.pop(id(p)), time.perf_counter()


def least_in_backward(uses: Uses, update_s: float) -> float:
    """Seconds of an iteration at least. uses: in compute alone. update_s: of all parameters, by its bound."""
    # Medians, with times that begin with each iteration.
    begins = [min(begin for begin, _ in times.values()) for times in uses.iterations]
    every = list(zip(begins, uses.iterations, strict=True))
    times = {
        key: tuple(statistics.median(times[key][place] - begin for begin, times in every) for place in (0, 1))
        for key in uses.numel
    }
    whole, found = sum(uses.numel.values()), 0.0
    for begin, end in times.values():
        within = sum(uses.numel[key] for key, (first, last) in times.items() if first <= begin and last >= end)
        found = max(found, end - begin + update_s * within / whole)
    return found


def iterate(model: GPT, optimizer: DOSAdam | None, batches: Sequence[Batch]) -> list[tuple[float, float]]:
    """Train on the batches, or compute alone without an optimizer: seconds of each forward and of the whole iteration.

    No work is in flight at the end.
    """
    seconds = []
    for batch in batches:
        begin = time.perf_counter()
        loss = model(*batch)
        forward_s = time.perf_counter() - begin
        loss.backward()
        if optimizer is None:
            model.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append((forward_s, time.perf_counter() - begin))
    if optimizer is not None:
        optimizer.synchronize()
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object with --json."""
    parser = Parser("overlap", __doc__)
    parser.add_count("rounds", 2, "of all schedules in turn, for each size of update")
    parser.add_count("batch", 32, f"sequences of {CONFIG.context} bytes")
    arguments = parser.parse_args(argv)
    with measuring(arguments.json) as (console, progress):
        torch.manual_seed(0)
        start = GPT(CONFIG).state_dict()
        corpus = Corpus(standard_library(), CONFIG.context)
        batches = corpus.batches(BLOCK * (1 + arguments.rounds), arguments.batch, seed=0)
        rows = [row for ratio in UPDATE_OVER_FORWARD for row in measure(start, batches, ratio, progress)]
    console.print(table_of("Seconds per iteration (medians) on the emulated accelerator", rows, left=0))
    return finish({"rows": rows}, console, arguments.json)


def measure(
    start: Mapping[str, Tensor], batches: Sequence[Batch], ratio: float | None, on_turn: Progress
) -> list[dict[str, Any]]:
    """Two rows, of updates in step and in backward: compute alone and all schedules in turn.

    A block of iterations each; the first block warms up. ratio: see `UPDATE_OVER_FORWARD`.
    """
    every = (*SCHEDULES, IN_BACKWARD)
    models = {name: GPT(CONFIG) for name in (ALONE, *every)}
    uses = Uses(models[ALONE])
    for model in models.values():
        model.load_state_dict(start)
    alone = iterate(models[ALONE], None, batches[:BLOCK])
    forward_s, whole_s = map(min, zip(*alone, strict=True))
    ratio = whole_s / forward_s if ratio is None else ratio
    profile, workload, bound_s = slow_machine(ratio, forward_s, whole_s - forward_s)
    optimizers = {name: optimizer_for(models[name], name, profile, workload) for name in every}
    contestants = {name: partial(iterate, model, optimizers.get(name)) for name, model in models.items()}
    blocks = [batches[i : i + BLOCK] for i in range(0, len(batches), BLOCK)]
    turns = take_turns(contestants, blocks, warm_up=1, on_turn=on_turn)
    counted = {name: list(chain(*(block[1:] for block in blocks))) for name, blocks in turns.items()}
    seconds = {name: [whole for _, whole in iterations] for name, iterations in counted.items()}
    forward = [forward_s for forward_s, _ in counted[ALONE]]
    backward = [whole - forward_s for forward_s, whole in counted[ALONE]]
    uses.iterations = [each for number, each in enumerate(uses.iterations) if number % BLOCK and number >= 2 * BLOCK]
    found = medians({"forward": forward, "backward": backward, **seconds})
    first, *others = (bits_of(models[name]) for name in every)
    compute = {"forward_s": found["forward"], "backward_s": found["backward"]}
    equal = {"bits_equal": all(all_equal(first, bits) for bits in others)}
    floor_s = found["backward"] + max(found["forward"], bound_s)
    # Gradients go to the host meanwhile, too.
    whole_s = lower_bound(workload, profile).seconds
    in_backward_s = max(found["forward"] + found["backward"], least_in_backward(uses, whole_s))
    return [
        {
            "updates": updates,
            **compute,
            "update_bound_s": update_s,
            **times,
            "iteration_s": found[name],
            "bound_s": least_s,
            "over_floor": found[name] / least_s,
            **equal,
        }
        for updates, name, times, update_s, least_s in (
            ("step", "full_overlap", {f"{each}_s": found[each] for each in SCHEDULES}, bound_s, floor_s),
            ("backward", IN_BACKWARD, {}, whole_s, in_backward_s),
        )
    ]


def optimizer_for(model: GPT, schedule: str, profile: HardwareProfile, workload: Workload) -> DOSAdam:
    """An optimizer that overlaps as the schedule says."""
    attached = schedule in ("full_overlap", IN_BACKWARD)
    forward_s = workload.forward_s if attached else 0.0
    known = dataclasses.replace(workload, forward_s=forward_s, in_backward=schedule == IN_BACKWARD)
    optimizer = DOSAdam(
        model.parameters(),
        policy=lambda work: adaptive(dataclasses.replace(known, subgroups=work.subgroups), profile),
        subgroup_size=workload.subgroups[0].numel,
        device=EmulatedDevice(profile, capacity=10 * workload.slot_bytes * len(workload.subgroups)),
    )
    if schedule == "serial":
        optimizer._session.gradients.gradient_ready = lambda *_: None  # type: ignore[method-assign]  # no early copies
    if attached:
        optimizer.attach(model, updates="backward" if schedule == IN_BACKWARD else "step")
    return optimizer


def slow_machine(ratio: float, forward_s: float, backward_s: float) -> tuple[HardwareProfile, Workload, float]:
    """An H100 node so slow that this model's update takes `ratio` forwards by its bound, a workload, and that bound.

    The bound is in seconds, of the update after backward. No state is resident, SLOTS are free.
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
        # Gradients are copied during backward, so the bound is not quite proportional to the slowdown.
        slowdown *= (wanted_s / bound_s) ** 0.8 if bound_s > 0 else 10.0
        bound_s = lower_bound(workload, node.scaled(1 / slowdown), after_backward).seconds
    return node.scaled(1 / slowdown), workload, bound_s


if __name__ == "__main__":
    sys.exit(main())
