"""The planner's answer: what each policy would take, what more would buy, and the largest model that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from perfmodel.adaptive import AdaptivePlanner
from perfmodel.bounds import Bound, lower_bound
from perfmodel.hardware import changed
from perfmodel.plan import Placement, Plan
from perfmodel.planner.question import MARGIN, MAX_SUBGROUPS, Question, Situation
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import format_count
from perfmodel.policies import DEFAULT_SLOTS, balanced_stride, cpu_only, static_ratio, stride
from perfmodel.simulate import Phase

RATIOS_TRIED = 12
"""Ratios between nothing and all that fits being resident."""
WORTHWHILE = 0.01
"""Settings that make less difference than this share of the time are not mentioned."""


@dataclass(frozen=True)
class Outcome:
    """What a policy gives. Times in seconds; None where it does not fit, or the compute is not known.

    exposed_s: by which the optimizer makes the iteration longer.
    shares: of the parameters by placement.
    """

    policy: str
    plan: Plan | None
    update_s: float | None = None
    iteration_s: float | None = None
    exposed_s: float | None = None
    shares: dict[Placement, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether there is the memory for it."""
        return self.plan is not None

    @property
    def seconds(self) -> float:
        """Of the iteration, or of the update if that is all that is known; infinite if it does not fit."""
        known = self.update_s if self.iteration_s is None else self.iteration_s
        return math.inf if known is None else known


@dataclass(frozen=True)
class Lever:
    """One thing changed, and what the adaptive policy then gives."""

    change: str
    outcome: Outcome


@dataclass(frozen=True)
class Remedy:
    """Settings with which the model fits, or would with more host memory, and what then follows."""

    change: str
    situation: Situation


@dataclass(frozen=True)
class Advice:
    """The answer to a question.

    outcomes: adaptive last. bound: of the update alone; None if nothing fits.
    largest: parameters of the largest model of the usual shape that would fit; 0 if none does.
    all_resident_bytes: device memory with which all optimizer state stays on the device.
    remedies: if it does not fit, settings with which it does; or, if there are none, one for which only host memory
        is missing.
    """

    situation: Situation
    outcomes: tuple[Outcome, ...]
    bound: Bound | None
    levers: tuple[Lever, ...]
    largest: int
    all_resident_bytes: int
    remedies: tuple[Remedy, ...]

    @property
    def best(self) -> Outcome:
        """The adaptive policy's."""
        return self.outcomes[-1]


def advise(question: Question) -> Advice:
    """Everything the planner has to say; every time in it is simulated, every size counted."""
    situation = Situation(question)
    now = adaptive_outcome(situation)
    return Advice(
        situation,
        (*_baselines(situation), now),
        lower_bound(situation.alone, situation.profile) if situation.fits else None,
        tuple(_levers(question, now)),
        largest(question),
        math.ceil((situation.device.peak + situation.alone.state_bytes) / (1 - MARGIN)),
        () if situation.fits else tuple(_remedies(question)),
    )


def adaptive_outcome(situation: Situation) -> Outcome:
    """What DOSAdam's adaptive policy gives, which measures the compute that transfers can run beside."""
    scope, beside = situation.scope, situation.beside
    work = dataclasses.replace(
        beside,
        forward_s=beside.forward_s if scope.forward is Phase.OVERLAPPED else 0.0,
        backward_s=beside.backward_s if scope.backward is Phase.OVERLAPPED else 0.0,
    )
    return _outcome("adaptive", situation, AdaptivePlanner()(work, situation.profile))


def largest(question: Question) -> int:
    """Parameters of the largest model of the usual shape that fits with the same settings, to 1%; 0 if none does."""

    def fits(numel: int) -> bool:
        model = Transformer.of_size(numel)
        size = max(question.subgroup_size, math.ceil(numel / MAX_SUBGROUPS))
        return Situation(dataclasses.replace(question, model=model, subgroup_size=size)).fits

    low, high = 1e6, 1e15
    if not fits(int(low)):
        return 0
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(int(middle)) else (low, middle)
    return int(low)


def _baselines(situation: Situation) -> Iterator[Outcome]:
    """The policies that adaptive is compared with."""
    work = situation.alone
    n = len(work.subgroups)
    everything = Plan((Placement.GPU_RESIDENT,) * n, tuple(range(n)), 0)
    fits = situation.fits_device and situation.adamw_bytes <= situation.room
    yield _outcome("fused AdamW", situation, everything, fits)
    yield _outcome("CPU only", situation, cpu_only(work))
    yield _best_ratio(situation)
    k = balanced_stride(work.subgroups[0], situation.profile)
    slots = max(1, min(DEFAULT_SLOTS, int(work.shared_free_bytes // work.slot_bytes)))
    yield _outcome(f"stride {k} (paper)", situation, stride(work, k, slots=slots))


def _best_ratio(situation: Situation) -> Outcome:
    """The fastest of some ratios whose resident state fits."""
    work = situation.alone
    held = 0
    shares = [0.0]
    for load in work.subgroups:
        held += load.state_bytes
        if held <= work.peak_free_bytes:
            shares.append(held / work.state_bytes)
    tried = sorted({shares[round(i * (len(shares) - 1) / RATIOS_TRIED)] for i in range(RATIOS_TRIED + 1)})
    outcomes = [_outcome(f"best ratio, {1 - share:.2f}", situation, static_ratio(work, 1 - share)) for share in tried]
    return min(outcomes, key=lambda outcome: outcome.seconds)


def _outcome(policy: str, situation: Situation, plan: Plan, fits: bool | None = None) -> Outcome:
    """What the plan gives. fits: whether memory suffices, if that is not for `Situation.allows` to say."""
    if not (situation.allows(plan) if fits is None else fits):
        return Outcome(policy, None)
    iteration_s, compute_s = situation.iteration_s(plan), situation.compute_s
    loads, total = situation.alone.subgroups, situation.alone.numel
    return Outcome(
        policy,
        plan,
        situation.update_s(plan),
        iteration_s,
        None if iteration_s is None or compute_s is None else max(0.0, iteration_s - compute_s),
        {placement: sum(loads[i].numel for i in plan.served(placement)) / total for placement in Placement},
    )


def _levers(question: Question, now: Outcome) -> Iterator[Lever]:
    """What may help, each recomputed: hardware always, settings only where they make a difference.

    Nothing that does not fit helps.
    """
    for change, other in _hardware(question):
        outcome = adaptive_outcome(Situation(other))
        if outcome.fits:
            yield Lever(change, outcome)
    for change, other in _settings(question):
        outcome = adaptive_outcome(Situation(other))
        if outcome.seconds < (1 - WORTHWHILE) * now.seconds:
            yield Lever(change, outcome)


def _hardware(question: Question) -> Iterator[tuple[str, Question]]:
    for gib in (1, 8):
        more = question.device_bytes + gib * 2**30
        yield f"{gib} GiB more GPU memory", dataclasses.replace(question, device_bytes=more)
    links = ("h2d_bandwidth", "d2h_bandwidth", "h2d_bandwidth_duplex", "d2h_bandwidth_duplex")
    for what, rates in (
        ("links twice as fast", links),
        ("host memory twice as fast", ("host_bandwidth",)),
        ("CPU update twice as fast", ("cpu_update_rate",)),
    ):
        faster = changed(question.profile, {rate: 2 * getattr(question.profile, rate) for rate in rates})
        yield what, dataclasses.replace(question, profile=faster)


def _settings(question: Question) -> Iterator[tuple[str, Question]]:
    """Choices of the user's with which the same work is done."""
    smaller = question.subgroup_size // 4
    if smaller and math.ceil(question.state_numel / smaller) <= MAX_SUBGROUPS:
        change = f"subgroups of {format_count(smaller)} parameters"
        yield change, dataclasses.replace(question, subgroup_size=smaller)
    if question.attach:
        yield "--no-attach", dataclasses.replace(question, attach=False)
    if not question.checkpointing:
        yield "--checkpointing", dataclasses.replace(question, checkpointing=True)


def _remedies(question: Question) -> Iterator[Remedy]:
    """Settings with which what does not fit does, asked anew; and those for which only more host memory is missing."""
    less = dataclasses.replace(question, checkpointing=True)
    alone = [
        ("with --checkpointing", less),
        ("with --offload-gradients", dataclasses.replace(question, offload_gradients=True)),
        ("with --batch 1", dataclasses.replace(question, batch=1)),
        ("without --offload-gradients", dataclasses.replace(question, offload_gradients=False)),
    ]
    together = [("with --checkpointing --offload-gradients", dataclasses.replace(less, offload_gradients=True))]
    short: list[Remedy] = []
    for changes in (alone, together):
        tried = [Remedy(change, Situation(other)) for change, other in changes if other != question]
        helps = [remedy for remedy in tried if adaptive_outcome(remedy.situation).fits]
        if helps:
            yield from helps
            return
        short += [remedy for remedy in tried if remedy.situation.fits_device and not Situation(question).fits_device]
    yield from short[:1]
