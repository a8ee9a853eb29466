"""The homes of state: in host memory as far as users allow, else on disk."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from dos.devices import Device
from dos.machine.host_memory import host_share
from dos.sharding.local import version
from dos.state.disk_store import DiskStore
from dos.state.host_store import HostStore
from dos.state.subgroup import Subgroup
from dos.state.windows import window_bytes
from perfmodel.plan import Tier
from perfmodel.windows import WINDOWS

_T = TypeVar("_T")


class Homes:
    """The stores in which state has its home.

    disk: None if users have not chosen any.
    exposed: the subgroups whose state is exposed since the last step: user code may write to it until the next one,
        unless it is on disk.
    """

    # State gets a home when it first needs one: on the host while there is room, else on disk (`tiers`). A home on the
    # host stays, because pinning is slow, until gradients or windows need its memory. The state is then written to
    # disk, and read through windows in each step, or moved home again where a plan finds room.
    def __init__(self, host: HostStore) -> None:
        self.host = host
        self.disk: DiskStore | None = None
        self.exposed: weakref.WeakSet[Subgroup] = weakref.WeakSet()
        self._shown: dict[Tensor, int] = {}
        """Views of state on disk that user code has, with the number of writes to each before that."""

    def open_disk(self, device: Device, folders: Sequence[Path]) -> None:
        """Add homes in these folders. Raises OSError if one cannot be used."""
        if self.host.limit is None:
            self.host.limit, self.host.shares = host_share(), True
        self.host.spills = True
        self.disk = DiskStore(device, self.host, folders)

    def windows_needed(self, subgroups: Iterable[Subgroup]) -> tuple[int, int]:
        """Return the number of windows that state of these needs, if any of it is on disk, and their bytes."""
        nbytes, limit = window_bytes(subgroups), self.host.limit
        most = WINDOWS if limit is None else (limit - self.host.gradient_bytes) // (2 * nbytes)
        return max(2, min(WINDOWS, most)), nbytes

    def tiers(self, subgroups: Iterable[Subgroup], every: Sequence[Subgroup]) -> dict[Subgroup, Tier]:
        """Return the tier of each subgroup's home, or of the home that it would get if all got one.

        every: all subgroups on the accelerator. If the host has room for all, windows need none.
        """
        subgroups = list(subgroups)
        tiers = {subgroup: subgroup.arena.tier for subgroup in subgroups}
        homeless = [s for s in subgroups if not self.host.has(s)]
        if self.disk is None or not homeless:
            return tiers
        self.host.lower_share()
        through = 0
        to_come = (self.host.home_bytes(s) for s in every if not self.host.has(s))
        if self.disk.nbytes or sum(to_come) > self.host.room:
            through = math.prod(self.windows_needed(every))
        homes = {s: self.host.home_bytes(s) for s in homeless if not self.disk.has(s)}
        room = self.host.room - max(0, through - self.host.windows.nbytes)
        found = housed(dict.fromkeys(homes, 0), homes, room)
        return tiers | {subgroup: Tier.DISK for subgroup in homeless if subgroup not in found}

    def made_bytes(self, subgroup: Subgroup) -> int:
        """Return the bytes of the subgroup's home that are allocated."""
        return self.host.home_bytes(subgroup, made=True) if self.host.has(subgroup) else 0

    def reserve(self, subgroups: Iterable[Subgroup], every: Sequence[Subgroup]) -> None:
        """Reserve homes for these, which may be written to at once. Nothing may be in flight.

        every: all subgroups on the accelerator.
        Raises MemoryError or OSError if host or disk have no room.
        """
        tiers = self.tiers(dict.fromkeys(subgroups), every)
        on_disk = [subgroup for subgroup, tier in tiers.items() if tier is Tier.DISK]
        at_home = [subgroup for subgroup, tier in tiers.items() if tier is not Tier.DISK]
        self.reserve_on_host(at_home)
        if self.disk is not None:
            self.disk.reserve(on_disk)
            for subgroup in on_disk:
                self.disk.expose(subgroup, writable=True)

    def reserve_on_host(self, subgroups: Sequence[Subgroup]) -> None:
        """Reserve homes on the host for these. Raises MemoryError if the host has no room.

        Where there is a disk, also the memory of their updates on the host, which `tiers` counts, too.
        """
        self.host.reserve(subgroups, subgroups if self.disk is not None else ())

    def expose(self, subgroups: Iterable[Subgroup]) -> None:
        """Expose state at home: user code gets views of it. Nothing may be in flight.

        Raises OSError, and DiskError for state on disk that another program has changed.
        """
        subgroups = list(subgroups)
        # User code copies views that span parts, and CUDA refuses a copy across the border of two pinned regions.
        for tensor in dict.fromkeys(home for subgroup in subgroups for home in subgroup.arena.homes):
            tensor.join()
        self.exposed.update(subgroups)
        self._map(subgroups, writable=False)

    def expose_again(self) -> None:
        """Map state that is `exposed` and was written to disk since. Nothing may be in flight. Raises as `expose`.

        User code may write to views that it has had since that state was at home.
        """
        self._map(self.exposed, writable=True)

    def _map(self, subgroups: Iterable[Subgroup], *, writable: bool) -> None:
        if self.disk is not None:
            for subgroup in subgroups:
                if self.disk.has(subgroup) and not self.host.has(subgroup):
                    self.disk.expose(subgroup, writable=writable)

    def show(self, views: Iterable[Tensor], subgroups: Iterable[Subgroup]) -> None:
        """Note that user code gets these views, of state in these subgroups."""
        if self.disk is not None and any(map(self.disk.shows, subgroups)):
            for view in views:
                self._shown.setdefault(view, version(view))

    def open(self) -> None:
        """Let what user code has written to its views count, because it loads them."""
        if self._shown:
            self._shown.clear()
            self._map(self.exposed, writable=True)

    def check_unwritten(self) -> None:
        """Raise RuntimeError if user code has written to views of state on disk since it got them."""
        if any(version(view) != before for view, before in self._shown.items()):
            raise RuntimeError(
                "user code wrote to a tensor of optimizer.state that is on disk, where tensors can only be read; to "
                "change state load it: optimizer.load_state_dict(optimizer.state_dict()) takes what was written"
            )

    def begin_step(self) -> None:
        """Begin a step, until which user code may write to its views: no state need be mapped again after this."""
        self.exposed.clear()
        self._shown.clear()


def housed(made: Mapping[_T, int], homes: Mapping[_T, int], room: float) -> set[_T]:
    """Return the items that keep a home on the host, or get one while there is room, in order.

    made: bytes of each home that are allocated; 0: it has none. homes: bytes of each whole home.
    room: bytes that may still be allocated; below 0 where windows need the memory of homes.
    """
    in_all = room + sum(made.values())
    found = set()
    for each in sorted(made, key=lambda one: not made[one]):
        nbytes = homes[each]
        more = nbytes - made[each]  # homes that state leaves in this step are not released yet
        if not nbytes or (nbytes <= in_all and (not more or more <= room)):
            found.add(each)
            room, in_all = room - more, in_all - nbytes
    return found
