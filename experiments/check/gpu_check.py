"""Does everything that this project claims hold on this machine? One command, one report.

    python -m experiments.gpu_check [--minutes 8] [--out DIR]

Each check runs in a process of its own, so one that fails, hangs or crashes does not stop the others. Without a GPU the
accelerator is emulated and everything is smaller: that tests this script and the optimizer's logic, not a GPU.
It may be ended at any time: what was found until then is in results.json. The exit status is 0 if every check passed or
was skipped with a reason, 1 otherwise. A check fails if something is wrong. Speed that falls short of a target is
reported as a target missed, and fails nothing.
"""

from __future__ import annotations

import datetime
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from dos.report import nvidia_smi
from experiments.check import calibration, contest, environment, hold_ups, streaming, suite
from experiments.check.base import GRACE_S, Check, Record, Settings, Size, Status, read_record, run_isolated
from experiments.check.report import alarms, show, write_results
from experiments.command import Parser, positive
from perfmodel.planner.units import parse_bytes, parse_count, parse_positive

RESULTS = Path("experiments/results")
INTERRUPTED = "interrupted"
WIDTH = 160
"""Of what is printed into a file, in characters."""

CHECKS = (
    Check("environment", "what this machine is, and whether its memory can be pinned", environment.run, share=8),
    Check("calibration", "rates of this machine", calibration.run, share=25, least_s=12),
    Check("contest", "against AdamW, peers and every kind of policy", contest.run, share=140, least_s=40),
    Check("attached", "the same with attached models", contest.run_attached, share=140, least_s=40),
    Check(
        "streaming",
        "weights that stream, and a model larger than the GPU's memory",
        streaming.run,
        share=90,
        least_s=30,
    ),
    Check("tests", "tests/cuda: bits, races, memory", suite.run, share=90, least_s=15),
    Check("overlap", "what copies hold up", hold_ups.run, share=25, least_s=10),
)
"""In the order in which they run: those first whose answers matter most if it ends early."""

_LEAST = {Size.TINY: 0.01, Size.SMALL: 0.1, Size.FULL: 1.0}
"""Of `Check.least_s`."""


def main(argv: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Run the checks; the exit status. Bad arguments exit with 2."""
    parser = Parser("gpu_check", __doc__, json=False)
    parser.add_argument("--minutes", type=parse_positive, default=8.0, help="that all of it may take, roughly (8)")
    parser.add_out(None, "folder for the results (experiments/results/GPU-DATE)")
    host = "host memory to choose models for: 96GiB (what is available)"
    parser.add_argument("--host-bytes", type=parse_bytes, metavar="SIZE", help=host)
    parser.add_argument("--size", choices=[s.value for s in Size], help="full with a GPU, small without")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of checks, separated by commas")
    parser.add_argument(
        "--parameters", type=parse_count, metavar="N", help="of the large model that streams: 8e9 (6.5e9)"
    )
    part = "GPU memory in which it trains: 24GiB (12GiB)"
    parser.add_argument("--slice", type=parse_bytes, metavar="SIZE", help=part)
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences of its steps (as many as fit, up to 16)")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.only or ()) - {check.name for check in checks})
    if unknown:
        names = ", ".join(check.name for check in checks)
        parser.error(f"argument --only: no check {unknown[0]!r}; there are {names}")

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    started = time.monotonic()
    date = datetime.datetime.now().astimezone().replace(microsecond=0)
    gpu, seen = find_gpu()
    out = args.out or RESULTS / f"{slug(gpu or 'emulated')}-{date.date().isoformat()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error}")
    size = Size(args.size) if args.size else Size.SMALL if gpu is None else Size.FULL
    streamed = {"parameters": args.parameters, "slice_bytes": args.slice, "batch": args.batch}
    settings = Settings(size, cuda=gpu is not None, out=out, host_bytes=args.host_bytes, **streamed)
    if gpu is None and seen:
        console.print(
            f"nvidia-smi shows {', '.join(seen)}, but torch cannot use it: is this torch for CUDA?", style="red"
        )
    console.print(f"{gpu or 'No GPU: the accelerator is emulated'}; results go to {out}", soft_wrap=True)

    results = {
        "gpu": gpu,
        "emulated": gpu is None,
        "date": date.isoformat(),
        **environment.commit(),
        "size": size.value,
        "minutes": args.minutes,
        "host_bytes": args.host_bytes,
        **streamed,
    }

    def keep(records: Sequence[Record], complete: bool = False) -> None:
        write_results(out, results | {"seconds": time.monotonic() - started, "complete": complete}, records)

    records = run_all(checks, settings, 60 * args.minutes, args.only, console, keep)
    keep(records, complete=not any(record.reason == INTERRUPTED for record in records))
    show(console, results, records, {check.name: check.title for check in checks})
    console.print(f"Everything is in {out}: results.json, timelines, logs.", soft_wrap=True)
    return int(any(r.status not in (Status.PASSED, Status.SKIPPED) for r in records))


def run_all(
    checks: Sequence[Check],
    settings: Settings,
    seconds: float,
    only: Sequence[str] | None,
    console: Console,
    on_progress: Callable[[Sequence[Record]], None] = lambda records: None,
) -> list[Record]:
    """One after the other; time that one does not need is the others', and the last is killed soon after the end.

    on_progress: called before and after each check with a record of every one, as far as it has come.
    """
    records = {check.name: Record(check.name, Status.NOT_RUN, "it had not begun") for check in checks}
    end = time.monotonic() + seconds
    waiting = [check for check in checks if only is None or check.name in only]
    interrupted = False
    for check in checks:
        if check not in waiting:
            records[check.name] = Record(check.name, Status.SKIPPED, "not asked for (--only)")
            continue
        left = end - time.monotonic()
        limit = left * check.share / sum(c.share for c in waiting)
        waiting.remove(check)
        record = Record(check.name, Status.NOT_RUN)
        if interrupted:
            record.reason = INTERRUPTED
        elif limit < check.least_s * _LEAST[settings.size]:
            record.reason = f"{max(0.0, limit):.0f} s were left for it, too little; give more --minutes"
        else:
            records[check.name] = Record(check.name, Status.RUNNING, "it was running")
            on_progress(list(records.values()))
            try:
                with console.status(f"{check.name}: {check.title} (up to {limit:.0f} s)"):
                    record = run_isolated(check, settings, limit, most_s=left + GRACE_S)
            except KeyboardInterrupt:
                record, interrupted = read_record(settings.out, check.name), True
                record.status, record.reason = Status.NOT_RUN, INTERRUPTED
        records[check.name] = record
        told_of = "; ".join(filter(None, (record.reason, *record.said)))
        line = f"{record.status.value:>8}  {check.name} ({record.seconds:.0f} s)"
        console.print(f"{line}: {told_of}" if told_of else line, soft_wrap=True)
        for alarm in alarms([record]):
            console.print(alarm, style="bold red", soft_wrap=True)
        on_progress(list(records.values()))
    return list(records.values())


def find_gpu() -> tuple[str | None, list[str] | None]:
    """The name of the GPU, None if torch can use none; and what nvidia-smi says.

    Asked in another process: this one must stay free of CUDA.
    """
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return environment.output_of(sys.executable, "-c", code) or None, nvidia_smi()


def slug(name: str) -> str:
    """A name for a folder."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tables after SIGTERM, too
    sys.exit(main())
