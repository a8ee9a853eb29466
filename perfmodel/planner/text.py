"""The planner's answer as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from perfmodel.format import INT8
from perfmodel.plan import Placement
from perfmodel.planner.advise import Advice
from perfmodel.planner.jobtext import job_assumptions, job_headline, job_tables
from perfmodel.planner.question import MARGIN
from perfmodel.planner.situation import Situation
from perfmodel.planner.tables import new_table
from perfmodel.planner.units import format_bytes, format_count, format_seconds
from perfmodel.planner.whatif import Remedy

LARGE_CHANGE = 0.005
"""Shares of the time below this are shown as no change."""


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
        lines.append(f"{operations} operations per parameter and token")
    lines += job_assumptions(advice)
    lines.append(
        f"{format_bytes(question.reserved)} of GPU memory for CUDA and fragmentation (--reserved); "
        f"{MARGIN:.0%} that DOSAdam leaves alone"
    )
    lines.append("activations of fused kernels, gradients None before forward: zero_grad() as it is by default")
    accumulating = advice.situation.device.peak_accumulating
    if question.accumulation and accumulating > advice.situation.device.peak:
        lines.append(f"accumulating over micro-batches, the peak is {format_bytes(accumulating)} instead")
    if question.attach:
        lines.append("updates run on into the next forward: optimizer.attach(model)")
    if question.offload_gradients and question.accumulation:
        lines.append("gradients of several micro-batches add up on the host, in float32 (--no-accumulation: one)")
    if question.state_format == INT8:
        lines.append("moments in 8 bits: other results than AdamW's (docs/formats.md)")
    if question.offload_gradients:
        lines.append("times do not count that offloaded gradients of subgroups updated on the GPU come up again")
    return lines


def show(advice: Advice, notes: list[str], console: Console) -> None:
    """Print the answer."""
    for line in headline(advice):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_memory(advice))
    if advice.situation.job.talks:
        for table in job_tables(advice):
            console.print(table)
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
    if question.nodes > 1:
        ranks += f" of {question.nodes} nodes"
    what = f"{format_count(question.model.numel)} parameters in {question.dtype}{ranks}, {situation.profile.name}"
    if question.zero in (1, 2) and question.ranks > 1:
        yield (
            "DOSAdam's state is divided over GPUs with the parameters (--fsdp). With --zero 1 or 2 something else must "
            "divide it, into plain tensors. That is not tested."
        )
    if not situation.fits_device:
        yield (
            f"{what}: DOES NOT FIT. Without any optimizer state the GPU needs {format_bytes(situation.device.peak)}, "
            f"{format_bytes(situation.device.peak - question.device_bytes)} more than it has."
        )
    if not situation.fits_host:
        needed, there = situation.host_needed, question.host_bytes or 0
        each = " on each node" if question.nodes > 1 else ""
        yield (
            f"{what}: DOES NOT FIT. {_on_host(situation)} need {format_bytes(needed)} of host memory{each}, "
            f"{format_bytes(needed - there)} more than there is."
        )
    for remedy in advice.remedies:
        yield _remedy(remedy)
    if situation.fits:
        where = f"{best.shares[Placement.GPU_RESIDENT]:.0%} of the optimizer state can stay on the GPU"
        if question.offload_parameters:
            where = "parameters, gradients and optimizer state are on the host"
        yield f"{what}: fits; {where}."
        yield _expected(advice)
        yield from job_headline(advice)
    if advice.largest:
        most = format_count(advice.largest)
        yield f"The largest model of the usual shape that fits with these settings: about {most} parameters."
    else:
        yield "With these settings no model fits: lower --batch or --seq."


def _expected(advice: Advice) -> str:
    """How long it takes, beside the simplest policy if there is a choice, and what limits the update."""
    best = advice.best
    unit = "update" if best.iteration_s is None else "iteration"
    cpu_only = next((outcome for outcome in advice.outcomes if outcome.policy == "CPU only"), None)
    if cpu_only is None:
        return f"An {unit} takes {format_seconds(best.seconds)}; parameters are updated in place on the host."
    return (
        f'An {unit} takes {format_seconds(best.seconds)} with policy="adaptive", '
        f"{cpu_only.seconds / best.seconds:.2f}x as fast as with all updates on the CPU. {_bottleneck(advice)}"
    )


def _on_host(situation: Situation) -> str:
    return "Parameters, gradients and optimizer state" if situation.host_model else "Optimizer state and staging"


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
    device, host, ranks = situation.device, situation.host, question.layout.per_node
    title = "Where things are" + (", one rank" if question.ranks > 1 else "")
    table = new_table(title, "", "GPU", "host", "bytes on the host")
    resident = advice.resident_bytes
    rows: list[tuple[str, int | None, int | None]] = [
        ("weights", device.weights, situation.host_model // 2),
        ("gradients", device.gradients, situation.host_model // 2),
        ("weights gathered", device.gathered, None),
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
    if not situation.host_model:
        table.add_row("state resident beside it", format_bytes(resident), "", "")
    table.add_row("needed", format_bytes(device.peak + resident), *_both(situation.host_per_rank))
    if ranks > 1:
        of = "of a node" if question.nodes > 1 else ""
        table.add_row(f"needed by {ranks} ranks {of}".rstrip(), "", *_both(situation.host_needed))
    there = "not given" if question.host_bytes is None else format_bytes(question.host_bytes)
    table.add_row("there is", format_bytes(question.device_bytes), there, "")
    if advice.all_resident_bytes is not None:
        table.add_row("for all state on the GPU", format_bytes(advice.all_resident_bytes), "", "")
    return table


def _both(nbytes: int) -> tuple[str, str]:
    """A size for people, and to the byte."""
    return format_bytes(nbytes), f"{nbytes:,}"


def _times(advice: Advice) -> Table:
    training_s = advice.situation.training_s
    title = "Expected times"
    if training_s is not None:
        beside = " with what is exchanged" if advice.situation.job.talks else ""
        title += f"; forward and backward alone{beside} {format_seconds(training_s)}"
    table = new_table(title, "policy", "update", "iteration", "tokens/s", "CPU", "streamed", "resident")
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
    table = new_table("What would help (adaptive, planned anew)", "change", "update", "", "iteration", "")
    if not advice.situation.question.offload_parameters:
        size = format_bytes(advice.situation.alone.slot_bytes)
        table.caption = f"GPU memory counts in whole subgroups, of {size} of state here."
    best = advice.best
    for lever in advice.levers:
        after = lever.outcome
        table.add_row(
            lever.change,
            *_changed(best.update_s, after.update_s),
            *_changed(best.iteration_s, after.iteration_s),
        )
    return table


def _changed(before: float | None, after: float | None) -> tuple[str, str]:
    """A time and what it is relative to another."""
    if after is None:
        return "", ""
    if before is None:
        return format_seconds(after), "fits"
    change = after / before - 1
    return format_seconds(after), f"{change:+.0%}" if abs(change) >= LARGE_CHANGE else "same"
