"""The planner's answer as text for people: sentences and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from json import dumps as quoted
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from perfmodel.format import INT8
from perfmodel.planner.answer import Answer
from perfmodel.planner.fastest import Fastest
from perfmodel.planner.machine import UNKNOWN
from perfmodel.planner.outcome import CPU_ONLY, FUSED
from perfmodel.planner.question import Question
from perfmodel.planner.situation import DEVICE, DISK, HOST, Situation
from perfmodel.planner.units import format_bytes, format_count, format_seconds, format_tflops
from perfmodel.planner.whatif import SOLD, WORTHWHILE, Effect

EFFECTS = {
    Effect.ROUNDING: "; moments in 8 bits give other results than AdamW's",
    Effect.TRAINING: "; this changes the training, for a step then has another batch",
}
"""Changes that a remedy makes besides memory and time."""
NEEDS = {Effect.MACHINE: " on a larger host", Effect.DISK: " and a disk"}
"""Needs of the fastest settings, if nothing fits without."""
ADVICE = {DEVICE: "lower --batch or --seq", HOST: "choose a larger --host", DISK: "choose a larger --disk"}
"""Advice if even the smallest model does not fit, by the memory that it lacks."""
LARGE_CHANGE = 0.005
"""Shares of the time below this are printed as no change."""
LITTLE = 0.03
"""Shares of the time below this are no gain worth another optimizer."""
RESOURCES = {"GPU": "the GPU", "CPU": "the CPU", "H2D": "PCIe to the GPU", "D2H": "PCIe to the host"}
"""Names of the resources of a bound, as those of the job have them."""
UNLIMITED = 1 << 16
"""Columns, more than any table has."""
NEARLY = 0.9
"""A resource that works for this share of the iteration or more leaves little to gain elsewhere."""
FORMATS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("GPU", "host", "bytes", "disk"), format_bytes),
    **dict.fromkeys(("seconds", "update", "iteration", "exposed"), format_seconds),
    **dict.fromkeys(("share", "CPU", "streamed", "resident"), "{:.0%}".format),
    "change": lambda share: f"{share:+.0%}" if abs(share) >= LARGE_CHANGE else "same",
}
"""Formats of the columns of tables; others are written as they are, with commas in numbers."""


def show(answer: Answer) -> None:
    """Print the answer."""
    console, tables = Console(markup=False), list(_tables(answer))
    # Wide ones are not cut: rich takes 80 columns for the width of a file, and a terminal wraps wider lines.
    unlimited = console.options.update(width=UNLIMITED)
    console.width = max(console.width, *(Measurement.get(console, unlimited, table).maximum for table in tables))
    for line in _headline(answer):
        console.print(line, highlight=False, soft_wrap=True)
    for table in tables:
        console.print(table)
    console.print("Assumed:", style="dim")
    for note in answer.assumptions:
        console.print(f"  {note}", style="dim", highlight=False, soft_wrap=True)


def _headline(answer: Answer) -> Iterator[str]:
    """Yield the answer in a few sentences."""
    question = answer.question
    ranks = f" on {question.ranks} GPUs" if question.ranks > 1 else ""
    machine = question.profile.name
    if machine == UNKNOWN:
        machine = f"a GPU of {format_bytes(question.device_bytes)}"
    what = f"{format_count(question.model.numel)} parameters in {question.dtype}{ranks}, {machine}"
    if answer.fastest:
        yield from _fastest(answer.fastest)
    if reasons := " ".join(_missing(answer.situation)):
        yield f"{'As asked, ' if answer.fastest else ''}{what}: DOES NOT FIT. {reasons}"
    if not answer.situation.fits and answer.alternative:
        yield f"The state of {answer.alternative.policy} fits on the GPU, which needs none of that on the host."
    for remedy, found in zip(answer.remedies, answer.remedies_at_best, strict=True):
        memory, asked = remedy.situation, remedy.situation.question
        rate = asked.step_tokens / remedy.outcome.seconds
        best_rate = found[0].step_tokens / found[1].seconds if found else 0.0
        trains = _tokens(asked, rate)
        if found and best_rate > (1 + WORTHWHILE) * rate:
            trains += f", {best_rate:,.0f} with --batch {found[0].batch}"
        yield (
            f"It fits {remedy.change}: the GPU then needs {format_bytes(memory.peak)}, the host "
            f"{format_bytes(memory.host_needed)}; {trains}{EFFECTS.get(remedy.effect, '')}."
        )
    if not (answer.situation.fits or answer.remedies or answer.fastest):
        most = format_bytes(max(SOLD[Effect.MACHINE][1]))
        several = "" if question.ranks > 1 else "; several GPUs may hold it (--ranks 8 --fsdp)"
        yield f"No setting makes it fit, not even with {most} of host memory{several}."
    if answer.best_batch:
        best, outcome = answer.best_batch
        tokens, takes = _tokens(best, best.step_tokens / outcome.seconds), format_seconds(outcome.seconds)
        fits = f"{what}: fits; " if answer.situation.fits else "At a smaller batch it does: "
        comma = "," if question.ranks > 1 else ""
        at_best = f"{tokens}{comma} at the best batch that fits, {_batch(best)}"
        if answer.fastest and answer.fastest.question == best:
            at_best = "the first line's batch is the best that fits"
        yield f"{fits}{at_best} ({takes} an iteration)."
    if question.flops_source and (answer.best_batch or answer.remedies):
        yield (
            f"That assumes that forward and backward reach {format_tflops(question.flops_rate)} per GPU: "
            f"{question.flops_source}."
        )
    if answer.situation.fits:
        yield from _expected(answer)
        if moved := answer.offloaded:
            yield f"{format_bytes(moved)} of saved tensors move to the host during forward: attach(activations=...)."
        if moved := answer.streamed:
            yield (
                f"{format_bytes(moved)} of weights come from the host in each forward and each backward: "
                "attach(weights=...)."
            )
        if answer.state_on_disk:
            yield _on_disk(answer)
    yield from _largest(answer)


def _fastest(best: Fastest) -> Iterator[str]:
    """Yield the fastest settings with AdamW's results, their share of the compute, and how to set them."""
    asked, words = best.question, f"add {best.change}" if best.change else "as asked"
    share = f"{best.compute_share:.0%} of what forward and backward reach alone"
    if more := best.accumulating():
        share += f", {more[1]:.0%} with --accumulation {more[0]}"
    tokens = _tokens(asked, best.tokens_per_s)
    exact = "moments in 8 bits" if asked.state_format == INT8 else "AdamW's results"
    exact += NEEDS.get(best.effect, "")
    yield f"Fastest with {exact}: {words}: {tokens}, {_batch(asked)} ({share})."
    where = ", with the model on the host" if asked.streams else ""
    yield f"In code{where}: {_code(asked)}."
    if asked.scales_loss and asked.offload_gradients:
        yield "fp16 needs GradScaler, which does not work with --offload-gradients: leave that out."


def _code(asked: Question) -> str:
    """The calls that set what the question says of the optimizer."""
    settings = {
        'device="cuda"': asked.streams,
        "offload_gradients=True": asked.offload_gradients,
        f'state_format="{asked.state_format}"': asked.state_format,
        f"subgroup_size={asked.chosen_size:_}": asked.chosen_size,
        'disk="DIRECTORY"': asked.disk_bytes is not None,
    }
    share = asked.offload_activations
    parts = {
        f"weights={0 if asked.weights == 'stream' else quoted(asked.weights)}": asked.streams,
        f"activations={quoted(share)}": share,
        'updates="backward"': asked.in_backward,
    }
    made = ", ".join(["...", *(text for text, wanted in settings.items() if wanted)])
    attached = ", ".join(["model", *(text for text, wanted in parts.items() if wanted)])
    calls = [f"optimizer = DOSAdam({made})"]
    if asked.fsdp:
        calls.insert(0, "fully_shard(...) of each block and the model")
    return "; ".join([*calls, f"optimizer.attach({attached})"] if asked.attach else calls)


def _missing(situation: Situation) -> Iterator[str]:
    """Yield a sentence for each memory that is not enough."""
    question, short = situation.question, situation.shortage
    if more := short[DEVICE]:
        needs = format_bytes(situation.peak)
        yield f"Without any optimizer state the GPU needs {needs}, {format_bytes(more)} more than it has."
    if more := short[HOST]:
        on_host = "Parameters, gradients and optimizer state" if situation.host_model else "Optimizer state and staging"
        if question.disk_bytes is not None:
            on_host = "With all of its state on disk, what passes through the host and what else is there"
        yield (
            f"{on_host} need {format_bytes(situation.host_needed)} of host memory, {format_bytes(more)} more "
            f"than there is beside the {format_bytes(question.reserved_on_host)} of the system and the processes."
        )
    if more := short[DISK]:
        yield (
            f"State that does not fit on the host takes {format_bytes(situation.disk_needed)} of disk, "
            f"{format_bytes(more)} more than there is."
        )


def _tokens(question: Question, tokens_per_s: float) -> str:
    """Tokens per second, of the job and of a GPU if there are several."""
    of_job = f" of the job, {tokens_per_s / question.ranks:,.0f} per GPU" if question.ranks > 1 else ""
    return f"{tokens_per_s:,.0f} tokens/s{of_job}"


def _batch(question: Question) -> str:
    return f"{question.batch:,} x {question.sequence:,} tokens{' per GPU' if question.ranks > 1 else ''}"


def _on_disk(answer: Answer) -> str:
    """Describe the places of the state."""
    resident, on_disk, total = answer.resident_state, answer.state_on_disk, answer.situation.state_bytes
    tiers = {"the GPU": resident, "the host": total - resident - on_disk, "disk": on_disk}
    rests = " and ".join(f"{format_bytes(nbytes)} on {tier}" for tier, nbytes in tiers.items() if nbytes)
    ranks = " of each rank" if answer.question.ranks > 1 else ""
    return f"The optimizer state{ranks} takes {rests}, as DOSAdam(disk=...) keeps it."


def _expected(answer: Answer) -> Iterator[str]:
    """Yield the time of the batch that was asked for, beside the best of the other policies, and its limit."""
    bound, best, situation = answer.bound, answer.best, answer.situation
    tokens = _tokens(answer.question, answer.tokens_per_s or 0.0)
    takes = f"The batch asked for, {_batch(answer.question)}, takes {format_seconds(best.seconds)} an iteration"
    if (other := answer.alternative) is None or bound is None:
        yield f"{takes}, {tokens}; parameters, gradients and optimizer state are on the host, and updated there."
    else:
        seconds = {row.policy: row.seconds for row in answer.policies if row.fits}
        compared = f"{_times_as_fast(other.seconds / best.seconds)} the best of the others that fit ({other.policy})"
        if other.policy != CPU_ONLY:
            compared += f", {_times_as_fast(seconds[CPU_ONLY] / best.seconds)} {CPU_ONLY}"
        yield f'{takes}, {tokens}, with policy="adaptive": {compared}.'
        all_resident = situation.room >= situation.state_bytes
        share = 1.0 if all_resident else answer.resident_state / situation.state_bytes
        yield f"{share:.0%} of the optimizer state can stay on the GPU then."
        busiest = RESOURCES.get(bound.binding, bound.binding)
        limit = f"Under any plan the update takes {format_seconds(bound.seconds)} at least, limited by {busiest}"
        if best.exposed_s is not None and best.exposed_s < 0.05 * best.seconds:
            limit += "; nearly all of it hides behind forward and backward, which limit the iteration"
        yield f"{limit}."
        if seconds.get(FUSED, math.inf) < (1 + LITTLE) * best.seconds:
            yield "All of AdamW's state fits on the GPU as it is: DOSAdam gains nothing until memory is short."
    share = answer.busy_s[answer.limit] / best.seconds
    if share >= NEARLY:
        yield f"What limits the job is {answer.limit}, at work for {share:.0%} of the iteration."
    else:
        yield f"With the best plan {answer.limit} is busiest, for {share:.0%} of the iteration; parts wait for others."


def _largest(answer: Answer) -> Iterator[str]:
    """Yield the largest batch and sequence of this model, each with the other as it is, and the largest model."""
    question, batch, sequence = answer.question, answer.largest_batch, answer.largest_sequence
    whole = " (the longest it takes)" if sequence == question.model.longest else ""
    most = [f"{batch:,} x {question.sequence:,} tokens"] * bool(batch)
    most += [f"{question.batch:,} x {sequence:,} tokens{whole}"] * bool(sequence)
    if most:
        yield f"The largest batch that fits{' per GPU' if question.ranks > 1 else ''}: {' or '.join(most)}."
    if answer.largest_parameters:
        numel = format_count(answer.largest_parameters)
        yield f"The largest model of the usual shape that fits with these settings: about {numel} parameters."
    else:
        lacks = answer.smallest_lacks[0]
        yield f"With these settings not even a small model fits, for lack of {lacks}: {ADVICE[lacks]}."


def _tables(answer: Answer) -> Iterator[Table]:
    """Yield memory; communication, if there is any; times of policies that fit; changes that would help."""
    job, best, profile = answer.situation.job, answer.best, answer.question.profile
    yield _memory(answer)

    table = _table("What each GPU sends and receives in an iteration", "", "bytes", "seconds")
    for each in job.collectives:
        _add(table, f"{each.what}, {each.part}", each.moved, each.seconds)
    up, down = profile.h2d_bandwidth, profile.d2h_bandwidth
    for what, rate in (("weights, forward", up), ("weights, backward", up), ("gradients, backward", down)):
        if copied := job.copied:
            _add(table, f"copies of {what}", copied, copied / rate)
    exposed_s = answer.situation.exposed_communication_s
    table.caption = f"Of that {format_seconds(exposed_s)} are not hidden behind compute."
    if table.rows:
        yield table

    if answer.busy_s:
        table = _table("At work in an iteration", "", "seconds", "share")
        for resource, seconds in sorted(answer.busy_s.items(), key=lambda item: -item[1]):
            _add(table, resource, seconds, seconds / best.seconds)
        yield table

    if answer.situation.fits:
        table = _table("Expected times", "policy", "update", "iteration", "exposed", "CPU", "streamed", "resident")
        for row in answer.policies:
            update = row.update_s if row.fits else "does not fit"
            _add(table, row.policy, update, row.iteration_s, row.exposed_s, *row.shares.values())
        if answer.bound:
            _add(table, "bound of any plan", answer.bound.seconds)
        yield table

    if answer.levers:
        table = _table("What would help (adaptive, planned anew)", "", "iteration", "change", "largest batch")
        for lever in answer.levers:
            seconds = lever.outcome.seconds
            _add(table, lever.change, seconds, seconds / best.seconds - 1 if best.fits else "fits", lever.largest_batch)
        yield table


def _memory(answer: Answer) -> Table:
    """Show where memory goes: of one rank, if nothing else is said."""
    question, situation = answer.question, answer.situation
    device, host, disk = situation.device, situation.host, question.disk_bytes is not None
    rows: dict[str, tuple[int | None, ...]] = {
        "weights": (device.weights,),
        "gradients": (device.gradients,),
        "weights gathered": (device.gathered,),
        "frozen weights" if question.streams else "parameters and gradients": (None, situation.host_model),
        "activations when backward begins": (device.activations, answer.offloaded),
        "logits and their loss": (device.logits,),
        "one block at work": (device.block,),
        "CUDA; a node's system": (device.reserved, question.reserved_on_host),
        "peak without optimizer state": (situation.peak,),
        "optimizer state: master weights": (None, host.master),
        "optimizer state: moments": (None, host.moments),
        "staging of gradients": (None, host.gradient_staging),
        "weights that may stream" if question.streams else "staging of parameters": (None, host.parameter_staging),
        "windows for state on disk": (None, situation.spill.window_bytes),
        "weights that stay beside the peak": (answer.staying,),
        "state resident beside the peak": (answer.resident_state,),
        "needed by a rank": (None, answer.host_per_rank, situation.disk_per_rank),
        "needed by a node": (None, answer.host_per_rank * question.ranks, situation.disk_needed),
        "there is": (question.device_bytes,),
        "there is on a node": (None, question.host_bytes, question.disk_bytes),
        "for all state on the GPU": (answer.all_resident,),
    }
    ranks = " of one rank" if question.ranks > 1 else ""
    table = _table(f"Memory{ranks}", "", "GPU", "host", "disk" if disk else "bytes on the host")
    for name, sizes in rows.items():
        on_device, on_host, on_disk = (size or None for size in (*sizes, None, None)[:3])
        cells = on_device, on_host, on_disk if disk else on_host
        if any(cells):
            _add(table, name, *cells)
    return table


def _table(title: str, *columns: str) -> Table:
    """An empty table; all columns but the first are numbers."""
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right", no_wrap=True)
    return table


def _add(table: Table, *values: Any) -> None:
    """Add a row, each value in the format of its column; None stays empty."""
    cells = []
    for column, value in zip(table.columns, values, strict=False):
        written = FORMATS.get(str(column.header), "{:,}".format)
        cells.append(value if isinstance(value, str) else written(value) if value is not None else "")
    table.add_row(*cells)


def _times_as_fast(ratio: float) -> str:
    return "as fast as" if abs(ratio - 1) < LARGE_CHANGE else f"{ratio:.2f}x as fast as"
