"""Changes that would help: other settings, and sizes that fit, each asked anew."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from perfmodel.format import INT8
from perfmodel.planner.options import difference
from perfmodel.planner.outcome import Outcome, adaptive_outcome
from perfmodel.planner.question import MAX_SUBGROUPS, Question
from perfmodel.planner.situation import Situation

WORTHWHILE = 0.01
"""Settings that make less difference than this share of the time are not mentioned."""
LARGER_BATCH = 1.5
"""A setting that makes the largest batch this many times as large is mentioned, whatever it does to the time."""
MOST_REMEDIES = 4
"""Proposals for a model that does not fit."""
MOST = 2**24
"""Sequences, or tokens in one, beyond which the planner does not look."""
SMALLEST = 10**6
"""Parameters below which it does not either."""


class Effect(enum.IntEnum):
    """Changes that a remedy makes besides memory and time; the less, the earlier it is proposed."""

    NOTHING = 0
    MACHINE = 1
    DISK = 2
    """State that does not fit on the host is on disk."""
    ROUNDING = 3
    """Results differ as those of 8-bit moments do."""
    TRAINING = 4
    """Steps have other batches."""


class Step(NamedTuple):
    """One setting, or a few that go together, that may save memory: changes of the question, and their effect."""

    changes: dict[str, Any]
    effect: Effect = Effect.NOTHING


SOLD = {
    Effect.MACHINE: (
        "host_bytes",
        [gib << 30 for gib in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)],
    ),
    Effect.DISK: ("disk_bytes", [tb * 10**12 for tb in (1, 2, 4, 8, 16, 32, 64)]),
}
"""Memory that a remedy may buy, and the sizes in which hosts and the disks of a node are sold, in bytes."""
AUTO = {"offload_activations": "auto"}
STREAM = {"weights": "auto", "offload_gradients": True, "attach": True}
STEPS = (
    Step({"fsdp": True}),
    Step({"fused_loss": True}),
    Step({"checkpointing": True}),
    Step({"offload_gradients": True}),
    Step(STREAM),
    Step(AUTO),
    *(Step({name: max(sizes)}, effect) for effect, (name, sizes) in SOLD.items()),
    Step({"accumulation": False, "micro_batches": 1}, Effect.TRAINING),
    Step({"batch": 1}, Effect.TRAINING),
    Step({"state_format": INT8}, Effect.ROUNDING),
    Step({"offload_parameters": True, "offload_gradients": False, "offload_activations": 0.0, "weights": "stay"}),
)
"""Steps in the order in which they are tried: those that can cost the least time come first.

FSDP2 divides the update over all ranks. A fused loss computes nothing twice. Checkpointing computes each block once
more, a third of the compute at most. Offloaded gradients are copied down and up. Weights that stream come twice in each
micro-batch, beside compute; saved tensors are copied down and up in each. Parameters on the host are copied in each
pass: only if nothing else is enough.
"""


@dataclass(frozen=True)
class Lever:
    """One change, the outcome of the adaptive policy then, and the largest batch that then fits."""

    change: str
    outcome: Outcome
    largest_batch: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields, with the entries of the outcome among them."""
        return {"change": self.change, "largest_batch": self.largest_batch, **self.outcome.to_json()}


@dataclass(frozen=True)
class Remedy:
    """Settings with which the model fits, and the situation and outcome then."""

    change: str
    effect: Effect
    situation: Situation
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """Return the change and its effect, memory in bytes, and the seconds of an iteration."""
        situation = self.situation
        return {
            "change": self.change,
            "fits": situation.fits,
            "effect": self.effect.name.lower(),
            "iteration_s": self.outcome.iteration_s,
            "device_peak": situation.peak,
            "host_per_node": situation.host_needed,
            "disk_per_node": situation.disk_needed,
        }


def levers(question: Question, now: Outcome) -> Iterator[Lever]:
    """Yield settings that make a difference, each recomputed. None helps with which it does not fit."""
    batch = most(question, "batch")
    for changes in _settings(question):
        if (other := question.replace(**changes)) == question:
            continue
        outcome, larger = adaptive_outcome(Situation(other)), most(other, "batch")
        if outcome.seconds < (1 - WORTHWHILE) * now.seconds or (outcome.fits and larger >= LARGER_BATCH * batch):
            yield Lever(difference(question, other), outcome, larger)


def _settings(question: Question) -> Iterator[dict[str, Any]]:
    """Choices of the user's with which the same work is done."""
    smaller = question.subgroup_size // 4
    if smaller and math.ceil(question.state_numel / smaller) <= MAX_SUBGROUPS:
        yield {"chosen_size": smaller}
    if not question.streams and not question.in_backward:
        yield {"attach": False}
    alone = question.ranks == 1 and not question.fsdp and not question.scales_loss
    if alone and question.attach:
        yield {"updates": "backward"}
    if question.ranks > 1:
        yield {"fsdp": True}
    yield from ({"checkpointing": True}, {"fused_loss": True}, {"offload_parameters": False})
    if not question.offload_parameters:
        if alone:
            yield STREAM
        yield AUTO
        if question.checkpointing:
            yield {"checkpointing": False, **AUTO}


def remedies(situation: Situation) -> list[Remedy]:
    """Settings with which the model fits: those that change least first, of these the fastest first.

    STEPS that change no result are tried one after the other until it fits; and for each step that was taken, once
    more without it. Only if that is not enough, steps that change more are tried with them: for each effect those that
    have it (for other batches those to 8-bit moments, too), of which the fastest proposal is kept.
    """
    if situation.fits:
        return []
    found: list[Remedy] = []
    scales = situation.question.scales_loss
    possible = [step for step in STEPS if not (scales and step.changes.get("offload_gradients"))]
    for effect in Effect:
        allowed = {Effect.NOTHING, effect} | ({Effect.ROUNDING} if effect is Effect.TRAINING else set())
        ways = _remedies(situation.question, [step for step in possible if step.effect in allowed], effect)
        found += sorted(ways, key=lambda remedy: remedy.outcome.seconds)[: 1 if effect else MOST_REMEDIES]
        if found and effect is Effect.NOTHING:
            break
    return found


def _remedies(question: Question, steps: list[Step], effect: Effect) -> list[Remedy]:
    """Find remedies of one effect: try the steps, and once more without each that was taken."""
    first = _until_it_fits(question, steps)
    fewer = ([step for step in steps if step is not without] for without in first if not without.effect)
    ways = [first, *(_until_it_fits(question, each) for each in fewer)]
    found = [_remedy(question, way, effect) for way in ways if way and max(step.effect for step in way) is effect]
    return list({each.change: each for each in found}.values())  # steps that imply others read the same


def _until_it_fits(question: Question, steps: list[Step]) -> list[Step]:
    """Find steps that are enough, each of them needed; empty if all of them are not enough.

    A step is taken if less is missing with it: on the device, or else on the host, or else on disk; if not, once more
    after the others, which may have made it useful. Once it fits, steps that later ones have made unnecessary are left
    out again, the slowest first.
    """
    taken: list[Step] = []
    missing = _shortage(question, taken)
    for step in (*steps, *steps):
        if step not in taken and (less := _shortage(question, [*taken, step])) < missing:
            taken, missing = [*taken, step], less
        if not any(missing):
            break
    else:
        return []
    for step in sorted(taken, key=steps.index, reverse=True):
        rest = [each for each in taken if each is not step]
        if not any(_shortage(question, rest)):
            taken = rest
    return taken


def _shortage(question: Question, steps: list[Step]) -> list[float]:
    """Bytes that are missing on the device, the host and the disk; infinite if the steps exclude each other."""
    try:
        return [*Situation(_with(question, steps)).shortage.values()]
    except ValueError:
        return [math.inf]


def _with(question: Question, steps: list[Step]) -> Question:
    return question.replace(**{name: value for step in steps for name, value in step.changes.items()})


def _remedy(question: Question, steps: list[Step], effect: Effect) -> Remedy:
    """Build the remedy, on the smallest host or disk that is enough."""
    situation = Situation(_with(question, steps))
    if effect in SOLD:
        name, sizes = SOLD[effect]
        asked = (Situation(situation.question.replace(**{name: size})) for size in sizes)
        situation = next(each for each in asked if each.fits)
    change = difference(question, situation.question)
    change = change if change.startswith("without") else f"with {change}"
    return Remedy(change, effect, situation, adaptive_outcome(situation))


def largest(question: Question) -> int:
    """Parameters of the largest model of the usual shape that fits with the same settings, to 1%; 0 if none does."""

    def fits(numel: int) -> bool:
        return Situation(question.with_model(numel)).fits

    return _greatest(fits, SMALLEST, 10**15, tolerance=0.005)


def most(question: Question, setting: str, limit: int | None = None) -> int:
    """The largest value of a setting, up to a limit, with which the model fits; 0 if none does."""

    def fits(value: int) -> bool:
        return Situation(question.replace(**{setting: value})).fits

    return _greatest(fits, 1, (limit or MOST) + 1)


def _greatest(fits: Callable[[int], bool], low: int, high: int, tolerance: float = 0.0) -> int:
    """The greatest number from `low` to below `high` that fits, to that share of it; 0 if `low` does not."""
    if not fits(low):
        return 0
    while high - low > max(1, tolerance * low):
        middle = max(low + 1, math.isqrt(low * high))
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
