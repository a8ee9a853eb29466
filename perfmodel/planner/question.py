"""What the planner is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfmodel.format import Format, format_of
from perfmodel.hardware import HardwareProfile
from perfmodel.planner.fabric import PCIE, Fabric
from perfmodel.planner.layout import Layout
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import format_bytes, format_count
from perfmodel.subgroups import automatic_subgroup_size

VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a parameter or gradient by name of its dtype."""
VALUES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What torch calls it."""
MARGIN = 0.02
"""Share of the device's memory that DOSAdam leaves alone."""
DEFAULT_RESERVED = 2**30
"""Device memory for CUDA's context, libraries' workspaces and fragmentation, in bytes; an assumption."""
SYSTEM_BYTES, PROCESS_BYTES = 4 * 2**30, 2 * 2**30
"""Host memory that the system takes of a node, and each rank's process before DOSAdam takes any; assumptions."""
MAX_SUBGROUPS = 5_000
"""More would take longer to plan than a planner's user wants to wait."""


@dataclass(frozen=True)
class Question:
    """What is to be trained, how, and on what. Sizes in bytes, of one rank's device and of a whole host.

    profile: of the machine; its ranks_per_host is replaced by the ranks of a node.
    host_bytes: of each node; None if it is not known.
    dtype: of parameters and gradients: bf16, fp16 or fp32.
    batch, sequence: sequences per rank and iteration, and tokens in each.
    chosen_size: subgroup_size as given to DOSAdam; 0: as it chooses.
    ranks: of the whole job, one device each, data-parallel.
    zero: stage of ZeRO (Rajbhandari et al. 2020): 1 divides optimizer state over the ranks, 2 gradients too, 3 weights.
    reserved: device memory that is not the model's.
    attach: whether updates run on into the next forward (`optimizer.attach(model)`).
    flops_rate: FLOP/s that forward and backward reach; None if not known.
    offload_gradients: as given to DOSAdam.
    state_format: as given to DOSAdam.
    accumulation: whether a step has several micro-batches, whose gradients add up and so are there all the time.
    micro_batches: of a step, of which times are.
    trainable: share of the parameters; the others are frozen, as with LoRA.
    host_reserved: bytes of a node's memory that are not DOSAdam's; None: SYSTEM_BYTES and PROCESS_BYTES for each rank.
    fused_loss: whether the loss never has all logits, as `Transformer.logit_bytes` counts it.
    nodes: over which the ranks are divided equally.
    fsdp: whether FSDP2 (`fully_shard`) divides the model; replicas: into as many copies (HSDP).
    offload_parameters: whether its CPUOffloadPolicy keeps parameters and gradients on the host.
    fabric: how GPUs reach one another.

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
    chosen_size: int = 0
    reserved: int = DEFAULT_RESERVED
    attach: bool = True
    flops_rate: float | None = None
    offload_gradients: bool = False
    state_format: str | None = None
    accumulation: bool = True
    micro_batches: int = 1
    trainable: float = 1.0
    host_reserved: int | None = None
    fused_loss: bool = False
    nodes: int = 1
    fsdp: bool = False
    replicas: int = 1
    offload_parameters: bool = False
    fabric: Fabric = PCIE

    def __post_init__(self) -> None:
        for name in ("device_bytes", "batch", "sequence", "micro_batches", "subgroup_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, found {getattr(self, name)}")
        if self.dtype not in VALUE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(VALUE_BYTES)}, found {self.dtype!r}")
        if not 0 < self.trainable <= 1:
            raise ValueError(f"trainable is a share of the parameters in (0, 1], found {self.trainable}")
        if not 0 <= self.zero <= 3:
            raise ValueError(f"zero must be 0, 1, 2 or 3, found {self.zero}")
        self._check_job()
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
    def format(self) -> Format:
        """In which DOSAdam keeps the state."""
        return format_of(VALUES[self.dtype], state_format=self.state_format)

    @property
    def tokens(self) -> int:
        """Of one rank's micro-batch."""
        return self.batch * self.sequence

    @property
    def trained(self) -> int:
        """Parameters of the whole model that are trained."""
        return math.ceil(self.model.numel * self.trainable)

    @property
    def state_numel(self) -> int:
        """Parameters whose optimizer state one rank owns."""
        return self.share(self.trained, 1)

    @property
    def reserved_on_host(self) -> int:
        """Bytes of a node's memory that are not DOSAdam's."""
        if self.host_reserved is not None:
            return self.host_reserved
        return SYSTEM_BYTES + self.layout.per_node * PROCESS_BYTES

    @property
    def subgroup_size(self) -> int:
        """Parameters of each subgroup."""
        return self.chosen_size or automatic_subgroup_size(self.state_numel, self.device_bytes)

    @property
    def subgroups(self) -> int:
        """How many one rank has."""
        return math.ceil(self.state_numel / self.subgroup_size)

    @property
    def layout(self) -> Layout:
        """How the ranks are arranged. Raises ValueError for what cannot be."""
        return Layout(self.ranks, self.nodes, self.replicas)

    @property
    def stage(self) -> int:
        """Of ZeRO: FSDP2's is 3."""
        return 3 if self.fsdp else self.zero

    @property
    def sharded(self) -> bool:
        """Whether the model's parameters are divided, which makes them DTensors."""
        return self.fsdp or (self.stage >= 3 and self.ranks > 1)

    def share(self, whole: int, stage: int) -> int:
        """One rank's part of what ZeRO divides from `stage` on."""
        return -(-whole // self.layout.shards) if self.stage >= stage else whole

    def _check_job(self) -> None:
        """Raises ValueError for what several ranks cannot be, or FSDP2."""
        _ = self.layout
        if self.fsdp and self.zero in (1, 2):
            raise ValueError(
                f"FSDP2 divides parameters, gradients and state, which is stage 3 of ZeRO, found --fsdp "
                f"with --zero {self.zero}; choose one of them"
            )
        if self.replicas > 1 and not self.sharded:
            raise ValueError(
                f"several replicas are FSDP2's (HSDP), found {self.replicas} without --fsdp; add it, or "
                "leave out --replicas: without FSDP2 every rank is a replica"
            )
        if self.offload_parameters and not self.sharded:
            raise ValueError(
                "--offload-parameters is FSDP2's CPUOffloadPolicy, found without --fsdp; add --fsdp, "
                "which one GPU may have, too"
            )
        if self.offload_parameters and self.offload_gradients:
            raise ValueError(
                "with --offload-parameters gradients go to the host by themselves, found "
                "--offload-gradients as well; leave it out"
            )
        if self.nodes > 1 and self.fabric.network is None:
            raise ValueError(
                f"how fast the network between {self.nodes} nodes of {self.profile.name} is is not "
                "known: pass --network, such as 400Gb"
            )
