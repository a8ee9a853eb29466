"""Training in virtual time beside a device's changing memory: no thread, no copy, the same on every machine.

The library decides: `MemoryMonitor` with its forecast, and the adaptive policy. An emulated device says what is free,
and denies memory. How long an iteration lasts, the simulator says, of the schedule that the engine would issue.
"""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

from dos.devices import Script
from dos.planning.monitor import MemoryMonitor
from dos.planning.policies import AdaptivePolicy, plan_of
from experiments.bench.memory import Setting
from experiments.training import UPDATE
from perfmodel import Op, Placement, Plan, Workload
from perfmodel.lanes import Stream
from perfmodel.plan import Move, Tier
from perfmodel.schedule import schedule_step
from perfmodel.simulate import serve
from perfmodel.tasks import MOVES, SubgroupState, Task, leaving

BLOCKS = 4
"""Of the model: in forward, what the training itself holds changes with each."""
SAMPLED = 0.5
"""Share of the gradients at which the monitor takes a sample."""
UP = Move(Tier.HOST, Tier.DEVICE)


class Training:
    """Iterations one after the other, as `DOSAdam` goes through them.

    seconds: of each iteration.
    """

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        """seed: of the gradients at which memory is sampled."""
        self._rank = rank = setting.rank
        self._loads = rank.loads.subgroups
        self.seconds: list[float] = []
        self._drawn = random.Random(seed)
        self._position = 0.0
        self._iteration = -1
        neighbour = Script(setting.neighbour, lambda: float(self._iteration))
        self.device = rank.device(lambda: self._position, neighbour)
        self._resident: dict[int, Tensor] = {}
        self._slots: list[Tensor] = []
        self._begun: list[Task] = []
        self._monitor = MemoryMonitor(self.device, self._held)
        self._policy = AdaptivePolicy(rank.profile)

    def iterate(self) -> None:
        """Forward, backward and update."""
        rank, n = self._rank, len(self._loads)
        self._iteration += 1
        for block in range(BLOCKS + 1):
            self._at(min(block / BLOCKS, 0.999))
        early = None
        for done in range(1, n + 1):
            self._at(1.0 + min(done / n, 0.999))
            if done == 1:
                self._monitor.enter(Op.BACKWARD)
            elif done == n or self._drawn.random() < SAMPLED:
                self._monitor.sample(always=True)
            if self.seconds:  # before the first step there is no state that could travel
                early = early or self._fetch_residents(self._decide()[1])
                self._gradient_is_there(n - done, early, past_half=2 * done > n)
        self._at(UPDATE)
        self._monitor.enter(Op.UPDATE)
        work, plan = self._decide()
        plan, found = self._make_room(plan)
        going = leaving(plan, found)
        self._monitor.end_iteration()
        step = schedule_step(plan, work, found, self._begun)
        seconds = serve(step, work, rank.profile).makespan
        self.seconds.append(rank.forward_s + seconds + (0.0 if self._begun else rank.backward_s))
        self._free_slots()
        for i in going:
            self.device.free(self._resident.pop(i))
        self._begun = []
        self._policy.search()
        self.device.memory()  # lets the neighbour take what has come free

    def _at(self, position: float) -> None:
        """The training has come to this position of its iteration, and the neighbour takes what it can get."""
        self._position = position
        self.device.memory()

    def _held(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._resident.values(), *self._slots))

    def _decide(self) -> tuple[Workload, Plan]:
        limits = self._monitor.limits(self._loads, update_overlaps_forward=False)
        backward_s = self._rank.backward_s if self.seconds else 0.0
        work = dataclasses.replace(self._rank.loads, backward_s=backward_s, **limits)
        return work, plan_of(self._policy, work)

    def _fetch_residents(self, plan: Plan) -> Plan:
        """As `Ledger.fetch_residents`."""
        for i in plan.served(Placement.GPU_RESIDENT):
            if i not in self._resident:
                if not self._reserve(i):
                    break
                self._fetch(i)
        return plan

    def _gradient_is_there(self, i: int, plan: Plan, *, past_half: bool) -> None:
        """As `DeviceSide.send_when_complete`."""
        load = self._loads[i]
        if plan.placements[i] is Placement.CPU and i not in self._resident:
            self._begun.append(Task(Op.GRADIENT, Stream.GRADIENT, i, load.gradient_bytes))
        streamed = [j for j in plan.served(Placement.GPU_STREAMED) if j not in self._resident]
        count = min(plan.slots, len(streamed))
        if past_half and not self._slots and 0 < count * self._slot_bytes <= self._monitor.spare_in_backward():
            self._get_slots(count)
            for slot, j in enumerate(streamed[: len(self._slots)]):
                self._fetch(j, slot)

    def _make_room(self, plan: Plan) -> tuple[Plan, list[SubgroupState]]:
        """As `room.make_room`: what is possible of the plan, and what it finds. What is not used is not under way."""
        coming = {task.subgroup: task for task in self._begun if task.move}
        residents = plan.served(Placement.GPU_RESIDENT)
        for i, task in coming.items():
            if task.slot is None and i not in residents:
                self.device.free(self._resident.pop(i))
        there = {i for i in self._resident if i not in coming}
        refused = [i for i in residents if i not in self._resident and not self._reserve(i)]
        failed = bool(refused)
        if not self.seconds:
            there = set(self._resident)  # state that was nowhere begins on the device
        streamed = [i for i in plan.served(Placement.GPU_STREAMED) if i not in there]
        in_slots = [i for i, task in coming.items() if task.slot is not None]
        if streamed[: len(in_slots)] != in_slots:
            self._free_slots()
            in_slots = []
        if streamed and not self._slots:
            self._get_slots(min(plan.slots, len(streamed)))
            failed |= len(self._slots) < min(plan.slots, len(streamed))
        denied = {i for i in residents if i not in self._resident} | set(
            () if self._slots else plan.served(Placement.GPU_STREAMED)
        )
        plan = dataclasses.replace(plan.on_host(denied), slots=len(self._slots))
        used = [
            task
            for task in self._begun
            if (task.subgroup in self._resident or task.subgroup in in_slots if task.move else True)
            and (task.move or plan.placements[task.subgroup or 0] is Placement.CPU)
        ]
        self._begun = used
        places = {(task.subgroup, task.move): place for place, task in enumerate(used)}
        found = [self._found(i, i in there, places.get((i, None)), places.get((i, UP))) for i in range(len(plan))]
        if failed and not leaving(plan, found):
            self._monitor.forecast.allocation_failed(self._held())
        return plan, found

    def _found(self, i: int, there: bool, departed: int | None, fetched: int | None) -> SubgroupState:
        load = self._loads[i]
        return SubgroupState(
            Tier.DEVICE if there else Tier.HOST,
            Tier.DEVICE,
            load.numel,
            load.gradient_bytes if departed is None else None,
            load.parameter_bytes,
            () if departed is None else (departed,),
            fetched,
        )

    def _fetch(self, i: int, slot: int | None = None) -> None:
        self._begun.append(Task(*MOVES[UP], i, self._loads[i].state_bytes, (), slot, (), UP))

    @property
    def _slot_bytes(self) -> int:
        return self._rank.loads.slot_bytes

    def _reserve(self, i: int) -> bool:
        buffer = self._allocate(self._loads[i].state_bytes)
        if buffer is not None:
            self._resident[i] = buffer
        return buffer is not None

    def _get_slots(self, count: int) -> None:
        slots = (self._allocate(self._slot_bytes) for _ in range(count))
        self._slots = [slot for slot in slots if slot is not None]

    def _free_slots(self) -> None:
        for buffer in self._slots:
            self.device.free(buffer)
        self._slots = []

    def _allocate(self, nbytes: int) -> Tensor | None:
        try:
            return self.device.allocate(nbytes)
        except torch.OutOfMemoryError:
            return None


def trained(setting: Setting, iterations: int, seed: int = 0) -> Training:
    """A training of this many iterations."""
    training = Training(setting, seed)
    for _ in range(iterations):
        training.iterate()
    return training
