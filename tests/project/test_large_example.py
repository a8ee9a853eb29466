"""The example of a model that is larger than the GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.support import ROOT
from tests.support.ranks import needs_fsdp2

EXAMPLE = ROOT / "examples" / "larger_than_the_gpu.py"


@needs_fsdp2
def test_a_model_larger_than_the_device_learns() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    whole, at_once = map(int, re.findall(r"(\d+) bytes", done.stdout))
    assert 0 < at_once < whole / 4
    first, last = map(float, re.findall(r"\d+\.\d+", done.stdout.splitlines()[-1]))
    assert last < first / 2
