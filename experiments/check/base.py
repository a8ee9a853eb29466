"""Checks: their settings and records, and the process of its own in which each runs.

Whatever it does there, hangs and crashes included, the others go on.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness import Limit

GRACE_S = 20.0
"""A check that has used up its time and half of it again has this much longer before it is killed."""
_LOG_LINES, _POLL_S = 40, 0.5


class Size(enum.Enum):
    """How much is done."""

    TINY = "tiny"
    """Seconds: shows that everything runs; no figure means anything."""
    SMALL = "small"
    """Some minutes on two cores, with an emulated accelerator."""
    FULL = "full"
    """For a GPU."""


class Status(enum.Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOT_RUN = "not run"
    RUNNING = "running"
    """Of results that were written while it ran."""


class Skipped(Exception):  # noqa: N818  (not an error: there is a reason)
    """Raised by a check that cannot be made here. Its text is the reason."""


@dataclass(frozen=True)
class Settings:
    """Settings that all checks of one run share.

    cuda: whether there is a GPU; without one the accelerator is emulated.
    out: folder of the results.
    host_bytes: host memory for which models are chosen; None: what is available.
    parameters, slice_bytes, batch: of the model that trains in a part of the GPU's memory, that part, and sequences of
        a step; None: the check's own.
    """

    size: Size
    cuda: bool
    out: Path
    host_bytes: int | None = None
    parameters: float | None = None
    slice_bytes: int | None = None
    batch: int | None = None


@dataclass
class Record:
    """A check and what came of it.

    reason: one line, for every status but PASSED. said: what it has found, in a line each.
    problems: what a check that went on has found wrong. figures: whatever was measured. targets: not met is not failed.
    """

    name: str
    status: Status
    reason: str = ""
    traceback: str = ""
    seconds: float = 0.0
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    targets: list[Limit] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON can say them."""
        return {name: plain(value) for name, value in vars(self).items()} | {
            "targets": [plain(vars(target)) for target in self.targets]
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """Raises ValueError, KeyError or TypeError for another file's values."""
        targets = [Limit(**target) for target in values["targets"]]
        return cls(**{**values, "status": Status(values["status"]), "targets": targets})


class Bench:
    """Notebook of a running check. Whatever it is told is on disk at once, so that a crash loses nothing.

    seconds: that the check may take; it ends itself when `left` says so.
    """

    def __init__(self, name: str, settings: Settings, seconds: float, path: Path) -> None:
        self.settings = settings
        self.size, self.cuda, self.out = settings.size, settings.cuda, settings.out
        self.record = Record(name, Status.FAILED, reason="it has not ended")
        self._path = path
        self._start = time.monotonic()
        self._seconds = seconds
        self._write()

    def left(self) -> float:
        """Seconds that remain."""
        return self._seconds - (time.monotonic() - self._start)

    def note(self, **figures: object) -> None:
        """Write figures down."""
        self.record.figures.update(figures)
        self._write()

    def say(self, text: str) -> None:
        """Write down a finding, in one line for people."""
        self.record.said.append(text)
        self._write()

    def problem(self, text: str) -> None:
        """Something is wrong: the check goes on, and will have failed."""
        self.record.problems.append(text)
        self._write()

    def target(self, *targets: Limit) -> None:
        """Write targets down."""
        self.record.targets += targets
        self._write()

    def finish(self, status: Status, reason: str = "", traceback: str = "") -> None:
        """The check has ended; PASSED only counts if there was no problem."""
        if status is Status.PASSED and self.record.problems:
            status, reason = Status.FAILED, self.record.problems[0]
        self.record.status, self.record.reason, self.record.traceback = status, reason, traceback
        self._write()

    def _write(self) -> None:
        self.record.seconds = time.monotonic() - self._start
        replace_text(self._path, json.dumps(self.record.to_json()))


@dataclass(frozen=True)
class Check:
    """One thing to check.

    run: importable by its name, for it runs in a process of its own. title: for the table.
    share: of the time, relative to the others. least_s: at full size, below which it is not begun.
    """

    name: str
    title: str
    run: Callable[[Bench], None]
    share: float
    least_s: float = 5.0


def replace_text(path: Path, text: str) -> None:
    """Write a file so that its readers find all of one version, also after this process was killed."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def plain(value: object) -> object:
    """The value as JSON can say it: numbers that are not finite become None."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def run_isolated(
    check: Check, settings: Settings, seconds: float, grace_s: float = GRACE_S, most_s: float = math.inf
) -> Record:
    """Run the check; what came of it, whatever that is.

    seconds: that it may take. most_s: after which it is killed at any rate. Its output goes to `logs/<name>.log` and
    its record to `checks/<name>.json` in the folder of the results. Interrupting or killing the caller ends the check's
    process, too, with all that it has started.
    """
    record, log = _record_path(settings.out, check.name), settings.out / "logs" / f"{check.name}.log"
    for path in (record, log):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    start = time.monotonic()
    kill_s = min(1.5 * seconds + grace_s, most_s)
    dump_at = start + kill_s - min(2.0, grace_s / 2)
    # Forked from a server that has imported everything and done nothing, so that there is neither CUDA nor a thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.check.gpu_check", "torch._dynamo"])  # which optimizers import
    # No daemon, which could not start the processes that tests need; it ends with this one in any case.
    process = context.Process(target=_run, args=(check.name, check.run, settings, seconds, dump_at))
    process.start()
    try:
        process.join(kill_s)
    finally:
        ended = not process.is_alive()
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # what it has started
        process.join()
    found = read_record(settings.out, check.name)
    if not ended:
        found.status, found.reason = Status.FAILED, f"it did not end within {kill_s:.0f} s and was killed; see {log}"
    elif process.exitcode:
        found.status, found.reason = Status.FAILED, f"its process ended with {_exit(process.exitcode)}; see {log}"
    if (not ended or process.exitcode) and log.exists():
        found.traceback = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    found.seconds = time.monotonic() - start
    return found


def _run(name: str, run: Callable[[Bench], None], settings: Settings, seconds: float, dump_at: float) -> None:
    """The process of one check, with a process group of its own for all that it starts.

    dump_at: when it shall say what it is doing, by time.monotonic().
    """
    os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with (settings.out / "logs" / f"{name}.log").open("w") as log:
        for stream in (1, 2):  # stdout and stderr, so that what C libraries print is caught, too
            os.dup2(log.fileno(), stream)
        faulthandler.enable(log)
        faulthandler.dump_traceback_later(max(0.01, dump_at - time.monotonic()), file=log)
        bench = Bench(name, settings, seconds, _record_path(settings.out, name))
        try:
            run(bench)
        except Skipped as reason:
            bench.finish(Status.SKIPPED, str(reason))
        except BaseException as error:
            bench.finish(Status.FAILED, f"{type(error).__name__}: {error}".partition("\n")[0], traceback.format_exc())
            traceback.print_exc()
        else:
            bench.finish(Status.PASSED)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through the interpreter's exit: threads of a broken check could keep it from ending.
        os._exit(0)


def _end_with(server: int) -> None:
    """Kill this process group when the server that it was forked from has ended, as it does with its caller."""
    while os.getppid() == server:
        time.sleep(_POLL_S)
    os.killpg(0, signal.SIGKILL)


def _record_path(out: Path, name: str) -> Path:
    return out / "checks" / f"{name}.json"


def read_record(out: Path, name: str) -> Record:
    """Read the record that the check has written so far."""
    try:
        return Record.from_json(json.loads(_record_path(out, name).read_text()))
    except (OSError, ValueError) as error:
        return Record(name, Status.FAILED, f"it wrote nothing down ({error})")


def _exit(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    number = -code
    hint = ", perhaps for want of host memory" if number == signal.SIGKILL else ""
    return f"signal {signal.Signals(number).name}{hint}"
