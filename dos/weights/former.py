"""The values that weights had where user code keeps the memory of these, and may put it back (`p.data = kept`)."""

from __future__ import annotations

from torch import Tensor

from dos.state.own_storage import with_own_storage
from dos.torch_internals.tensors import StorageWeakRef


class FormerMemory:
    """The memory that each parameter of a block was given, and what was in it before other values were written there.

    User code that exchanges weights for an evaluation keeps `p.data`, sets other memory, and puts the first one back.
    Values of the other memory are copied meanwhile to where updates and transfers find them: into what user code keeps.
    """

    def __init__(self) -> None:
        # By ids of parameters, which the block keeps. References are weak: most often user code keeps nothing.
        self._given: dict[int, list[StorageWeakRef]] = {}
        """Memory of each parameter whose values are those of the parameter, or were before it moved."""
        self._kept: dict[int, list[tuple[StorageWeakRef, Tensor]]] = {}
        self._several = set[int]()
        """The parameters of which user code keeps memory that they had before."""

    def __bool__(self) -> bool:
        return bool(self._kept or self._several)

    def give(self, p: Tensor, place: Tensor) -> None:
        """Let the parameter have this memory, in a storage of its own."""
        # Programs that save checkpoints take tensors that share one for one tensor.
        p.data = with_own_storage(place)
        alive = [each for each in self._given.get(id(p), ()) if not each.expired()]
        (self._several.add if alive else self._several.discard)(id(p))
        self._given[id(p)] = [*alive, StorageWeakRef(p.untyped_storage())]

    def is_back(self, p: Tensor) -> bool:
        """Return whether user code has put memory back into which other values were written since."""
        return id(p) in self._kept and self._find(p) is not None

    def _find(self, p: Tensor) -> Tensor | None:
        now = StorageWeakRef(p.untyped_storage())
        return next((values for storage, values in self._kept[id(p)] if storage == now), None)

    def take(self, p: Tensor, place: Tensor, values: Tensor) -> Tensor:
        """Return the values that the parameter is to have: these, or those from before if its memory was put back.

        `place`, in which the values of before are, is about to be overwritten.
        """
        now = StorageWeakRef(p.untyped_storage())
        if now in self._given.get(id(p), ()):
            return place  # user code has put back what it kept, and the parameter has moved and was trained since
        before = self._find(p) if id(p) in self._kept else None
        kept = [each for each in self._kept.pop(id(p), ()) if each[0] != now and not each[0].expired()]
        given = [each for each in self._given.pop(id(p), ()) if not each.expired()]
        if given:
            former = place.detach().to("cpu", copy=True)  # the device may have no memory for it
            kept += [(each, former) for each in given]
        if kept:
            self._kept[id(p)] = kept
        if before is None:
            return values
        self._given[id(p)] = [now]  # user code may put it back once more, as where it has kept it since the beginning
        return before
