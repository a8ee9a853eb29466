"""The memory that holds optimizer state: one store for each tier. Where state is, the ledger says."""

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
        """Whether there is room here that is the subgroup's own."""

    def reserve(self, subgroups: Iterable[Subgroup]) -> list[Subgroup]:
        """Make room for the state of these. Returns those for which there is none, if that can be elsewhere."""

    def drop(self, subgroup: Subgroup) -> None:
        """Release the subgroup's room. Its state is elsewhere; nothing in flight may use the room."""

    def fetch(self, subgroup: Subgroup) -> State:
        """The subgroup's room, from which another store can copy."""

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], beside: Sequence[Copy] = ()
    ) -> Job:
        """Copy the subgroup's state here once all of `after` have ended; there is room.

        number: of the subgroup in the plan. beside: further copies over the same link.
        """


class Stores:
    """The stores of one device's subgroups, the fastest first."""

    def __init__(self, device: Device, homes: Homes) -> None:
        self.device = DeviceStore(device)
        self.homes = homes
        self.host: HostStore = homes.host
        self.disk: DiskStore | None = homes.disk
        self.of: dict[Tier, Store] = {Tier.DEVICE: self.device, Tier.HOST: self.host}
        if self.disk is not None:
            self.of[Tier.DISK] = self.disk

    def copy(
        self, move: Move, number: int, subgroup: Subgroup, after: Sequence[Job], beside: Sequence[Copy] = ()
    ) -> Job:
        """Issue the copy of a subgroup's state from one tier's room to another's, once all of `after` have ended.

        Arguments: see `Store.store`.
        """
        source = self.of[move.source].fetch(subgroup)
        if self.disk is not None and move.source is Tier.DISK:
            return self.disk.load(number, subgroup, source if self.host.houses(subgroup) else None, after)
        return self.of[move.destination].store(number, subgroup, source, after, beside)
