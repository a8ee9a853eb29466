"""The copies of a model's blocks: of which home each is, and of which block a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dos.devices import memory_of
from dos.torch_internals.tensors import storage_address
from dos.weights.block import Block


class Copies:
    """The copies of all blocks of one model."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._by_storage = {block.storage: block for block in blocks}

    @property
    def homes(self) -> dict[int, Tensor]:
        """The homes by the ids of their copies."""
        return {id(c): m.parameter for b in self._blocks for c, m in zip(b.copies, b.members, strict=True)}

    @property
    def of_homes(self) -> dict[int, Tensor]:
        """The copies by the ids of their homes."""
        return {id(m.parameter): c for b in self._blocks for c, m in zip(b.copies, b.members, strict=True)}

    def leave_memory(self, block: Block) -> None:
        """Let the copies of a block leave their memory, and know the block by their new storage."""
        del self._by_storage[block.storage]
        block.leave_memory()
        self._by_storage[block.storage] = block

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the block of which this is a copy, or a view of one; None for other tensors."""
        storage = memory_of(tensor)
        return None if storage is None else self._by_storage.get(storage_address(storage))
