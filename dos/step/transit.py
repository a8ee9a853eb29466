"""Transits: transfers of gradients and state that backward begins for the step to come."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dos.debug import DEBUG, log
from dos.devices import LANE_OF, Caller, Copy, Device, Job
from dos.devices.coalesce import Lent, joined
from dos.state.stores import Stores
from dos.state.subgroup import Subgroup
from perfmodel import Op, Placement, Plan
from perfmodel.plan import Move, Tier
from perfmodel.tasks import GRADIENT, MOVES, Task


@dataclass(frozen=True, eq=False, slots=True)
class Transit:
    """A transfer that was issued.

    number: rises in the order of issue. op: GRADIENT, or the operation of the state's move. nbytes: the bytes copied.
    subgroup: None for gradients without elements.
    job: ends with the transfer. Until then the device, or the disk's thread, keeps the memory of both sides.
    slot: the staging slot that it fills; None: it fills the subgroup's room.
    """

    number: int
    op: Op
    subgroup: Subgroup | None
    source: Tier
    to: Tier
    job: Job
    nbytes: int
    slot: int | None = None

    def __repr__(self) -> str:
        numel = 0 if self.subgroup is None else self.subgroup.numel
        place = "" if self.slot is None else f", slot {self.slot}"
        way = f"{self.source.value} to {self.to.value}"
        return f"<Transit {self.number}: {self.op.value}, {way}{place}, {self.nbytes} bytes of {numel} parameters>"

    def task(self, index: int) -> Task:
        """Return the transit as a task of a schedule. index: of the subgroup now; backward may have had another."""
        if self.op is Op.GRADIENT:
            return Task(*GRADIENT, index, self.nbytes)
        move = Move(self.source, self.to)
        return Task(*MOVES[move], index, self.nbytes, (), self.slot, (), move)


def wait_for_all(transits: Iterable[Transit]) -> None:
    """Block until these have ended. Failures do not matter: a step that needs one copies again, or raises."""
    for transit in transits:
        if DEBUG:
            log("waits:", transit)
        with contextlib.suppress(Exception):
            transit.job.wait()


class Adopting(Protocol):
    """A subgroup in a step, with the transits of its gradients that the step uses; see `Subject`."""

    @property
    def subgroup(self) -> Subgroup: ...
    @property
    def departed(self) -> Sequence[Transit]: ...


MOST_EARLY = 1000
"""The most transits without a step; then they are waited for, and forgotten."""


class Transits:
    """The transits that backward has begun for the step to come, and where state is meanwhile.

    `at` reports the source of a fetch until a step adopts it. The step adopts the transits that it uses; all others are
    cancelled.

    all: those that no step has adopted.
    exposed: whether state at home was exposed since the last step. User code may write to it until the next one, and
        the step would lose these writes if it used state that was fetched before them.
    """

    def __init__(self, device: Device, stores: Stores) -> None:
        self.all: list[Transit] = []
        self.exposed = False
        self._device, self._stores = device, stores
        self._state: dict[Subgroup, Transit] = {}
        """The transits that copy state to the device, by subgroup."""
        self._freed: deque[Transit] = deque()
        """The transits of gradients whose memory on the device only the copy keeps."""
        self._freed_bytes = 0
        self._considered: Plan | None = None
        """The plan for which these two were computed."""
        self._streamed: list[int] = []
        self._slot_bytes = 0
        self._numbers = itertools.count()

    def at(self, subgroup: Subgroup) -> Tier | None:
        """Return the tier of the subgroup's newest state; None: nowhere, it was never updated."""
        # The device's store has the room as soon as it is reserved, which has no state until the copy has ended.
        coming = self._state.get(subgroup)
        if coming is not None and coming.slot is None:
            return coming.source
        for tier, store in self._stores.of.items():
            if store.has(subgroup):
                return tier
        return None

    def send(
        self,
        index: int,
        subgroup: Subgroup | None,
        copies: Sequence[Copy],
        callers: Collection[Caller] = (),
        *,
        freed: bool = False,
        then: Callable[[], None] | None = None,
    ) -> Transit:
        """Copy gradients of one subgroup to the host, behind the work that the caller has queued on the device.

        subgroup: the first subgroup in which they lie; None: they have no elements.
        callers: the queues in which backward wrote them, if not all in the present one.
        freed: whether only the copy keeps their memory on the device from now on; see `hold_back`.
        then: see `Device.copy`.
        """
        if len(self.all) > MOST_EARLY:  # many backwards without a step; departures refer to transits in use
            wait_for_all(self.all)
            # Transits of state stay: `at` must know the state in transit, and the step inherits them.
            self.all = sorted(self._state.values(), key=lambda transit: transit.number)
        # Behind the work of each queue in which backward writes these gradients.
        behind = () if then is None else (then,)
        sent = joined(copies) if freed else Lent(joined(copies))
        job = self._device.copy(Op.GRADIENT, index, sent, self._device.fence(callers), *behind)
        nbytes = sum([source.nbytes for _, source in copies])
        transit = Transit(next(self._numbers), Op.GRADIENT, subgroup, Tier.DEVICE, Tier.HOST, job, nbytes)
        self.all.append(transit)
        if DEBUG:
            log("issued:", transit)
        if freed:
            self._freed.append(transit)
            self._freed_bytes += nbytes
        return transit

    def hold_back(self, nbytes: int, most: int) -> None:
        """Block while gradients that only copies keep on the device take more than `most` bytes, with `nbytes` more.

        Else backward, which is faster than the link, would fill the device with gradients that wait for their copy.
        """
        # The first copy ends first, because the stream is in order. Its end releases the gradient's memory.
        while self._freed and self._freed_bytes + nbytes > most:
            wait_for_all([self._freed[0]])
            self._freed_bytes -= self._freed.popleft().nbytes

    def _fetch(self, index: int, subgroup: Subgroup, slot: int | None = None) -> None:
        """Copy state from the host to the device, into a slot or into its reserved room.

        No step may be in flight, because it may still write the state that is read here.
        """
        # Behind the caller's stream, which may still use former contents of the memory that the copy writes.
        job = self._stores.copy(Move(Tier.HOST, Tier.DEVICE), index, subgroup, self._device.fence())
        number, nbytes = next(self._numbers), subgroup.state.nbytes
        transit = Transit(number, Op.PREFETCH, subgroup, Tier.HOST, Tier.DEVICE, job, nbytes, slot)
        self.all.append(transit)
        self._state[subgroup] = transit
        if DEBUG:
            log("issued:", transit)

    def fetch_residents(self, plan: Plan, subgroups: Sequence[Subgroup], left: float) -> None:
        """Fetch state that will be resident while backward runs, as far as memory allows; the step reads state on disk.

        left: bytes that the state may take.
        Fetches nothing while state is exposed, because user code's later writes would be lost.
        """
        if self.exposed:
            return
        store = self._stores.device
        store.expect_denials(True)  # the step will try again
        for i in plan.served(Placement.GPU_RESIDENT):
            subgroup = subgroups[i]
            if subgroup in self._state or self.at(subgroup) is not Tier.HOST:
                continue
            left -= subgroup.load().state_bytes
            if left < 0:
                return
            # No attempt after a denial: each one makes the allocator empty its cache, in the middle of backward.
            if store.reserve([subgroup]):
                return
            try:
                self._fetch(i, subgroup)
            except BaseException:
                drain_streams(self._device)  # a part of the copy may still write to the room
                store.drop(subgroup)  # `at` would take room without a transit for the place of the state
                raise

    def fill_slots(self, plan: Plan, subgroups: Sequence[Subgroup], spare: Callable[[], float]) -> None:
        """Allocate and fill the plan's slots while backward runs, if they take at most `spare` bytes."""
        store = self._stores.device
        if store.slots or self.exposed:
            return
        if self._considered is not plan:  # remembered, because each gradient calls this
            self._considered = plan
            self._streamed = [i for i in plan.served(Placement.GPU_STREAMED) if self.at(subgroups[i]) is Tier.HOST]
            self._slot_bytes = max((subgroups[i].state.carved_bytes for i in self._streamed), default=0)
        streamed = self._streamed
        if not streamed:
            return
        nbytes, count = self._slot_bytes, min(plan.slots, len(streamed))
        # More slots would take memory that backward still needs, and user code would run out of memory.
        if nbytes * count > spare():
            return
        store.get_slots(count, nbytes)
        for slot, i in enumerate(streamed[: len(store.slots)]):
            store.occupy(subgroups[i], slot)
            self._fetch(i, subgroups[i], slot)

    @property
    def in_slots(self) -> list[Subgroup]:
        """The subgroups whose state is in transit to slots, in the order of the slots."""
        return [subgroup for subgroup, transit in self._state.items() if transit.slot is not None]

    def comes(self, subgroup: Subgroup) -> bool:
        """Return whether the subgroup's state is in transit to its room on the device."""
        return subgroup in self._state and self._state[subgroup].slot is None

    def cancel(self, subgroups: Iterable[Subgroup] | None = None) -> None:
        """Cancel fetches of state to its room, of these or of all, and drop the room. The state is still at home."""
        coming = [s for s in (self._state if subgroups is None else subgroups) if self.comes(s)]
        for subgroup in coming:
            # The copy writes to the room until it ends: the allocator would give the memory to other code meanwhile.
            wait_for_all([self._state[subgroup]])
            if self._stores.device.has(subgroup):
                self._stores.device.drop(subgroup)
            del self._state[subgroup]

    def cancel_slots(self) -> None:
        """Cancel fetches of state to slots, and release the slots."""
        passing = self.in_slots
        # As in `cancel`: the allocator would give the memory of slots to other code while copies still write to it.
        wait_for_all(self._state[subgroup] for subgroup in passing)
        for subgroup in passing:
            del self._state[subgroup]
        self._stores.device.release_slots()

    def wait(self) -> None:
        """Block until the transits have ended, so that memory to which they copy can be released."""
        wait_for_all(self.all)

    def adopt(self, plan: Plan, subjects: Sequence[Adopting]) -> list[tuple[int, Transit]]:
        """Hand the transits that the step uses over to it; return them, each with the index of its subgroup."""
        used: list[tuple[int, Transit]] = []
        for i, subject in enumerate(subjects):
            # Gradients of subgroups that are updated on the device after all were sent in vain.
            if plan.placements[i] is Placement.CPU:
                used += [(i, transit) for transit in subject.departed]
            if subject.subgroup in self._state:
                used.append((i, self._state[subject.subgroup]))
        used.sort(key=lambda each: each[1].number)
        # The step waits for the transits that it uses. All others stay here, because `settle` waits for them.
        numbers = {transit.number for _, transit in used}
        self.all = [transit for transit in self.all if transit.number not in numbers]
        self._state, self._considered = {}, None
        # From here on the step keeps these gradients' memory, and waits for their copies.
        self._freed.clear()
        self._freed_bytes = 0
        return used

    def end(self) -> None:
        """Forget all transits, which have ended, and which no step will use."""
        self.all = []
        self._freed.clear()
        self._freed_bytes = 0


def drain_streams(device: Device) -> None:
    """Block until all work of the optimizer that is queued on the device has ended, even failed work."""
    for op in LANE_OF:  # streams are in order: an empty job ends after all jobs before it
        with contextlib.suppress(Exception):
            last = device.launch(0, lambda: None, 0) if op is Op.UPDATE else device.copy(op, 0, [])
            last.wait()
