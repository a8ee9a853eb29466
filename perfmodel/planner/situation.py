"""Facts that follow from a question before anything is decided: memory, and the work beside it."""

from __future__ import annotations

import dataclasses
import functools
import math
from itertools import accumulate

from perfmodel.demand import demand, operation_demand
from perfmodel.hardware import DISK_RATES, HardwareProfile
from perfmodel.lanes import LANE_OF_STREAM, Stream
from perfmodel.plan import Placement, Plan
from perfmodel.planner.beside import seconds_of
from perfmodel.planner.job import Job
from perfmodel.planner.memory import device_footprint, held_bytes, host_bytes, saved_tensors, spill
from perfmodel.planner.question import MARGIN, Question
from perfmodel.schedule import schedule, schedule_micro_batch
from perfmodel.simulate import Phase, Scope, Simulator, makespan
from perfmodel.tasks import Task
from perfmodel.timeline import Lane, Op
from perfmodel.workload import BlockLoad, SubgroupLoad, Workload, peak_room

DEVICE, HOST, DISK = "memory on the device", "host memory", "room on disk"
"""Memories that may not be enough."""


class Situation:
    """Facts that follow from a question before anything is decided. Bytes and seconds.

    profile: of the machine with the question's ranks on it. device, host: memory of one rank.
    saved: tensors that blocks keep; least_offloaded: bytes of them that move to the host under any plan.
    state_bytes: of one rank's optimizer state, wherever it is. spill: the part that is on the host if none is on the
        device; the rest is on disk, if there is one.
    host_model: parameters and gradients of one rank that are on the host.
    peak: device memory at the worst moment without any optimizer state. usable: all but DOSAdam's margin.
        room: for optimizer state at that moment.
    host_per_rank, disk_per_rank: of one rank with all state off the device. host_needed, disk_needed: of all
        ranks. shortage: how much each memory has too little for that; 0 where it is not known how much there is.
    lacking: the memories that are not enough; on the host it is the sum that DOSAdam's constructor checks.
    job: the work beside the optimizer. compute_s: of forward's and backward's arithmetic in a step.
    scope: how the compute takes part in an iteration.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.profile = question.profile.replace(ranks_per_host=question.ranks)
        if question.disk_bytes is not None:
            shared = {rate: getattr(self.profile, rate) / question.ranks for rate in DISK_RATES}
            self.profile = self.profile.replace(**shared)
        plain, share = device_footprint(question), question.offload_activations
        self.saved = saved_tensors(question)
        sums = [0, *accumulate(each.nbytes for each in self.saved)]
        # The share that was asked for; if that is for the planner to say, the least with which the rest fits.
        amounts = sums if share == "auto" else [max(nbytes for nbytes in sums if nbytes <= float(share) * sums[-1])]
        for nbytes in amounts:
            self.least_offloaded = nbytes
            self.device = dataclasses.replace(plain, activations=plain.activations - peak_room(self.saved, nbytes))
            self.peak = self.device.peak_bytes(question.accumulation)
            if self.peak <= question.device_bytes:
                break
        self.usable = int((1 - MARGIN) * question.device_bytes)
        self.room = max(0, self.usable - self.peak)
        on_host = question.share(question.model.numel) + question.state_numel if question.offload_parameters else 0
        if question.streams:  # weights that are trained count with their state
            on_host = int((1 - question.trainable) * question.model.layers * question.model.block_numel)
        self.host_model = on_host * question.value_bytes
        self.state_bytes = host_bytes(question, question.state_numel).state
        self.spill = spill(question, self.host_model + self.least_offloaded)
        self.host = host_bytes(question, self.spill.numel)
        self.host_per_rank = self.host.total + self.spill.window_bytes + self.host_model + self.least_offloaded
        self.host_needed = self.host_per_rank * question.ranks
        self.disk_per_rank = self.state_bytes - self.host.state
        self.disk_needed = self.disk_per_rank * question.ranks
        self.shortage = {
            memory: 0 if there is None else max(0, needed - there)
            for memory, needed, there in (
                (DEVICE, self.peak, question.device_bytes),
                (HOST, self.host_needed + question.reserved_on_host, question.host_bytes),
                (DISK, self.disk_needed, question.disk_bytes),
            )
        }
        self.lacking = [memory for memory, nbytes in self.shortage.items() if nbytes]
        self.job = Job(question, self.profile)
        self.compute_s = sum(self.job.compute_s) * question.micro_batches
        # With several ranks gradients are reduced after the hooks that would copy them to the host early;
        # FSDP2 hands each layer's over when its reduce-scatter has ended.
        backward = Phase.OVERLAPPED if question.fsdp or question.ranks == 1 else Phase.SERIAL
        self.scope = Scope(
            Phase.UPDATED if question.in_backward else backward,
            Phase.OVERLAPPED if question.attach else Phase.SERIAL,
        )

    @property
    def fits(self) -> bool:
        """Whether all memories are enough."""
        return not self.lacking

    @functools.cached_property
    def training_s(self) -> float:
        """Seconds of a step's forward and backward with their collectives and copies."""
        return (self.iteration_workload.forward_s + self.iteration_workload.backward_s) * self.question.micro_batches

    @property
    def exposed_communication_s(self) -> float:
        """Seconds that collectives and copies of parameters add to compute."""
        return max(0.0, self.training_s - self.compute_s)

    @functools.cached_property
    def update_workload(self) -> Workload:
        """The update with the memory that DOSAdam gives it.

        State is resident in whole subgroups. Slots share that memory; if not attached, they are gone when the next
        forward begins, and may have the memory that it and backward need. So do weights that may stream.
        """
        question = self.question
        loads, blocks = self._loads()
        work = Workload(
            loads,
            host_free_bytes=self.spill.free_bytes,
            windows=self.spill.windows,
            passing_bytes=max(load.returned_bytes + (load.parameter_bytes if blocks else 0) for load in loads),
            blocks=blocks,
            blocks_most=0 if question.weights == "stream" else math.inf,
        )
        slot, window = work.slot_bytes, work.weight_bytes(())
        most = work.state_bytes + work.weight_bytes(range(len(blocks))) - window
        resident = window + (most if self.room >= most else self.room // slot * slot)
        beyond = 0 if question.attach else max(0, self.usable - self.device.update + window - resident) // slot * slot
        return dataclasses.replace(
            work,
            peak_free_bytes=resident,
            shared_free_bytes=resident + beyond,
            activations=self.saved,
            activation_least_bytes=self.least_offloaded,
            activation_host_bytes=self._most_offloaded,
            in_backward=question.in_backward,
        )

    @functools.cached_property
    def iteration_workload(self) -> Workload:
        """The update beside forward and backward."""
        return dataclasses.replace(
            self.update_workload,
            forward_s=self.job.forward_s(),
            backward_s=self.job.backward_s,
            micro_batches=self.question.micro_batches,
        )

    def update_s(self, plan: Plan) -> float:
        """Seconds of the update alone, all gradients where they are used."""
        if self.question.offload_parameters:
            return self._in_place_s
        return makespan(plan, self.update_workload, self.profile)

    def iteration_s(self, plan: Plan) -> float:
        """Seconds of a step: micro-batches and update.

        No less than any resource is busy for: the simulation of the schedule does not know that
        collectives take their part of PCIe.
        """
        if self.question.offload_parameters:
            # If attached, a layer's copy to the device waits for its own update, else forward for all.
            update_s, attached = self._in_place_s, self.question.attach
            before_s = self.job.backward_s + (0.0 if attached else update_s)
            seconds = before_s + self.job.forward_s(updated=update_s if attached else 0.0)
        else:
            made = Simulator(self.iteration_workload, self.profile, self.scope).schedule(plan)
            seconds = seconds_of(made, self.iteration_workload, self.profile)
        seconds += self._micro_batch_s(plan) * (self.question.micro_batches - 1)
        if not self.job.has_communication:
            return seconds
        return max(seconds, *self.busy_s(plan).values())

    def _micro_batch_s(self, plan: Plan) -> float:
        """Seconds of each further micro-batch of a step, which no update follows."""
        work = self.iteration_workload
        if self.question.offload_parameters or self.question.micro_batches == 1:
            return work.forward_s + work.backward_s
        return seconds_of(schedule_micro_batch(plan, work), work, self.profile)

    def operations(self, plan: Plan) -> list[Task]:
        """The optimizer's copies and updates in a step, and one micro-batch's copies of saved tensors and weights."""
        overlapped = Scope(Phase.OVERLAPPED, Phase.OVERLAPPED)  # in which offloaded gradients move, too
        tasks = schedule(plan, self.update_workload, overlapped).tasks
        # Parameters on the host are updated where they are.
        left_out = {*Stream} - {Stream.CPU} if self.question.offload_parameters else {Stream.COMPUTE}
        return [task for task in tasks if task.stream not in left_out]

    def busy_s(self, plan: Plan) -> dict[str, float]:
        """Seconds for which each resource works in a step.

        No iteration is shorter than the longest of them, however well everything overlaps. Links
        count at the rates of one direction alone.
        """
        profile, job, times = self.profile, self.job, self.question.micro_batches
        seconds: dict[Lane, list[float]] = {lane: [] for lane in Lane}
        traffic = []
        for task in self.operations(plan):
            load = self.update_workload.subgroups[task.subgroup or 0]
            cost = operation_demand(task.stream, task.size, load, profile)
            count = times if task.op in (Op.SAVE, Op.RESTORE, Op.WEIGHTS) else 1
            seconds[LANE_OF_STREAM[task.stream]].append(cost.seconds * count)
            traffic.append(cost.traffic * count)
        lanes = {lane: math.fsum(each) for lane, each in seconds.items()}
        up, down = 2 * job.copied * times, job.returned * times
        exchanged = sum(each.seconds for each in job.collectives) * times
        pcie, between = (exchanged, 0.0) if job.over_pcie else (0.0, exchanged)
        busy = {
            "compute": self.compute_s + lanes[Lane.GPU],
            "interconnect": between,
            "PCIe to the GPU": pcie + lanes[Lane.H2D] + up / profile.h2d_bandwidth,
            "PCIe to the host": pcie + lanes[Lane.D2H] + down / profile.d2h_bandwidth,
            "CPU": lanes[Lane.CPU],
            "disk": disk_s(lanes[Lane.READ], lanes[Lane.WRITE], profile),
            "host DRAM": (math.fsum(traffic) + up + down) / profile.host_bandwidth_per_rank,
        }
        return {resource: busy_s for resource, busy_s in busy.items() if busy_s > 0}

    @property
    def _most_offloaded(self) -> float:
        """Bytes up to which moving lowers the peak, and for which there is host memory."""
        if self.question.offload_activations != "auto":
            return self.least_offloaded
        nothing = dataclasses.replace(self.device, activations=0, logits=0)
        useful = max(0, self.peak - nothing.peak_bytes(self.question.accumulation))
        if self.question.host_bytes is not None:
            free = self.question.host_bytes - self.question.reserved_on_host - self.host_needed
            useful = min(useful, max(0, free) // self.question.ranks)
        return self.least_offloaded + useful

    def _loads(self) -> tuple[tuple[SubgroupLoad, ...], tuple[BlockLoad, ...]]:
        """The subgroups, and the blocks that may stream, whose subgroups are their own.

        Half of the parameters outside blocks stand before these and half behind, as embedding and output layer do.
        """
        question, model = self.question, self.question.model
        each: dict[int, SubgroupLoad] = {}

        def cut(numel: int) -> list[SubgroupLoad]:
            whole, rest = divmod(numel, question.subgroup_size)
            sizes = [question.subgroup_size] * whole + [rest] * (rest > 0)
            return [each.setdefault(size, self._load(size)) for size in sizes]

        if not question.streams:
            return tuple(cut(question.state_numel)), ()
        one = math.ceil(model.block_numel * question.trainable)
        outer = question.state_numel - one * model.layers
        loads, blocks = cut(max(0, outer) // 2), list[BlockLoad]()
        for _ in range(model.layers):
            start = len(loads)
            loads += cut(one)
            blocks.append(BlockLoad(model.block_numel * question.value_bytes, start, len(loads)))
        return (*loads, *cut(max(0, outer) - max(0, outer) // 2)), tuple(blocks)

    def _load(self, numel: int) -> SubgroupLoad:
        """Return a subgroup of `numel` parameters."""
        question = self.question
        return dataclasses.replace(
            SubgroupLoad.of(numel, question.format),
            returned_bytes=numel * question.value_bytes * question.offload_gradients,
            host_bytes=int(numel * held_bytes(question)),
        )

    @property
    def _in_place_s(self) -> float:
        """Seconds of an update of parameters on the host, at its memory's speed."""
        costs = [demand(Placement.CPU, load, self.profile)[Stream.CPU] for load in self.update_workload.subgroups]
        return sum(max(alone, traffic / self.profile.host_bandwidth_per_rank) for alone, traffic in costs)


def disk_s(read_s: float, write_s: float, profile: HardwareProfile) -> float:
    """Seconds of reading and writing that take so long alone, in turns or at once, whichever is faster."""
    reads = profile.disk_read_bandwidth_duplex / profile.disk_read_bandwidth
    writes = profile.disk_write_bandwidth_duplex / profile.disk_write_bandwidth
    both_s = min(read_s / reads, write_s / writes)
    return read_s + write_s - max(0.0, reads + writes - 1) * both_s
