"""State in host memory."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Sequence

from dos.devices import Copy, Device, Job
from dos.devices.pinned import excess, lost
from dos.machine.host_memory import check_host_memory, left_of_share
from dos.machine.terminal import Pinning
from dos.state.arena import Arena, State
from dos.state.host_tensor import HostTensor
from dos.state.subgroup import Subgroup
from dos.state.windows import Windows
from perfmodel import Op
from perfmodel.plan import Tier


class HostStore:
    """State, gradients and new parameters in host memory. Homes keep their memory once it is allocated.

    limit: the most bytes of all; None: the memory that the host has. shares: whether the limit is a share of that.
    windows: state on disk passes through them.
    keeps_gradients: whether offloaded gradients stay here until the step, also of subgroups that the device updates.
    spills: whether state that does not fit is written to disk.
    awaited: the arenas whose gradients count even before they are here.
    """

    def __init__(self, limit: int | None = None, *, keeps_gradients: bool = False) -> None:
        self.limit = limit
        self.shares = self.spills = False
        self._keeps_gradients = keeps_gradients
        self.awaited: weakref.WeakSet[Arena] = weakref.WeakSet()
        self.windows = Windows()
        self._tensors: weakref.WeakSet[HostTensor] = weakref.WeakSet()
        self._whole: weakref.WeakSet[HostTensor] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are allocated."""
        return sum(tensor.nbytes for tensor in self._tensors) + self.windows.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of these that a CUDA runtime has pinned."""
        return sum(tensor.pinned_bytes for tensor in self._tensors) + self.windows.pinned_bytes

    @property
    def lost(self) -> bool:
        """Whether this process is a forked child, which lacks memory that its parent pinned."""
        return any(lost(tensor.tensor) for tensor in self._tensors)

    def lower_share(self) -> None:
        """Lower a limit that is a share to the memory that is left: another optimizer may have taken some since."""
        if self.shares and self.limit is not None:
            self.limit = self.nbytes + left_of_share(self.limit - self.nbytes)

    @property
    def _left(self) -> float:
        """Bytes that may still be allocated. Passages of gradients do not count, because they take little."""
        passages = sum(tensor.nbytes for tensor in self._whole)
        return math.inf if self.limit is None else self.limit - self.nbytes + passages

    @property
    def room(self) -> float:
        """Bytes that may still be allocated for state, beside the gradients that are awaited."""
        gradients = [arena.incoming for arena in self.awaited]
        return self._left - sum(max(0, each.tensor.nbytes - each.nbytes) for each in gradients)

    @property
    def gradient_bytes(self) -> int:
        """Bytes that awaited gradients may take."""
        return sum(arena.incoming.tensor.nbytes for arena in self.awaited)

    def has(self, subgroup: Subgroup) -> bool:
        """Return whether the subgroup has its home here."""
        start, stop = subgroup.start, subgroup.stop
        return not [t for t in subgroup.arena.homes if not (t.whole or t.has(start, stop))]

    def stages(self, subgroup: Subgroup) -> bool:
        """Return whether the staging of its gradients is allocated."""
        return subgroup.arena.incoming.has(subgroup.start, subgroup.stop)

    def has_reserved(self, subgroup: Subgroup, *, updated: bool) -> bool:
        """Return whether `reserve` would allocate nothing for the subgroup. updated: whether its staging, too."""
        tensors = [*subgroup.arena.homes, *(subgroup.arena.staging if updated else ())]
        return all(t.whole or t.has(subgroup.start, subgroup.stop) for t in tensors)

    def reserve(self, subgroups: Iterable[Subgroup], updated: Iterable[Subgroup] = ()) -> list[Subgroup]:
        """Allocate homes of subgroups, and the staging of gradients and parameters of the subgroups in `updated`.

        subgroups: first those of which each step copies the most.
        Raises MemoryError, before any is allocated, if the host has too little: state has no other place.
        """
        # Staging first, through which each step copies: the system may limit the bytes that can be pinned.
        wanted = [(tensor, s) for s in updated for tensor in s.arena.staging]
        self.make(wanted + [(tensor, s) for s in subgroups for tensor in s.arena.homes])
        return []

    def stage(self, subgroups: Iterable[Subgroup]) -> None:
        """Allocate the staging of gradients of these. Raises as `reserve`."""
        self.make((s.arena.incoming, s) for s in subgroups)

    def drop(self, subgroup: Subgroup) -> None:
        """Drop a home. Only for state on disk: pinning takes 0.2 to 0.4 s per GB, so all other homes stay."""
        for tensor in self._own(subgroup):
            tensor.release(subgroup.start, subgroup.stop)
        # Staged parameters are released with the home: an update must not join masters with the zeros left there.
        subgroup.newest.clear()
        subgroup.uploads.forget()  # the staging may be other memory when it is allocated again

    def home_bytes(self, subgroup: Subgroup, *, made: bool = False) -> int:
        """Return the bytes of a home and of updates there. made: only bytes that `drop` would release."""
        own = (t for t in self._own(subgroup) if not made or t.has(subgroup.start, subgroup.stop))
        parts = ((t, *t.part(subgroup.start, subgroup.stop)) for t in own)
        return sum((last - first) * t.tensor.itemsize for t, first, last in parts)

    def whole(self, subgroup: Subgroup, tier: Tier) -> bool:
        """Return whether nothing has to be allocated here for an update of state that is in this tier."""
        made = tier is Tier.HOST and self.home_bytes(subgroup) == self.home_bytes(subgroup, made=True)
        return made or tier is Tier.DEVICE

    def _own(self, subgroup: Subgroup) -> list[HostTensor]:
        """Return the memory that is dropped with the home: not gradients that stay for the step, nor weights."""
        arena = subgroup.arena
        kept = [arena.incoming] if self._keeps_gradients else []
        if arena.streams:  # this is the home of the parameters themselves
            kept.append(arena.weights_at_home())
        return [tensor for tensor in (*arena.homes, *arena.staging) if tensor not in kept]

    def fetch(self, subgroup: Subgroup) -> State:
        window = self.windows.of(subgroup)
        return subgroup.state if window is None or self.has(subgroup) else window.state

    def make_windows(self, count: int, nbytes: int, device: Device) -> None:
        """Allocate `count` windows of `nbytes` each. Raises MemoryError if the host has too little memory."""
        self._check(count * nbytes - self.windows.nbytes, mapped=False)
        self.windows.make(count, nbytes, device)

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], further: Sequence[Copy] = ()
    ) -> Job:
        device = subgroup.arena.device
        assert device is not None, "state of parameters on the host never leaves"
        copies = source.moves(self.fetch(subgroup), to_host=True)
        return device.copy(Op.FLUSH, number, [*copies, *further] if further else copies, after)

    def pin_ahead(self, subgroups: Iterable[Subgroup]) -> None:
        """Allocate one more part of the homes of these, before state leaves the device, if the host has the memory."""
        for s in subgroups:
            for tensor in (*s.arena.homes, *s.arena.staging):
                if not tensor.has(s.start, s.stop):
                    with contextlib.suppress(MemoryError):
                        self.make([(tensor, s)])
                    return

    def reserve_whole(self, tensor: HostTensor) -> None:
        """Allocate a passage, which belongs to no subgroup and does not count. Raises as `reserve`."""
        check_host_memory(tensor.tensor.nbytes, spills=self.spills, mapped=tensor.tensor.nbytes)
        tensor.allow_huge_pages(0, len(tensor.tensor))
        tensor.make(0, len(tensor.tensor), whole=True)
        self._tensors.add(tensor)
        self._whole.add(tensor)

    def hold(self, tensor: HostTensor) -> None:
        """Allocate a tensor of weights without state. Raises as `reserve`."""
        self._check(tensor.tensor.nbytes)
        tensor.allow_huge_pages(0, len(tensor.tensor))
        tensor.make(0, len(tensor.tensor), whole=True)
        self._tensors.add(tensor)

    def _check(self, nbytes: int, *, mapped: bool = True) -> None:
        if nbytes > self._left:
            remedies = "" if self.spills else "disk= with a folder for state, "
            remedies += "offload_gradients=False, " if self._keeps_gradients else ""
            raise MemoryError(
                f"optimizer state needs {nbytes} more bytes of host memory, of which host_memory={self.limit} leaves "
                f"{max(0, int(self._left))}; choose more, {remedies}or a smaller subgroup_size"
            )
        check_host_memory(nbytes, spills=self.spills, mapped=nbytes if mapped else 0)

    def make(self, wanted: Iterable[tuple[HostTensor, Subgroup]]) -> None:
        """Allocate the parts of these tensors that belong to these subgroups. Raises as `reserve`."""
        absent = ((t, s) for t, s in wanted if not (t.whole or t.has(s.start, s.stop)))
        missing = {(t, *t.part(s.start, s.stop)): t not in s.arena.homes for t, s in absent}
        if missing:
            total = sum((last - first) * t.tensor.itemsize for t, first, last in missing)
            self._check(total)
            # For all parts first: two neighbours share a huge page only if both may have one when it is allocated.
            for tensor, first, last in missing:
                tensor.allow_huge_pages(first, last)
            done = 0
            with Pinning(total) as pinning:
                for (tensor, first, last), movable in missing.items():
                    pinning.at(done)
                    tensor.make(first, last, whole=movable and self.limit is None)
                    done += (last - first) * tensor.tensor.itemsize
                    self._tensors.add(tensor)
            for tensor, first, last in reversed(missing):  # no copy uses these yet
                if not excess():
                    break
                tensor.unpin(first, last)
