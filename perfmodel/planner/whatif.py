"""What would help: faster parts, more memory, other settings, each asked anew."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from perfmodel.format import INT8
from perfmodel.hardware import DISK_RATES, LINK_RATES
from perfmodel.planner.outcome import Outcome, adaptive_outcome
from perfmodel.planner.question import MAX_SUBGROUPS, Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import format_count

WORTHWHILE = 0.01
"""Settings that make less difference than this share of the time are not mentioned."""


LARGER_BATCH = 1.5
"""So many times the largest batch is worth a mention, whatever it does to the time."""
DISKS_TB = (1, 2, 4, 8, 16, 32, 64)
"""Room that disks of a node are sold with."""
HOSTS_GIB = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Memory that hosts are sold with."""
ONE_REPLICA = "one replica over all ranks"
RECOMPUTE_LESS = "--offload-activations auto, without --checkpointing"
SETTINGS: dict[str, dict[str, Any]] = {
    "--checkpointing": {"checkpointing": True},
    "--offload-gradients": {"offload_gradients": True},
    "--fused-loss": {"fused_loss": True},
    "--native-gradients": {"native_gradients": True},
    "without --offload-gradients": {"offload_gradients": False, "native_gradients": False},
    "--fsdp": {"fsdp": True, "zero": 0},
    ONE_REPLICA: {"replicas": 1},
    "--offload-activations auto": {"offload_activations": "auto"},
    "--offload-parameters": {
        "offload_parameters": True,
        "offload_gradients": False,
        "native_gradients": False,
        "offload_activations": 0.0,
    },
    "without --offload-parameters": {"offload_parameters": False},
    "--no-attach": {"attach": False},
    RECOMPUTE_LESS: {"checkpointing": False, "offload_activations": "auto"},
}
"""Settings that change no result, and what each changes of the question."""
SAVING = tuple(SETTINGS)[:9]
"""Those that may save memory."""
OFF_DEVICE = {"--offload-gradients", "--offload-activations auto"}
"""Those that FSDP2's parameters on the host leave nothing for."""
MOST_REMEDIES = 4
"""Proposals for what does not fit."""
MOST = 2**24
"""Sequences, or tokens in one, beyond which the planner does not look for what fits."""


@dataclass(frozen=True)
class Lever:
    """One thing changed, what the adaptive policy then gives, and for a setting the largest batch that then fits."""

    change: str
    outcome: Outcome
    largest_batch: int | None = None


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


BOUGHT = Effect.MACHINE, Effect.DISK


@dataclass(frozen=True)
class Remedy:
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
    for change, other in _hardware(dataclasses.replace(question, chosen_size=question.subgroup_size)):
        outcome = min(adaptive_outcome(Situation(other), kept=now.plan), now, key=lambda each: each.seconds)
        if outcome.fits:
            yield Lever(change, outcome)
    batch = most(question, "batch")
    for change, other in _settings(question):
        outcome, larger = adaptive_outcome(Situation(other)), most(other, "batch")
        if outcome.seconds < (1 - WORTHWHILE) * now.seconds or (outcome.fits and larger >= LARGER_BATCH * batch):
            yield Lever(change, outcome, larger)


def _hardware(question: Question) -> Iterator[tuple[str, Question]]:
    for gib in (1, 8) if not question.offload_parameters else ():
        more = question.device_bytes + gib * 2**30
        yield f"{gib} GiB more GPU memory", dataclasses.replace(question, device_bytes=more)
    for what, rates in (
        ("links twice as fast", LINK_RATES),
        ("host memory twice as fast", ("host_bandwidth",)),
        ("CPU update twice as fast", ("cpu_update_rate",)),
        *((("disks twice as fast", DISK_RATES),) if question.disk_bytes is not None else ()),
    ):
        faster = question.profile.replace(**{rate: 2 * getattr(question.profile, rate) for rate in rates})
        yield what, dataclasses.replace(question, profile=faster)
    fabric, layout = question.fabric, question.layout
    for what, rate, ranks in (
        ("GPU interconnect", "interconnect", layout.per_node),
        ("network", "network", layout.nodes),
    ):
        if (now := getattr(fabric, rate)) is not None and ranks > 1:
            faster_fabric = dataclasses.replace(fabric, **{rate: 2 * now})
            yield f"{what} twice as fast", dataclasses.replace(question, fabric=faster_fabric)


def _settings(question: Question) -> Iterator[tuple[str, Question]]:
    """Choices of the user's with which the same work is done."""
    smaller = question.subgroup_size // 4
    if smaller and math.ceil(question.state_numel / smaller) <= MAX_SUBGROUPS:
        yield f"subgroups of {format_count(smaller)} parameters", dataclasses.replace(question, chosen_size=smaller)
    names = ["--no-attach", "--checkpointing", "--fused-loss", "without --offload-parameters"]
    if not question.offload_parameters:
        names += ["--offload-activations auto"] + [RECOMPUTE_LESS] * question.checkpointing
    settings = {name: SETTINGS[name] for name in names}
    if question.fsdp and question.replicas > 1:
        settings[ONE_REPLICA] = SETTINGS[ONE_REPLICA]
    elif question.fsdp and question.nodes > 1:
        settings["--hsdp"] = {"replicas": question.nodes}
    for name, changes in settings.items():
        if (other := dataclasses.replace(question, **changes)) != question:
            yield name, other


def remedies(question: Question) -> list[Remedy]:
    """Settings with which what does not fit does, each asked anew: what changes least first, then the fastest.

    Up to three settings that change no result are combined, never more than it takes. Only if they are not enough, a
    larger host, a disk, 8-bit moments, smaller batches or steps of one micro-batch are added.
    """
    found: list[tuple[Effect, tuple[str, ...], Situation]] = []
    for effect, names, changes in ((Effect.NOTHING, (), {}), *_more(question)):
        if effect > Effect.NOTHING and found and found[0][0] is Effect.NOTHING:
            break
        for setting_names, settings in _combinations(question):
            change = (*setting_names, *names)
            alike = [names for kind, names, _ in found if kind is effect or kind not in BOUGHT]
            if any(set(enough) <= set(change) for enough in alike):
                continue
            other = _changed(question, settings | changes, effect)
            if other is not None and Situation(other).fits:
                found.append((effect, change, Situation(other)))
    rows = [
        Remedy(_sentence(names, effect, each), effect, each, adaptive_outcome(each)) for effect, names, each in found
    ]
    rows.sort(key=lambda remedy: (remedy.effect, remedy.outcome.seconds))
    if rows and rows[0].effect is not Effect.NOTHING:  # two of a kind, so that there are several kinds
        kinds = itertools.groupby(rows, lambda remedy: remedy.effect)
        rows = [each for kind, alike in kinds for each in list(alike)[: 1 if kind is Effect.DISK else 2]]
    return rows[:MOST_REMEDIES]


def _more(question: Question) -> Iterator[tuple[Effect, tuple[str, ...], dict[str, Any]]]:
    """What changes more than memory and time, the least first."""
    if question.host_bytes is not None:
        yield Effect.MACHINE, (), {}
        yield Effect.DISK, (), {"disk_bytes": DISKS_TB[-1] * 10**12}
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
        for name in SAVING
        if any(getattr(question, key) != value for key, value in SETTINGS[name].items())
        and (name != "--native-gradients" or question.accumulation)
        and (name != "--fsdp" or (several and not question.sharded))
        and (name != "--offload-parameters" or several or question.sharded)
    ]
    for count in range(4):
        for names in itertools.combinations(useful, count):
            if not ("--offload-parameters" in names and OFF_DEVICE & set(names)):
                yield names, {key: value for name in names for key, value in SETTINGS[name].items()}


def _changed(question: Question, changes: dict[str, Any], effect: Effect) -> Question | None:
    """The question with these settings, on the smallest host or disk that suffices; None if it cannot be or was so."""
    try:
        other = dataclasses.replace(question, **changes)
    except ValueError:
        return None
    if effect in BOUGHT:
        name, needed, sizes = _bought(Situation(other), effect)
        enough = next((size for size in sizes if size >= needed), None)
        if enough is None or enough <= (getattr(question, name) or 0):
            return None
        bought: dict[str, Any] = {name: enough}
        other = dataclasses.replace(other, **bought)
    return other if other != question else None


def _bought(situation: Situation, effect: Effect) -> tuple[str, int, list[int]]:
    """What is larger: its name in the question, how many bytes it takes, and the sizes that there are."""
    if effect is Effect.DISK:
        needed = situation.disk_per_rank * situation.question.layout.per_node
        return "disk_bytes", needed, [terabytes * 10**12 for terabytes in DISKS_TB]
    return "host_bytes", situation.host_needed + situation.question.reserved_on_host, [gib << 30 for gib in HOSTS_GIB]


def _sentence(names: tuple[str, ...], effect: Effect, situation: Situation) -> str:
    """The settings in words: `with --checkpointing --fused-loss, without --offload-gradients`."""
    added = [name for name in names if not name.startswith("without")]
    if effect is Effect.MACHINE:
        added.append(f"--host {(situation.question.host_bytes or 0) >> 30}GB")
    if effect is Effect.DISK:
        added.append(f"--disk {(situation.question.disk_bytes or 0) // 10**12}TB")
    left_out = [name for name in names if name.startswith("without")]
    return ", ".join(filter(None, [f"with {' '.join(added)}" if added else "", *left_out]))


def largest(question: Question) -> int:
    """Parameters of the largest model of the usual shape that fits with the same settings, to 1%; 0 if none does."""

    def fits(numel: int) -> bool:
        model = Transformer.of_size(numel)
        size = question.chosen_size and max(question.chosen_size, math.ceil(numel / MAX_SUBGROUPS))
        return Situation(dataclasses.replace(question, model=model, chosen_size=size)).fits

    return _greatest(fits, 10**6, 10**15, tolerance=0.005)


def most(question: Question, setting: str, limit: int | None = None) -> int:
    """The largest value of a setting, up to a limit, with which the model fits; 0 if none does."""

    def fits(value: int) -> bool:
        changes: dict[str, Any] = {setting: value}
        return Situation(dataclasses.replace(question, **changes)).fits

    return _greatest(fits, 1, (limit or MOST) + 1)


def _greatest(fits: Callable[[int], bool], low: int, high: int, tolerance: float = 0.0) -> int:
    """The greatest number from `low` to below `high` that fits, to that share of it; 0 if `low` does not."""
    if not fits(low):
        return 0
    while high - low > max(1, tolerance * low):
        middle = max(low + 1, math.isqrt(low * high))
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
