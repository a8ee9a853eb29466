"""The number of the current stream of a CUDA device. Torch 2.6 to 2.13.

`torch.cuda.current_stream` goes through five functions and makes an object each time, and each gradient asks.
"""

from __future__ import annotations

import torch


def stream_number(device: int) -> int:
    """Return a number of the thread's current stream on the device with this index: no other stream there has it."""
    number: int = torch._C._cuda_getCurrentRawStream(device)
    return number
