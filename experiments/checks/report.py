"""What came of all checks: one file for machines, tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dos.memory.monitor import Source
from experiments.checks.base import Record, Status, plain, replace_text

CONTESTS = ("full-memory", "policies", "largest", "torchao", "deepspeed", "bitsandbytes")
"""Checks that have contenders, in the order in which they are shown."""
_COLOURS = {Status.PASSED: "green", Status.FAILED: "red", Status.SKIPPED: "dim", Status.NOT_RUN: "yellow"}


def write_results(out: Path, run: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Write results.json anew: what ran where and when, all checks with every figure so far, all targets."""
    values = {
        "what": "python -m experiments.gpu_check",
        **run,
        "checks": {record.name: record.to_json() for record in records},
        "failed": [r.name for r in records if r.status is Status.FAILED],
        "not_run": [r.name for r in records if r.status is Status.NOT_RUN],
        "running": [r.name for r in records if r.status is Status.RUNNING],
        "alarms": alarms(records),
        "targets_missed": [f"{r.name}: {t.name}" for r in records for t in r.targets if t.met is False],
    }
    replace_text(out / "results.json", json.dumps(plain(values), indent=1) + "\n")


def show(console: Console, run: Mapping[str, Any], records: Sequence[Record], titles: Mapping[str, str]) -> None:
    """The tables: contenders, targets, checks."""
    for alarm in alarms(records):
        console.print(alarm, style="bold red", soft_wrap=True)
    where = run["gpu"] or "EMULATED, no GPU: figures say nothing about one"
    for name in CONTESTS:
        record = next((r for r in records if r.name == name), None)
        if record is not None and record.figures.get("contenders"):
            console.print(contenders(record, f"{titles[name]} ({where})"))
    console.print(targets(records))
    console.print(checks(records, titles))
    missed = sum(t.met is False for r in records for t in r.targets)
    failed = sum(r.status is Status.FAILED for r in records)
    not_run = sum(r.status is Status.NOT_RUN for r in records)
    console.print(f"Checks: {failed} failed, {not_run} not run. Targets: {missed} missed, which fails nothing.")
    for alarm in alarms(records):
        console.print(alarm, style="bold red", soft_wrap=True)


def alarms(records: Sequence[Record]) -> list[str]:
    """What spoils figures, whatever they are: to be said first, last and at once."""
    unpinned = [record.name for record in records if record.figures.get("pinned") is False]
    blind: dict[str, list[str]] = {}
    for record in records:
        source = record.figures.get("memory_source")
        if source not in (None, Source.NVML.value, Source.DEVICE.value):
            blind.setdefault(str(source), []).append(record.name)
    found = []
    if unpinned:
        found.append(
            f"HOST MEMORY IS NOT PINNED ({', '.join(unpinned)}): copies are slow and do not run beside anything, so "
            "every speed here is spoilt. Raise the limit of locked memory (ulimit -l unlimited; docker run --ulimit "
            "memlock=-1)"
        )
    found += [
        f"FREE MEMORY COMES FROM {source} ({', '.join(names)}): what others take is seen late, if at all"
        for source, names in blind.items()
    ]
    return found


def gist(record: Record) -> str:
    """In one line what sizes a check has chosen and what it has found, as far as that is not in a table."""
    try:
        return ", ".join(_parts(record.figures))
    except Exception as error:  # a check that ended half way has left half of its figures; the others go on
        return f"figures that cannot be shown ({type(error).__name__}: {error})"


def _parts(figures: Mapping[str, Any]) -> Iterator[str]:
    if figures.get("available_bytes") is not None:
        yield f"{figures['available_bytes'] / 2**30:.1f} GiB of host memory available"
    if figures.get("touched_bytes"):
        yield f"after touching {figures['touched_bytes'] / 2**30:.1f} GiB"
    if figures.get("pinning"):
        pinning = figures["pinning"]
        huge = pinning["huge_page_bytes"]
        pages = "" if huge is None else f", {huge / pinning['bytes']:.0%} in huge pages"
        word = {True: "pinned", False: "NOT pinned", None: "taken"}[figures.get("pinned")]
        yield f"{pinning['bytes'] / 2**30:.2f} GiB {word} at {pinning['gib_per_s']:.1f} GiB/s{pages}"
    if figures.get("parameters"):
        yield f"{figures['parameters'] / 1e6:,.1f}M parameters"
    if figures.get("tests"):
        outcomes = ", ".join(f"{count} {what}" for what, count in figures["outcomes"].items())
        yield f"{figures['tests']} tests: {outcomes or 'none has ended'}"
    yield from (
        f"{way}: forward {slower['forward']:.2f}x, backward {slower['backward']:.2f}x"
        for way, slower in figures.get("slower", {}).items()
        if way != "alone"
    )
    if figures.get("same_bits"):
        different = [name for name, same in figures["same_bits"].items() if not same]
        yield f"OTHER BITS with {', '.join(different)}" if different else "the same bits"
    if isinstance(figures.get("iteration_s"), dict):
        yield from (f"{name} {milliseconds(seconds)}" for name, seconds in figures["iteration_s"].items())


def contenders(record: Record, title: str) -> Table:
    """One contest."""
    figures = record.figures
    table = Table(title=f"{title}\n{figures['parameters'] / 1e6:,.1f}M parameters, batch {figures['batch']}")
    for heading in (
        *("", "iteration", "step(), host", "hooks, host", "update", "predicted", "bound", "lanes at once"),
        *("state on device", "reserved, peak", "allocator retries"),
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, score in figures["contenders"].items():
        update = figures.get("updates", {}).get(name, {})
        if score["dropped"]:
            table.add_row(name, score["dropped"], style="dim")
            continue
        lanes, share = update.get("lanes_at_once"), score["resident_share"]
        hooks = [score[key] for key in ("hooks_in_forward_s", "hooks_in_backward_s") if key in score]
        rounds = score["allocator"]
        table.add_row(
            name,
            milliseconds(score["iteration_s"]),
            milliseconds(score["step_on_host_s"]),
            milliseconds(sum(hooks)) if hooks else "",
            *(milliseconds(score[key]) for key in ("update_s", "predicted_update_s")),
            milliseconds(update.get("bound_s")),
            "" if lanes is None else f"{lanes:.2f}",
            "" if share is None else f"{share:.0%}",
            f"{max(r['peak_reserved_bytes'] for r in rounds) / 2**30:.1f} GiB" if rounds else "",
            str(sum(r["num_alloc_retries"] for r in rounds)) if rounds else "",
        )
    return table


def targets(records: Sequence[Record]) -> Table:
    """All targets, and whether they were met."""
    table = Table("check", "target", "found", "wanted", "", "", title="Targets")
    for record in records:
        for target in record.targets:
            verdict = {True: "[green]met", False: "[red]missed", None: "[dim]not measured"}[target.met]
            found = "" if target.value is None else f"{target.value:.4g}"
            table.add_row(record.name, target.name, found, target.limit, verdict, target.note)
    return table


def checks(records: Sequence[Record], titles: Mapping[str, str]) -> Table:
    """All checks, and how they ended."""
    table = Table("check", "", "", "seconds", "reason", title="Checks")
    for record in records:
        table.add_row(
            record.name,
            titles.get(record.name, ""),
            f"[{_COLOURS[record.status]}]{record.status.value}",
            f"{record.seconds:.0f}",
            record.reason,
        )
    return table


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f} ms"
