"""What came of all checks: one file for machines, tables for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

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
        "targets_missed": [f"{r.name}: {t.name}" for r in records for t in r.targets if t.met is False],
    }
    replace_text(out / "results.json", json.dumps(plain(values), indent=1) + "\n")


def show(console: Console, run: Mapping[str, Any], records: Sequence[Record], titles: Mapping[str, str]) -> None:
    """The tables: contenders, targets, checks."""
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


def contenders(record: Record, title: str) -> Table:
    """One contest."""
    figures = record.figures
    table = Table(title=f"{title}\n{figures['parameters'] / 1e6:,.1f}M parameters, batch {figures['batch']}")
    for heading in ("", "iteration", "update", "predicted", "bound", "lanes at once", "state on device"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, score in figures["contenders"].items():
        update = figures.get("updates", {}).get(name, {})
        if score["dropped"]:
            table.add_row(name, score["dropped"], style="dim")
            continue
        lanes, share = update.get("lanes_at_once"), score["resident_share"]
        table.add_row(
            name,
            *(milliseconds(score[key]) for key in ("iteration_s", "update_s", "predicted_update_s")),
            milliseconds(update.get("bound_s")),
            "" if lanes is None else f"{lanes:.2f}",
            "" if share is None else f"{share:.0%}",
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
