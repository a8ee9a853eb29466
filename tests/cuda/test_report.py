"""`python -m dos.report` on a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from dos import report
from tests.support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


def test_the_gpu_and_what_can_be_pinned_are_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"] == torch.cuda.get_device_name()
    assert found["gpu_memory_free_bytes"] <= found["gpu_memory_bytes"]
    assert "MiB" in found["pinned"]
    assert found["free_memory_from"]
