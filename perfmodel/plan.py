"""Plans: where each subgroup is updated in one iteration, in which order, over how many staging slots."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple


class Tier(enum.Enum):
    """A place where state or weights rest."""

    __hash__ = object.__hash__  # Enum's own is a call of Python for each look-up, in hooks and simulations

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Move(NamedTuple):
    """State goes from one tier to another, where there may be a slot for it or room of its own."""

    source: Tier
    destination: Tier


class Placement(enum.Enum):
    """The choices of a plan: where a subgroup is updated, and where its state stays afterwards.

    label: its name in reports. stays: once the plan has settled, also where the state comes from. Instead of on the
        host it may rest on disk, and then comes through there; see `Plan.on_disk`.
    """

    __hash__ = object.__hash__  # Enum's own is a call of Python for each look-up, in hooks and simulations

    CPU = "cpu", Tier.HOST
    """State on the host, updated by the host."""
    GPU_STREAMED = "gpu_streamed", Tier.HOST
    """State on the host, prefetched into a staging slot, updated on the device, flushed back."""
    GPU_RESIDENT = "gpu_resident", Tier.DEVICE
    """State stays on the device and is updated there."""

    def __init__(self, label: str, stays: Tier) -> None:
        self.label = label
        self.stays = stays


@dataclass(frozen=True)
class Plan:
    """Placements of all subgroups of one iteration.

    placements: one per subgroup, by subgroup index.
    order: the subgroup indices in the order in which every lane serves them; a permutation.
    slots: staging slots on the device; at least 1 if any subgroup is streamed.
    activation_bytes: of saved tensors that move to the host, those saved first.
    on_disk: the subgroups whose state rests on disk; it passes through the host on its way to and from the update.
    blocks_on_device: the blocks whose weights stay on the device; those of all others come for each use of them.
    threads: of updates on the CPU; 0: as many as the CPU lane takes by itself.

    Raises ValueError when the parts do not fit together.
    """

    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    slots: int
    activation_bytes: int = 0
    on_disk: frozenset[int] = frozenset()
    blocks_on_device: frozenset[int] = frozenset()
    threads: int = 0

    def __post_init__(self) -> None:
        n = len(self.placements)
        if len(self.order) != n or set(self.order) != set(range(n)):
            raise ValueError(
                f"plan order must name each of the {n} subgroups once, found {len(self.order)} entries "
                f"({len(set(self.order))} distinct); use tuple(range({n})) for the natural order"
            )
        for name in ("slots", "activation_bytes", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"plan {name} must be 0 or more, found {getattr(self, name)}")
        there = [i for i in self.on_disk if not 0 <= i < n or self.placements[i].stays is not Tier.HOST]
        if there:
            raise ValueError(
                f"plan on_disk must name subgroups that are updated on the CPU or streamed, found {sorted(there)}"
            )
        if self.slots == 0 and Placement.GPU_STREAMED in self.placements:
            raise ValueError("a plan with streamed subgroups needs at least 1 staging slot, found 0")

    def __len__(self) -> int:
        return len(self.placements)

    def served(self, placement: Placement) -> tuple[int, ...]:
        """Indices of the subgroups with this placement, in service order."""
        return tuple([i for i in self.order if self.placements[i] is placement])

    def stays(self, subgroup: int) -> Tier:
        """The tier where the subgroup's state rests after the iteration."""
        return Tier.DISK if subgroup in self.on_disk else self.placements[subgroup].stays

    def on_host(self, subgroups: Collection[int]) -> Plan:
        """The plan with these subgroups updated on the host."""
        if not subgroups:
            return self
        placements = tuple(Placement.CPU if i in subgroups else p for i, p in enumerate(self.placements))
        return replace(self, placements=placements)

    def __str__(self) -> str:
        counts = Counter(self.placements)
        parts = [f"{counts[p]} {p.label}" for p in Placement if counts[p]]
        parts += [f"state of {len(self.on_disk)} on disk"] if self.on_disk else []
        moved = f"; {self.activation_bytes / 2**20:.1f} MiB of saved tensors move to the host"
        weights = f"; weights of {len(self.blocks_on_device)} blocks stay on the device"
        slots = f"{self.slots} slot{'' if self.slots == 1 else 's'}"
        threads = f"; {self.threads} CPU thread{'' if self.threads == 1 else 's'}"
        return (
            f"{len(self)} subgroups: {', '.join(parts) or 'none'}; {slots}; {self._runs()}"
            f"{moved if self.activation_bytes else ''}{weights if self.blocks_on_device else ''}"
            f"{threads if self.threads and counts[Placement.CPU] else ''}"
        )

    def _runs(self) -> str:
        """The service order in short: `C` CPU, `S` streamed, `R` resident, runs counted, e.g. `S C C` as `S 2C`."""
        letters = {Placement.CPU: "C", Placement.GPU_STREAMED: "S", Placement.GPU_RESIDENT: "R"}
        runs = [(letter, len(list(run))) for letter, run in groupby(letters[self.placements[i]] for i in self.order)]
        return " ".join(letter if count == 1 else f"{count}{letter}" for letter, count in runs)
