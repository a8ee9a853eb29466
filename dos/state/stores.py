"""The memory of optimizer state: one store for each tier, in one of which a subgroup's newest state is."""

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
from dos.state.windows import window_bytes
from perfmodel.plan import Move, Tier


class Store(Protocol):
    """Memory of one tier, and the copies that fill it."""

    def has(self, subgroup: Subgroup) -> bool:
        """Return whether the subgroup's state is here; room to which it has yet to come does not count."""

    def reserve(self, subgroups: Iterable[Subgroup]) -> list[Subgroup]:
        """Allocate room for the state of these; return the subgroups without, where their state may be elsewhere.

        The room is empty until a job writes to it; `DeviceStore.use` notes that for the device.
        """

    def drop(self, subgroup: Subgroup) -> None:
        """Drop the subgroup's room. Its state must be elsewhere, and no transfer in flight may use the room."""

    def fetch(self, subgroup: Subgroup) -> State:
        """Return the subgroup's state in its room here, from which another store can copy."""

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], further: Sequence[Copy] = ()
    ) -> Job:
        """Copy the subgroup's state to its room here, once all of `after` have ended.

        number: the subgroup's position in the plan. further: copies over the same link.
        """


class Stores:
    """The stores of one device's subgroups, the fastest first: where state is, and how it moves."""

    def __init__(self, device: Device, homes: Homes) -> None:
        self.device = DeviceStore(device)
        self.homes = homes
        self.host: HostStore = homes.host
        self.disk: DiskStore | None = homes.disk
        self.of: dict[Tier, Store] = {Tier.DEVICE: self.device, Tier.HOST: self.host}
        if self.disk is not None:
            self.of[Tier.DISK] = self.disk

    def at(self, subgroup: Subgroup) -> Tier | None:
        """Return the tier of the subgroup's state; None: nowhere, it was never updated."""
        for tier, store in self.of.items():
            if store.has(subgroup):
                return tier
        return None

    def tiers(self, subgroups: Sequence[Subgroup]) -> list[Tier]:
        """Return where the state of each is; the host for state that is nowhere."""
        if self.disk is None:
            here = self.device.has
            return [Tier.DEVICE if here(subgroup) else Tier.HOST for subgroup in subgroups]
        return [self.at(subgroup) or Tier.HOST for subgroup in subgroups]

    def drop_empty(self) -> None:
        """Drop the rooms on the device and on disk to which no state has come."""
        self.device.drop_empty()
        if self.disk is not None:
            self.disk.drop_empty()

    def copy(
        self, move: Move, number: int, subgroup: Subgroup, after: Sequence[Job], further: Sequence[Copy] = ()
    ) -> Job:
        """Issue the copy of a subgroup's state from one tier's room to another's. Arguments: see `Store.store`."""
        source = self.of[move.source].fetch(subgroup)
        if self.disk is not None and move.source is Tier.DISK:
            return self.disk.load(number, subgroup, source if self.host.has(subgroup) else None, after)
        return self.of[move.destination].store(number, subgroup, source, after, further)

    def bring_home(self, subgroups: Iterable[Subgroup]) -> None:
        """Move the state of all these home. Blocks. No step and no fetch may be in flight.

        User code may write there from now on.
        Raises MemoryError or OSError if a home has no room.
        """
        subgroups = list(subgroups)
        self.device.expect_denials(False)
        places, homes = {s: self.at(s) for s in subgroups}, self.homes.tiers(subgroups, subgroups)
        away = [(s, Move(tier, homes[s])) for s, tier in places.items() if tier not in (None, homes[s])]
        to_disk = [s for s, move in away if move == Move(Tier.DEVICE, Tier.DISK)]
        away = [(s, move) for s, move in away if Tier.DISK not in move]
        self.homes.reserve_on_host([s for s, _ in away])
        # The caller's stream may still read views of the homes that are written below.
        after = self.device.device.fence()
        if to_disk:
            self.to_disk(to_disk, Tier.DEVICE, after)
        for job in [self.copy(move, 0, s, after) for s, move in away]:
            job.wait()  # the host reads the state from here on, and the device's room is released below
        for subgroup, move in away:
            self.of[move.source].drop(subgroup)

    def spill(self, subgroups: Iterable[Subgroup]) -> None:
        """Move state of these from the host to disk, the last first, until offloaded gradients fit on the host.

        As `bring_home`. Raises OSError if the disk has no room either.
        """
        at_home = [subgroup for subgroup in subgroups if self.at(subgroup) is Tier.HOST]
        missing = max(0, window_bytes(at_home) - self.host.windows.nbytes) - self.host.room
        moving = []
        while at_home and missing > 0:
            moving.append(at_home.pop())
            missing -= self.host.home_bytes(moving[-1], made=True)
        try:
            self.to_disk(moving, Tier.HOST)
        finally:
            # Some state is in files now: user code's writes to its views must reach them, even where a later write has
            # failed.
            self.homes.expose_again()

    def to_disk(self, subgroups: Sequence[Subgroup], source: Tier, after: Sequence[Job] = ()) -> None:
        """Move state from its home on the host, or from the device, to disk. Blocks.

        after: jobs that must end before the state on the device is read. Nothing else may be in flight.
        Raises OSError, with nothing changed, if the disk has no room.
        """
        assert self.disk is not None, "there is nowhere else"
        self.disk.reserve(subgroups)
        windows, nbytes = self.host.windows, window_bytes(subgroups)
        if subgroups and not windows.fit(1, nbytes):
            windows.make(1, nbytes, self.device.device)  # beyond the limit, if need be: homes are dropped below
        for subgroup in subgroups:
            windows.enter(subgroup, 0)
            # One subgroup at a time, through one window: the next copy would overwrite bytes that are being written.
            if source is Tier.DEVICE:
                self.copy(Move(Tier.DEVICE, Tier.HOST), 0, subgroup, after).wait()
            self.copy(Move(Tier.HOST, Tier.DISK), 0, subgroup, ()).wait()
            windows.leave(subgroup)
            # After the wait: if the write fails, this room has the only copy of the state.
            self.of[source].drop(subgroup)
