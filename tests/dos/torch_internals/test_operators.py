"""What dos/torch_internals/operators.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

import pytest
import torch

from dos.torch_internals.operators import add_to_all, copy_all, queue_copies, queue_empty_kernel, tensor_at
from dos.torch_internals.tensors import version_counter

CHANGED = "torch has changed what dos/torch_internals/operators.py relies on"


def test_lists_of_tensors_are_written_in_place() -> None:
    """And each write counts."""
    tensors = [torch.ones(()), torch.ones(2, dtype=torch.bfloat16), torch.ones(0)]
    add_to_all(tensors, 1)
    assert [each.tolist() for each in tensors] == [2.0, [2.0, 2.0], []], CHANGED
    copies = [torch.empty_like(each) for each in tensors]
    copy_all(copies, tensors)
    assert [each.tolist() for each in copies] == [2.0, [2.0, 2.0], []], CHANGED
    assert [version_counter(each) for each in (*tensors, *copies)] == [1] * 6, CHANGED


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_copies_that_are_queued_together_are_those_of_copy(device: str) -> None:
    """In their order, of several dtypes, with a higher version for each."""
    sources = [torch.arange(3.0).to(dtype).to(device) for dtype in (torch.bfloat16, torch.float32)]
    destinations = [torch.zeros(3), torch.zeros(3)]
    queue_copies(destinations, sources)
    if device != "cpu":
        torch.cuda.synchronize()
    assert [each.tolist() for each in destinations] == [[0.0, 1.0, 2.0]] * 2, CHANGED
    assert [version_counter(each) for each in destinations] == [1, 1], CHANGED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_a_tensor_of_an_address_has_that_memory(dtype: torch.dtype) -> None:
    owner = torch.arange(8).to(dtype)
    found = tensor_at(owner[2:].data_ptr(), 5, dtype, owner.device)
    assert found.data_ptr() == owner[2:].data_ptr(), CHANGED
    assert found.tolist() == [2, 3, 4, 5, 6], CHANGED
    found.zero_()
    assert owner.tolist() == [0, 1, 0, 0, 0, 0, 0, 7], CHANGED
    del found
    assert owner[0] == 0, CHANGED


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_empty_kernel_ends_at_once() -> None:
    queue_empty_kernel()
    torch.cuda.synchronize()


def test_there_is_a_kernel_to_queue() -> None:
    assert callable(torch.cuda._sleep), CHANGED
    assert torch.cuda._sleep.__code__.co_varnames == ("cycles",), CHANGED
