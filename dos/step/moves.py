"""Moves of state between tiers while no step is in flight: home, or to disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dos.devices import Device, Job
from dos.state.stores import Stores
from dos.state.subgroup import Subgroup
from dos.state.windows import window_bytes
from perfmodel.plan import Move, Tier


class Moves:
    """Moves the state of one optimizer. No step and no fetch may be in flight."""

    def __init__(self, device: Device, stores: Stores) -> None:
        self._device, self._stores = device, stores

    def bring_home(self, subgroups: Iterable[Subgroup]) -> None:
        """Move the state of all these home. Blocks. User code may write there from now on.

        Raises MemoryError or OSError if a home has no room.
        """
        subgroups, stores = list(subgroups), self._stores
        stores.device.expect_denials(False)
        places, homes = {s: stores.at(s) for s in subgroups}, stores.homes.tiers(subgroups, subgroups)
        away = [(s, Move(tier, homes[s])) for s, tier in places.items() if tier not in (None, homes[s])]
        to_disk = [s for s, move in away if move == Move(Tier.DEVICE, Tier.DISK)]
        away = [(s, move) for s, move in away if Tier.DISK not in move]
        stores.homes.reserve_on_host([s for s, _ in away])
        after = self._device.fence()  # the caller's stream may still read views of the homes that are written below
        if to_disk:
            self.to_disk(to_disk, Tier.DEVICE, after)
        for job in [stores.copy(move, 0, s, after) for s, move in away]:
            job.wait()  # the host reads the state from here on, and the device's room is released below
        for subgroup, move in away:
            stores.of[move.source].drop(subgroup)

    def spill(self, subgroups: Iterable[Subgroup]) -> None:
        """Move state of these from the host to disk, the last first, until offloaded gradients fit on the host.

        Raises OSError if the disk has no room either.
        """
        stores = self._stores
        at_home = [subgroup for subgroup in subgroups if stores.at(subgroup) is Tier.HOST]
        missing = max(0, window_bytes(at_home) - stores.host.windows.nbytes) - stores.host.room
        moving = []
        while at_home and missing > 0:
            moving.append(at_home.pop())
            missing -= stores.host.home_bytes(moving[-1], made=True)
        try:
            self.to_disk(moving, Tier.HOST)
        finally:
            # Some state is in files now: user code's writes to its views must reach them, even where a later write has
            # failed.
            stores.homes.expose_again()

    def to_disk(self, subgroups: Sequence[Subgroup], source: Tier, after: Sequence[Job] = ()) -> None:
        """Move state from its home on the host, or from the device, to disk. Blocks.

        after: jobs that must end before the state on the device is read. Nothing else may be in flight.
        Raises OSError, with nothing changed, if the disk has no room.
        """
        stores = self._stores
        assert stores.disk is not None, "there is nowhere else"
        stores.disk.reserve(subgroups)
        windows, nbytes = stores.host.windows, window_bytes(subgroups)
        if subgroups and not windows.fit(1, nbytes):
            windows.make(1, nbytes, self._device)  # beyond the limit, if need be: homes are dropped below
        for subgroup in subgroups:
            windows.enter(subgroup, 0)
            # One subgroup at a time, through one window: the next copy would overwrite bytes that are being written.
            if source is Tier.DEVICE:
                stores.copy(Move(Tier.DEVICE, Tier.HOST), 0, subgroup, after).wait()
            stores.copy(Move(Tier.HOST, Tier.DISK), 0, subgroup, ()).wait()
            windows.leave(subgroup)
            # After the wait: if the write fails, this room has the only copy of the state.
            stores.of[source].drop(subgroup)
