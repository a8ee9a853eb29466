"""What the planner is asked, and what follows from it before anything is decided: memory, and the work beside it."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from perfmodel.footprint import DeviceBytes, HostBytes, host_footprint
from perfmodel.hardware import HardwareProfile, changed
from perfmodel.plan import Placement, Plan
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import format_bytes, format_count
from perfmodel.simulate import Phase, Scope, makespan
from perfmodel.workload import Workload

VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a parameter or gradient by name of its dtype."""
MARGIN = 0.02
"""Share of the device's memory that DOSAdam leaves alone."""
DEFAULT_SUBGROUP_SIZE = 100_000_000
"""Parameters of a subgroup, unless DOSAdam is told otherwise."""
DEFAULT_RESERVED = 2**30
"""Device memory for CUDA's context, libraries' workspaces and fragmentation, in bytes; an assumption."""
MAX_SUBGROUPS = 5_000
"""More would take longer to plan than a planner's user wants to wait."""


@dataclass(frozen=True)
class Question:
    """What is to be trained, how, and on what. Sizes in bytes, of one rank's device and of the whole host.

    profile: of the machine; its ranks_per_host is replaced by `ranks`.
    host_bytes: None if it is not known.
    dtype: of parameters and gradients: bf16, fp16 or fp32.
    batch, sequence: sequences per rank and iteration, and tokens in each.
    ranks: on this host, one device each, data-parallel.
    zero: stage of ZeRO (Rajbhandari et al. 2020): 1 divides optimizer state over the ranks, 2 gradients too, 3 weights.
    reserved: device memory that is not the model's.
    attach: whether updates run on into the next forward (`optimizer.attach(model)`).
    flops_rate: FLOP/s that forward and backward reach; None if not known.
    offload_gradients: as given to DOSAdam; it counts in memory, not in times.

    Raises ValueError for what cannot be.
    """

    model: Transformer
    profile: HardwareProfile
    device_bytes: int
    host_bytes: int | None = None
    dtype: str = "bf16"
    batch: int = 1
    sequence: int = 2048
    checkpointing: bool = False
    eager_attention: bool = False
    ranks: int = 1
    zero: int = 0
    subgroup_size: int = DEFAULT_SUBGROUP_SIZE
    reserved: int = DEFAULT_RESERVED
    attach: bool = True
    flops_rate: float | None = None
    offload_gradients: bool = False

    def __post_init__(self) -> None:
        for name in ("device_bytes", "batch", "sequence", "ranks", "subgroup_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, found {getattr(self, name)}")
        if self.dtype not in VALUE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(VALUE_BYTES)}, found {self.dtype!r}")
        if not 0 <= self.zero <= 3:
            raise ValueError(f"zero must be 0, 1, 2 or 3, found {self.zero}")
        if not 0 <= self.reserved < self.device_bytes:
            raise ValueError(
                f"{format_bytes(self.reserved)} of device memory are reserved, and there are "
                f"{format_bytes(self.device_bytes)}; reserve less"
            )
        if self.model.longest is not None and self.sequence > self.model.longest:
            raise ValueError(f"the model takes {self.model.longest} tokens at most, found sequences of {self.sequence}")
        if self.subgroups > MAX_SUBGROUPS:
            least = format_count(math.ceil(self.state_numel / MAX_SUBGROUPS))
            raise ValueError(
                f"subgroups of {format_count(self.subgroup_size)} parameters make {self.subgroups:,} of them, more "
                f"than {MAX_SUBGROUPS:,}; choose {least} or more"
            )

    @property
    def value_bytes(self) -> int:
        """Bytes of a parameter or gradient."""
        return VALUE_BYTES[self.dtype]

    @property
    def tokens(self) -> int:
        """Of one rank's iteration."""
        return self.batch * self.sequence

    @property
    def state_numel(self) -> int:
        """Parameters whose optimizer state one rank owns."""
        return self.share(self.model.numel, 1)

    @property
    def subgroups(self) -> int:
        """How many one rank has."""
        return math.ceil(self.state_numel / self.subgroup_size)

    @property
    def obstacle(self) -> str:
        """Why DOSAdam cannot do this today, whatever fits; empty if it can."""
        if self.zero >= 3 and self.ranks > 1:
            return "DOSAdam refuses parameters that are divided over ranks (FSDP2, DTensor)"
        return ""

    def share(self, whole: int, stage: int) -> int:
        """One rank's part of what ZeRO divides from `stage` on."""
        return -(-whole // self.ranks) if self.zero >= stage else whole


class Situation:
    """What follows from a question before anything is decided.

    device, host: bytes of one rank. profile: of the machine with the question's ranks.
    scope: how the compute takes part in an iteration.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.profile = changed(question.profile, {"ranks_per_host": question.ranks})
        self.device = device_footprint(question)
        self.host: HostBytes = host_footprint(
            question.state_numel, question.value_bytes, offload_gradients=question.offload_gradients
        )
        # With several ranks gradients are reduced after the hooks that would send them off early.
        backward = Phase.OVERLAPPED if question.ranks == 1 else Phase.SERIAL
        self.scope = Scope(backward, Phase.OVERLAPPED if question.attach else Phase.SERIAL)

    @property
    def fits_device(self) -> bool:
        """Whether the model trains on the device at all, with all optimizer state elsewhere."""
        return self.device.peak <= self.question.device_bytes

    @property
    def fits_host(self) -> bool:
        """Whether the host has the memory that all ranks need together; True if it is not known how much it has."""
        return self.question.host_bytes is None or self.host_needed <= self.question.host_bytes

    @property
    def fits(self) -> bool:
        """Both."""
        return self.fits_device and self.fits_host

    @property
    def host_needed(self) -> int:
        """Host memory of all ranks together, in bytes."""
        return self.host.total * self.question.ranks

    @property
    def room(self) -> int:
        """Device memory for optimizer state at the peak of the iteration, in bytes."""
        return max(0, self._usable - self.device.peak)

    @property
    def adamw_bytes(self) -> int:
        """State of an AdamW that keeps all on the device: as ours, but float32 parameters are their own master."""
        return self.host.moments if self.question.dtype == "fp32" else self.host.state

    @property
    def compute_s(self) -> float | None:
        """Seconds of forward and backward; None if not known."""
        return None if self.question.flops_rate is None else self.beside.forward_s + self.beside.backward_s

    @functools.cached_property
    def alone(self) -> Workload:
        """The update with the memory that DOSAdam gives it.

        State is resident in whole subgroups. Slots share that memory; if not attached, they are gone when the next
        forward begins, and may have what it and backward need.
        """
        question = self.question
        size, numel = question.subgroup_size, question.state_numel
        work = Workload.of_sizes(
            [min(size, numel - start) for start in range(0, numel, size)],
            gradient_bytes=question.value_bytes,
            parameter_bytes=question.value_bytes,
            state_bytes=self.host.state // numel,
        )
        slot = work.slot_bytes
        resident = work.state_bytes if self.room >= work.state_bytes else self.room // slot * slot
        beyond = 0 if question.attach else max(0, self._usable - self.device.update - resident) // slot * slot
        return dataclasses.replace(work, peak_free_bytes=resident, shared_free_bytes=resident + beyond)

    @functools.cached_property
    def beside(self) -> Workload:
        """The same beside forward and backward."""
        if self.question.flops_rate is None:
            return self.alone
        flops = self.question.model.flops(self.question.tokens, checkpointing=self.question.checkpointing)
        forward_s, backward_s = (f / self.question.flops_rate for f in flops)
        return dataclasses.replace(self.alone, forward_s=forward_s, backward_s=backward_s)

    def allows(self, plan: Plan) -> bool:
        """Whether resident state and staging slots fit into the memory there is."""
        work = self.alone
        held = sum(work.subgroups[i].state_bytes for i in plan.served(Placement.GPU_RESIDENT))
        staged = held + plan.slots * work.slot_bytes
        return self.fits and held <= work.peak_free_bytes and staged <= work.shared_free_bytes

    def update_s(self, plan: Plan) -> float:
        """Seconds of the update alone, all gradients on the device."""
        return makespan(plan, self.alone, self.profile)

    def iteration_s(self, plan: Plan) -> float | None:
        """Seconds of backward, update and the next forward; None if the compute is not known."""
        return None if self.compute_s is None else makespan(plan, self.beside, self.profile, self.scope)

    @property
    def _usable(self) -> int:
        return int((1 - MARGIN) * self.question.device_bytes)


def device_footprint(question: Question) -> DeviceBytes:
    """What the model and its compute take on one rank's device.

    ZeRO keeps whole, one block at a time, what it divides: weights while they are gathered, gradients until they are
    reduced. Gradients that are offloaded are on the device one block at a time, too.
    """
    model, values = question.model, question.value_bytes
    attention = {"eager_attention": question.eager_attention}
    one_block = math.ceil(model.numel / model.layers) * values
    whole = (question.zero >= 3) + (question.zero >= 2 or question.offload_gradients)
    return DeviceBytes(
        weights=question.share(model.numel, 3) * values,
        gradients=0 if question.offload_gradients else question.share(model.numel, 2) * values,
        activations=model.peak_activation_bytes(
            question.tokens, question.sequence, values, checkpointing=question.checkpointing, **attention
        ),
        block=model.activation_bytes(question.tokens, question.sequence, values, **attention) + whole * one_block,
        reserved=question.reserved,
    )
