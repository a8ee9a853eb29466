"""The memory of optimizer state: one store for each tier. The ledger knows where state is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from dos.devices import Copy, Device, Job
from dos.state.arena import State
from dos.state.device_store import DeviceStore
from dos.state.disk_store import DiskStore
from dos.state.homes import Homes
from dos.state.host_store import HostStore
from dos.state.subgroup import Subgroup
from perfmodel.plan import Move, Tier


class Store(Protocol):
    """Memory of one tier, and the copies that fill it."""

    def has(self, subgroup: Subgroup) -> bool:
        """Return whether the subgroup has room here."""

    def reserve(self, subgroups: Iterable[Subgroup]) -> list[Subgroup]:
        """Allocate room for the state of these; return the subgroups without, where their state may be elsewhere."""

    def drop(self, subgroup: Subgroup) -> None:
        """Drop the subgroup's room. Its state must be elsewhere, and no transfer in flight may use the room."""

    def fetch(self, subgroup: Subgroup) -> State:
        """Return the subgroup's state in its room here, from which another store can copy."""

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], beside: Sequence[Copy] = ()
    ) -> Job:
        """Copy the subgroup's state to its room here, once all of `after` have ended.

        number: the subgroup's position in the plan. beside: further copies over the same link.
        """


class Stores:
    """The stores of one device's subgroups, the fastest first, and where the newest state of each is."""

    def __init__(self, device: Device, homes: Homes) -> None:
        self.device = DeviceStore(device)
        self.homes = homes
        self.host: HostStore = homes.host
        self.disk: DiskStore | None = homes.disk
        self.of: dict[Tier, Store] = {Tier.DEVICE: self.device, Tier.HOST: self.host}
        if self.disk is not None:
            self.of[Tier.DISK] = self.disk

    def at(self, subgroup: Subgroup) -> Tier | None:
        """Return the tier of the subgroup's state, where it has room; None: nowhere, it was never updated."""
        for tier, store in self.of.items():
            if store.has(subgroup):
                return tier
        return None

    def copy(
        self, move: Move, number: int, subgroup: Subgroup, after: Sequence[Job], beside: Sequence[Copy] = ()
    ) -> Job:
        """Issue the copy of a subgroup's state from one tier's room to another's. Arguments: see `Store.store`."""
        source = self.of[move.source].fetch(subgroup)
        if self.disk is not None and move.source is Tier.DISK:
            return self.disk.load(number, subgroup, source if self.host.has(subgroup) else None, after)
        return self.of[move.destination].store(number, subgroup, source, after, beside)
