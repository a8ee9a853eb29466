"""Run sweeps over configurations: published loops and our policies, simulated, or scaled down on a device.

    python -m experiments.sweep                     # all ready sweeps
    python -m experiments.sweep ratio mine.toml     # a ready one, and one of yours
    python -m experiments.sweep --report            # all ready ones, and docs/results.md with their pictures

A sweep is a TOML file; `experiments/paper/sweep/ready/` has examples. Each run is a row of OUT/NAME.csv.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from experiments.command import Parser, table
from experiments.harness import FILE_WIDTH
from experiments.paper.runs import read_runs
from experiments.paper.sweep.compare import METRICS, compare, listing, save_comparison
from experiments.paper.sweep.predict import Outcome, Predictor
from experiments.paper.sweep.report import PICTURES, READY, write_report
from experiments.paper.sweep.spec import Configuration, Sweep, read_sweep
from experiments.plots import can_draw

SWEEPS = Path(__file__).parent / "ready"
REPORT = Path("docs/results.md")
COLUMNS = tuple(f.name for kind in (Configuration, Outcome) for f in dataclasses.fields(kind))


def run(sweep: Sweep, path: Path, predictor: Predictor) -> dict[Configuration, Outcome]:
    """The outcomes of a sweep's configurations, each a row of the file as soon as it is known.

    Raises ValueError if the file is there and has other columns, OSError if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        if (before := file.readline()) and not {"machine", "update_s"} <= set(before.strip().split(",")):
            raise ValueError(f"{path} has no rows of a sweep in it; remove it or choose another folder with --out")
        file.truncate(0)
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        results = {}
        for config in track(sweep.configurations, sweep.name, console=Console(stderr=True)):
            results[config] = outcome(config, predictor)
            rows.writerow((*dataclasses.astuple(config), *dataclasses.astuple(results[config])))
            file.flush()
    return results


def outcome(config: Configuration, predictor: Predictor) -> Outcome:
    """The configuration's outcome: simulated, or measured on its device, scaled down."""
    if config.device == "simulated":
        return predictor.outcome(config)
    from experiments.paper.sweep.device import run_on_device  # simulations need no torch

    return run_on_device(config, predictor)


def show(sweep: Sweep, results: dict[Configuration, Outcome], console: Console) -> None:
    """Tables for people: times, and how many times as fast as ZeRO-Offload."""
    comparisons = compare(sweep, results)
    if not comparisons:
        heading, *lines = listing(results)
        console.print(table(sweep.title, heading, lines))
    for comparison in comparisons:
        for metric in METRICS:
            heading, *lines = comparison.table(metric)
            if len(heading) > 1:
                title = ", ".join(filter(None, (sweep.title, comparison.facet)))
                console.print(table(f"{title}: {metric}, and speedup over ZeRO-Offload", heading, lines))


def draw(sweep: Sweep, results: dict[Configuration, Outcome], folder: Path, prefix: str = "") -> None:
    """The charts of a sweep, one for each facet."""
    for number, comparison in enumerate(compare(sweep, results)):
        title = ", ".join(filter(None, (sweep.title, comparison.facet)))
        save_comparison(comparison, title, folder / f"{prefix}{sweep.name}{f'_{number}' if number else ''}.png")


def find(name: str) -> Path:
    """A ready sweep by name, or a file."""
    ready = SWEEPS / f"{name}.toml"
    if Path(name).is_file() or not ready.is_file():
        return Path(name)
    return ready


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status, 2 (by SystemExit) for input it cannot use."""
    parser = Parser("sweep", __doc__, json=False)
    ready = ", ".join(sorted(path.stem for path in SWEEPS.glob("*.toml")))
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"a TOML file, or one of {ready}")
    parser.add_argument("--out", type=Path, default=Path("out/sweep"), help="folder for rows and charts (%(default)s)")
    parser.add_argument(
        "--report", type=Path, nargs="?", const=REPORT, help=f"write the results of all ready sweeps ({REPORT})"
    )
    options = parser.parse_args(arguments)
    if options.report and options.sweeps:
        parser.error(f"--report is of all ready sweeps; leave out {' '.join(options.sweeps)}")
    if options.report and not can_draw():
        return 2
    try:
        sweeps = [read_sweep(find(name)) for name in options.sweeps or READY]
        names = [sweep.name for sweep in sweeps]
        if len(set(names)) < len(names):
            raise ValueError(f"two sweeps are called {max(names, key=names.count)!r}; rename one of the files")
        predictor = Predictor(read_runs())
        results = {sweep.name: run(sweep, options.out / f"{sweep.name}.csv", predictor) for sweep in sweeps}
        console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
        for sweep in sweeps:
            show(sweep, results[sweep.name], console)
            draw(sweep, results[sweep.name], options.out)
        print(f"rows and charts in {options.out}")
        if options.report:
            for sweep in sweeps:
                draw(sweep, results[sweep.name], options.report.parent / PICTURES, "sweep_")
            write_report(options.report, {s.name: (s, results[s.name]) for s in sweeps}, predictor)
            print(f"results in {options.report}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"interrupted; {options.out} has the rows until here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
