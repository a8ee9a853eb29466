"""What dos/torch_internals/streams.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from dos.torch_internals.streams import find_stream_number

CHANGED = "torch has changed what dos/torch_internals/streams.py relies on"


def test_torch_has_numbers_of_streams() -> None:
    """A build for the CPU, too, in its declarations."""
    assert (
        "def _cuda_getCurrentRawStream(device: _int) -> _int"
        in Path(torch.__file__).with_name("_C").joinpath("__init__.pyi").read_text()
    ), CHANGED


def test_the_public_function_makes_an_object_each_time() -> None:
    assert "return Stream(" in inspect.getsource(torch.cuda.current_stream), "torch has become sufficient"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_each_stream_has_a_number_of_its_own() -> None:
    current, stream_number = torch.cuda.current_stream(), find_stream_number()
    before, side = stream_number(current.device_index), torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert stream_number(side.device_index) not in (before, 0), CHANGED
    assert stream_number(current.device_index) == before, CHANGED
