"""Private attributes of tensors and of their storages, without public names in torch 2.6 to 2.13.

`StorageWeakRef` is equal to another one of the same storage; `weakref.ref` is to a Python object, of which torch may
make several for one storage. `torch.func.debug_unwrap`, which 2.6 does not have, can replace `unwrapped` one day.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

version_counter: Callable[[Tensor], int] = operator.attrgetter("_version")
"""Returns the number of in-place writes to the tensor, or to another one that shares its counter.

Backward compares it, to refuse saved tensors that were written to. Raises RuntimeError for an inference tensor.
"""

storage_address: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Returns the address of torch's storage object: the same for all tensors of the storage, whose memory may move."""

tensor_address: Callable[[Tensor], int] = operator.attrgetter("_cdata")
"""Returns the address of torch's tensor object. `model.to()` may put another one behind the same Python object."""

has_storage: Callable[[Tensor], bool] = torch._C._has_storage
"""Returns whether one storage has the tensor's values: not of a sparse or MKLDNN tensor, or within torch.func."""

is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor
"""Returns whether the tensor stands for zeros without memory, as in forward-mode AD: it has a storage, no address."""


class StorageObjects:
    """Keeps the storage objects of tensors, not their memory, so that no other object has the address of one meanwhile.

    addresses: as `storage_address`. Of many at once: calls of Python make and delete each `StorageWeakRef`.
    """

    __slots__ = ("_free", "addresses")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.addresses: list[int] = []
        # Modules may be gone at the interpreter's exit.
        self._free: Callable[[int], None] = torch.Storage._free_weak_ref  # type: ignore[attr-defined]
        for tensor in tensors:
            address: Any = tensor.untyped_storage()._weak_ref()
            self.addresses.append(address)

    def __del__(self) -> None:
        for address in self.addresses:
            self._free(address)


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which this is a view, and whose version counter it shares; itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


def converted_from(tensor: Tensor) -> Tensor | None:
    """Return the leaf of which this is a conversion to another dtype, or a view of one, by autograd; else None."""
    node = base_of(tensor).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    found: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return found


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether the tensor is of a subclass that has its values in other tensors."""
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    return wraps


def held_tensor(tensor: Any) -> Tensor | None:
    """Return the one tensor that a wrapper has its values in, if that is dense and of the same shape and dtype.

    Such are torchao's subclasses for training in lower precision. None if it has other tensors besides, such as scales,
    for then the one alone has not the wrapper's values.
    """
    names, _ = tensor.__tensor_flatten__()
    held: Any = getattr(tensor, names[0]) if len(names) == 1 else None
    if type(held) not in PLAIN or held.layout != torch.strided:
        return None
    alike: bool = (held.shape, held.dtype) == (tensor.shape, tensor.dtype)
    return held if alike else None


PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that wrap no other."""


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor without the wrappers of torch.func, such as of torch.func.vmap."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


hooks_after_accumulation: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)
"""Returns the hooks of `register_post_accumulate_grad_hook` by the ids of their handles; None: there was never one.

Torch calls them in the order of the dict.
"""


def share_gradient_hooks(parameter: Tensor, other: Tensor) -> None:
    """Let torch call the hooks of `parameter.register_hook`, later ones included, for the gradient of `other`, too."""
    if parameter._backward_hooks is None:
        parameter._backward_hooks = OrderedDict()  # to which `register_hook` adds, and its handles refer
    other._backward_hooks = parameter._backward_hooks


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether there are hooks of `parameter.register_hook`."""
    return bool(parameter._backward_hooks)


def first_counted(parameters: Iterable[Tensor]) -> Tensor | None:
    """Return the first of these on which a hook of `register_multi_grad_hook` waits for other gradients, too."""
    for parameter in parameters:  # in one loop: each forward of a block asks
        hooks = parameter._backward_hooks
        if hooks and any("register_multi_grad_hook.<locals>.get_inner_hook" in repr(hook) for hook in hooks.values()):
            return parameter
    return None


def hook_again(parameter: Tensor) -> None:
    """Let the tensor object that a swap has put behind the parameter call the parameter's hooks again.

    `register_post_accumulate_grad_hook` does so only with the first hook.
    """
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
