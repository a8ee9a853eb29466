"""Is the result the same bits however it was computed, and is it AdamW's?"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dos import DOSAdam, EmulatedDevice
from dos.deciding.controller import AdaptivePolicy, Policy
from experiments.checks.base import Bench, Size, Target
from experiments.checks.training import EXACT, SETTINGS, STEPS, Batch, Job, Reference, deterministic, prepare
from experiments.gpt import GPT
from perfmodel import Placement, Plan, Workload
from perfmodel.format import MIXED
from perfmodel.hardware import HardwareProfile

POLICIES = ("cpu", "0.5", "0", "stride:1", "stride:2", "stride:3", "adaptive", "changing")
SHARES = {Size.TINY: (1 / 2, 1 / 4, 1 / 9), Size.SMALL: (1 / 2, 1 / 4, 1 / 9), Size.FULL: (1 / 2, 1 / 7, 1 / 31)}
"""Sizes of a subgroup, as shares of the model."""
GRADIENTS = ("early", "late", "offloaded")
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of a loss in nats. AdamW's update differs from ours in the last places; 16-bit parameters now and then by one of
their own places, which is why theirs is wider."""

_EMULATED = HardwareProfile.builtin("h100").scaled(1 / 20)
"""So fast that emulating it costs little time with a small model."""


@dataclass(frozen=True)
class Setting:
    """One way to compute the same. share: of the model, in one subgroup. gradients: see GRADIENTS."""

    policy: str
    share: float
    attached: bool
    gradients: str

    def __str__(self) -> str:
        attached = ", attached" if self.attached else ""
        return f"policy {self.policy}, subgroups of {self.share:.2f}, gradients {self.gradients}{attached}"


class Changing(AdaptivePolicy):
    """Another random plan at every call, so that state moves all the time."""

    def __init__(self) -> None:
        super().__init__(_EMULATED)
        self._random = random.Random(0)

    def __call__(self, workload: Workload) -> Plan:
        n = len(workload.subgroups)
        placements = tuple(self._random.choices(list(Placement), k=n))
        order = self._random.sample(range(n), n)
        return Plan(placements, tuple(order), slots=self._random.randint(1, 3))

    def observe(self, *_: object) -> None:
        """Nothing can be learnt from it."""


def check_bits(bench: Bench) -> None:
    """Every policy, subgroup size and overlap, in an order that is mixed, as many of them as time allows."""
    with deterministic():
        device = prepare(bench)
        job = EXACT[bench.size]
        batches = job.batches(STEPS[bench.size], device)
        everything = list(settings(SHARES[bench.size]))
        random.Random(0).shuffle(everything)
        first = Setting("cpu", 1 / 7, attached=False, gradients="late")
        expected = outcome(job, batches, device, first, emulated=not bench.cuda)
        again = outcome(job, batches, device, first, emulated=not bench.cuda)
        if not same(expected, again):
            raise RuntimeError("the same run twice gives different bits, so forward and backward are not reproducible")
        equal: list[str] = []
        different: list[str] = []
        for setting in everything:
            if bench.left() < 0:
                break
            found = outcome(job, batches, device, setting, emulated=not bench.cuda)
            (equal if same(expected, found) else different).append(str(setting))
            bench.note(steps=len(batches), settings=len(everything), equal=len(equal), different=different)
        for setting_name in different:
            bench.problem(f"other bits with {setting_name}")
        done = len(equal) + len(different)
        bench.target(Target.at_least("settings compared in bits", done, len(everything)))


def check_losses(bench: Bench) -> None:
    """Losses of DOSAdam and AdamW, step by step, in float32 and in bfloat16 with float32 masters."""
    with deterministic():
        device = prepare(bench)
        job = EXACT[bench.size]
        batches = job.batches(STEPS[bench.size], device)
        for dtype, tolerance in LOSS_TOLERANCE.items():
            name = str(dtype).removeprefix("torch.")
            model = job.model(device, dtype)
            reference = Reference(list(model.parameters()), masters=dtype != torch.float32)
            expected = losses(model, batches, reference.step, reference.zero_grad)
            model = job.model(device, dtype)
            optimizer = optimizer_for(model, "stride:2", 1 / 7, emulated=not bench.cuda)
            optimizer.attach(model)
            ours = losses(model, batches, optimizer.step, optimizer.zero_grad)
            off = max(abs(a - b) for a, b in zip(ours, expected, strict=True))
            bench.note(**{name: {"AdamW": expected, "DOSAdam": ours, "largest difference": off}})
            if not off <= tolerance:
                bench.problem(f"{name}: a loss differs from AdamW's by {off:.2e}, more than {tolerance:g}")


def settings(shares: Sequence[float]) -> Iterator[Setting]:
    """All combinations."""
    for policy, share, attached, gradients in itertools.product(POLICIES, shares, (False, True), GRADIENTS):
        yield Setting(policy, share, attached, gradients)


def optimizer_for(model: GPT, policy: str, share: float, *, emulated: bool, **options: Any) -> DOSAdam:
    """DOSAdam with a policy by name; adaptive has memory for 40% of the state. options: of DOSAdam, besides."""
    choice: str | float | Policy = policy
    if policy == "changing":
        choice = Changing()
    elif policy.replace(".", "").isdecimal():
        choice = float(policy)
    settings = {
        "policy": choice,
        "profile": _EMULATED,
        "subgroup_size": int(share * model.numel) + 1,
        "memory_budget": int(0.4 * MIXED.state_bytes * model.numel),
        "device": EmulatedDevice(_EMULATED, capacity=100 * model.numel + (1 << 20)) if emulated else None,
    }
    return DOSAdam(model.parameters(), **{**settings, **SETTINGS, **options})


def outcome(
    job: Job, batches: Sequence[Batch], device: torch.device, setting: Setting, *, emulated: bool
) -> list[Tensor]:
    """Parameters and state after training on the batches."""
    model = job.model(device)
    optimizer = optimizer_for(
        model, setting.policy, setting.share, emulated=emulated, offload_gradients=setting.gradients == "offloaded"
    )
    if setting.gradients == "late":
        optimizer.gradient_ready = lambda parameter: None  # type: ignore[method-assign]  # nothing leaves early
    if setting.attached:
        optimizer.attach(model)
    losses(model, batches, optimizer.step, optimizer.zero_grad)
    return results(model, optimizer)


def results(model: GPT, optimizer: DOSAdam) -> list[Tensor]:
    """Parameters and state as they are now."""
    optimizer.synchronize()
    states = [optimizer.state[p] for p in model.parameters()]
    return [p.detach() for p in model.parameters()] + [state[name] for state in states for name in sorted(state)]


def losses(
    model: GPT, batches: Sequence[Batch], step: Callable[[], object], zero_grad: Callable[[], None]
) -> list[float]:
    """Train on the batches."""
    found = []
    for batch in batches:
        zero_grad()
        loss = model(*batch)
        loss.backward()
        step()
        found.append(loss.detach())
    return [float(loss) for loss in found]


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether all tensors have the same bits."""
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(some, others, strict=True))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
