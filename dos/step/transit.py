"""Transfers that backward begins for the step to come: transits of gradients, and state that fills slots."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dos.debug import DEBUG, log
from dos.devices import LANE_OF, Caller, Copy, Device, Job
from dos.devices.coalesce import Lent, joined
from dos.state.stores import Stores
from dos.state.subgroup import Subgroup
from perfmodel import Op, Placement, Plan
from perfmodel.lanes import Stream
from perfmodel.plan import Move, Tier
from perfmodel.tasks import GRADIENT, MOVES, Task

FETCH = Move(Tier.HOST, Tier.DEVICE)


@dataclass(frozen=True, eq=False, slots=True)
class Transit:
    """A copy of gradients to the host that was issued.

    number: rises in the order of issue. nbytes: the bytes copied. subgroup: None for gradients without elements.
    job: ends with the transfer. Until then the device keeps the memory of both sides.
    """

    number: int
    subgroup: Subgroup | None
    job: Job
    nbytes: int

    def __repr__(self) -> str:
        numel = 0 if self.subgroup is None else self.subgroup.numel
        return f"<Transit {self.number}: gradient, device to host, {self.nbytes} bytes of {numel} parameters>"


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
    """Transfers that backward has begun for the next step, which adopts those it uses: transits, and fetches to slots.

    all: the transits that no step has adopted.
    """

    def __init__(self, device: Device, stores: Stores) -> None:
        self.all: list[Transit] = []
        self._device, self._stores = device, stores
        self._considered: Plan | None = None
        """The plan for which these two were computed."""
        self._streamed: list[int] = []
        self._slot_bytes = 0
        self._numbers = itertools.count()

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
        freed: whether only the copy keeps their memory on the device from now on.
        then: see `Device.copy`.
        """
        if len(self.all) > MOST_EARLY:  # many backwards without a step; departures refer to transits in use
            wait_for_all(self.all)
            self.all = []
        # Behind the work of each queue in which backward writes these gradients.
        behind = () if then is None else (then,)
        sent = copies if isinstance(copies, Lent) else joined(copies) if freed else Lent(joined(copies))
        job = self._device.copy(Op.GRADIENT, index, sent, self._device.fence(callers), *behind)
        nbytes = sum([source.nbytes for _, source in copies])
        transit = Transit(next(self._numbers), subgroup, job, nbytes)
        self.all.append(transit)
        if DEBUG:
            log("issued:", transit)
        return transit

    def fill_slots(self, plan: Plan, subgroups: Sequence[Subgroup], spare: Callable[[], float]) -> None:
        """Allocate and fill the plan's slots while backward runs, if they take at most `spare` bytes.

        No step may be in flight, because it may still write the state that is read here.
        """
        store = self._stores.device
        # User code may write to exposed state until the next step, which would lose writes behind the copy.
        if store.slots or self._stores.homes.exposed:
            return
        if self._considered is not plan:  # remembered, because each gradient calls this
            self._considered = plan
            at, served = self._stores.at, plan.served(Placement.GPU_STREAMED)
            self._streamed = [i for i in served if at(subgroups[i]) is Tier.HOST]
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
            subgroup = subgroups[i]
            store.occupy(subgroup, slot)
            # Behind the caller's stream, which may still use former contents of the memory that the copy writes.
            job = self._stores.copy(FETCH, i, subgroup, self._device.fence())
            store.use(Stream.PREFETCH, job, (), slot)
            if DEBUG:
                log("issued:", f"slot {slot}: {store.slots[slot]}")

    def adopt(self, plan: Plan, subjects: Sequence[Adopting]) -> list[tuple[Task, Job]]:
        """Hand over to the step what it uses; return that as tasks of a schedule, of each stream in order."""
        # Gradients of subgroups that are updated on the device after all were sent in vain.
        sent = {t: i for i in plan.served(Placement.CPU) for t in subjects[i].departed}
        # The step waits for the transits that it uses. All others stay here, because `settle` waits for them.
        self.all = [transit for transit in self.all if transit not in sent]
        self._considered = None
        used = [(Task(*GRADIENT, sent[t], t.nbytes), t.job) for t in sorted(sent, key=lambda t: t.number)]
        index = {subject.subgroup: i for i, subject in enumerate(subjects)}
        for slot, (subgroup, job) in enumerate(self._stores.device.filled.items()):
            fetch = Task(*MOVES[FETCH], index[subgroup], subgroup.state.nbytes, (), slot, (), FETCH)
            used.append((fetch, job))
        return used


def drain_streams(device: Device) -> None:
    """Block until all work of the optimizer that is queued on the device has ended, even failed work."""
    for op in LANE_OF:  # streams are in order: an empty job ends after all jobs before it
        with contextlib.suppress(Exception):
            last = device.launch(0, lambda: None, 0) if op is Op.UPDATE else device.copy(op, 0, [])
            last.wait()
