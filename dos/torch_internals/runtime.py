"""The functions of CUDA's runtime, or HIP's, in the libraries that torch has loaded. Torch 2.6 to 2.13.

No GPU has run this.
"""

from __future__ import annotations

import ctypes

import torch


def runtime_functions() -> tuple[int, ...] | None:
    """Return the addresses of those that `dos._adam.Runtime` takes; None where one has another name."""
    name = "hip" if torch.version.hip else "cuda"
    try:
        calls, torch_calls = (ctypes.CDLL(f"lib{part}_{name}.so") for part in ("c10", "torch"))
        # By way of a library that is linked with the runtime, whose own name has its version.
        found = [getattr(calls, name + call) for call in ("StreamWaitEvent", "EventRecord", "MemcpyAsync")]
        found.append(torch_calls._ZN2at4cuda5sleepEl)  # at::cuda::sleep(int64_t), as torch.cuda._sleep
        found.append(calls.hipModuleLaunchKernel if torch.version.hip else ctypes.CDLL("libcuda.so.1").cuLaunchKernel)
    except (OSError, AttributeError):
        return None
    return tuple(ctypes.cast(call, ctypes.c_void_p).value or 0 for call in found)
