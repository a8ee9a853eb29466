"""What dos/torch_internals/tensors.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dos.torch_internals.tensors import (
    StorageObjects,
    base_of,
    first_counted,
    has_storage,
    held_tensor,
    hook_again,
    hooks_after_accumulation,
    is_wrapper,
    is_zero_tensor,
    share_gradient_hooks,
    storage_address,
    tensor_address,
    unwrapped,
    version_counter,
)

CHANGED = "torch has changed what dos/torch_internals/tensors.py relies on"


def test_each_write_is_counted_by_all_that_share_a_counter() -> None:
    tensor = torch.zeros(4)
    view, detached, apart = tensor[1:], tensor.detach(), tensor.data
    for count, write in enumerate((tensor.add_, view.mul_, detached.sub_), start=1):
        write(1)
        assert [version_counter(each) for each in (tensor, view, detached)] == [count] * 3, CHANGED
    assert version_counter(apart) == 0, CHANGED
    with torch.inference_mode():
        uncounted = torch.zeros(4)
    with pytest.raises(RuntimeError, match="version counter"):
        version_counter(uncounted)


def test_views_know_the_tensor_that_they_are_of() -> None:
    tensor = torch.zeros(4)
    view = tensor[1:].view(3, 1)
    assert base_of(view) is tensor, CHANGED
    for whole in (tensor, tensor.detach()):
        assert base_of(whole) is whole, CHANGED


def test_a_storage_is_known_by_its_address() -> None:
    tensor, other = torch.zeros(4), torch.zeros(0)
    storage = tensor.untyped_storage()
    address = storage_address(storage)
    assert address == storage_address(tensor[1:].untyped_storage()) == StorageWeakRef(storage).cdata, CHANGED
    storage.resize_(0)
    assert storage.data_ptr() == other.data_ptr() == 0
    assert address == storage_address(storage) != storage_address(other.untyped_storage()), CHANGED


def test_no_other_storage_has_an_address_of_storage_objects_and_their_memory_goes() -> None:
    tensors = [torch.zeros(4) for _ in range(20)]
    kept = StorageObjects(tensors)
    assert kept.addresses == [storage_address(each.untyped_storage()) for each in tensors], CHANGED
    tensors.clear()
    assert all(map(torch.Storage._expired, kept.addresses)), CHANGED
    others = [torch.zeros(4) for _ in range(40)]
    assert {storage_address(each.untyped_storage()) for each in others}.isdisjoint(kept.addresses), CHANGED


def test_tensors_without_memory() -> None:
    dense = torch.ones(3)
    assert has_storage(dense), CHANGED
    assert not has_storage(dense.to_sparse()), CHANGED
    if torch.backends.mkldnn.is_available():
        assert not has_storage(dense.to_mkldnn()), CHANGED
    zeros = torch._efficientzerotensor(3)  # what forward-mode AD makes
    assert is_zero_tensor(zeros), CHANGED
    assert has_storage(zeros), CHANGED
    assert zeros.data_ptr() == 0, CHANGED
    assert not is_zero_tensor(torch.zeros(3)), CHANGED


class Wrapper(Tensor):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Tensor:
        return inner


def test_wrappers_are_told_by_how_they_are_taken_apart() -> None:
    assert is_wrapper(torch.zeros(2).as_subclass(Wrapper)), CHANGED
    assert not is_wrapper(torch.zeros(2)), CHANGED
    assert not is_wrapper(nn.Parameter(torch.zeros(2))), CHANGED


def test_a_wrapper_of_one_dense_tensor_says_which() -> None:
    """torch.compile and FSDP take wrappers apart by the same method."""
    inner = torch.ones(2)

    class Holds(Tensor):
        @staticmethod
        def __new__(cls, dtype: torch.dtype, *names: str) -> Any:
            return Tensor._make_wrapper_subclass(cls, (2,), dtype=dtype)

        def __init__(self, dtype: torch.dtype, *names: str) -> None:
            self.names, self.inner, self.other = names, inner, torch.ones(())

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return list(self.names), None

        @classmethod
        def __tensor_unflatten__(cls, *_: object) -> None: ...

        @classmethod
        def __torch_dispatch__(cls, *_: object) -> None: ...

    assert held_tensor(Holds(torch.float32, "inner")) is inner, CHANGED
    assert held_tensor(Holds(torch.bfloat16, "inner")) is None
    assert held_tensor(Holds(torch.float32, "inner", "other")) is None
    assert held_tensor(Holds(torch.float32, "other")) is None


def test_what_torch_func_wraps_is_inside() -> None:
    tensor, found = torch.randn(3, 2), []

    def look(row: Tensor) -> Tensor:
        found.extend([has_storage(row), unwrapped(row)])
        return row.sum()

    torch.func.vmap(torch.func.grad(look))(tensor)
    within, inside = found
    assert not within, CHANGED
    assert storage_address(inside.untyped_storage()) == storage_address(tensor.untyped_storage()), CHANGED
    assert unwrapped(tensor) is tensor, CHANGED


def test_a_swap_loses_hooks_until_they_are_listed_again() -> None:
    parameter, calls = nn.Parameter(torch.ones(2)), []

    def backward() -> list[str]:
        calls.clear()
        (2 * parameter).sum().backward()
        return calls.copy()

    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("before"))
    assert backward() == ["before"]
    address = tensor_address(parameter)
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.zeros(2)))
    assert tensor_address(parameter) != address, CHANGED
    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    assert backward() == [], f"torch keeps hooks: hook_again can go from {CHANGED.split()[-3]}"
    hook_again(parameter)
    assert backward() == ["before", "after"], CHANGED


def test_hooks_after_accumulation_are_listed_while_they_are_registered() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert hooks_after_accumulation(parameter) is None, CHANGED

    def hook(_: torch.Tensor) -> None:
        pass

    handle = parameter.register_post_accumulate_grad_hook(hook)
    assert list(hooks_after_accumulation(parameter).values()) == [hook], CHANGED
    handle.remove()
    assert not hooks_after_accumulation(parameter), CHANGED


def test_hooks_of_one_parameter_run_for_the_gradient_of_another() -> None:
    parameter, copy, calls = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2)), list[str]()
    early = parameter.register_hook(lambda _: calls.append("early"))
    share_gradient_hooks(parameter, copy)
    late = parameter.register_hook(lambda gradient: 2 * gradient)
    copy.sum().backward()
    assert (calls, copy.grad.tolist()) == (["early"], [2, 2]), CHANGED
    early.remove()
    late.remove()
    copy.sum().backward()
    assert (calls, copy.grad.tolist()) == (["early"], [3, 3]), CHANGED


def test_a_storage_is_known_as_long_as_anything_has_it() -> None:
    tensor = torch.zeros(4)
    first, kept = StorageWeakRef(tensor.untyped_storage()), tensor.data
    assert StorageWeakRef(kept.untyped_storage()) == first, CHANGED
    tensor.data = torch.ones(4)
    assert StorageWeakRef(tensor.untyped_storage()) != first, CHANGED
    assert not first.expired(), CHANGED
    del kept
    assert first.expired(), CHANGED


def test_hooks_that_count_gradients_have_a_name() -> None:
    p, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert first_counted([p]) is None, CHANGED
    p.register_hook(lambda g: g)
    torch.autograd.graph.register_multi_grad_hook([p, other], lambda g: None, mode="any")
    assert first_counted([p]) is None, CHANGED
    torch.autograd.graph.register_multi_grad_hook([p, other], lambda g: None)
    assert first_counted([other]) is other, CHANGED
    assert first_counted([torch.ones(()), p]) is p, CHANGED
