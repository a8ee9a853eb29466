"""Where state has its home: in host memory as far as users allow, else on disk."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dos.devices import Device
from dos.machine.host_memory import host_share
from dos.state.disk_store import DiskStore
from dos.state.host_store import HostStore
from dos.state.subgroup import Subgroup
from dos.state.windows import window_bytes
from perfmodel.plan import Tier
from perfmodel.windows import WINDOWS

_T = TypeVar("_T")


class Homes:
    """The stores that state comes home to.

    disk: None if users have not chosen any.
    shown: those of whose state user code was given views since the last step, to which it may write until the next.
    """

    # State gets a home when it first needs one: on the host while there is room, else on disk (`tiers`). A home on the
    # host stays, for pinning is slow, until gradients or windows need its memory; the state goes to disk then, and
    # comes through windows from there in each step, or home again where a plan finds room.
    def __init__(self, host: HostStore) -> None:
        self.host = host
        self.disk: DiskStore | None = None
        self.shown: weakref.WeakSet[Subgroup] = weakref.WeakSet()

    def open_disk(self, device: Device, folders: Sequence[Path]) -> None:
        """Have homes in these folders, too. Raises OSError if one cannot be used."""
        if self.host.limit is None:
            self.host.limit, self.host.shares = host_share(), True
        self.host.spills = True
        self.disk = DiskStore(device, self.host, folders)

    def windows_needed(self, subgroups: Iterable[Subgroup]) -> tuple[int, int]:
        """How many windows there are to be for state of these, if any of it is on disk, and their bytes."""
        nbytes, limit = window_bytes(subgroups), self.host.limit
        most = WINDOWS if limit is None else (limit - self.host.gradient_bytes) // (2 * nbytes)
        return max(2, min(WINDOWS, most)), nbytes

    def tiers(self, subgroups: Iterable[Subgroup], every: Sequence[Subgroup]) -> dict[Subgroup, Tier]:
        """Where each has its home, or would get it if all did.

        every: all on the accelerator. If the host has room for them, there need be none for windows.
        """
        subgroups = list(subgroups)
        tiers = {subgroup: subgroup.arena.tier for subgroup in subgroups}
        homeless = [s for s in subgroups if not self.host.houses(s)]
        if self.disk is None or not homeless:
            return tiers
        self.host.lower_share()
        through = 0
        to_come = (self.host.home_bytes(s) for s in every if not self.host.houses(s))
        if self.disk.nbytes or sum(to_come) > self.host.room:
            through = math.prod(self.windows_needed(every))
        found = self._housed((s for s in homeless if not self.disk.has(s)), through)
        return tiers | {subgroup: Tier.DISK for subgroup in homeless if subgroup not in found}

    def _housed(self, subgroups: Iterable[Subgroup], through: int) -> set[Subgroup]:
        """See `housed`. through: bytes of windows that there have to be besides."""
        homes = {subgroup: self.host.home_bytes(subgroup) for subgroup in subgroups}
        made = {subgroup: self.made_bytes(subgroup) for subgroup in homes}
        return housed(made, homes, self.host.room - max(0, through - self.host.windows.nbytes))

    def made_bytes(self, subgroup: Subgroup) -> int:
        """Bytes of the subgroup's home that are there."""
        return self.host.home_bytes(subgroup, made=True) if self.host.houses(subgroup) else 0

    def reserve(self, subgroups: Iterable[Subgroup], every: Sequence[Subgroup]) -> None:
        """Have homes for these, which may be written to at once: what is there lies there. Nothing is in flight.

        every: all on the accelerator.
        Raises MemoryError or OSError if there is no room.
        """
        tiers = self.tiers(dict.fromkeys(subgroups), every)
        on_disk = [subgroup for subgroup, tier in tiers.items() if tier is Tier.DISK]
        at_home = [subgroup for subgroup, tier in tiers.items() if tier is not Tier.DISK]
        self.reserve_on_host(at_home)
        if self.disk is not None:
            self.disk.reserve(on_disk)
            for subgroup in on_disk:
                self.disk.show(subgroup)

    def reserve_on_host(self, subgroups: Sequence[Subgroup]) -> None:
        """Have homes on the host for these. Raises MemoryError if there is no room.

        Beside a disk with what their updates on the host take, which `tiers` counts, too.
        """
        self.host.reserve(subgroups, subgroups if self.disk is not None else ())

    def show(self, subgroups: Iterable[Subgroup]) -> None:
        """Make state that is at home ready for users, who get views of it. Nothing is in flight.

        Raises OSError, DiskError also for state on disk that something else has changed.
        """
        # Users copy views across parts, and CUDA refuses a copy that crosses the border of two pinned regions.
        self.host.join_homes()
        subgroups = list(subgroups)
        self.shown.update(subgroups)
        self._map(subgroups)

    def show_again(self) -> None:
        """Let what is `shown` be so, some of which has gone to disk since. Nothing is in flight. Raises as `show`."""
        self._map(self.shown)

    def _map(self, subgroups: Iterable[Subgroup]) -> None:
        if self.disk is not None:
            for subgroup in subgroups:
                if self.disk.has(subgroup) and not self.host.has(subgroup):
                    self.disk.show(subgroup)


def housed(made: Mapping[_T, int], homes: Mapping[_T, int], room: float) -> set[_T]:
    """The items that keep a home on the host, or for which it has room, one after the other.

    made: bytes of each home that are there; 0: it has none. homes: bytes of each when it is whole.
    room: bytes that may yet be made; below 0 where homes have to go for windows.
    """
    in_all = room + sum(made.values())
    found = set()
    for each in sorted(made, key=lambda one: not made[one]):
        nbytes = homes[each]
        more = nbytes - made[each]  # rooms that state moves out of in this step are not free yet
        if not nbytes or (nbytes <= in_all and (not more or more <= room)):
            found.add(each)
            room, in_all = room - more, in_all - nbytes
    return found
