"""Results of all checks: one file for machines, tables for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dos.planning.reading import Source
from experiments.check.base import Record, Status, plain, replace_text
from experiments.check.suite import NOT_COMPARED
from experiments.command import table, table_of

UPDATE = ("update", "exposed", "predicted", "bound")
"""Seconds of a contender's update that the table shows."""
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
        "targets_missed": [f"{r.name}: {t.name}" for r in records for t in r.targets if t.missed],
    }
    replace_text(out / "results.json", json.dumps(plain(values), indent=1) + "\n")


def show(console: Console, run: Mapping[str, Any], records: Sequence[Record], titles: Mapping[str, str]) -> None:
    """The tables: contenders, targets, checks."""
    for alarm in alarms(records):
        console.print(alarm, style="bold red", soft_wrap=True)
    where = run["gpu"] or "EMULATED, no GPU: figures say nothing about one"
    for record in records:
        for kind, of in (("contenders", ""), ("attached", ", models attached")):
            if record.figures.get(kind):
                console.print(contenders(record, kind, f"{titles[record.name]}{of} ({where})"))
    if any(record.targets for record in records):
        console.print(targets(records))
    console.print(checks(records, titles))
    missed = sum(t.missed for r in records for t in r.targets)
    failed = sum(r.status is Status.FAILED for r in records)
    not_run = sum(r.status is Status.NOT_RUN for r in records)
    console.print(f"Checks: {failed} failed, {not_run} not run. Targets: {missed} missed, which fails nothing.")
    for alarm in alarms(records):
        console.print(alarm, style="bold red", soft_wrap=True)


def alarms(records: Sequence[Record]) -> list[str]:
    """Alarms: facts that spoil all figures, to be said first, last and at once."""
    found = [record.reason.upper() for record in records if record.reason.startswith(NOT_COMPARED)]
    unpinned = [record.name for record in records if record.figures.get("pinned") is False]
    blind: dict[str, list[str]] = {}
    for record in records:
        source = record.figures.get("memory_source")
        if source not in (None, Source.NVML.value, Source.DEVICE.value):
            blind.setdefault(str(source), []).append(record.name)
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


def contenders(record: Record, kind: str, title: str) -> Table:
    """One contest. kind: the figures that it has."""
    figures = record.figures

    rows = [
        {
            "": name,
            "iteration": score["dropped"] or milliseconds(score["iteration_s"]),
            "step(), host": milliseconds(score["step_on_host_s"]),
            **{key: milliseconds((score["update"] or {}).get(f"{key}_s")) for key in UPDATE},
            "on device": f"{score['update']['share_gpu_resident']:.0%}" if score["update"] else "",
            "reserved_bytes": score["reserved_bytes"] or None,
        }
        for name, score in figures[kind].items()
    ]
    parameters = f"{figures['parameters'] / 1e6:,.1f}M parameters, batch {figures['batch']}"
    return table_of(f"{title}\n{parameters}", rows)


def targets(records: Sequence[Record]) -> Table:
    """All targets, and whether they were met."""
    verdicts = {True: "[green]met", False: "[red]missed", None: "[dim]not measured"}
    cells = (
        [r.name, t.name, "" if t.measured is None else f"{t.measured:.4g}", t.allowed, verdicts[t.met], t.note]
        for r in records
        for t in r.targets
    )
    return table("Targets", ("check", "target", "found", "wanted", "", ""), cells, left=6)


def checks(records: Sequence[Record], titles: Mapping[str, str]) -> Table:
    """All checks, and how they ended."""
    cells = (
        [r.name, titles.get(r.name, ""), f"[{_COLOURS[r.status]}]{r.status.value}", f"{r.seconds:.0f}", r.reason]
        for r in records
    )
    return table("Checks", ("check", "", "", "seconds", "reason"), cells, left=5)


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f} ms"
