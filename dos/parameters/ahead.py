"""A step as backward's last gradient finds it, while the device still computes: most often `step()` finds the same."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dos.gradients.departures import Departures, SoFar
from dos.parameters.active import Given, Share, Steady, updates_alike
from dos.parameters.registry import Registry
from dos.state.stores import Stores
from dos.state.subgroup import Subgroup
from dos.step.work import Columns, SubgroupUpdate, Subject, new_columns
from dos.torch_internals.tensors import storage_address, version_counter
from perfmodel.tasks import SubgroupState


class Ahead(NamedTuple):
    """A step as long as its gradients are those that are `known`, and departures are those of `departures`.

    It keeps no gradient alive, which user code may drop.

    taken: the number of steps so far. updates: without gradients; their `settings` are still empty, their `shares` of
        `steady`. before: each subgroup, whose state may have moved since.
    """

    steady: Steady
    taken: float
    known: Sequence[weakref.ref[Tensor]]
    addresses: Sequence[int]
    versions: Sequence[int]
    storages: Sequence[int]
    departures: SoFar
    updates: dict[Subgroup, SubgroupUpdate]
    shares: Sequence[Share]
    settings: list[Any]
    subjects: list[Subject]
    before: list[SubgroupState]

    @classmethod
    def of(cls, given: Given, registry: Registry, departures: Departures, stores: Stores) -> Ahead | None:
        """Look at a step with these gradients; return None if each has to be looked at in `step()`."""
        count = given.steady.counts_alike()
        if given.steady.with_masters or count is None:
            return None
        departures.begin_step(0)
        settings = list[Any]()
        updates = updates_alike(given, settings, registry)
        subjects = [departures.subject(subgroup, updates.get(subgroup)) for subgroup in registry.accelerated]
        found = departures.so_far()
        if found is None:
            return None
        tiers = stores.tiers(registry.accelerated)
        before = [subject.before_step(tier) for subject, tier in zip(subjects, tiers, strict=True)]
        for update in updates.values():
            update.columns = _NONE
        return cls(
            given.steady,
            count,
            [*map(weakref.ref, given.gradients)],
            given.addresses,
            *_states(given.gradients),
            found,
            updates,
            [share for subgroup in updates if (share := given.steady.shares[subgroup]) is not None],
            settings,
            subjects,
            before,
        )

    def holds(self, given: Given, departures: Departures) -> bool:
        """Return whether this is the step that begins with these gradients, for which departures then go on."""
        return (
            given.steady is self.steady
            and given.addresses == self.addresses
            and all(map(operator.is_, [known() for known in self.known], given.gradients))
            and _states(given.gradients) == (self.versions, self.storages)
            and departures.goes_on(self.departures)
        )

    def take(self, given: Given, scale: float) -> Mapping[Subgroup, SubgroupUpdate]:
        """Return the updates with these gradients. scale: of all of them."""
        self.settings[:] = self.steady.settings(self.taken, scale)
        for update, share in zip(self.updates.values(), self.shares, strict=True):
            update.take(share.columns(given, None))
        return self.updates


_NONE = new_columns([()] * len(Columns._fields))


def _states(gradients: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the versions and the storages of gradients."""
    return [*map(version_counter, gradients)], [*map(storage_address, map(Tensor.untyped_storage, gradients))]
