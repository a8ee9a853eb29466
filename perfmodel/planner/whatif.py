"""What would help: faster parts, more memory, other settings, each asked anew."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from perfmodel.format import INT8
from perfmodel.hardware import changed
from perfmodel.planner.outcome import Outcome, adaptive_outcome
from perfmodel.planner.question import MAX_SUBGROUPS, Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.units import format_count

WORTHWHILE = 0.01
"""Settings that make less difference than this share of the time are not mentioned."""


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
    for change, other in _settings(question):
        outcome = adaptive_outcome(Situation(other))
        if outcome.seconds < (1 - WORTHWHILE) * now.seconds:
            yield Lever(change, outcome)


def _hardware(question: Question) -> Iterator[tuple[str, Question]]:
    for gib in (1, 8) if not question.offload_parameters else ():
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
    fabric, layout = question.fabric, question.layout
    if fabric.interconnect is not None and layout.per_node > 1:
        faster_fabric = dataclasses.replace(fabric, interconnect=2 * fabric.interconnect)
        yield "GPU interconnect twice as fast", dataclasses.replace(question, fabric=faster_fabric)
    if fabric.network is not None and layout.nodes > 1:
        faster_fabric = dataclasses.replace(fabric, network=2 * fabric.network)
        yield "network twice as fast", dataclasses.replace(question, fabric=faster_fabric)


def _settings(question: Question) -> Iterator[tuple[str, Question]]:
    """Choices of the user's with which the same work is done."""
    smaller = question.subgroup_size // 4
    if smaller and math.ceil(question.state_numel / smaller) <= MAX_SUBGROUPS:
        change = f"subgroups of {format_count(smaller)} parameters"
        yield change, dataclasses.replace(question, chosen_size=smaller)
    if question.attach:
        yield "--no-attach", dataclasses.replace(question, attach=False)
    if not question.checkpointing:
        yield "--checkpointing", dataclasses.replace(question, checkpointing=True)
    if not question.fused_loss:
        yield "--fused-loss", dataclasses.replace(question, fused_loss=True)
    if question.offload_parameters:
        yield "without --offload-parameters", dataclasses.replace(question, offload_parameters=False)
    if question.fsdp and question.replicas > 1:
        yield "one replica over all ranks", dataclasses.replace(question, replicas=1)
    elif question.fsdp and question.nodes > 1:
        yield "--hsdp", dataclasses.replace(question, replicas=question.nodes)


def remedies(question: Question) -> Iterator[Remedy]:
    """Settings with which what does not fit does, asked anew; else where only host memory is missing."""
    short: list[Remedy] = []
    ways = [*_single(question), *_divided(question)], _together(question), *([way] for way in _fewer_bytes(question))
    for changes in ways:
        tried = [Remedy(change, Situation(other)) for change, other in changes if other != question]
        helps = [remedy for remedy in tried if adaptive_outcome(remedy.situation).fits]
        if helps:
            yield from helps
            return
        short += [remedy for remedy in tried if remedy.situation.fits_device and not Situation(question).fits_device]
    yield from short[:1]


def _single(question: Question) -> Iterator[tuple[str, Question]]:
    """One setting changed. Where gradients are is a choice unless parameters on the host have made it."""
    yield "with --checkpointing", dataclasses.replace(question, checkpointing=True)
    if not question.offload_parameters:
        yield "with --offload-gradients", dataclasses.replace(question, offload_gradients=True)
    yield "with --fused-loss", dataclasses.replace(question, fused_loss=True)
    yield "with --batch 1", dataclasses.replace(question, batch=1)
    yield "without --offload-gradients", dataclasses.replace(question, offload_gradients=False)


def _divided(question: Question) -> Iterator[tuple[str, Question]]:
    """The model divided over more ranks, or kept on the host."""
    if question.ranks > 1 and not question.sharded:
        yield "with --fsdp", dataclasses.replace(question, fsdp=True, zero=0)
    if question.replicas > 1:
        yield "with one replica over all ranks", dataclasses.replace(question, replicas=1)
    if question.sharded and not question.offload_parameters:
        on_host = dataclasses.replace(question, offload_parameters=True, offload_gradients=False)
        yield "with --offload-parameters", on_host


def _together(question: Question) -> Iterator[tuple[str, Question]]:
    """Two settings that free the most memory on the device."""
    less = dataclasses.replace(question, checkpointing=True, offload_gradients=not question.offload_parameters)
    if less.offload_gradients:
        yield "with --checkpointing --offload-gradients", less
    if question.sharded:
        most = dataclasses.replace(less, offload_parameters=True, offload_gradients=False)
        yield "with --checkpointing --offload-parameters", most


def _fewer_bytes(question: Question) -> Iterator[tuple[str, Question]]:
    """What else frees host memory: no accumulator, and then moments in codes, which change results."""
    if question.offload_parameters:
        return
    less = dataclasses.replace(question, checkpointing=True, offload_gradients=True, accumulation=False)
    yield "with --checkpointing --offload-gradients --no-accumulation", less
    coded = dataclasses.replace(less, state_format=INT8)
    yield "with --checkpointing --offload-gradients --no-accumulation --state-format int8", coded
