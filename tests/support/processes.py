"""Programs in processes of their own."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support import ROOT

PACKAGES = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
"""Where this Python has torch and the rest."""

Done = subprocess.CompletedProcess[str]

SERVER = """
import gc, json, os, runpy, sys
import torch._dynamo
import tests.support.training
gc.freeze()
while line := sys.stdin.readline():
    child = os.fork()
    if child:
        print(os.waitpid(child, 0)[1], flush=True)
        continue
    asked = json.loads(line)
    for number, name in enumerate((os.devnull, *asked["outputs"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    what, *sys.argv = asked["arguments"]
    sys.path[:1] = os.environ["PYTHONPATH"].split(os.pathsep)
    if what == "-c":
        sys.path.insert(0, "")
        code = sys.argv[0]
        sys.argv[0] = "-c"
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif what == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv.insert(0, what)
        sys.path.insert(0, os.path.dirname(what))
        runpy.run_path(what, run_name="__main__")
    break
"""
"""Imports modules once, which takes seconds, and runs each program in a fork, which ends as an interpreter does."""


def run(*command: str | Path, cwd: Path = ROOT, timeout: float = 200, good: bool = True, **environment: str) -> Done:
    """Run a program with so much more in its environment. good: fail unless it ends well."""
    env: Mapping[str, str] = {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0 or not good, done.stdout + done.stderr
    return done


def python(*arguments: str | Path, **settings: Any) -> str:
    """What Python prints. settings: of `run_python`."""
    return run_python(*arguments, **settings).stdout


def run_python(
    *arguments: str | Path,
    cwd: Path = ROOT,
    timeout: float = 200,
    good: bool = True,
    **environment: str,
) -> Done:
    """Run Python with the checkout's packages, of which torch and dos have been imported before.

    good: fail unless it ends well.
    """
    asked = list(map(str, arguments))
    server = _server()
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        request = {
            "arguments": asked,
            "cwd": str(cwd),
            "environment": {**os.environ, "PYTHONPATH": str(ROOT), **environment},
            "outputs": list(map(str, outputs)),
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], timeout)[0]:
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise subprocess.TimeoutExpired(asked, timeout)
        code = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        done = Done(asked, code, *(output.read_text() for output in outputs))
    assert done.returncode == 0 or not good, done.stdout + done.stderr
    return done


@functools.cache
def _server() -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
