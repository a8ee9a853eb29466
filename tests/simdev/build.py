"""Compiles the simulated accelerator for the torch that is installed: ``python -m tests.simdev.build``."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tests.support import ROOT

_SOURCE = Path(__file__).with_name("simdev.cpp")
_TORCH = Path(torch.__file__).parent
_FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-shared",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    f"-I{_TORCH}/include",
    f"-I{_TORCH}/include/torch/csrc/api/include",
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
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise UnavailableError("there is no C++ compiler (g++)")
    if sys.platform != "linux":
        raise UnavailableError("it maps memory as Linux does")
    key = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), torch.__version__.encode(), *map(str.encode, _FLAGS)]))
    found = ROOT / "build" / "simdev" / f"{key.hexdigest()[:16]}.so"
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        made = found.with_suffix(f".{os.getpid()}")
        libraries = (f"-L{_TORCH}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_TORCH}/lib")
        subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(made), *libraries], check=True)
        made.replace(found)  # at once, for another process may look
    return found


if __name__ == "__main__":
    try:
        print(library())
    except UnavailableError as error:
        print(f"The simulated accelerator is not built, and its tests are skipped: {error}.")
