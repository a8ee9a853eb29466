"""Where state has its home: in host memory as far as users allow, else on disk."""

from __future__ import annotations

from collections.abc import Iterable

from dos.state.disk_store import DiskStore
from dos.state.host_store import HostStore
from dos.state.subgroup import Subgroup
from dos.state.windows import window_bytes
from perfmodel.plan import Tier
from perfmodel.windows import WINDOWS


class Homes:
    """The stores that state comes home to.

    disk: None if users have not chosen any.
    """

    def __init__(self, host: HostStore) -> None:
        self.host = host
        self.disk: DiskStore | None = None

    def windows(self, subgroups: Iterable[Subgroup]) -> tuple[int, int]:
        """How many windows there are to be for state of these, if any of it is on disk, and their bytes."""
        nbytes, limit = max(map(window_bytes, subgroups)), self.host.limit
        most = WINDOWS if limit is None else (limit - sum(self.host.gradient_bytes.values())) // (2 * nbytes)
        return max(2, min(WINDOWS, most)), nbytes

    def tiers(self, subgroups: Iterable[Subgroup], *, complete: bool = False) -> dict[Subgroup, Tier]:
        """Where each has its home, or would get it if all did.

        complete: whether these are all there are. If the host has room for them, there need be none for windows.
        """
        found, subgroups, room = {}, list(subgroups), self.host.room
        homeless = sum(s.load().host_bytes for s in subgroups if not self.host.houses(s))
        if self.disk is not None and subgroups and (self.disk.nbytes or homeless > room or not complete):
            count, nbytes = self.windows(subgroups)
            room -= max(0, count * nbytes - self.host.windows.nbytes)
        for subgroup in subgroups:
            tier = subgroup.arena.tier
            if tier is Tier.HOST and self.disk is not None and not self.host.houses(subgroup):
                nbytes = subgroup.load().host_bytes
                tier = Tier.DISK if self.disk.has(subgroup) or nbytes > room else Tier.HOST
                room -= nbytes if tier is Tier.HOST else 0
            found[subgroup] = tier
        return found

    def reserve(self, subgroups: Iterable[Subgroup]) -> None:
        """Have homes for these, which may be written to at once: what is there lies there. Nothing is in flight.

        Raises MemoryError or OSError if there is no room.
        """
        tiers = self.tiers(dict.fromkeys(subgroups))
        on_disk = [subgroup for subgroup, tier in tiers.items() if tier is Tier.DISK]
        at_home = [subgroup for subgroup, tier in tiers.items() if tier is not Tier.DISK]
        # Where there is a limit, state counts with what its updates on the host take.
        self.host.reserve(at_home, at_home if self.disk is not None else ())
        if self.disk is not None:
            self.disk.reserve(on_disk)
            for subgroup in on_disk:
                self.disk.show(subgroup)

    def show(self, subgroups: Iterable[Subgroup]) -> None:
        """Make state that is at home ready for users, who get views of it. Nothing is in flight."""
        self.host.join_homes()
        if self.disk is not None:
            for subgroup in subgroups:
                if self.disk.has(subgroup) and not self.host.houses(subgroup):
                    self.disk.show(subgroup)
