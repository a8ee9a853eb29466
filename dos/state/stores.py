"""What holds optimizer state: one store for each tier, all with the same verbs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from dos.devices import Copy, Job
from dos.state.arena import State
from dos.state.device_store import DeviceStore
from dos.state.disk_store import DiskStore
from dos.state.homes import Homes
from dos.state.host_store import HostStore
from dos.state.subgroup import Subgroup
from dos.state.windows import window_bytes
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

    def __init__(self, device: DeviceStore, homes: Homes) -> None:
        self.device = device
        self.homes = homes
        self.host: HostStore = homes.host
        self.disk: DiskStore | None = homes.disk
        self.of: dict[Tier, Store] = {Tier.DEVICE: device, Tier.HOST: self.host}
        if self.disk is not None:
            self.of[Tier.DISK] = self.disk

    def where(self, subgroup: Subgroup) -> Tier | None:
        """Where the subgroup's state is; None: nowhere, it was never updated."""
        return next((tier for tier, store in self.of.items() if store.has(subgroup)), None)

    def write_kept(self) -> None:
        """Write to disk what windows keep. Nothing is in flight."""
        windows = self.host.windows
        for subgroup in list(windows.kept):
            self.move(Move(Tier.HOST, Tier.DISK), 0, subgroup, ()).wait()
            windows.leave(subgroup)

    def to_disk(self, subgroups: Sequence[Subgroup], source: Tier, after: Sequence[Job] = ()) -> None:
        """Bring state from its home on the host, or from the device, to disk.

        after: what has to end before it leaves the device. Nothing else is in flight, and windows keep nothing.
        Raises OSError, with nothing changed, if there is no room.
        """
        assert self.disk is not None, "there is nowhere else"
        self.disk.reserve(subgroups)
        windows, nbytes = self.host.windows, window_bytes(subgroups)
        if subgroups and not windows.fit(1, nbytes):
            windows.make(1, nbytes, self.device.device)  # beyond the limit, if need be: there will be room
        for subgroup in subgroups:
            windows.enter(subgroup, 0)
            if source is Tier.DEVICE:
                self.move(Move(Tier.DEVICE, Tier.HOST), 0, subgroup, after).wait()
            self.move(Move(Tier.HOST, Tier.DISK), 0, subgroup, ()).wait()
            windows.leave(subgroup)
            self.of[source].drop(subgroup)

    def leave_host(self, subgroups: Iterable[Subgroup]) -> None:
        """Bring state of these from the host to disk, the last first, until gradients that may come have room.

        Conditions: see `to_disk`.
        """
        at_home = [subgroup for subgroup in subgroups if self.where(subgroup) is Tier.HOST]
        missing = max(0, window_bytes(at_home) - self.host.windows.nbytes) - self.host.room
        leaving = []
        while at_home and missing > 0:
            leaving.append(at_home.pop())
            missing -= self.host.home_bytes(leaving[-1], made=True)
        self.to_disk(leaving, Tier.HOST)

    def move(
        self, move: Move, number: int, subgroup: Subgroup, after: Sequence[Job], beside: Sequence[Copy] = ()
    ) -> Job:
        """Bring a subgroup's state from one tier to another. Arguments: see `Store.store`."""
        source = self.of[move.source].fetch(subgroup)
        if move.source is Tier.DISK and self.disk is not None:
            return self.disk.load(number, subgroup, source if self.host.houses(subgroup) else None, after)
        return self.of[move.destination].store(number, subgroup, source, after, beside)
