"""Runs a check in a process of its own: whatever it does, hangs and crashes included, the others go on."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from experiments.check.base import Bench, Check, Record, Settings, Skipped, Status

GRACE_S = 20.0
"""A check that has used up its time and half of it again has this much longer before it is killed."""
_LOG_LINES = 40


def run_isolated(
    check: Check, settings: Settings, seconds: float, grace_s: float = GRACE_S, most_s: float = math.inf
) -> Record:
    """Run the check; what came of it, whatever that is.

    seconds: that it may take. most_s: after which it is killed at any rate. Its output goes to `logs/<name>.log` and
    its record to `checks/<name>.json` in the folder of the results. Interrupting the caller ends the check's process,
    too, with all that it has started.
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
    process = context.Process(target=_run, args=(check.name, check.run, settings, seconds, dump_at), daemon=True)
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
    if not ended or process.exitcode:
        found.traceback = "\n".join(_tail(log))
    found.seconds = time.monotonic() - start
    return found


def _run(name: str, run: Callable[[Bench], None], settings: Settings, seconds: float, dump_at: float) -> None:
    """The process of one check, with a process group of its own for all that it starts.

    dump_at: when it shall say what it is doing, by time.monotonic().
    """
    os.setsid()
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
        # Not through the interpreter's exit: what a broken check has left behind could keep it from ending.
        os._exit(0)


def _record_path(out: Path, name: str) -> Path:
    return out / "checks" / f"{name}.json"


def read_record(out: Path, name: str) -> Record:
    """What the check has written down so far."""
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


def _tail(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return []
