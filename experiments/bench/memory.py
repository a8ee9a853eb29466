"""Adaptive residency while device memory changes: recorded traces and scripted neighbours, against the clock.

    python -m experiments.memory [--json]          # about five minutes on two cores
    python -m experiments.memory --only half,none  # a minute: memory for half of the state, and for nothing
    python -m experiments.memory --simulate        # the published 20B run on the H100 profile; nothing is trained

A small GPT trains on the emulated accelerator with the proportions of a published rank: memory, compute and update.
The training's own memory follows the trace of that rank by phase of the iteration. Another process may want memory,
too: it takes what is free and waits for the rest. Adaptive runs are compared with everything on the CPU, with the fixed
stride and ratio that would have been best for the memory of the whole run, and with the bound for the memory of each
iteration. Times are the mean per iteration where memory changes, the median where it does not.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from rich.console import Console

from experiments.bench.memory_runs import (
    CONFIG,
    Batch,
    Setting,
    bound_s,
    fixed_policies,
    neighbours,
    share_that_fits,
    train,
)
from experiments.command import Parser, seconds, table
from experiments.corpus import Corpus, standard_library
from experiments.paper import memory_h100
from experiments.paper.ranks import PublishedRank
from experiments.paper.runs import TRACES

ITERATIONS = 20
"""Of a run with a neighbour; runs in which nothing changes have half as many."""
BATCH = 4
CANDIDATES = 2
"""Of the fixed policies, those that run for real: the best by simulation."""
NOISE = 0.02
"""Times that differ by less are equal."""
A_THIRD = 1 / 3
SPEEDUP = 1.5
"""Over everything on the CPU, expected where a third of the state fits."""


def misses(row: dict[str, Any]) -> list[str]:
    """What was to hold and does not."""
    adaptive_s, cpu_only_s, best_fixed_s = (row[key] for key in ("adaptive_s", "cpu_only_s", "best_fixed_s"))
    found = {
        "capacity exceeded": row["capacity_exceeded"],
        "errors": row["errors"] > 0,
        "other bits than on the CPU alone": not row["bits_equal"],
        "slower than the best fixed": adaptive_s > (1 + NOISE) * (best_fixed_s or math.inf),
        f"less than {SPEEDUP} times as fast as the CPU alone": row["fits_share"] >= A_THIRD
        and cpu_only_s < SPEEDUP * adaptive_s,
        "transfers although all fits": row["script"] == "ample" and row["moved_after_first"] > 0,
        "other traffic or time than the CPU alone": row["script"] == "none"
        and not (row["same_traffic"] and abs(adaptive_s / cpu_only_s - 1) <= NOISE),
    }
    return [f"{row['script']}: {what}" for what, missed in found.items() if missed]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is one JSON object with --json. Exit status 1 if something was missed."""
    parser = Parser(prog="python -m experiments.memory", description="Adaptive residency while device memory changes.")
    parser.add_json()
    parser.add_argument("--simulate", action="store_true", help="the published 20B run on an H100 node, simulated")
    parser.add_out(None, "with --simulate: file for its picture, a PNG", formerly="picture")
    parser.add_count("steps", ITERATIONS, "of each run with a neighbour", formerly="iterations")
    parser.add_argument("--only", metavar="NAMES", help="these rows alone, separated by commas")
    arguments = parser.parse_args(argv)
    console = Console(stderr=arguments.json)
    if arguments.simulate:
        return memory_h100.report(console, arguments.out, as_json=arguments.json)
    torch.set_num_threads(1)  # one core for the model and the lanes' real work, one for the threads that keep time
    with console.status("") as status:
        try:
            rows = measure(arguments.steps, status.update, arguments.only and arguments.only.split(","))
        except ValueError as error:
            parser.error(str(error))
    show(rows, console)
    missed = [what for row in rows for what in misses(row)]
    console.print(f"missed: {', '.join(missed) or 'nothing'}")
    if arguments.json:
        print(json.dumps({"rows": rows, "missed": missed}))
    return int(bool(missed))


def measure(
    iterations: int, on_progress: Callable[[str], None], only: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """All scripts, or those of `only`. iterations: of a run with a neighbour.

    Raises ValueError for a script that there is not.
    """
    batches = Corpus(standard_library(), CONFIG.context).batches(iterations, BATCH, seed=0)
    some = batches[: max(2, iterations // 2)]
    ranks = {trace: Setting.of(PublishedRank.read(trace)) for trace in TRACES}
    first = next(iter(ranks.values()))
    scripts = {trace: (setting, some, CANDIDATES) for trace, setting in ranks.items()}
    for name, points in neighbours(first.rank.free_bytes, iterations).items():
        scripts[name] = (Setting(first.rank, points), batches, CANDIDATES)
    state = first.rank.loads.state_bytes
    scripts["ample"] = (first.with_free(2 * state), some, 0)
    scripts["half"] = (first.with_free(state // 2), some, CANDIDATES)
    scripts["none"] = (first.with_free(0), some, 0)
    unknown = set(only or ()) - set(scripts)
    if unknown:
        raise ValueError(f"no row {', '.join(sorted(unknown))}; there are {', '.join(scripts)}")
    chosen = scripts if only is None else {name: scripts[name] for name in only}
    return [
        row(name, setting, of_run, on_progress, candidates=candidates)
        for name, (setting, of_run, candidates) in chosen.items()
    ]


def row(
    script: str,
    setting: Setting,
    batches: Sequence[Batch],
    on_progress: Callable[[str], None],
    *,
    candidates: int = CANDIDATES,
) -> dict[str, Any]:
    """One script. candidates: of the fixed policies, how many run for real. Times are seconds per iteration.

    fits_share: mean share of the state for which there was memory at the peak. best_fixed: None if none was looked for.
    unmet_iterations: at the end of which the neighbour was waiting for memory.
    moved_after_first: transfers after the first iteration, of any kind. same_traffic: as everything on the CPU has.
    """
    on_progress(script)
    n = len(batches)
    fixed = fixed_policies(setting, n)[:candidates]
    adaptive, on_cpu, *others = train(setting, ["adaptive", "cpu", *(policy for _, policy in fixed)], batches)
    typical = len({nbytes for _, nbytes in setting.neighbour}) == 1
    times = sorted((run.iteration_s(typical=typical), name) for run, (name, _) in zip(others, fixed, strict=True))
    best_s, best = times[0] if times else (None, None)
    return {
        "script": script,
        "iterations": n,
        "capacity_exceeded": adaptive.exceeded,
        "errors": len(adaptive.errors),
        "bits_equal": adaptive.equals(on_cpu),
        "adaptive_s": adaptive.iteration_s(typical=typical),
        "cpu_only_s": on_cpu.iteration_s(typical=typical),
        "best_fixed_s": best_s,
        "bound_s": bound_s(setting, n),
        "best_fixed": best,
        "fits_share": share_that_fits(setting, n),
        "unmet_iterations": adaptive.unmet_iterations,
        "moved_after_first": adaptive.transfers(first=1).total(),
        "same_traffic": adaptive.transfers() == on_cpu.transfers(),
    }


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A table for people."""
    headings = ("memory", "best fixed, which", "bits", "fits", "CPU only", "best fixed", "adaptive", "bound", "waited")
    cells = []
    for r in rows:
        bits = "equal" if r["bits_equal"] else "DIFFERENT"
        times = seconds(*(r[key] for key in ("cpu_only_s", "best_fixed_s", "adaptive_s", "bound_s")))
        seen = [r["script"], r["best_fixed"] or "", bits, f"{r['fits_share']:.0%}"]
        cells.append([*seen, *times, str(r["unmet_iterations"])])
    console.print(table("Seconds per iteration on the emulated accelerator", headings, cells, left=3))
    console.print(
        "fits: mean share of the state for which there was memory at the peak; waited: iterations at whose end the "
        "neighbour waited for memory"
    )


if __name__ == "__main__":
    sys.exit(main())
