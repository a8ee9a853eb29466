"""What would help: faster parts, more memory, other settings, each asked anew."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from perfmodel.format import INT8
from perfmodel.hardware import DISK_RATES, LINK_RATES
from perfmodel.planner.outcome import Outcome, adaptive_outcome
from perfmodel.planner.question import MAX_SUBGROUPS, Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.units import format_count

WORTHWHILE = 0.01
"""Settings that make less difference than this share of the time are not mentioned."""
LARGER_BATCH = 1.5
"""So many times the largest batch is worth a mention, whatever it does to the time."""
MOST_REMEDIES = 4
"""Proposals for what does not fit."""
MOST = 2**24
"""Sequences, or tokens in one, beyond which the planner does not look for what fits."""
SMALLEST = 10**6
"""Parameters below which it does not either."""


class Effect(enum.IntEnum):
    """What a remedy changes besides memory and time; the less, the earlier it is proposed."""

    NOTHING = 0
    MACHINE = 1
    DISK = 2
    """State that does not fit on the host is on disk."""
    ROUNDING = 3
    """Results differ as those of 8-bit moments do."""
    TRAINING = 4
    """Steps have other batches."""


OFF = {"offload_gradients": False, "native_gradients": False}
AUTO = "--offload-activations auto"
ONE_REPLICA = "one replica over all ranks"
SAVING: dict[str, dict[str, Any]] = {
    "--checkpointing": {"checkpointing": True},
    "--offload-gradients": {"offload_gradients": True},
    "--fused-loss": {"fused_loss": True},
    "--native-gradients": {"native_gradients": True},
    "without --offload-gradients": OFF,
    "--fsdp": {"fsdp": True, "zero": 0},
    ONE_REPLICA: {"replicas": 1},
    AUTO: {"offload_activations": "auto"},
    "--offload-parameters": {"offload_parameters": True, "offload_activations": 0.0, **OFF},
}
"""Settings that change no result and may save memory, and what each changes of the question."""
BOUGHT: dict[Effect, tuple[str, dict[int, str]]] = {
    Effect.MACHINE: (
        "host_bytes",
        {
            gib << 30: f"--host {gib}GB"
            for gib in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
        },
    ),
    Effect.DISK: ("disk_bytes", {tb * 10**12: f"--disk {tb}TB" for tb in (1, 2, 4, 8, 16, 32, 64)}),
}
"""What a remedy may buy, and the sizes in which hosts and the disks of a node are sold."""


class Lever(NamedTuple):
    """One thing changed, what the adaptive policy then gives, and for a setting the largest batch that then fits."""

    change: str
    outcome: Outcome
    largest_batch: int | None = None


class Remedy(NamedTuple):
    """Settings with which the model fits, and what then follows."""

    change: str
    effect: Effect
    situation: Situation
    outcome: Outcome


def levers(question: Question, now: Outcome) -> Iterator[Lever]:
    """What may help, each recomputed: hardware always, settings only where they make a difference.

    Nothing that does not fit helps. Better hardware can do what it did before, with the plan made for
    less of it, and at its old pace (a processor twice as fast with half of its threads, where more
    would take host memory's bandwidth from the links); so it never costs time.
    """
    # With subgroups as large as before, so that the plan is one for them, too.
    same = question.replace(chosen_size=question.subgroup_size)
    for change, changes in _hardware(same):
        other = Situation(same.replace(**changes))
        outcome = min(adaptive_outcome(other, kept=now.plan), now, key=lambda each: each.seconds)
        if outcome.fits:
            yield Lever(change, outcome)
    batch = most(question, "batch")
    for change, changes in _settings(question):
        if (asked := question.replace(**changes)) == question:
            continue
        outcome, larger = adaptive_outcome(Situation(asked)), most(asked, "batch")
        if outcome.seconds < (1 - WORTHWHILE) * now.seconds or (outcome.fits and larger >= LARGER_BATCH * batch):
            yield Lever(change, outcome, larger)


def _hardware(question: Question) -> Iterator[tuple[str, dict[str, Any]]]:
    """More memory and faster parts."""
    if not question.offload_parameters:
        for gib in (1, 8):
            yield f"{gib} GiB more GPU memory", {"device_bytes": question.device_bytes + gib * 2**30}
    profile, fabric = question.profile, question.fabric
    rates = {"links": LINK_RATES, "host memory": ("host_bandwidth",), "CPU update": ("cpu_update_rate",)}
    rates |= {"disks": DISK_RATES} if question.disk_bytes is not None else {}
    for what, names in rates.items():
        faster = profile.replace(**{name: 2 * getattr(profile, name) for name in names})
        yield f"{what} twice as fast", {"profile": faster}
    if fabric.interconnect and question.per_node > 1:
        yield (
            "GPU interconnect twice as fast",
            {"fabric": dataclasses.replace(fabric, interconnect=2 * fabric.interconnect)},
        )
    if fabric.network and question.nodes > 1:
        yield "network twice as fast", {"fabric": dataclasses.replace(fabric, network=2 * fabric.network)}


def _settings(question: Question) -> Iterator[tuple[str, dict[str, Any]]]:
    """Choices of the user's with which the same work is done."""
    smaller = question.subgroup_size // 4
    if smaller and math.ceil(question.state_numel / smaller) <= MAX_SUBGROUPS:
        yield f"subgroups of {format_count(smaller)} parameters", {"chosen_size": smaller}
    yield "--no-attach", {"attach": False}
    yield from ((name, SAVING[name]) for name in ("--checkpointing", "--fused-loss"))
    yield "without --offload-parameters", {"offload_parameters": False}
    if not question.offload_parameters:
        yield AUTO, SAVING[AUTO]
        if question.checkpointing:
            yield f"{AUTO}, without --checkpointing", {"checkpointing": False, **SAVING[AUTO]}
    if question.fsdp and question.replicas > 1:
        yield ONE_REPLICA, SAVING[ONE_REPLICA]
    elif question.fsdp:
        yield "--hsdp", {"replicas": question.nodes}


def remedies(situation: Situation) -> list[Remedy]:
    """Settings with which what does not fit does, each asked anew: what changes least first, then the fastest.

    Up to three settings that change no result are combined, never more than it takes. Only if they are not enough, a
    larger host, a disk, 8-bit moments, smaller batches or steps of one micro-batch are added.
    """
    if situation.fits:
        return []
    question = situation.question
    found: list[tuple[Effect, tuple[str, ...], Situation]] = []
    for effect, names, changes in _kinds(question):
        if found and found[0][0] is Effect.NOTHING:
            break
        for setting_names, settings in _combinations(question):
            change = (*setting_names, *names)
            alike = [names for kind, names, _ in found if kind is effect or kind not in BOUGHT]
            if any(set(enough) <= set(change) for enough in alike):
                continue
            try:
                other = Situation(question.replace(**settings | changes))
            except ValueError:
                continue
            if other.fits:
                found.append((effect, change, other))
    rows = [_remedy(*each) for each in found]
    rows.sort(key=lambda remedy: (remedy.effect, remedy.outcome.seconds))
    if rows and rows[0].effect is not Effect.NOTHING:  # two of a kind, so that there are several kinds
        kinds = itertools.groupby(rows, lambda remedy: remedy.effect)
        rows = [each for kind, alike in kinds for each in list(alike)[: 1 if kind is Effect.DISK else 2]]
    return rows[:MOST_REMEDIES]


def _kinds(question: Question) -> Iterator[tuple[Effect, tuple[str, ...], dict[str, Any]]]:
    """What is changed beside settings that change no result: nothing, and then the least first."""
    yield Effect.NOTHING, (), {}
    if question.host_bytes is not None:
        yield from ((effect, (), {name: max(sizes)}) for effect, (name, sizes) in BOUGHT.items())
    coded, single = {"state_format": INT8}, {"accumulation": False, "micro_batches": 1}
    if not question.offload_parameters and question.state_format != INT8:
        yield Effect.ROUNDING, ("--state-format int8",), coded
    if question.batch > 1:
        yield Effect.TRAINING, ("--batch 1",), {"batch": 1}
    if question.accumulation:
        yield Effect.TRAINING, ("--no-accumulation",), single
        yield Effect.TRAINING, ("--no-accumulation", "--batch 1"), single | {"batch": 1}
        yield Effect.TRAINING, ("--no-accumulation", "--state-format int8"), single | coded


def _combinations(question: Question) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """None, one, two or three of the settings that change no result and may save memory."""
    several = question.ranks > 1
    useful = [
        name
        for name, changes in SAVING.items()
        if any(getattr(question, key) != value for key, value in changes.items())
        and (name != "--native-gradients" or question.accumulation)
        and (name != "--fsdp" or (several and not question.sharded))
        and (name != "--offload-parameters" or several or question.sharded)
    ]
    for count in range(4):
        for names in itertools.combinations(useful, count):
            # Parameters on the host leave nothing on the device that these would move.
            if not ("--offload-parameters" in names and {"--offload-gradients", AUTO} & {*names}):
                yield names, {key: value for name in names for key, value in SAVING[name].items()}


def _remedy(effect: Effect, names: tuple[str, ...], situation: Situation) -> Remedy:
    """On the smallest host or disk that suffices, in words: `with --checkpointing, without --offload-gradients`."""
    if effect in BOUGHT:
        setting, sizes = BOUGHT[effect]
        asked = ((name, situation.question.replace(**{setting: size})) for size, name in sizes.items())
        name, situation = next((name, other) for name, each in asked if (other := Situation(each)).fits)
        names = (*names, name)
    added = " ".join(name for name in names if not name.startswith("without"))
    left_out = [name for name in names if name.startswith("without")]
    change = ", ".join([f"with {added}"] * bool(added) + left_out)
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


def fastest_batch(question: Question) -> tuple[Question, Outcome] | None:
    """The question with the batch that trains most tokens per second, and what it gives; None if none fits.

    Larger batches hide more of the update, and leave less memory for state. So it is looked for from the largest
    batch that fits down, in steps of a quarter, for as long as that is faster.
    """
    found, fastest, size = None, 0.0, most(question, "batch")
    while size:
        asked = question.replace(batch=size)
        outcome = adaptive_outcome(Situation(asked))
        if found and asked.step_tokens / outcome.seconds <= fastest:
            break
        if outcome.fits:
            found, fastest = (asked, outcome), asked.step_tokens / outcome.seconds
        size = size * 3 // 4
    return found


def _greatest(fits: Callable[[int], bool], low: int, high: int, tolerance: float = 0.0) -> int:
    """The greatest number from `low` to below `high` that fits, to that share of it; 0 if `low` does not."""
    if not fits(low):
        return 0
    while high - low > max(1, tolerance * low):
        middle = max(low + 1, math.isqrt(low * high))
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
