"""Compiles the simulated accelerator for the torch that is installed."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_BUILT = _FOLDER.parents[1] / "build" / "simdev"
_TORCH = Path(torch.__file__).parent
_SHARED = "../../csrc/order.h", "../../csrc/arrivals.h", "../../csrc/runtime.h"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")
_TORCH_FLAGS = (
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    f"-I{_TORCH}/include",
    f"-I{_TORCH}/include/torch/csrc/api/include",
    *(f"-L{_TORCH}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_TORCH}/lib"),
)


class UnavailableError(Exception):
    """It cannot be compiled here; the message says why."""


def library() -> Path:
    """The compiled library for this torch and this source; compiles it if need be, which takes a minute.

    Raises UnavailableError without a compiler or with a torch that lacks what it needs, CalledProcessError if the
    compiler fails.
    """
    header = _TORCH / "include/c10/core/CachingDeviceAllocator.h"
    if not header.exists() or "struct C10_API DeviceAllocator" not in header.read_text():
        raise UnavailableError(f"torch {torch.__version__} has no c10::DeviceAllocator")
    return _compiled("simdev.cpp", _TORCH_FLAGS, torch.__version__)


def arithmetic() -> Path:
    """The compiled library of timed.cpp, which needs no torch. Raises as `library`."""
    return _compiled("timed.cpp", (), "")


def _compiled(name: str, flags: tuple[str, ...], version: str) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise UnavailableError("there is no C++ compiler (g++)")
    if sys.platform != "linux":
        raise UnavailableError("it maps memory as Linux does")
    sources = [(_FOLDER / each).read_bytes() for each in (name, "timed.h", *_SHARED)]
    key = hashlib.sha256(b"\0".join([*sources, *map(str.encode, (version, *_FLAGS, *flags))]))
    found = _BUILT / f"{key.hexdigest()[:16]}.so"
    found.parent.mkdir(parents=True, exist_ok=True)
    with found.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may compile the same
        if not found.exists():
            made = found.with_suffix(".made")
            subprocess.run([compiler, *_FLAGS, str(_FOLDER / name), "-o", str(made), *flags], check=True)
            made.replace(found)  # whole, also after an interruption
    return found
