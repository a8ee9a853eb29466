"""The functions of the runtime are found in what torch has loaded."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dos.torch_internals.runtime import runtime_functions

CALLS = ("StreamWaitEvent", "EventRecord", "MemcpyAsync")
LAUNCHES = {"cuda": "cuLaunchKernel", "hip": "hipModuleLaunchKernel"}


def loaded(monkeypatch: pytest.MonkeyPatch, name: str, *, missing: str = "") -> list[int]:
    """Let torch have these libraries; the addresses of the functions that are looked for."""
    names = (*(name + call for call in CALLS), "sleep", LAUNCHES[name])
    functions = {each: ctypes.CFUNCTYPE(None)(lambda: None) for each in names}
    found = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions.values()]
    functions.pop(missing, None)
    libraries: dict[str, Any] = {f"libtorch_{name}.so": SimpleNamespace(_ZN2at4cuda5sleepEl=functions.pop("sleep"))}
    libraries["libcuda.so.1"] = SimpleNamespace(**functions)
    libraries[f"libc10_{name}.so"] = SimpleNamespace(**functions)
    monkeypatch.setattr(ctypes, "CDLL", lambda library: libraries[library])
    monkeypatch.setattr(torch.version, "hip", "7" if name == "hip" else None)
    return found


@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(monkeypatch, name) == list(runtime_functions() or ())


@pytest.mark.parametrize("missing", ["cudaMemcpyAsync", "cuLaunchKernel"])
def test_torch_queues_where_one_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, "cuda", missing=missing)
    assert runtime_functions() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_none() -> None:
    assert runtime_functions() is None
