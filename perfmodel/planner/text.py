"""The planner's answer as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from perfmodel.format import INT8
from perfmodel.plan import Placement
from perfmodel.planner.advise import Advice
from perfmodel.planner.jobtext import job_assumptions, job_headline, job_tables
from perfmodel.planner.outcome import CPU_ONLY, FUSED, Outcome
from perfmodel.planner.question import MARGIN
from perfmodel.planner.situation import Situation
from perfmodel.planner.tables import new_table
from perfmodel.planner.units import format_bytes, format_count, format_seconds
from perfmodel.planner.whatif import Effect, Remedy

EFFECTS = {
    Effect.NOTHING: "",
    Effect.MACHINE: "",
    Effect.ROUNDING: "; moments in 8 bits give other results than AdamW's",
    Effect.TRAINING: "; this changes the training, for a step then has another batch",
}
LARGE_CHANGE = 0.005
"""Shares of the time below this are shown as no change."""


def assumptions(advice: Advice) -> list[str]:
    """What the figures rest on that was not given, a line each, beside what is assumed of the machine."""
    situation, question = advice.situation, advice.situation.question
    lines = [question.model.assumed] if question.model.assumed else []
    flops = sum(question.model.flops(1, checkpointing=question.checkpointing, trainable=question.trainable))
    lines.append(f"{flops / question.model.numel:.3g} operations per parameter and token")
    lines += job_assumptions(advice)
    lines.append(
        f"{format_bytes(question.reserved)} of GPU memory for CUDA and fragmentation (--reserved); "
        f"{MARGIN:.0%} that DOSAdam leaves alone"
    )
    lines.append("activations of fused kernels, gradients None before forward: zero_grad() as it is by default")
    lines.append(_accumulation(advice.situation))
    if question.attach:
        lines.append("updates run on into the next forward: optimizer.attach(model)")
    if question.state_format == INT8:
        lines.append("moments in 8 bits: other results than AdamW's (docs/formats.md)")
    if question.trainable < 1:
        lines.append(f"{format_count(question.trained)} parameters are trained, the others frozen (--trainable)")
    if question.host_bytes is not None:
        lines.append(
            f"{format_bytes(situation.host_reserved)} of each node's memory for the system and the processes "
            "(--host-reserved)"
        )
    return lines


def _accumulation(situation: Situation) -> str:
    """What is assumed about the micro-batches of a step, and what the other assumption would give."""
    question = situation.question
    if not question.accumulation:
        return "one micro-batch in each step (--no-accumulation), so gradients come as activations go"
    text = "gradient accumulation: steps of several micro-batches, whose gradients "
    if question.offload_gradients:
        text += "add up on the host, in float32"
    elif question.offload_parameters:
        text += "add up on the host"
    else:
        text += "stay beside the next one's activations"
    peak = situation.device.peak
    less = f", and a peak of {format_bytes(peak)}" if peak < situation.peak else ""
    times = "one (--accumulation N)" if question.micro_batches == 1 else f"{question.micro_batches}"
    return f"{text} (--no-accumulation: one{less}); times are of a step with {times}"


def show(advice: Advice, notes: list[str], console: Console) -> None:
    """Print the answer."""
    for line in headline(advice):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_memory(advice))
    if advice.situation.job.has_communication:
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
            f"{what}: DOES NOT FIT. Without any optimizer state the GPU needs {format_bytes(situation.peak)}, "
            f"{format_bytes(situation.peak - question.device_bytes)} more than it has."
        )
    if not situation.fits_host:
        needed, there = situation.host_needed, (question.host_bytes or 0) - situation.host_reserved
        each = " on each node" if question.nodes > 1 else ""
        yield (
            f"{what}: DOES NOT FIT. {_on_host(situation)} need {format_bytes(needed)} of host memory{each}, "
            f"{format_bytes(needed - there)} more than there is beside the {format_bytes(situation.host_reserved)} of "
            "the system and the processes."
        )
    if not situation.fits and advice.alternative is not None:
        yield f"The state of {advice.alternative.policy} fits on the GPU, which needs none of that on the host."
    for remedy in advice.remedies:
        yield _remedy(remedy)
    if situation.fits:
        share = 1.0 if situation.all_resident else best.shares[Placement.GPU_RESIDENT]
        where = f"{share:.0%} of the optimizer state can stay on the GPU"
        if question.offload_parameters:
            where = "parameters, gradients and optimizer state are on the host"
        yield f"{what}: fits; {where}."
        yield from _expected(advice)
        yield from job_headline(advice)
    if advice.largest_batch or advice.largest_sequence:
        yield _largest_input(advice)
    if advice.largest:
        most = format_count(advice.largest)
        yield f"The largest model of the usual shape that fits with these settings: about {most} parameters."
    else:
        yield "With these settings no model fits: lower --batch or --seq."


def _expected(advice: Advice) -> Iterator[str]:
    """How long it takes, beside the best of the other policies, and what limits the update."""
    best, other = advice.best, advice.alternative
    unit = "update" if best.iteration_s is None else "iteration"
    takes = f"An {unit} takes {format_seconds(best.seconds)}"
    if other is None:
        yield f"{takes}; parameters are updated in place on the host."
        return
    compared = f"{_times_as_fast(best, other)} the best of the others that fit ({other.policy})"
    cpu_only = next(outcome for outcome in advice.outcomes if outcome.policy == CPU_ONLY)
    if other is not cpu_only:
        compared += f", {_times_as_fast(best, cpu_only)} {CPU_ONLY}"
    yield f'{takes} with policy="adaptive", {compared}. {_bottleneck(advice)}'
    if any(outcome.policy == FUSED and outcome.fits for outcome in advice.outcomes):
        yield "All of AdamW's state fits on the GPU as it is: DOSAdam gains nothing until memory is short."


def _largest_input(advice: Advice) -> str:
    """The largest batch and sequence of this model, each with the other as it is."""
    question = advice.situation.question
    whole = " (the longest it takes)" if advice.largest_sequence == question.model.longest else ""
    many = "s" if advice.largest_batch != 1 else ""
    batch = f"{advice.largest_batch:,} sequence{many} of {question.sequence:,} tokens" if advice.largest_batch else ""
    tokens = f"{question.batch:,} of {advice.largest_sequence:,} tokens{whole}" if advice.largest_sequence else ""
    each = " per GPU" if question.ranks > 1 else ""
    return f"The largest batch that fits{each}: {' or '.join(filter(None, (batch, tokens)))}."


def _times_as_fast(best: Outcome, other: Outcome) -> str:
    ratio = other.seconds / best.seconds
    return "as fast as" if abs(ratio - 1) < LARGE_CHANGE else f"{ratio:.2f}x as fast as"


def _on_host(situation: Situation) -> str:
    return "Parameters, gradients and optimizer state" if situation.host_model else "Optimizer state and staging"


def _remedy(remedy: Remedy) -> str:
    situation, change = remedy.situation, remedy.change
    device, host = format_bytes(situation.peak), format_bytes(situation.host_needed)
    seconds = remedy.outcome.iteration_s
    takes = "" if seconds is None else f"; an iteration takes {format_seconds(seconds)}"
    return f"It fits {change}: the GPU then needs {device}, the host {host}{takes}{EFFECTS[remedy.effect]}."


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
    peak = "peak: activations beside gradients" if question.accumulation else "peak: gradients replace activations"
    rows: list[tuple[str, int | None, int | None]] = [
        ("weights", device.weights, situation.host_model // 2),
        ("gradients", device.gradients, situation.host_model // 2),
        ("weights gathered", device.gathered, None),
        ("activations when backward begins", device.activations, None),
        ("logits and their loss", device.logits, None),
        ("one block at work", device.block, None),
        ("CUDA, fragmentation", device.reserved, None),
        (peak, situation.peak, None),
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
    table.add_row("needed", format_bytes(situation.peak + resident), *_both(situation.host_per_rank))
    if ranks > 1:
        of = "of a node" if question.nodes > 1 else ""
        table.add_row(f"needed by {ranks} ranks {of}".rstrip(), "", *_both(situation.host_needed))
    there = "not given" if question.host_bytes is None else format_bytes(question.host_bytes)
    if question.host_bytes is not None:
        table.add_row("system and processes of a node", "", *_both(situation.host_reserved))
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
        beside = " with what is exchanged" if advice.situation.job.has_communication else ""
        title += f"; forward and backward alone{beside} {format_seconds(training_s)}"
    table = new_table(title, "policy", "update", "iteration", "tokens/s", "CPU", "streamed", "resident")
    question = advice.situation.question
    tokens = question.tokens * question.micro_batches * question.ranks
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
    best = advice.best
    unit = "update" if advice.situation.compute_s is None else "iteration"
    table = new_table("What would help (adaptive, planned anew)", "change", unit, "", "largest batch")
    if not advice.situation.question.offload_parameters:
        size = format_bytes(advice.situation.update_workload.slot_bytes)
        table.caption = f"GPU memory counts in whole subgroups, of {size} of state here."
    for lever in advice.levers:
        seconds = lever.outcome.seconds
        change = seconds / best.seconds - 1
        batch = "" if lever.largest_batch is None else f"{lever.largest_batch:,}"
        told = f"{change:+.0%}" if abs(change) >= LARGE_CHANGE else "same"
        table.add_row(lever.change, format_seconds(seconds), told if best.fits else "fits", batch)
    return table
