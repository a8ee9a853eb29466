"""What users do besides a plain loop: does it run, are the bits the same under every policy, what does it take?"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dos import DOSAdam
from experiments.checks.base import Bench, Size, Skipped
from experiments.checks.calibration import measured_profile
from experiments.checks.plans import optimizer_for, results, same
from experiments.checks.training import (
    EXACT,
    PRESSED,
    Batch,
    Job,
    deterministic,
    fitted,
    free_memory,
    prepare,
)

STEPS = {Size.TINY: 4, Size.SMALL: 6, Size.FULL: 8}
TIMED = {Size.TINY: 2, Size.SMALL: 3, Size.FULL: 6}
"""Iterations whose median counts."""
MOST = 150e6
"""Parameters of the model that is timed."""
OTHERS = ("stride:2", "adaptive")
"""Policies that are compared with CPU only."""
SHARE = 1 / 7
"""Of the model, in one subgroup."""
INFINITE = 2
"""The step in which a gradient is infinite, if there is a GradScaler to skip it."""


@dataclass(frozen=True)
class Feature:
    """One way to train. options: of DOSAdam. dtype: of the parameters.

    scaled: with a GradScaler, which torch has for float16. micro_batches: gradients of so many add up.
    as_plain: the bits must be a plain loop's.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    scaled: bool = False
    micro_batches: int = 1
    as_plain: bool = False


PLAIN = Feature("plain")
FEATURES = (
    Feature("clipping", {"max_grad_norm": 0.1}),
    Feature("moments in 8 bits", {"state_format": "int8"}),
    Feature("GradScaler", dtype=torch.float16, scaled=True),
    Feature("offloaded gradients", {"offload_gradients": True}, as_plain=True),
    Feature("offloaded gradients of two micro-batches", {"offload_gradients": True}, micro_batches=2),
)


def run(bench: Bench) -> None:
    """Every feature under three policies, to the bit; then an iteration with each, on a larger model."""
    with deterministic():
        device = prepare(bench)
        job = EXACT[bench.size]
        batches = job.batches(STEPS[bench.size], device)
        plain = bits_of(job, batches, device, "cpu", PLAIN)
        equal: dict[str, bool] = {}
        for feature in FEATURES:
            with bench.guarded(feature.name):
                expected = bits_of(job, batches, device, "cpu", feature)
                if feature.as_plain and not same(expected, plain):
                    bench.problem(f"{feature.name}: other bits than without")
                if feature.options.get("max_grad_norm") and same(expected, plain):
                    bench.problem(f"{feature.name}: nothing was clipped")
                found = {p: same(expected, bits_of(job, batches, device, p, feature)) for p in OTHERS}
                equal[feature.name] = all(found.values())
                for policy in (p for p, is_same in found.items() if not is_same):
                    bench.problem(f"{feature.name}: other bits with policy {policy} than on the host")
            bench.note(same_bits=equal)
    seconds: dict[str, float] = {}
    larger = fitted(PRESSED[bench.size], bench.settings, most=MOST)
    options = {"profile": measured_profile(bench.out, device)} if bench.cuda else {}
    for feature in (PLAIN, *FEATURES):
        if bench.left() < 0:
            break
        with bench.guarded(f"{feature.name}, timed"):
            one = replace(feature, options={**feature.options, **options}, micro_batches=1)
            seconds[feature.name] = iteration_s(larger, TIMED[bench.size], device, one)
        free_memory(bench.cuda)
        bench.note(parameters=larger.numel, iteration_s=seconds, policy="adaptive")


def run_compiled(bench: Bench) -> None:
    """The same for torch.compile: the bits of a compiled model under three policies, attached and not."""
    backend = "inductor" if bench.cuda else "aot_eager"  # which needs no compiler
    with deterministic():
        device = prepare(bench)
        job = EXACT[bench.size]
        batches = job.batches(STEPS[bench.size], device)
        model = job.model(device)
        start = {name: t.clone() for name, t in model.state_dict().items()}
        compiled: Any = torch.compile(model, backend=backend, dynamic=False)
        begin = time.perf_counter()
        compiled(*batches[0]).backward()
        wait(device)
        bench.note(backend=backend, first_iteration_s=time.perf_counter() - begin)

        def trained(policy: str, *, attach: bool) -> list[Tensor]:
            model.load_state_dict(start)
            model.zero_grad()
            optimizer = optimizer_for(model, policy, SHARE, emulated=not bench.cuda)
            if attach:
                optimizer.attach(compiled)
            train(compiled, optimizer, batches, PLAIN)
            found = [t.clone() for t in results(model, optimizer)]
            del optimizer
            free_memory(bench.cuda)
            return found

        expected = trained("cpu", attach=False)
        if not same(expected, trained("cpu", attach=False)):
            raise Skipped("the same compiled run twice gives different bits, so it is not reproducible here")
        equal = {}
        for policy, attach in (("stride:2", True), ("adaptive", False), ("cpu", True)):
            name = f"{policy}, attached" if attach else policy
            equal[name] = same(expected, trained(policy, attach=attach))
            bench.note(same_bits=equal)
            if not equal[name]:
                bench.problem(f"torch.compile: other bits with policy {name} than on the host")
        optimizer = optimizer_for(model, "adaptive", SHARE, emulated=not bench.cuda)
        bench.note(
            iteration_s={
                "compiled": timed(compiled, optimizer, batches[0], TIMED[bench.size], PLAIN),
                "not compiled": timed(model, optimizer, batches[0], TIMED[bench.size], PLAIN),
            }
        )


def bits_of(job: Job, batches: Sequence[Batch], device: torch.device, policy: str, feature: Feature) -> list[Tensor]:
    """Parameters and state after training on the batches."""
    model = job.model(device, feature.dtype)
    optimizer = optimizer_for(model, policy, SHARE, emulated=device.type == "cpu", **feature.options)
    train(model, optimizer, batches, feature)
    return results(model, optimizer)


def iteration_s(job: Job, steps: int, device: torch.device, feature: Feature) -> float:
    """Seconds of an iteration under the adaptive policy, which has memory for 40% of the state."""
    model = job.model(device, feature.dtype)
    optimizer = optimizer_for(model, "adaptive", SHARE, emulated=device.type == "cpu", **feature.options)
    return timed(model, optimizer, job.batches(1, device)[0], steps, feature)


def timed(model: nn.Module, optimizer: DOSAdam, batch: Batch, steps: int, feature: Feature) -> float:
    """Median seconds of iterations that are each waited for, after two that do not count."""
    marks: list[float] = []

    def mark() -> None:
        wait(batch[0].device)
        marks.append(time.perf_counter())

    train(model, optimizer, [batch] * (2 + steps), feature, after=mark)
    return statistics.median(b - a for a, b in itertools.pairwise(marks[1:]))


def train(
    model: nn.Module,
    optimizer: DOSAdam,
    batches: Sequence[Batch],
    feature: Feature,
    after: Callable[[], None] = lambda: None,
) -> None:
    """The loop that users write. after: called at the end of each iteration."""
    kind = batches[0][0].device.type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**8, enabled=feature.scaled)
    parameter = optimizer.param_groups[0]["params"][0]
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        for _ in range(feature.micro_batches):
            scaler.scale(model(*batch)).backward()
        if feature.scaled and step == INFINITE:
            parameter.grad.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        after()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
