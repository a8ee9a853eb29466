"""Private attributes of tensors, and of their storages. None of them has a public name in torch 2.6 to 2.13.

`torch.func.debug_unwrap`, which 2.6 does not have, can take the place of `unwrapped` one day.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

version_counter: Callable[[Tensor], int] = operator.attrgetter("_version")
"""How often the tensor, or another that shares its counter, was written to in place.

Backward compares it, to refuse saved tensors that were written to. An inference tensor has none: RuntimeError.
"""

storage_address: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Where torch's storage object is: the same for all tensors in one piece of memory, though that may move."""

tensor_address: Callable[[Tensor], int] = operator.attrgetter("_cdata")
"""Where torch's tensor object is. `model.to()` may put another one behind the same Python object."""

has_storage: Callable[[Tensor], bool] = torch._C._has_storage
"""Whether one storage has the tensor's values: not those of a sparse or MKLDNN tensor, or within torch.func."""

is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor
"""Whether it stands for zeros that lie nowhere, as forward-mode AD makes them: it has a storage, but no address."""


def is_view(tensor: Tensor) -> bool:
    """Whether the tensor is a view of another one."""
    return tensor._base is not None


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that this is a view of, and whose counter of writes it shares; itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


def converted_from(tensor: Tensor) -> Tensor | None:
    """The leaf of which this is a conversion to another dtype, or a view of one, by autograd's graph; None: of none."""
    node = base_of(tensor).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    found: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return found


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is of a subclass that has its values in other tensors."""
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    return wraps


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor out of what torch.func wraps around it, such as with torch.func.vmap."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def hook_again(parameter: Tensor) -> None:
    """Have hooks that are listed called again by the tensor object that a swap has put behind the parameter.

    `register_post_accumulate_grad_hook` does so with the first hook alone.
    """
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
