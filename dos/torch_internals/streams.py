"""The number of the current stream of a CUDA device. Torch 2.6 to 2.13.

`torch.cuda.current_stream` goes through five functions and makes an object each time, and each gradient asks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def find_stream_number() -> Callable[[int], int]:
    """Return torch's function, of the index of a device.

    It returns a number of the thread's current stream on that device: no other stream there has it.
    """
    found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return found
