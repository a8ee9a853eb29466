"""The work of an iteration and the compute beside it: sizes, bytes per lane, compute times, free memory."""

from __future__ import annotations

import functools
import math
from bisect import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from perfmodel.format import MIXED, Format, update_traffic
from perfmodel.plan import Placement, Plan, Tier


@dataclass(frozen=True)
class SubgroupLoad:
    """One subgroup as the lanes see it. Counts are parameters, sizes are bytes of the whole subgroup.

    gradient_bytes: device to host, when updated on the CPU.
    parameter_bytes: host to device, when updated on the CPU.
    state_bytes: each way when streamed (master weights and moments); held on the device when resident.
    read_bytes: of parameters that an update reads because they are their masters, or halves of them; device to
        host when updated on the CPU after an update on the device.
    returned_bytes: of gradients that have left for the host in any case, and come up again for updates on the device.
    host_bytes: host memory that it takes where its state rests there: with gradients and parameters on their way.
    format: of the state, which says how fast updates are.
    """

    numel: int
    gradient_bytes: int
    parameter_bytes: int
    state_bytes: int
    read_bytes: int = 0
    returned_bytes: int = 0
    host_bytes: int = 0
    format: str = field(default=MIXED.name, kw_only=True)

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, found {getattr(self, name)}")

    @classmethod
    def of(cls, numel: int, state: Format) -> SubgroupLoad:
        """A subgroup of `numel` parameters whose state is kept in one format."""
        each = state.value_bytes, state.value_bytes, state.state_bytes, state.read_bytes
        sizes = [int(numel * nbytes) for nbytes in (*each, 0, state.held_bytes)]
        return cls(numel, *sizes, format=state.name)

    @property
    def cpu_traffic(self) -> int:
        """Bytes of host DRAM traffic of an update on the CPU."""
        each = self.gradient_bytes, self.parameter_bytes, self.state_bytes, self.read_bytes
        return int(update_traffic(*each))


SIZES = tuple(f.name for f in fields(SubgroupLoad) if f.name != "format")
"""The fields of a subgroup that are counts or bytes."""
AHEAD = 2
"""Groups of saved tensors that are on their way at a time while backward uses another."""
WEIGHT_WINDOW = 2
"""Blocks that stream and are on the device at a time: the one that computes, and the next."""


class SavedTensors(NamedTuple):
    """Tensors that forward saves for backward and that may be on the host in between.

    nbytes: of them all. born: share of forward that has passed when they are saved.
    due: share of backward that has passed when it needs them.
    """

    nbytes: int
    born: float
    due: float


class BlockLoad(NamedTuple):
    """A part of the model, such as a layer, whose weights stay on the device or come from the host for each use.

    nbytes: of its weights. start, stop: its subgroups, all between these; none if all of it is frozen.
    """

    nbytes: int
    start: int
    stop: int


class HostTimes(NamedTuple):
    """Seconds that the host takes to issue a step, with no update on the CPU beside it; 0: not known.

    turn: for each subgroup that the CPU updates. job: for each copy and update of what passes through slots.
    rest: for all else until `step()` returns, and in the next forward beside what takes `Workload.host_share`.
    """

    turn: float = 0.0
    job: float = 0.0
    rest: float = 0.0

    def seconds(self, on_cpu: Any, streamed: Any, filled: Any = 0) -> Any:
        """Seconds for so many subgroups by placement, numbers or arrays. filled: slots that backward fills."""
        return self.rest + on_cpu * self.turn + (3 * streamed - filled) * self.job


NO_TIMES = HostTimes()


def peak_room(activations: Sequence[SavedTensors], activation_bytes: int) -> int:
    """Bytes that moving saved tensors frees at the peak. The device has 1 + AHEAD of them even if all move."""
    sums = list(accumulate((each.nbytes for each in activations), initial=0))
    kept = max((after - before for before, after in zip(sums, sums[1 + AHEAD :], strict=False)), default=sums[-1])
    gone = sums[bisect(sums, activation_bytes) - 1]
    return max(0, min(gone, sums[-1] - kept))


@dataclass(frozen=True)
class Workload:
    """One iteration's optimizer work and the compute beside it.

    subgroups: at least one.
    forward_s, backward_s: compute times in seconds that transfers may hide behind (0: nothing to hide behind).
    peak_free_bytes: device memory free at the peak of the iteration while no more saved tensors move than have to; for
        resident state.
    update_free_bytes: device memory free while updating, beyond resident state; for staging slots.
    shared_free_bytes: device memory free while updating that resident state and slots share. Where it is no more than
        `peak_free_bytes`, as slots are in use at the next peak, it grows with that when saved tensors move.
    passing_bytes: of a slot, beside state: for offloaded gradients, and weights, that come up. As much for one subgroup
        is not free, for it is needed whatever the plan is.
    activations: saved tensors that may move to the host, in the order in which forward saves them, a few together.
    activation_least_bytes, activation_host_bytes: of them have to move, and have room on the host.
    host_free_bytes: host memory for state that rests there, beyond windows, by `SubgroupLoad.host_bytes`. State
        that exceeds it is on disk.
    windows: buffers on the host through which state from disk passes.
    blocks: whose weights may be on the host, in the order in which forward uses them. Memory counts as free where
        weights may be: `peak_free_bytes` and `shared_free_bytes` are for those that stay or are fetched, too.
    blocks_least, blocks_most: of them that stay on the device.
    micro_batches: of an iteration, each with a forward and a backward; the times are of one.
    in_backward: whether a subgroup is updated as soon as backward has completed its gradients, not after backward.
    host_share: the seconds in which the host issues forward and backward with nothing beside it, over their own. Beside
        an update on the CPU they are `HardwareProfile.slowdown` times as many. 0: not known, or the host is never late.
        Of forward alone where updates begin behind backward.
    host: what `step()` takes the host, before which the next forward cannot begin.
    half_freed_bytes: device memory that is free in all of backward's second half, beyond that at the peak. Slots that
        fit into both are filled from its half on, all or none, others as backward ends. None: not known, and memory is
        freed evenly in all of backward.
    ahead_s: seconds before the end of backward at which the host issues the step: from then on the CPU updates what has
        arrived. 0: the host is no faster than the device, or waits for it.

    Raises ValueError for an empty workload, negative times or sizes, saved tensors or blocks that are out of order, or
    blocks whose gradients are not offloaded.
    """

    subgroups: tuple[SubgroupLoad, ...]
    forward_s: float = 0.0
    backward_s: float = 0.0
    peak_free_bytes: float = math.inf
    update_free_bytes: float = math.inf
    shared_free_bytes: float = math.inf
    passing_bytes: int = 0
    activations: tuple[SavedTensors, ...] = ()
    activation_least_bytes: int = 0
    activation_host_bytes: float = math.inf
    host_free_bytes: float = math.inf
    windows: int = 0
    blocks: tuple[BlockLoad, ...] = ()
    blocks_least: int = 0
    blocks_most: float = math.inf
    micro_batches: int = 1
    in_backward: bool = False
    ahead_s: float = 0.0
    host_share: float = 0.0
    host: HostTimes = NO_TIMES
    half_freed_bytes: float | None = None

    def __post_init__(self) -> None:
        if not self.subgroups:
            raise ValueError("a workload needs at least one subgroup, found none")
        free = "peak_free_bytes", "update_free_bytes", "shared_free_bytes"
        host = "activation_least_bytes", "activation_host_bytes", "host_free_bytes", "windows", "passing_bytes"
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches must be 1 or more, found {self.micro_batches}")
        if self.blocks:
            self._check_blocks()
        known = () if self.half_freed_bytes is None else ("half_freed_bytes",)
        for name in ("forward_s", "backward_s", "ahead_s", "host_share", *free, *host, *known):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, found {getattr(self, name)}")
        for early, late in pairwise((SavedTensors(0, 0.0, 1.0), *self.activations, SavedTensors(0, 1.0, 0.0))):
            if early.nbytes < 0 or not (early.born <= late.born and early.due >= late.due):
                raise ValueError(
                    "activations must be in the order in which forward saves them and be due in the reverse order, "
                    f"with shares of forward and backward in [0, 1]; found {early} before {late}"
                )

    def _check_blocks(self) -> None:
        for before, block in pairwise((BlockLoad(0, 0, 0), *self.blocks)):
            if not (block.nbytes >= 0 and before.stop <= block.start <= block.stop <= len(self.subgroups)):
                raise ValueError(
                    f"blocks must each have subgroups of their own, of {len(self.subgroups)}, in the order of these; "
                    f"found {block} after {before}"
                )
            kept = [i for i in range(block.start, block.stop) if self.subgroups[i].gradient_bytes]
            if not all(self.subgroups[i].returned_bytes for i in kept):
                raise ValueError(f"weights on the host need offloaded gradients, found returned_bytes=0 in {block}")

    @classmethod
    def of_sizes(cls, sizes: Iterable[int], state: Format = MIXED, **others: Any) -> Workload:
        """A workload of subgroups with `sizes` parameters whose state is kept in one format. others: its fields."""
        return cls(tuple(SubgroupLoad.of(numel, state) for numel in sizes), **others)

    @functools.cached_property
    def numel(self) -> int:
        """Parameters of all subgroups."""
        return sum(load.numel for load in self.subgroups)

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of all optimizer state."""
        return sum(load.state_bytes for load in self.subgroups)

    def state_bytes_of(self, subgroups: Iterable[int]) -> int:
        """Bytes of the state of these alone, by index."""
        return sum(self.subgroups[i].state_bytes for i in subgroups)

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Size of a staging slot that takes any of the subgroups, in bytes."""
        return max(load.state_bytes for load in self.subgroups)

    @functools.cached_property
    def returns(self) -> bool:
        """Whether offloaded gradients come up again for updates on the device."""
        return any(load.returned_bytes for load in self.subgroups)

    def staging_bytes(self, slots: int, *, streams: bool = True) -> int:
        """Device memory for this number of slots, of the bytes that are free.

        streams: whether state passes through them, and not offloaded gradients alone, of which those of one slot are
        set apart.
        """
        return slots * self.slot_bytes * streams + max(0, slots - 1) * self.passing_bytes

    def staged_bytes(self, plan: Plan) -> int:
        """The same for the slots of a plan."""
        return self.staging_bytes(plan.slots, streams=Placement.GPU_STREAMED in plan.placements or not self.returns)

    def slots_within(self, nbytes: float, most: int, *, streams: bool = True) -> int:
        """The number of slots, `most` at most, for which this much device memory is enough."""
        return next((n for n in range(most, 0, -1) if self.staging_bytes(n, streams=streams) <= nbytes), 0)

    @functools.cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Forward in its order: parts of compute and their sizes, to which their times are in proportion.

        A part is a subgroup's, known by its index, or a frozen block's, by ~index. Sizes are parameters, and if there
        are blocks bytes of weights.
        """
        if not self.blocks:
            return tuple((i, load.numel) for i, load in enumerate(self.subgroups))
        found = [(i, load.parameter_bytes) for i, load in enumerate(self.subgroups)]
        for block in self.blocks:  # of a block that is frozen in part each subgroup stands for more than itself
            sizes = [size for _, size in found[block.start : block.stop]]
            for i, size in enumerate(sizes, block.start):
                found[i] = i, block.nbytes * size // max(sum(sizes), 1)
        for b in range(len(self.blocks) - 1, -1, -1):
            if self.blocks[b].start == self.blocks[b].stop:
                found.insert(self.blocks[b].start, (~b, self.blocks[b].nbytes))
        return tuple(found)

    @functools.cached_property
    def backward_runs(self) -> tuple[tuple[int, int], ...]:
        """Backward likewise, which ends with the first subgroup: blocks frozen before that have no part in it."""
        return self.runs[[part for part, _ in self.runs].index(0) :][::-1]

    @functools.cached_property
    def seconds_by_size(self) -> tuple[float, float]:
        """Seconds of backward, and of forward, for a part of size 1."""
        backward, forward = (max(sum(size for _, size in runs), 1) for runs in (self.backward_runs, self.runs))
        return self.backward_s / backward, self.forward_s / forward

    def staying(self, count: int) -> frozenset[int]:
        """Blocks that stay where this number of them does: evenly spread, so that fetches have as much to hide behind.

        With the last blocks alone, or the first, simulated iterations take up to 29% longer where links are scarce.
        """
        if count not in self._staying:
            found = frozenset((2 * j + 1) * len(self.blocks) // (2 * count) for j in range(count))
            self._staying[count] = found
        return self._staying[count]

    def block_counts(self, free: float) -> range:
        """Numbers of blocks that may stay where this much device memory is free for weights; at least one number."""
        least, most = min(self.blocks_least, len(self.blocks)), int(min(self.blocks_most, len(self.blocks)))
        counts = (count for count in range(most, least, -1) if self.weight_bytes(self.staying(count)) <= free)
        return range(least, next(counts, least) + 1)

    def streaming(self, on_device: Collection[int]) -> frozenset[int]:
        """The subgroups whose weights are on the host if those of these blocks are on the device."""
        return self._of_blocks(on_device)[0]

    def weight_bytes(self, on_device: Collection[int]) -> int:
        """Device memory for weights if those of these blocks stay and the others have a window."""
        return self._of_blocks(on_device)[1]

    def _of_blocks(self, on_device: Collection[int]) -> tuple[frozenset[int], int]:
        key = frozenset(on_device)
        if key not in self._by_blocks:
            streamed = [block for b, block in enumerate(self.blocks) if b not in key]
            subgroups = frozenset(i for block in streamed for i in range(block.start, block.stop))
            window = sum(sorted(block.nbytes for block in streamed)[-WEIGHT_WINDOW:])
            self._by_blocks[key] = subgroups, sum(self.blocks[b].nbytes for b in key) + window
        return self._by_blocks[key]

    def moved(self, activation_bytes: int) -> tuple[SavedTensors, ...]:
        """The tensors saved first that fit into this number of bytes: they move to the host."""
        if activation_bytes not in self._moved:
            sums = list(accumulate(each.nbytes for each in self.activations))
            self._moved[activation_bytes] = self.activations[: bisect(sums, activation_bytes)]
        return self._moved[activation_bytes]

    # Remembered, because a planner asks for each division of memory, and each plan that it simulates.
    @functools.cached_property
    def _staying(self) -> dict[int, frozenset[int]]:
        return {}

    @functools.cached_property
    def _by_blocks(self) -> dict[frozenset[int], tuple[frozenset[int], int]]:
        return {}

    @functools.cached_property
    def _moved(self) -> dict[int, tuple[SavedTensors, ...]]:
        return {}

    @functools.cached_property
    def _rooms(self) -> dict[int, int]:
        return {}

    def peak_free(self, activation_bytes: int) -> float:
        """Device memory free at the peak when these bytes of saved tensors move."""
        return self.peak_free_bytes + self._gained(activation_bytes)

    def shared_free(self, activation_bytes: int) -> float:
        """Device memory that resident state and slots share then."""
        return self.shared_free_bytes + (self._gained(activation_bytes) if self.shares_peak else 0)

    @property
    def shares_peak(self) -> bool:
        """Whether resident state and slots share the memory that is free at the peak."""
        return self.shared_free_bytes <= self.peak_free_bytes

    def _gained(self, activation_bytes: int) -> int:
        if not self.activations:
            return 0
        if activation_bytes not in self._rooms:
            now, least = (peak_room(self.activations, n) for n in (activation_bytes, self.activation_least_bytes))
            self._rooms[activation_bytes] = max(0, now - least)
        return self._rooms[activation_bytes]

    def has_room(self, plan: Plan) -> bool:
        """Whether there is memory for all that a plan has on the device, and for saved tensors that it moves."""
        if any(block >= len(self.blocks) for block in plan.blocks_on_device):
            return False  # a plan for a model that had more blocks
        weights = self.weight_bytes(plan.blocks_on_device)
        resident = self.state_bytes_of(plan.served(Placement.GPU_RESIDENT)) + weights
        staged, moved = self.staged_bytes(plan), plan.activation_bytes
        at_home = (i for i in plan.order if plan.stays(i) is Tier.HOST)
        return (
            resident <= self.peak_free(moved)
            and staged <= self.update_free_bytes
            and resident + staged <= self.shared_free(moved)
            and self.activation_least_bytes <= moved <= self.activation_host_bytes
            and min(self.blocks_least, len(self.blocks)) <= len(plan.blocks_on_device) <= self.blocks_most
            and (
                math.isinf(self.host_free_bytes)
                or self.host_free_bytes >= sum(self.subgroups[i].host_bytes for i in at_home)
            )
        )
