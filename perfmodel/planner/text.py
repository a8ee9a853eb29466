"""The planner's answer as text for people, and as plain values for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from perfmodel.plan import Placement
from perfmodel.planner.advise import Advice, Outcome, Remedy
from perfmodel.planner.question import MARGIN
from perfmodel.planner.units import format_bytes, format_count, format_seconds

LARGE_CHANGE = 0.005
"""Shares of the time below this are shown as no change."""


def as_json(advice: Advice, assumptions: list[str]) -> dict[str, Any]:
    """The answer as plain values; sizes in bytes, times in seconds, None where something does not fit."""
    situation, question = advice.situation, advice.situation.question
    settings = {
        f.name: getattr(question, f.name) for f in dataclasses.fields(question) if f.name not in ("model", "profile")
    }
    device, host = situation.device, situation.host
    return {
        "fits": situation.fits,
        "obstacle": question.obstacle or None,
        "model": dataclasses.asdict(question.model),
        "machine": situation.profile.to_json(),
        "settings": settings,
        "device": {
            **dataclasses.asdict(device),
            "peak": device.peak,
            "peak_accumulating": device.peak_accumulating,
            "total": question.device_bytes,
            "fits": situation.fits_device,
            "state": situation.host.state,
            "room_for_state": situation.room,
            "resident_state": _resident_bytes(advice),
            "all_resident_total": advice.all_resident_bytes,
        },
        "host": {
            **dataclasses.asdict(host),
            "per_rank": host.total,
            "all_ranks": situation.host_needed,
            "available": question.host_bytes,
            "fits": situation.fits_host,
        },
        "compute_s": situation.compute_s,
        "policies": [_outcome_json(outcome) for outcome in advice.outcomes],
        "bound": None
        if advice.bound is None
        else {
            "update_s": advice.bound.seconds,
            "binding": advice.bound.binding,
            "shares": _shares(advice.bound.shares),
        },
        "levers": [{"change": lever.change, **_outcome_json(lever.outcome)} for lever in advice.levers],
        "remedies": [
            {
                "change": remedy.change,
                "fits": remedy.situation.fits,
                "device_peak": remedy.situation.device.peak,
                "host_all_ranks": remedy.situation.host_needed,
            }
            for remedy in advice.remedies
        ],
        "largest_parameters": advice.largest,
        "assumptions": assumptions,
    }


def assumptions(advice: Advice, compute: str) -> list[str]:
    """What the figures rest on that was not given, a line each. compute: where the rate of arithmetic comes from."""
    question, profile = advice.situation.question, advice.situation.profile
    lines = [f"rates of {profile.name}: {profile.provenance.source}"]
    if profile.provenance.source != "measured":
        lines[0] += "; measure yours with python -m dos.calibrate"
    if question.model.assumed:
        lines.append(question.model.assumed)
    if question.flops_rate is None:
        lines.append("no compute times: the GPU's arithmetic is not known, pass --tflops for iterations")
    else:
        lines.append(f"forward and backward reach {question.flops_rate / 1e12:.3g} TFLOP/s per GPU: {compute}")
        operations = 8 if question.checkpointing else 6
        together = "; communication between ranks takes no time" if question.ranks > 1 else ""
        lines.append(f"{operations} operations per parameter and token{together}")
    lines.append(
        f"{format_bytes(question.reserved)} of GPU memory for CUDA and fragmentation (--reserved); "
        f"{MARGIN:.0%} that DOSAdam leaves alone"
    )
    lines.append("activations of fused kernels, gradients None before forward: zero_grad() as it is by default")
    accumulating = advice.situation.device.peak_accumulating
    if accumulating > advice.situation.device.peak:
        lines.append(f"accumulating over micro-batches, the peak is {format_bytes(accumulating)} instead")
    if question.attach:
        lines.append("updates run on into the next forward: optimizer.attach(model)")
    if question.offload_gradients:
        lines.append("times do not count that offloaded gradients of subgroups updated on the GPU come up again")
    return lines


def show(advice: Advice, notes: list[str], console: Console) -> None:
    """Print the answer."""
    for line in headline(advice):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_memory(advice))
    if advice.situation.fits:
        console.print(_times(advice))
    if advice.levers:
        console.print(_what_if(advice))
    console.print("Assumed:", style="dim")
    for note in notes:
        console.print(f"  {note}", style="dim", highlight=False, soft_wrap=True)


def headline(advice: Advice) -> Iterator[str]:
    """The answer in a few sentences."""
    situation, question, best = advice.situation, advice.situation.question, advice.best
    ranks = f" on {question.ranks} GPUs" if question.ranks > 1 else ""
    what = f"{format_count(question.model.numel)} parameters in {question.dtype}{ranks}, {situation.profile.name}"
    if question.obstacle:
        yield f"NOT POSSIBLE YET: {question.obstacle}. What follows is what it would take."
    elif question.zero and question.ranks > 1:
        yield "DOSAdam does not divide state over GPUs: something else must, into plain tensors. That is not tested."
    if not situation.fits_device:
        yield (
            f"{what}: DOES NOT FIT. Without any optimizer state the GPU needs {format_bytes(situation.device.peak)}, "
            f"{format_bytes(situation.device.peak - question.device_bytes)} more than it has."
        )
    if not situation.fits_host:
        needed, there = situation.host_needed, question.host_bytes or 0
        yield (
            f"{what}: DOES NOT FIT. Optimizer state and staging need {format_bytes(needed)} of host memory, "
            f"{format_bytes(needed - there)} more than there is."
        )
    for remedy in advice.remedies:
        yield _remedy(remedy)
    if situation.fits:
        resident = best.shares[Placement.GPU_RESIDENT]
        fits = "memory would suffice" if question.obstacle else "fits"
        yield f"{what}: {fits}; {resident:.0%} of the optimizer state can stay on the GPU."
        cpu_only = next(outcome for outcome in advice.outcomes if outcome.policy == "CPU only")
        unit = "update" if best.iteration_s is None else "iteration"
        yield (
            f'An {unit} takes {format_seconds(best.seconds)} with policy="adaptive", '
            f"{cpu_only.seconds / best.seconds:.2f}x as fast as with all updates on the CPU. {_bottleneck(advice)}"
        )
    if advice.largest:
        most = format_count(advice.largest)
        yield f"The largest model of the usual shape that fits with these settings: about {most} parameters."
    else:
        yield "With these settings no model fits: lower --batch or --seq."


def _remedy(remedy: Remedy) -> str:
    situation, change = remedy.situation, remedy.change
    device, host = format_bytes(situation.device.peak), format_bytes(situation.host_needed)
    if situation.fits:
        return f"It fits {change}: the GPU then needs {device}, the host {host}."
    there = format_bytes(situation.question.host_bytes or 0)
    return f"The GPU would be large enough {change} ({device}), the host would not: {host} instead of {there}."


def _bottleneck(advice: Advice) -> str:
    best, bound = advice.best, advice.bound
    if bound is None or best.update_s is None:
        return ""
    text = f"What limits the update is {bound.binding}, to {format_seconds(bound.seconds)} at least"
    if best.exposed_s is not None and best.iteration_s and best.exposed_s < 0.05 * best.iteration_s:
        text += "; nearly all of it hides behind forward and backward, which limit the iteration"
    return text + "."


def _memory(advice: Advice) -> Table:
    situation, question = advice.situation, advice.situation.question
    device, host, ranks = situation.device, situation.host, question.ranks
    title = "Where things are" + (", one rank" if ranks > 1 else "")
    table = _table(title, "", "GPU", "host", "bytes on the host")
    resident = _resident_bytes(advice)
    rows: list[tuple[str, int | None, int | None]] = [
        ("weights", device.weights, None),
        ("gradients", device.gradients, None),
        ("activations when backward begins", device.activations, None),
        ("one block at work", device.block, None),
        ("CUDA, fragmentation", device.reserved, None),
        ("peak: gradients replace activations", device.peak, None),
        ("optimizer state: master weights", None, host.master),
        ("optimizer state: moments", None, host.moments),
        ("staging of gradients", None, host.gradient_staging),
        ("staging of parameters", None, host.parameter_staging),
        ("gradients accumulated", None, host.accumulated),
    ]
    for name, on_device, on_host in rows:
        if on_device or on_host:
            table.add_row(
                name,
                format_bytes(on_device) if on_device else "",
                format_bytes(on_host) if on_host else "",
                f"{on_host:,}" if on_host else "",
            )
    table.add_section()
    table.add_row("state resident beside it", format_bytes(resident), "", "")
    table.add_row("needed", format_bytes(device.peak + resident), format_bytes(host.total), f"{host.total:,}")
    if ranks > 1:
        table.add_row(f"needed by {ranks} ranks", "", format_bytes(ranks * host.total), f"{ranks * host.total:,}")
    there = "not given" if question.host_bytes is None else format_bytes(question.host_bytes)
    table.add_row("there is", format_bytes(question.device_bytes), there, "")
    table.add_row("for all state on the GPU", format_bytes(advice.all_resident_bytes), "", "")
    return table


def _times(advice: Advice) -> Table:
    compute_s = advice.situation.compute_s
    title = "Expected times"
    if compute_s is not None:
        title += f"; forward and backward alone {format_seconds(compute_s)}"
    table = _table(title, "policy", "update", "iteration", "tokens/s", "CPU", "streamed", "resident")
    tokens = advice.situation.question.tokens * advice.situation.question.ranks
    for outcome in advice.outcomes:
        if outcome.update_s is None:
            table.add_row(outcome.policy, "does not fit", style="dim")
            continue
        table.add_row(
            outcome.policy,
            format_seconds(outcome.update_s),
            "not known" if outcome.iteration_s is None else format_seconds(outcome.iteration_s),
            "" if outcome.iteration_s is None else f"{tokens / outcome.iteration_s:,.0f}",
            *(f"{outcome.shares[p]:.0%}" for p in Placement),
            style="bold" if outcome is advice.best else None,
        )
    if advice.bound is not None:
        table.add_row("bound of any plan", format_seconds(advice.bound.seconds), style="dim")
    return table


def _what_if(advice: Advice) -> Table:
    table = _table("What would help (adaptive, planned anew)", "change", "update", "", "iteration", "")
    table.caption = (
        f"GPU memory counts in whole subgroups, of {format_bytes(advice.situation.alone.slot_bytes)} of state here."
    )
    best = advice.best
    for lever in advice.levers:
        after = lever.outcome
        table.add_row(
            lever.change,
            *_changed(best.update_s, after.update_s),
            *_changed(best.iteration_s, after.iteration_s),
        )
    return table


def _table(title: str, *headings: str) -> Table:
    """A table whose columns but the first are numbers."""
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return table


def _changed(before: float | None, after: float | None) -> tuple[str, str]:
    """A time and what it is relative to another."""
    if after is None:
        return "", ""
    if before is None:
        return format_seconds(after), "fits"
    change = after / before - 1
    return format_seconds(after), f"{change:+.0%}" if abs(change) >= LARGE_CHANGE else "same"


def _resident_bytes(advice: Advice) -> int:
    if advice.best.plan is None:
        return 0
    loads = advice.situation.alone.subgroups
    return sum(loads[i].state_bytes for i in advice.best.plan.served(Placement.GPU_RESIDENT))


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "fits": outcome.fits,
        "update_s": outcome.update_s,
        "iteration_s": outcome.iteration_s,
        "exposed_s": outcome.exposed_s,
        "shares": _shares(outcome.shares),
        "slots": None if outcome.plan is None else outcome.plan.slots,
    }


def _shares(shares: dict[Placement, float]) -> dict[str, float]:
    return {placement.label: share for placement, share in shares.items()}
