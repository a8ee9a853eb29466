"""How many calls and files of ours a gradient passes on its way to the kernel, as docs/architecture.md says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import dos
from dos import DOSAdam, EmulatedDevice
from dos.devices import Copy, Job
from dos.kernels import update
from perfmodel import Op
from tests.support.training import FAST, backward, mlp, train

OURS = Path(dos.__file__).parent


def calls_of_ours() -> list[CodeType]:
    """What is called now, innermost first."""
    found, frame = [], sys._getframe(1)
    while frame.f_back is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return [code for code in found if Path(code.co_filename).is_relative_to(OURS)]


def files(calls: Sequence[CodeType]) -> list[str]:
    """In which they are, outermost first; without those around backward once it was asked for more in this process."""
    found = dict.fromkeys(str(Path(code.co_filename).relative_to(OURS)) for code in reversed(calls))
    return [
        file
        for file in found
        if file not in ("in_backward/runs.py", *(f"weights/{name}.py" for name in ("inputs", "interrupted", "parts")))
    ]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[list[CodeType]]:
    """What was called whenever the native kernel was."""
    seen: list[list[CodeType]] = []
    native = update._adam

    class Watched:
        def __getattr__(self, name: str) -> Callable[..., object]:
            seen.append(calls_of_ours())
            return getattr(native, name)

    monkeypatch.setattr(update, "_adam", Watched())
    return seen


def test_with_all_parameters_on_the_host_six_calls_lie_above_the_kernel(kernel: list[list[CodeType]]) -> None:
    model = mlp()
    train(model, DOSAdam(model.parameters()), 2)
    called = [code.co_name for code in reversed(kernel[-1])]
    assert called == ["step", "holding", "step", "_commit", "apply", "__call__"]


def test_a_gradient_from_the_device_to_the_kernel_of_the_host(kernel: list[list[CodeType]]) -> None:
    """Two ways: backward sends it, and the CPU lane updates."""
    sent: list[list[CodeType]] = []

    class Watched(EmulatedDevice):
        def copy(self, op: Op, subgroup: int, copies: Sequence[Copy], after: Sequence[Job] = ()) -> Job:
            if op is Op.GRADIENT:
                sent.append(calls_of_ours())
            return super().copy(op, subgroup, copies, after)

    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=300, device=Watched(FAST, 10**9))
    train(model, optimizer, 2)
    sent.clear()
    train(model, optimizer, 1)
    in_backward = ["parameters/watching.py", "owners/gradients.py", "guard.py", "backward.py", "step/transit.py"]
    assert [files(calls) for calls in sent] == [in_backward] * len(sent)
    assert files(kernel[-1]) == ["step/issue.py", "step/host_lane.py", "step/work.py", "kernels/update.py"]


def test_backward_sends_a_gradient_through_at_most_six_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to the thread of the device's link."""
    deepest: list[list[str]] = []
    submit = ThreadPoolExecutor.submit

    def watched(self: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Any:
        deepest.append(files(calls_of_ours()))
        return submit(self, *args, **kwargs)

    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=300, device=EmulatedDevice(FAST, 10**9))
    train(model, optimizer, 2)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", watched)
    backward(model, 0)
    assert deepest, "backward sends gradients"
    assert max(map(len, deepest)) <= 6, deepest
