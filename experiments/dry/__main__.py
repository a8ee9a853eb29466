"""Iterations on a GPU that is only time, beside their floors and what the machines took.

    python -m experiments.dry [--machine h200] [--setting half] [--attached | --not-attached]
        [--updates backward] [--json]

All of the library's Python runs, with its threads and at its own speed, on real modules with hooks: the contest's GPT
of 1.19 billion parameters. No byte moves and nothing is computed: the accelerator of `experiments/simdev` passes as
much time as the machine did (`machines.py`), and its runtime keeps the host as long (`gpu.py`). So it shows what
emulated devices do not: a host that is late or early, Python's lock, and host memory shared as it was measured to be.
Rows are true only while nothing else runs on two cores; each takes a quarter of a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.command import Parser, table_of
from experiments.dry.machines import FILES, SETTINGS, Costs
from experiments.dry.row import PROGRAM, Row
from experiments.harness import Limit, finish, measuring
from experiments.simdev.build import UnavailableError, library

HERE = Path(__file__).parents[2]
COLUMNS = (
    *("machine", "setting", "attached", "updates", "iteration_ms", "floor_ms", "physical_ms", "measured_ms"),
    *("host_backward_ms", "device_backward_ms", "step_before_issue_ms", "lane_gap_ms", "noise_ms", "plan"),
    *("believed_forward_ms", "predicted_ms"),
)


COSTS = [field.name for field in dataclasses.fields(Costs)]


class FailedError(Exception):
    """A row failed; the message is what its process wrote."""


def run_apart(row: Row, dos: Path = HERE) -> list[dict[str, Any]]:
    """The figures of a row, or a contest's rows, from a process of its own.

    dos: the folder of the dos and perfmodel that run.
    """
    words = ["-W", "ignore", "-c", PROGRAM, str(dos.resolve()), str(HERE), json.dumps(dataclasses.asdict(row))]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedError(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def limits(rows: Sequence[Mapping[str, Any]]) -> list[Limit]:
    """Adaptive plans are not behind fixed ones, of the same machine and setting, by more than 2%."""
    found = []
    for row in rows:
        place = row["machine"], row["setting"], row["attached"]
        others = [each for each in rows if (each["machine"], each["setting"].split(", ")[0], each["attached"]) == place]
        if len(others) > 1 and row["setting"] in SETTINGS:
            best = min((each for each in others if each is not row), key=lambda each: each["iteration_ms"])
            name = f"adaptive over the best fixed policy ({', '.join(map(str, place))})"
            found.append(Limit.at_most(name, row["iteration_ms"] / best["iteration_ms"], 1.02, best["setting"]))
    return found


def _cost(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    if name not in COSTS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(COSTS)}, and =NUMBER; found {text!r}")
    return name, float(number)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("dry", __doc__)
    parser.add_argument("--machine", action="append", choices=FILES, help="one of them (all); may be given again")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="one of them (all); may be given again")
    parser.add_argument("--attached", action="store_const", const=True, help="only attached models")
    parser.add_argument("--not-attached", action="store_const", dest="attached", const=False, help="only others")
    during = "when updates begin (step); in backward only of attached models"
    parser.add_argument("--updates", choices=("step", "backward"), default="step", help=during)
    own = "in place of the setting's own, as DOSAdam takes it; may be given again"
    parser.add_argument("--policy", action="append", help=own)
    fixed = "besides, fixed policies that need no more memory; the status is 1 if adaptive is behind by more than 2%%"
    parser.add_argument("--fixed", action="store_true", help=fixed)
    parser.add_count("steps", 8, "iterations that count")
    parser.add_count("warm-up", 60, "iterations before them, in which figures that plans follow settle")
    parser.add_count("repeat", 1, "times that each row is run: the one of median time is shown")
    parser.add_count("threads", None, "of the CPU lane, in place of those that DOSAdam chooses")
    parser.add_count("layers", None, "of another, small model")
    contest = "settings of one format take turns on one optimizer, as they did on the machines"
    parser.add_argument("--contest", action="store_true", help=contest)
    parser.add_argument("--process-group", action="store_true", help="with a process group of one rank")
    parser.add_argument("--dos", type=Path, default=HERE, help="a folder whose dos (built) and perfmodel run instead")
    parser.add_argument("--cost", action="append", type=_cost, default=[], help="NAME=NUMBER of Costs, such as copy_s")
    parser.add_argument("--trace", help="a file for cProfile's figures of the caller's thread in the last row")
    arguments = parser.parse_args(argv)
    try:
        library()
    except UnavailableError as error:
        parser.error(f"the simulated accelerator is not built: {error}")
    attached = (True, False) if arguments.attached is None else (arguments.attached,)
    if arguments.updates == "backward":
        attached = (True,)
    settings = arguments.setting or list(SETTINGS)
    if arguments.contest:  # one of each format stands for all
        settings = list({SETTINGS[name].format: name for name in settings}.values())
    rows: list[dict[str, Any]] = []
    with measuring(arguments.json, emulated=False) as (console, progress):
        for machine, setting, attach in itertools.product(arguments.machine or FILES, settings, attached):
            policies = arguments.policy or [None, *(SETTINGS[setting].fixed if arguments.fixed else ())]
            for policy in policies:
                row = Row(
                    machine,
                    setting,
                    attach,
                    arguments.warm_up,
                    arguments.steps,
                    policy,
                    arguments.process_group,
                    arguments.contest,
                    arguments.layers,
                    arguments.trace,
                    dict(arguments.cost),
                    arguments.updates,
                    arguments.threads or 0,
                )
                runs = []
                for number in range(arguments.repeat):
                    where = "attached" if attach else "not attached"
                    progress(f"{machine}, {setting}, {policy or 'its own policy'}, {where}, run {number + 1}")
                    runs.append(run_apart(row, arguments.dos))
                for same in zip(*runs, strict=True):
                    rows.append(sorted(same, key=lambda each: each["iteration_ms"])[len(runs) // 2])
    console.print(table_of("milliseconds on a dry GPU", rows, *COLUMNS, left=3))
    return finish({"rows": rows}, console, arguments.json, limits(rows) if arguments.fixed else None)


if __name__ == "__main__":
    sys.exit(main())
