"""Finds the blocks of a model, and the parameters that belong to one block alone."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from dos.arguments import is_number, share_or_count
from dos.sharding.local import is_sharded
from dos.state.record import is_dense
from dos.torch_internals.modes import is_compiled
from dos.torch_internals.module_parameters import own_parameters
from dos.torch_internals.tensors import is_wrapper

Amount = int | float | Literal["auto"]
"""How many blocks stay on the device: a number, a share (a float), or the plan's choice."""


@dataclass
class Member:
    """A parameter of a block, and the modules that have it, each with its name there.

    trained: whether an optimizer updates it.
    where: the modules, weakly, with the names: a model's hooks refer to its blocks, and a cycle would leave the model
        to the garbage collector.
    """

    parameter: Tensor
    trained: bool = False
    where: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)

    def add(self, module: nn.Module, name: str) -> None:
        """Add a module that has the parameter under this name."""
        self.where.append((weakref.ref(module), name))

    @property
    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules that have the parameter, and its name in each."""
        found = ((reference(), name) for reference, name in self.where)
        return ((module, name) for module, name in found if module is not None)


def checked_weights(value: object) -> Amount | None:
    """Return how many blocks stay: a number as an int, a share from 0 to 1 as a float, "auto", or None.

    Raises TypeError or ValueError for anything else.
    """
    if value is None:
        return None
    if isinstance(value, str) and value == "auto":
        return "auto"
    if not is_number(value):
        raise TypeError(
            f"weights must be the number of blocks that stay on the device, a share of them as a float, 'auto' or "
            f"None, found {value!r}"
        )
    amount = share_or_count(value, least_float=math.inf)
    if amount is None:
        raise ValueError(f"weights must be 0 or more blocks as an int, or a share from 0 to 1, found {value}")
    return amount


def staying(amount: Amount, count: int) -> int:
    """Return how many of `count` blocks stay; none at first where the plan decides."""
    if amount == "auto":
        return 0
    return min(count, math.floor(amount * count) if isinstance(amount, float) else amount)


def spread(count: int, staying: int) -> frozenset[int]:
    """Return which of `count` blocks stay: evenly spread, so that fetches of all others overlap with compute."""
    return frozenset((2 * i + 1) * count // (2 * staying) for i in range(staying))


def find_blocks(model: nn.Module, blocks: Iterable[nn.Module] | None) -> list[nn.Module]:
    """Return the modules whose weights move one after another.

    blocks: the user's choice; None: the longest ModuleList of modules of one type.
    Raises TypeError for objects that are no modules, ValueError if there are none, or some are not in the model.
    """
    if blocks is None:
        lists = [
            list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(each) for each in m}) == 1
        ]
        found = max(lists, key=len, default=[])
        if not found:
            raise ValueError(
                f"weights= moves a model block by block, and {type(model).__name__} has no ModuleList of modules of "
                "one type; name them: optimizer.attach(model, weights=..., blocks=[model.first, model.second])"
            )
        return found
    if not isinstance(blocks, Iterable):
        raise TypeError(
            f"blocks must be modules, found {type(blocks).__name__}; pass model.layers, or a list of modules"
        )
    found = list(dict.fromkeys(blocks))
    wrong = [each for each in found if not isinstance(each, nn.Module)]
    if wrong:
        raise TypeError(
            f"blocks must be modules, found {type(wrong[0]).__name__}; pass model.layers, or a list of modules"
        )
    known = set(model.modules())
    foreign = [each for each in found if each not in known or each is model]
    if not found or foreign:
        name = type(foreign[0]).__name__ if foreign else "none"
        raise ValueError(
            f"blocks must be modules within the model, found {name}; pass model.layers, or a list of modules"
        )
    inner = {m for each in found for m in each.modules() if m is not each}
    nested = [each for each in found if each in inner]
    if nested:
        raise ValueError(f"a block must not be part of another one, found {type(nested[0]).__name__} within another")
    return found


def check_streamable(model: nn.Module, parameters: Collection[Tensor]) -> None:
    """Raise ValueError for a model whose weights cannot stream; the message says what to do."""
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "weights= is for one process, found DistributedDataParallel; on several GPUs use FSDP2 with "
            "CPUOffloadPolicy (docs/many-gpus.md)"
        )
    if any(map(is_sharded, [*parameters, *model.parameters()])):
        raise ValueError(
            "weights= is for whole parameters, found DTensors; FSDP2 moves its shards itself with CPUOffloadPolicy "
            "(docs/many-gpus.md)"
        )
    if any(map(is_wrapper, [*parameters, *model.parameters()])):
        raise ValueError(
            "weights= is for plain parameters, found wrappers of tensors, such as torchao's; attach the model without "
            "weights="
        )
    if is_compiled(model):
        raise ValueError(
            "weights= cannot reach into a model that is compiled as a whole; compile its blocks instead: "
            "for block in model.layers: block.compile()"
        )
    if any(is_lazy(p) for p in model.parameters()):
        raise ValueError("the model has uninitialised parameters; run a forward on the host before attach(weights=...)")


def members_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[Member]]:
    """Return the parameters of each block that no module outside of it has, and whose memory can be replaced."""
    inside = defaultdict[nn.Module, set[int]](set)
    for number, block in enumerate(blocks):
        for module in block.modules():
            inside[module].add(number)
    owners = defaultdict[int, set[int]](set)
    outside = {-1}
    found: list[dict[int, Member]] = [{} for _ in blocks]
    for module in model.modules():
        for name, parameter in own_parameters(module).items():
            if parameter is None:
                continue
            numbers = inside.get(module, outside)
            owners[id(parameter)] |= numbers
            for number in numbers - outside:
                found[number].setdefault(id(parameter), Member(parameter)).add(module, name)
    # A parameter of two blocks would be fetched for one and be stale in the other. A parameter that a module outside of
    # all blocks has, too, is read while no block runs.
    return [
        [member for key, member in mine.items() if len(owners[key]) == 1 and _can_stream(member.parameter)]
        for mine in found
    ]


def _can_stream(parameter: Tensor) -> bool:
    """Return whether the parameter's memory can be replaced: not if it is of a subclass, or has gaps in memory."""
    return type(parameter) is nn.Parameter and is_dense(parameter) and not parameter.is_neg() and parameter.numel() > 0
