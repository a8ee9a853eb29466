"""What follows from a question before anything is decided: memory, and the work beside it."""

from __future__ import annotations

import dataclasses
import functools
import math
from itertools import accumulate

from perfmodel.demand import demand
from perfmodel.footprint import FP32_BYTES, DeviceBytes, HostBytes, host_footprint
from perfmodel.format import float32
from perfmodel.lanes import Stream
from perfmodel.plan import Placement, Plan
from perfmodel.planner.job import Job
from perfmodel.planner.question import MARGIN, Question
from perfmodel.simulate import Phase, Scope, makespan
from perfmodel.workload import SavedTensors, SubgroupLoad, Workload, peak_room

MOST_GROUPS = 32
"""Groups in which saved tensors are planned."""


class Situation:
    """What follows from a question before anything is decided.

    device, host: bytes of one rank. profile: of the machine with the question's ranks on it.
    host_model: bytes of parameters and gradients of one rank that are on the host.
    scope: how the compute takes part in an iteration. job: what runs beside the optimizer.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.profile = question.profile.replace(ranks_per_host=question.layout.per_node)
        plain = device_footprint(question)
        self.saved = saved_tensors(question)
        self.least_leaving = self._least_leaving(plain)
        """Bytes of saved tensors that leave under any plan."""
        gone = peak_room(self.saved, self.least_leaving)
        self.device = dataclasses.replace(plain, activations=plain.activations - gone)
        self.host: HostBytes = host_footprint(
            question.state_numel,
            question.value_bytes,
            offload_gradients=question.offload_gradients and question.accumulation and not question.native_gradients,
            accelerated=not question.offload_parameters,
            values=question.format.values,
            state_format=question.state_format,
        )
        on_host = question.share(question.model.numel, 1) + question.state_numel if question.offload_parameters else 0
        self.host_model = on_host * question.value_bytes
        self.job = Job(question, self.profile)
        # With several ranks gradients are reduced after the hooks that would send them off early;
        # FSDP2 hands each layer's over when its reduce-scatter has ended.
        early = question.sharded or question.ranks == 1
        self.scope = Scope(
            Phase.OVERLAPPED if early else Phase.SERIAL, Phase.OVERLAPPED if question.attach else Phase.SERIAL
        )

    @property
    def peak(self) -> int:
        """Device memory at the worst moment without any optimizer state, in bytes."""
        return self._peak(self.device)

    @property
    def fits_device(self) -> bool:
        """Whether the model trains on the device at all, with all optimizer state elsewhere."""
        return self.peak <= self.question.device_bytes

    @property
    def fits_host(self) -> bool:
        """Whether a host has the memory that its ranks need together; True if it is not known how much it has.

        DOSAdam's constructor compares the same sum with the memory that is available then.
        """
        question = self.question
        return question.host_bytes is None or self.host_needed <= question.host_bytes - question.reserved_on_host

    @property
    def fits(self) -> bool:
        """Both."""
        return self.fits_device and self.fits_host

    @property
    def host_needed(self) -> int:
        """Host memory of all ranks of a node together, in bytes."""
        return self.host_per_rank * self.question.layout.per_node

    @property
    def host_per_rank(self) -> int:
        """Host memory of one rank, in bytes."""
        return self.host.total + self.host_model + self.least_leaving

    @property
    def room(self) -> int:
        """Device memory for optimizer state at the peak of the iteration, in bytes."""
        return max(0, self._usable - self.peak)

    @property
    def all_resident(self) -> bool:
        """Whether all optimizer state has room on the device."""
        return self.fits and self.room >= self.update_workload.state_bytes

    @property
    def adamw_bytes(self) -> int:
        """State of an AdamW that keeps all on the device, with float32 masters of 16-bit parameters."""
        return int(self.question.state_numel * float32(self.question.format.values, accelerated=False).state_bytes)

    @property
    def compute_s(self) -> float | None:
        """Seconds of forward's and backward's arithmetic in a step; None if not known."""
        return None if self.job.compute_s is None else sum(self.job.compute_s) * self.question.micro_batches

    @functools.cached_property
    def training_s(self) -> float | None:
        """Seconds of a step's forward and backward with their collectives and copies; None if not known."""
        work = self.iteration_workload
        return None if self.job.compute_s is None else (work.forward_s + work.backward_s) * self.question.micro_batches

    @property
    def exposed_communication_s(self) -> float | None:
        """Seconds that collectives and copies of parameters add to compute; None if not known."""
        if self.training_s is None or self.compute_s is None:
            return None
        return max(0.0, self.training_s - self.compute_s) + self.job.after_update_s

    @functools.cached_property
    def update_workload(self) -> Workload:
        """The update with the memory that DOSAdam gives it.

        State is resident in whole subgroups. Slots share that memory; if not attached, they are gone when the next
        forward begins, and may have what it and backward need.
        """
        question = self.question
        size, numel = question.subgroup_size, question.state_numel
        sizes = (min(size, numel - start) for start in range(0, numel, size))
        each = FP32_BYTES if question.accumulation and not question.native_gradients else question.value_bytes
        work = Workload(
            tuple(
                dataclasses.replace(
                    SubgroupLoad.of(size, question.format), returned_bytes=size * each * question.offload_gradients
                )
                for size in sizes
            )
        )
        slot = work.slot_bytes
        resident = work.state_bytes if self.room >= work.state_bytes else self.room // slot * slot
        beyond = 0 if question.attach else max(0, self._usable - self.device.update - resident) // slot * slot
        return dataclasses.replace(
            work,
            peak_free_bytes=resident,
            shared_free_bytes=resident + beyond,
            activations=self.saved,
            activation_least_bytes=self.least_leaving,
            activation_host_bytes=self._most_leaving,
        )

    @functools.cached_property
    def iteration_workload(self) -> Workload:
        """The same beside forward and backward."""
        return dataclasses.replace(self.update_workload, forward_s=self.job.forward_s(), backward_s=self.job.backward_s)

    def allows(self, plan: Plan) -> bool:
        """Whether resident state and staging slots fit into the memory there is."""
        return self.fits and self.update_workload.has_room(plan)

    def update_s(self, plan: Plan) -> float:
        """Seconds of the update alone, all gradients where they are used."""
        if self.question.offload_parameters:
            return self._in_place_s
        return makespan(plan, self.update_workload, self.profile)

    def iteration_s(self, plan: Plan) -> float | None:
        """Seconds of a step: micro-batches, update and what waits for it; None if the compute is not known.

        No less than any resource is busy for: what collectives take of PCIe is not there for the
        optimizer's transfers, which the simulation of the schedule does not know.
        """
        if self.training_s is None:
            return None
        if self.question.offload_parameters:
            seconds = self._on_host_s
        else:
            seconds = makespan(plan, self.iteration_workload, self.profile, self.scope)
        # Micro-batches but the last are forward and backward, with no update beside them.
        seconds += self._micro_batch_s(plan.activation_bytes) * (self.question.micro_batches - 1)
        if not self.job.has_communication:
            return seconds
        return max(seconds + self.job.after_update_s, *self.job.busy_s(plan, self.update_workload).values())

    def _micro_batch_s(self, leaving: int) -> float:
        """Seconds of forward and backward, which wait for so many bytes of saved tensors."""
        work, profile = self.iteration_workload, self.profile
        back_s = max(work.backward_s, leaving / profile.h2d_bandwidth)
        return max(work.forward_s, leaving / profile.d2h_bandwidth) + back_s

    def _peak(self, device: DeviceBytes) -> int:
        return device.peak_accumulating if self.question.accumulation else device.peak

    def _least_leaving(self, device: DeviceBytes) -> int:
        """The share that was asked for; if that is for the planner to say, what has to leave so that the rest fits."""
        share, sums = self.question.offload_activations, [0, *accumulate(each.nbytes for each in self.saved)]
        if share != "auto":
            return max(nbytes for nbytes in sums if nbytes <= float(share) * sums[-1])
        for nbytes in sums:
            rest = dataclasses.replace(device, activations=device.activations - peak_room(self.saved, nbytes))
            if self._peak(rest) <= self.question.device_bytes:
                return nbytes
        return 0

    @property
    def _most_leaving(self) -> float:
        """Bytes, up to where the peak is another one and there is room on the host."""
        if self.question.offload_activations != "auto":
            return self.least_leaving
        nothing = dataclasses.replace(self.device, activations=0, logits=0)
        useful = max(0, self.peak - self._peak(nothing))
        if self.question.host_bytes is not None:
            free = self.question.host_bytes - self.question.reserved_on_host - self.host_needed
            useful = min(useful, max(0, free) // self.question.layout.per_node)
        return self.least_leaving + useful

    @property
    def _in_place_s(self) -> float:
        """Seconds of an update of parameters on the host, at its memory's speed."""
        costs = [demand(Placement.CPU, load, self.profile)[Stream.CPU] for load in self.update_workload.subgroups]
        return sum(max(alone, traffic / self.profile.host_bandwidth_per_rank) for alone, traffic in costs)

    @property
    def _on_host_s(self) -> float:
        """Seconds of an iteration with parameters on the host.

        If attached, a layer's copy to the device waits for its own update, else forward for all.
        """
        update_s, backward_s = self._in_place_s, self.job.backward_s
        if self.question.attach:
            return backward_s + self.job.forward_s(updated=update_s)
        return backward_s + update_s + self.job.forward_s()

    @property
    def _usable(self) -> int:
        return int((1 - MARGIN) * self.question.device_bytes)


def saved_tensors(question: Question) -> tuple[SavedTensors, ...]:
    """What blocks keep of one rank, in groups, as they are saved evenly over forward and used over backward."""
    model, values, count = question.model, question.value_bytes, min(question.model.layers, MOST_GROUPS)
    settings = {"checkpointing": question.checkpointing, "eager_attention": question.eager_attention}
    nbytes = model.layers * model.kept_bytes(question.tokens, question.sequence, values, **settings) // count
    return tuple(SavedTensors(nbytes, i / count, 1 - i / count) for i in range(1, count + 1))


def device_footprint(question: Question) -> DeviceBytes:
    """What the model and its compute take on one rank's device.

    ZeRO keeps whole, one block at a time, what it divides: weights while they are gathered, gradients until they are
    reduced. Gradients that are offloaded are on the device one block at a time, too.
    FSDP2 prefetches: two blocks are gathered, and beside a block's gradients are those that the one
    before it has yet to reduce. Embedding and output layer belong to its root, which is gathered
    from forward to the end of backward; both are counted. Parameters on the host take nothing else.
    """
    model, values = question.model, question.value_bytes
    attention = {"eager_attention": question.eager_attention}
    one_block = math.ceil(model.numel / model.layers) * values
    gradients_of_one = math.ceil(question.trained / model.layers) * values
    whole = (question.zero >= 3) * one_block + (question.zero >= 2 or question.offload_gradients) * gradients_of_one
    gathered = 0
    if question.sharded:
        root = 2 * model.vocabulary * model.width * values
        whole = gathered = min(2 * one_block + root, model.numel * values)
    on_host = question.offload_parameters
    return DeviceBytes(
        weights=0 if on_host else question.share(model.numel, 3) * values,
        gradients=0 if on_host or question.offload_gradients else question.share(question.trained, 2) * values,
        activations=model.peak_activation_bytes(
            question.tokens, question.sequence, values, checkpointing=question.checkpointing, **attention
        ),
        block=model.activation_bytes(question.tokens, question.sequence, values, **attention) + whole,
        reserved=question.reserved,
        gathered=gathered,
        logits=model.logit_bytes(question.tokens, values, fused=question.fused_loss),
    )
