"""Programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import ROOT

PACKAGES = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
"""Where this Python has torch and the rest."""


def run(
    *command: str | Path, cwd: Path = ROOT, timeout: float = 200, good: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with so much more in its environment. good: fail unless it ends well."""
    env: Mapping[str, str] = {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0 or not good, done.stdout + done.stderr
    return done


def python(*arguments: str | Path, cwd: Path = ROOT, good: bool = True, **environment: str) -> str:
    """What Python prints, with the checkout's packages. good: fail unless it ends well; else what it says of that."""
    done = run(sys.executable, *arguments, cwd=cwd, good=good, **{"PYTHONPATH": str(ROOT), **environment})
    return done.stdout if good else done.stderr
