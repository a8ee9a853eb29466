"""Tokens of gradients, which tell whether a gradient is still the same as when its token was made."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from dos.sharding.fingerprint import fingerprint
from dos.sharding.local import counts_writes, local, version
from dos.state.record import Form
from dos.torch_internals.tensors import StorageObjects, storage_address, version_counter

GradientOrHandle = Tensor | Future
"""A gradient in `p.grad`, or the handle that `OffloadedGradients.gradients` has for an offloaded one."""


class Token:
    """A gradient as it is now: this object, this memory read in this way, this version.

    Numbers alone do not tell two gradients apart: versions begin anew with each tensor, and the allocator reuses
    addresses. The object alone does not either: `gradient.data = ...` changes neither the object nor its version.

    gradient: None where DDP will set another tensor with the same values as `p.grad`.
    negated: whether its memory has the values with the other sign, as a lazily negated tensor's; False for a handle.
    sent: whether `Tokens` has it.
    bits: a fingerprint, where the version does not count all writes, or for another tensor; rewritten: whether
        `look_at_bits` has found other bits.
    """

    # `step()` reads thousands of these before its first work, cold: they take less memory so.
    __slots__ = (
        *("_address", "_form", "_keeps", "_plain", "_seen_version", "_storage"),
        *("bits", "gradient", "negated", "rewritten", "sent"),
    )

    def __init__(self, gradient: GradientOrHandle, *, here: bool = True, like: Form | None = None) -> None:
        """here: whether `p.grad` is this tensor itself. like: the form that it most likely has."""
        # Weak: user code releases a gradient by setting it to None, and its memory must be released then.
        self.gradient: weakref.ref[Any] | None = weakref.ref(gradient) if here else None
        self.bits: Tensor | None = None
        self.rewritten = self.negated = self.sent = False
        self._plain = type(gradient) is Tensor  # as almost all gradients are
        if isinstance(gradient, Tensor):
            try:
                self._seen_version = version_counter(gradient) if self._plain else version(gradient)
            except RuntimeError:
                self._plain, self._seen_version = False, 0  # an inference tensor counts no writes
            mine = gradient if self._plain else local(gradient)
            # Keeps the storage object, not its memory: no other storage can have the same address meanwhile.
            self._keeps = StorageObjects([mine])
            self._storage = self._keeps.addresses[0]
            self.negated = mine.is_neg()  # once, because it lets go of Python's lock
            form = mine.dtype, mine.shape, mine.stride(), self.negated
            self._address, self._form = mine.data_ptr(), like if like == form else form  # one object compares at once
            if not here or not (self._plain or counts_writes(gradient)):
                self.bits = fingerprint(mine)

    @staticmethod
    def of_plain(gradients: Sequence[Tensor], forms: Sequence[Form | None]) -> list[Token]:
        """Return the tokens of gradients in `p.grad` that are plain tensors, no inference tensors among them.

        forms: that they most likely have. As one by one, in one function: hooks of backward call this.
        """
        keeps, found, new, ref = StorageObjects(gradients), list[Token](), Token.__new__, weakref.ref
        for gradient, like, storage in zip(gradients, forms, keeps.addresses, strict=True):
            token = new(Token)
            token.gradient, token._plain, token.bits = ref(gradient), True, None
            token.rewritten = token.sent = False
            token._seen_version, token._address = version_counter(gradient), gradient.data_ptr()
            token._keeps, token._storage, token.negated = keeps, storage, gradient.is_neg()
            form = gradient.dtype, gradient.shape, gradient.stride(), token.negated
            token._form = like if like == form else form
            found.append(token)
        return found

    @property
    def alive(self) -> GradientOrHandle | None:
        """The gradient; None if it was released."""
        return None if self.gradient is None else self.gradient()

    def holds(self, gradient: GradientOrHandle) -> bool:
        """Return whether this is the token of the gradient, except for writes, which `writes` counts."""
        if self.rewritten or self.gradient is None or self.gradient() is not gradient:
            return False
        if not isinstance(gradient, Tensor):
            return True
        mine = gradient if self._plain else local(gradient)
        same = self._storage == storage_address(mine.untyped_storage()) and self._address == mine.data_ptr()
        return same and self._form == (mine.dtype, mine.shape, mine.stride(), mine.is_neg())

    def unchanged(self, gradient: Tensor, writes: int | None) -> bool:
        """Return whether the token `holds` the gradient, whose values are the same.

        writes: the number of writes since that changed no value; None: values have changed.
        """
        if self._plain and self.gradient is not None and self.gradient() is gradient:
            # `holds`, without a call: `step()` asks for each gradient that was sent, before its first work.
            form = gradient.dtype, gradient.shape, gradient.stride(), gradient.is_neg()
            same = not self.rewritten and self._address == gradient.data_ptr() and self._form == form
            if not same or self._storage != storage_address(gradient.untyped_storage()):
                return False
        elif not self.holds(gradient):
            return False
        now = version_counter(gradient) if self._plain else version(gradient)
        return self.bits is not None or now - self._seen_version == writes

    def writes(self, gradient: Tensor) -> int:
        """Return the number of writes to the gradient, which the token `holds`, as far as versions count them."""
        return (version_counter(gradient) if self._plain else version(gradient)) - self._seen_version


class Tokens:
    """Tokens of gradients that are sent together, column by column, so that all are compared at once.

    usual: whether the columns say all that the tokens do, as long as none is `rewritten`.
    """

    __slots__ = ("_addresses", "_forms", "_gradients", "_storages", "_versions", "usual")

    def __init__(self, tokens: Sequence[Token], start: int) -> None:
        """start: the first element of the first gradient that was sent."""
        each = [
            (t._address, t._form, t._seen_version, t._storage, t.gradient, t._plain and t.bits is None) for t in tokens
        ]
        addresses, self._forms, versions, storages, self._gradients, plain = zip(*each, strict=True)
        self._addresses = addresses[0] + start * self._forms[0][0].itemsize, *addresses[1:]
        self._versions, self._storages = [*versions], [*storages]  # the tokens keep the storages
        self.usual = False not in plain and None not in self._gradients
        for token in tokens:
            token.sent = True

    def unchanged(
        self, gradients: Sequence[Tensor], addresses: Sequence[int], forms: Sequence[object], writes: int
    ) -> bool:
        """Return whether each token is known to be `unchanged`; False: ask each.

        addresses: of the first element of each gradient that was sent. forms: of the gradients.
        """
        return (
            self.usual
            and self._addresses == addresses
            and self._forms == forms
            and all(map(operator.is_, [known() for known in self._gradients if known is not None], gradients))
            and [*map(version_counter, gradients)]
            == ([n + writes for n in self._versions] if writes else self._versions)
            and [*map(storage_address, map(Tensor.untyped_storage, gradients))] == self._storages
        )
