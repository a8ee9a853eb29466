"""Tokens per second of each optimizer, in a process of its own: where AdamW does not fit, or beside AdamW.

    python -m experiments.headline [--model 6.6B|1.2B|8B] [--tokens N] [--rounds N] [--contender NAME] [--json]

6.6 billion parameters on one GPU of 80 GB, where AdamW with float32 masters does not fit; or 1.2 billion, of which
DOSAdam has memory for a half or a tenth of the state, beside AdamW and all peers that are installed, each with its best
settings; or 8 billion whose weights stream, in all of the GPU's memory and in a slice of it (`--slice`). All parameters
are trained, in bfloat16 with float32 masters where nothing else is said; a micro-batch has 4 sequences of 2,048 tokens
(`--batch`), or as many as fit, if `--tokens` says how many a step has. "No optimizer" is the ceiling. Beside DOSAdam's
figure is what the planner (`python -m perfmodel`) says. Without a GPU the same commands run with an emulated
accelerator and tiny models, and say that no figure means anything; with `--dry h100` they run DOSAdam, at full size, on
the GPU of `experiments.dry`, which is only time.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.check import environment
from experiments.check.base import Check, Record, Settings, Size, Status, run_isolated
from experiments.check.gpu_check import RESULTS, find_gpu, slug
from experiments.check.headline_on_dry import SAID, needs_gpu, run_dry
from experiments.check.training_ways import DOES_NOT_FIT, Steps, train
from experiments.check.ways import JOBS, LARGE, ways
from experiments.command import Parser, positive, table_of
from experiments.dry.machines import FILES
from experiments.harness import finish, measuring
from perfmodel.planner.units import parse_bytes

SECONDS = 150.0
"""That a contender may take, with four micro-batches or fewer."""
NEEDS_GPU = "needs a GPU"
COLUMNS = (
    *("contender", "parameters", "batch", "tokens_per_step", "tokens_per_s", "spread", "predicted_tokens_per_s"),
    *("gpu_bytes", "host_bytes", "note"),
)
EMULATED = (
    "No GPU was found: the accelerator is emulated, and a tiny model stands for {model}. The command runs; no figure "
    "means anything."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the contenders one after the other, and print; the last line is one JSON object with --json."""
    known = {model: [way.name for way in ways(model)] for model in JOBS}
    parser = Parser("headline", __doc__)
    parser.add_argument("--model", choices=JOBS, default=LARGE, help="parameters (%(default)s)")
    parser.add_count("rounds", 1, "of all contenders in turn; medians of them are shown")
    parser.add_count("micro-batches", 1, "of a step")
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences of a micro-batch (4)")
    whole = "of a step instead: 32768; in the largest micro-batches that fit"
    parser.add_argument("--tokens", type=positive, metavar="N", help=whole)
    parser.add_argument(
        "--slice", type=parse_bytes, default=24 << 30, metavar="SIZE", help="GPU memory where a slice is used (24GiB)"
    )
    parser.add_out(None, "folder for the results (experiments/results/GPU-DATE-headline; out/headline without a GPU)")
    parser.add_argument("--contender", action="append", metavar="NAME", help="one of them (all); may be given again")
    parser.add_argument("--dry", choices=FILES, help="on a GPU that is only time, at the rates of this machine")
    arguments = parser.parse_args(argv)
    names = arguments.contender or known[arguments.model]
    for name in names:
        if name not in known[arguments.model]:
            parser.error(f"argument --contender: found {name!r}; there are {'; '.join(known[arguments.model])}")
    context = JOBS[arguments.model].config.context
    if arguments.tokens and (arguments.tokens % context or arguments.micro_batches > 1):
        parser.error(f"argument --tokens: expected a multiple of {context}, without --micro-batches")
    gpu = None if arguments.dry else find_gpu()[0]
    date = datetime.date.today().isoformat()
    out: Path = arguments.out or (RESULTS / f"{slug(gpu)}-{date}-headline" if gpu else Path("out/headline"))
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(Size.TINY if gpu is None else Size.FULL, cuda=gpu is not None, out=out)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    steps = Steps(arguments.micro_batches, arguments.batch, arguments.tokens, arguments.slice)
    seconds = SECONDS * max(1.0, arguments.micro_batches / 4, (arguments.tokens or 0) / context / 16)

    def row(name: str, steps: Steps) -> dict[str, Any]:
        """The figures of a contender; with --tokens in smaller micro-batches where the largest do not fit."""
        if arguments.dry and needs_gpu(arguments.model, name):
            return {"contender": name, "note": NEEDS_GPU}
        if arguments.dry:
            found = {"contender": name, **run_dry(arguments.dry, arguments.model, name, steps, out, 2 * seconds)}
        else:
            work = functools.partial(train, arguments.model, name, steps)
            found = row_of(name, run_isolated(Check(slug(name), name, work, 1.0), settings, seconds))
        if steps.tokens and found["note"] == DOES_NOT_FIT and found["batch"] > 1:
            return row(name, dataclasses.replace(steps, batch=found["batch"] - 1))
        return found

    with measuring(arguments.json, emulated=gpu is None and not arguments.dry) as (console, progress):
        for number, name in itertools.product(range(arguments.rounds), names):
            progress(f"{name}, round {number + 1}")
            turns[name].append(row(name, steps))
            if not console.is_terminal:  # where no status is shown
                last = turns[name][-1]
                console.print(f"{name}: " + (last["note"] or f"{last['tokens_per_s']:,.0f} tokens/s"), soft_wrap=True)
    rows = [median_of(turn) for turn in turns.values()]
    shown = [key for key in COLUMNS if any(row.get(key) for row in rows)]
    where = gpu or (f"Dry {arguments.dry}" if arguments.dry else "Emulated")
    console.print(table_of(f"{where}: tokens per second", rows, *shown))
    if arguments.dry:
        console.print(SAID.format(machine=arguments.dry), soft_wrap=True)
    elif gpu is None:
        console.print(EMULATED.format(model=arguments.model), soft_wrap=True)
    head = {
        "gpu": gpu,
        "dry": arguments.dry,
        "date": date,
        **environment.commit(),
        "model": arguments.model,
        **dataclasses.asdict(steps),
    }
    return finish({**head, "rows": rows}, console, arguments.json)


def median_of(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The round of median speed, with all rounds' speeds; the last one of a contender without any."""
    ran = sorted((turn for turn in turns if "tokens_per_s" in turn), key=lambda turn: turn["tokens_per_s"])
    if not ran:
        return turns[-1]
    return {**ran[len(ran) // 2], "rounds": [turn["tokens_per_s"] for turn in turns if "tokens_per_s" in turn]}


def row_of(name: str, record: Record) -> dict[str, Any]:
    """The figures of a contender, or why there are none."""
    ended = record.status is Status.PASSED
    return {"contender": name, "note": "" if ended else record.reason, **record.figures, "seconds": record.seconds}


if __name__ == "__main__":
    sys.exit(main())
