"""What holds optimizer state: one store for each tier, all with the same verbs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from dos.devices import Copy, Job
from dos.state.arena import State
from dos.state.device_store import DeviceStore
from dos.state.host_store import HostStore
from dos.state.subgroup import Subgroup
from perfmodel.plan import Move, Tier


class Store(Protocol):
    """State in one tier."""

    def has(self, subgroup: Subgroup) -> bool:
        """Whether there is room here that is the subgroup's own."""

    def reserve(self, subgroups: Iterable[Subgroup]) -> list[Subgroup]:
        """Make room for the state of these; those for which there is none, if that can be elsewhere."""

    def drop(self, subgroup: Subgroup) -> None:
        """Give the subgroup's room back. Its state is elsewhere; nothing in flight may use what was here."""

    def fetch(self, subgroup: Subgroup) -> State:
        """The subgroup's state, in memory from which another store can copy it."""

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], beside: Sequence[Copy] = ()
    ) -> Job:
        """Copy the subgroup's state here once all of `after` are done; there is room.

        number: of the subgroup in the plan. beside: what else goes the same way.
        """


class Stores:
    """All stores. Of several that have a subgroup's state the first has the newest."""

    def __init__(self, device: DeviceStore, host: HostStore) -> None:
        self.device = device
        self.host = host
        self.of: dict[Tier, Store] = {Tier.DEVICE: device, Tier.HOST: host}

    def where(self, subgroup: Subgroup) -> Tier | None:
        """Where the subgroup's state is; None: nowhere, it was never updated."""
        return next((tier for tier, store in self.of.items() if store.has(subgroup)), None)

    def move(
        self, move: Move, number: int, subgroup: Subgroup, after: Sequence[Job], beside: Sequence[Copy] = ()
    ) -> Job:
        """Bring a subgroup's state from one tier to another. Arguments: see `Store.store`."""
        source = self.of[move.source].fetch(subgroup)
        return self.of[move.destination].store(number, subgroup, source, after, beside)
