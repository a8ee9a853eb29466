"""The amount of host memory that can be pinned: in one call, and in all."""

from __future__ import annotations

import math
import platform
import resource
from pathlib import Path

LEAST_BYTES = 2 << 20
"""The least bytes of a piece of memory that could not be pinned as a whole: a huge page."""
LEFT_TO_OTHERS = 128 << 20
"""The bytes that stay unpinned where the system limits the total: torch and data loaders pin memory, too."""
_VERSION = Path("/proc/version")
_LEAKS_ABOVE = 2 << 30
"""Linux 6.11 fails to pin more bytes in one call, and keeps the pages of such a call until the machine restarts."""


class PinLimit:
    """The amount that the runtime has refused to pin in this process.

    A call that fails may cost memory until the machine restarts, so no call repeats a size that has failed, nor tries a
    larger one. Where a size fails that was pinned before, the system limits the total.

    regions: the bytes of each region that is pinned now, by its first byte.
    error: the runtime's message for the last call that failed.
    """

    def __init__(self) -> None:
        self.regions: dict[int, int] = {}
        self.error = "not tried on this kernel" if leaks() else ""
        self._most = math.inf
        """The most bytes that may be pinned in all; infinite while no total is known."""
        self._refused = _LEAKS_ABOVE + 1 if leaks() else math.inf
        """The least bytes of a call that is known to fail."""
        self._largest = 0
        """The most bytes of a call that has not failed."""
        self._total_is_limited = False
        self._allocation_refused = math.inf
        """The least bytes that the runtime has refused to allocate."""

    @property
    def pinned(self) -> int:
        """Bytes that are pinned now."""
        return sum([*self.regions.values()])  # over a copy: any thread may collect a tensor and unpin it

    def fitting(self, nbytes: int, least: int = LEAST_BYTES, unpinned: int = 0) -> int:
        """Return the most bytes, up to `nbytes`, of the next call; 0 if only pieces below `least` could be pinned.

        unpinned: bytes that will be unpinned first.
        """
        while not self._may_pin(nbytes, unpinned):
            nbytes = 1 << ((nbytes - 1).bit_length() - 1) if nbytes > 1 else 0
            if nbytes < least:
                return 0
        return nbytes

    def _may_pin(self, nbytes: int, unpinned: int) -> bool:
        if self._most < math.inf and self.pinned - unpinned + nbytes > self._most:
            return False
        # Memory that was unpinned can be pinned again, if the total was the reason.
        again = self._most < math.inf and nbytes <= self._largest
        return nbytes < self._refused or again

    def succeeded(self, nbytes: int) -> None:
        """Remember that a call of this size did not fail."""
        self._largest = max(self._largest, nbytes)

    def failed(self, nbytes: int, error: str) -> None:
        """Remember that a call of this size failed."""
        self.error = error
        if self._most < math.inf:  # others have taken the memory that was unpinned: no size is tried twice
            self._largest = 0
        self._total_is_limited |= nbytes <= self._largest
        self._refused = min(self._refused, nbytes)

    def may_allocate(self, nbytes: int) -> bool:
        """Return whether the runtime is to allocate pinned memory: it has registered nothing, and not refused this."""
        return math.isfinite(self._refused) and not self._largest and nbytes < self._allocation_refused

    def refuse_allocation(self, nbytes: int) -> None:
        """Remember that the runtime does not allocate so many bytes."""
        self._allocation_refused = min(self._allocation_refused, nbytes)

    def settle(self) -> None:
        """Set the total, once all sizes were tried, if a call has shown that there is one."""
        if self._total_is_limited:
            self._most, self._total_is_limited = min(self._most, max(0, self.pinned - LEFT_TO_OTHERS)), False

    def excess(self) -> int:
        """Return the bytes that are pinned and should be left to others."""
        return 0 if self._most == math.inf else max(0, self.pinned - int(self._most))


def leaks() -> bool:
    """Return whether this kernel keeps the pages of large calls that fail."""
    return platform.release().startswith("6.11.")


def remedy() -> str:
    """Return the likely reasons why this system pins little memory, with what to do about each."""
    try:
        version = _VERSION.read_text().lower()
    except OSError:
        version = ""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    reasons = []
    if "microsoft" in version:
        reasons.append("WSL2 pins a part of its memory only: raise memory= under [wsl2] in .wslconfig")
    if "linuxkit" in version:
        reasons.append("Docker Desktop pins a part of its machine's memory only: raise it in Docker's settings")
    if leaks():
        reasons.append(f"Linux {platform.release()} cannot pin more than 2 GiB at once: use another kernel")
    if locked != resource.RLIM_INFINITY:
        reasons.append(f"raise the limit of locked memory, {locked >> 10} KiB (ulimit -l unlimited)")
    return "; ".join(reasons) or f"Linux {platform.release()} has no limit that DOSAdam knows: look at dmesg"
