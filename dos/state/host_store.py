"""State in host memory."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Iterable, Sequence

from dos.devices import Copy, Device, Job
from dos.machine.host_memory import check_host_memory, left_of_share
from dos.state.arena import Arena, State, state_copies
from dos.state.host_tensor import HostTensor
from dos.state.subgroup import Subgroup
from dos.state.windows import Windows
from perfmodel import Op

logger = logging.getLogger(__name__)

TELL_S = 5.0
"""Seconds between two messages about memory that is being pinned."""


class HostStore:
    """State in host memory, and what travels through there: homes, whose memory stays once it is made.

    limit: bytes that all may take; None: what the host has. shares: whether that is a share of what the host had.
    windows: through which state on disk passes.
    keeps_gradients: whether gradients wait here for the step, and not for an update on the host alone.
    spills: whether what there is no room for goes to disk, as far as it is state.
    awaited: the arenas whose gradients are counted whether they are there or to come.
    """

    def __init__(self, limit: int | None = None, *, keeps_gradients: bool = False) -> None:
        self.limit = limit
        self.shares = self.spills = False
        self._keeps_gradients = keeps_gradients
        self.awaited: weakref.WeakSet[Arena] = weakref.WeakSet()
        self.windows = Windows()
        self._tensors: weakref.WeakSet[HostTensor] = weakref.WeakSet()
        self._whole: weakref.WeakSet[HostTensor] = weakref.WeakSet()
        self._apart: weakref.WeakSet[HostTensor] = weakref.WeakSet()
        """State of which parts were pinned since users last got views of it."""

    @property
    def nbytes(self) -> int:
        """Host memory that was made."""
        return sum(tensor.nbytes for tensor in self._tensors) + self.windows.nbytes

    def lower_share(self) -> None:
        """Lower a limit that is a share to what the host has left: another optimizer may have taken from it since."""
        if self.shares and self.limit is not None:
            self.limit = self.nbytes + left_of_share(self.limit - self.nbytes)

    @property
    def _left(self) -> float:
        """Bytes that may yet be made of what counts: not that through which gradients pass, which is little."""
        passages = sum(tensor.nbytes for tensor in self._whole)
        return math.inf if self.limit is None else self.limit - self.nbytes + passages

    @property
    def room(self) -> float:
        """Bytes that may yet be made for state, beside gradients that may come."""
        gradients = [arena.incoming for arena in self.awaited]
        return self._left - sum(max(0, each.tensor.nbytes - each.nbytes) for each in gradients)

    @property
    def gradient_bytes(self) -> int:
        """That awaited gradients may take."""
        return sum(arena.gradient.nbytes for arena in self.awaited)

    def has(self, subgroup: Subgroup) -> bool:
        """Whether there is room for the subgroup's state, where it has been or is to come."""
        return subgroup in self.windows.kept or self.houses(subgroup)

    def houses(self, subgroup: Subgroup) -> bool:
        """Whether that is its home."""
        return all(tensor.has(subgroup.start, subgroup.stop) for tensor in subgroup.arena.home())

    def stages(self, subgroup: Subgroup) -> bool:
        """Whether its gradients can travel through here."""
        return subgroup.arena.incoming.has(subgroup.start, subgroup.stop)

    def reserve(self, subgroups: Iterable[Subgroup], updated: Iterable[Subgroup] = ()) -> list[Subgroup]:
        """Make room for the state of some subgroups, and for gradients and parameters of those that are updated here.

        Raises MemoryError, before any is made, if the host has not enough: state has no other place to go.
        """
        wanted = [(tensor, s) for s in subgroups for tensor in s.arena.home()]
        self.make([*wanted, *((tensor, s) for s in updated for tensor in s.arena.staging())])
        return []

    def stage(self, subgroups: Iterable[Subgroup]) -> None:
        """Make room for gradients that come from these. Raises as `reserve`."""
        self.make((s.arena.incoming, s) for s in subgroups)

    def drop(self, subgroup: Subgroup) -> None:
        """Give a home back. Only for one on disk: pinning takes 0.2 to 0.4 s per GB, so others stay."""
        for tensor in self._own(subgroup):
            tensor.release(subgroup.start, subgroup.stop)
        # Staged parameters go with the home: masters must not be joined with the zeros that come in their place.
        subgroup.newest.clear()

    def home_bytes(self, subgroup: Subgroup, *, made: bool = False) -> int:
        """Bytes of a home with what updates there take. made: those that `drop` gives back."""
        own = (t for t in self._own(subgroup) if not made or t.has(subgroup.start, subgroup.stop))
        parts = ((t, *t.part(subgroup.start, subgroup.stop)) for t in own)
        return sum((last - first) * t.tensor.itemsize for t, first, last in parts)

    def _own(self, subgroup: Subgroup) -> list[HostTensor]:
        """The memory that goes with its home: not gradients that may wait for the step, nor weights that stream."""
        arena = subgroup.arena
        kept = [arena.incoming] if self._keeps_gradients else []
        if arena.streams:  # the parameters themselves are there
            kept.append(arena.weights_at_home())
        return [tensor for tensor in (*arena.home(), *arena.staging()) if tensor not in kept]

    def fetch(self, subgroup: Subgroup) -> State:
        window = None if self.houses(subgroup) else self.windows.of(subgroup)
        return subgroup.state if window is None else window.state

    def make_windows(self, count: int, nbytes: int, device: Device) -> None:
        """Make windows of so many bytes. Raises MemoryError if the host has not enough memory for them."""
        self._check(count * nbytes - self.windows.nbytes)
        self.windows.make(count, nbytes, device)

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], beside: Sequence[Copy] = ()
    ) -> Job:
        device = subgroup.arena.device
        assert device is not None, "state of parameters on the host never leaves"
        return device.copy(Op.FLUSH, number, [*state_copies(self.fetch(subgroup), source), *beside], after)

    def prepare(self, subgroups: Iterable[Subgroup]) -> None:
        """Make one more part of what these need once their state leaves the device, if the host has memory for it."""
        for s in subgroups:
            for tensor in (*s.arena.home(), *s.arena.staging()):
                if not tensor.has(s.start, s.stop):
                    with contextlib.suppress(MemoryError):
                        self.make([(tensor, s)])
                    return

    def reserve_whole(self, tensor: HostTensor) -> None:
        """Make all of a tensor that is of no subgroup. Raises as `reserve`."""
        check_host_memory(tensor.tensor.nbytes, spills=self.spills)
        tensor.allow_huge_pages(0, len(tensor.tensor))
        tensor.make(0, len(tensor.tensor))
        self._tensors.add(tensor)
        self._whole.add(tensor)

    def hold(self, tensor: HostTensor) -> None:
        """Make all of a tensor that holds weights without state. Raises as `reserve`."""
        self._check(tensor.tensor.nbytes)
        tensor.allow_huge_pages(0, len(tensor.tensor))
        tensor.make(0, len(tensor.tensor))
        self._tensors.add(tensor)

    def join_homes(self) -> None:
        """Make state ready for users, who copy views of it that span subgroups. No step may be in flight."""
        while self._apart:
            self._apart.pop().join()

    def _check(self, nbytes: int) -> None:
        if nbytes > self._left:
            remedies = "" if self.spills else "disk= with a folder for state, "
            remedies += "offload_gradients=False, " if self._keeps_gradients else ""
            raise MemoryError(
                f"optimizer state needs {nbytes} more bytes of host memory, of which host_memory={self.limit} leaves "
                f"{max(0, int(self._left))}; choose more, {remedies}or a smaller subgroup_size"
            )
        check_host_memory(nbytes, spills=self.spills)

    def make(self, wanted: Iterable[tuple[HostTensor, Subgroup]]) -> None:
        """Make what these tensors have of these subgroups. Raises as `reserve`."""
        missing = {(t, *t.part(s.start, s.stop)): None for t, s in wanted if not t.has(s.start, s.stop)}
        if missing:
            total = sum((last - first) * t.tensor.itemsize for t, first, last in missing)
            self._check(total)
            # Of all before any is made: two neighbours share a huge page only if both may have it by then.
            for tensor, first, last in missing:
                tensor.allow_huge_pages(first, last)
            began = told = time.perf_counter()
            done = 0
            for tensor, first, last in missing:
                if time.perf_counter() - told > TELL_S:
                    told = time.perf_counter()
                    logger.warning(
                        "pinning host memory for optimizer state, once: %d of %d GiB after %d s",
                        done >> 30,
                        total >> 30,
                        told - began,
                    )
                tensor.make(first, last)
                done += (last - first) * tensor.tensor.itemsize
                self._tensors.add(tensor)
                if tensor.shown:
                    self._apart.add(tensor)
