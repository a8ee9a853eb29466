"""The question that the planner answers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from perfmodel.format import BYTES, STATE_FORMATS, Format, format_of
from perfmodel.hardware import HardwareProfile
from perfmodel.planner.machine import PCIE, Fabric
from perfmodel.planner.options import option
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import (
    format_bytes,
    format_count,
    in_gib,
    in_tb,
    parse_bytes,
    parse_bytes_or_0,
    parse_count,
    parse_memory,
    parse_offloaded,
)
from perfmodel.subgroups import automatic_subgroup_size

VALUES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Torch's names of the dtypes of parameters and gradients."""
_SHORT = {torch_name: name for name, torch_name in VALUES.items()}
MARGIN = 0.02
"""Share of the device's memory that DOSAdam leaves alone."""
DEFAULT_RESERVED = 2**30
"""Device memory for CUDA's context, libraries' workspaces and fragmentation, in bytes; an assumption."""
SYSTEM_BYTES, PROCESS_BYTES = 4 * 2**30, 2 * 2**30
"""Host memory that the system takes of a node, and each rank's process before DOSAdam takes any; assumptions."""
MAX_SUBGROUPS = 5_000
"""More would take longer to plan than a planner's user wants to wait."""


_count = partial(option, metavar="N", type=parse_count)
_size = partial(option, group="the machine", metavar="SIZE", type=parse_bytes_or_0)


@dataclass(frozen=True)
class Question:
    """A training and its machine; the help of the options describes further fields.

    model: with all its parameters. profile: of the machine; its ranks_per_host is replaced by `ranks`.
    device_bytes: of one rank's device. host_bytes: of the node, which has all ranks; None if it is not known.
    trainable: share of the parameters.
    accumulation: whether a step has several micro-batches, whose gradients add up and so are there all the time.
    flops_rate: FLOP/s that forward and backward reach. flops_source: the source of that, for people.
    fabric: how GPUs reach one another.

    Raises ValueError for settings that exclude each other.
    """

    model: Transformer
    profile: HardwareProfile
    device_bytes: int
    dtype: str = option(
        "bf16", "of parameters and gradients", "the model", choices=VALUES, type=lambda name: _SHORT.get(name, name)
    )
    batch: int = _count(1, "sequences per GPU and micro-batch")
    sequence: int = _count(2048, "tokens per sequence (2048, or the longest that the model takes)", name="--seq")
    checkpointing: bool = option(False, "recompute each block's activations")
    eager_attention: bool = option(False, "attention keeps its matrices")
    ranks: int = _count(1, "GPUs of the node, data-parallel", "the machine")
    chosen_size: int = _count(0, "parameters (as DOSAdam chooses)", name="--subgroup-size", write=format_count)
    reserved: int = _size(DEFAULT_RESERVED, "GPU memory for CUDA and fragmentation (assumed: 1GiB)")
    attach: bool = option(True, "step() waits for its updates")
    updates: str = option(
        "step",
        "when subgroups are updated: by step(), or, without clipping, as backward makes their gradients: "
        "attach(updates=...)",
        choices=("step", "backward"),
    )
    flops_rate: float = math.inf
    flops_source: str = ""
    offload_gradients: bool = option(False, "DOSAdam(offload_gradients=True)")
    offload_activations: float | str = option(
        0.0,
        "saved tensors that move to the host: none (default), a share, or as much as makes it fit and fastest",
        back="--offload-activations none",
        metavar="none|auto|SHARE",
        type=parse_offloaded,
    )
    weights: str = option(
        "stay",
        "weights of layers: all on the GPU (stay), each from the host when it computes (stream), or as many of either "
        "as is fastest (auto): attach(weights=...)",
        choices=("stay", "stream", "auto"),
    )
    accumulation: bool = option(True, "one micro-batch in each step", "steps")
    micro_batches: int = _count(
        1, "micro-batches of each step, of which times are", "steps", name="--accumulation", back=""
    )
    state_format: str | None = option(
        None, "DOSAdam(state_format=...); split is the default", choices=["split", *filter(None, STATE_FORMATS)]
    )
    trainable: float = option(1.0, "parameters that are not frozen: 40M, 0.5%%", metavar="N|SHARE")
    host_reserved: int | None = _size(
        None, "host memory for the system and the processes of a node (assumed: 4GiB and 2GiB for each rank)"
    )
    fused_loss: bool = option(False, "never all logits: Liger's linear cross-entropy")
    fsdp: bool = option(False, "FSDP2 divides the model over the ranks")
    offload_parameters: bool = option(False, "FSDP2's CPUOffloadPolicy")
    fabric: Fabric = PCIE
    host_bytes: int | None = _size(None, "memory of the node: 128GB", name="--host", type=parse_memory, write=in_gib)
    disk_bytes: int | None = _size(
        None,
        "room on each node's disks for state that does not fit on the host: 2TB",
        name="--disk",
        type=parse_bytes,
        write=in_tb,
    )

    def __post_init__(self) -> None:
        if self.offload_parameters and not self.fsdp:
            raise ValueError(
                "--offload-parameters is FSDP2's CPUOffloadPolicy, found without --fsdp; add --fsdp, "
                "which one GPU may have, too"
            )
        if self.offload_parameters and (self.offload_gradients or self.offload_activations or self.disk_bytes):
            raise ValueError(
                "with --offload-parameters gradients and state are on the host, and DOSAdam has nothing on the "
                "device, found one of --offload-gradients, --offload-activations and --disk as well; leave it out"
            )
        if self.streams and (self.ranks > 1 or self.fsdp):
            raise ValueError(
                f"weights that stream are for one GPU without FSDP2, found --weights {self.weights}; FSDP2 moves its "
                "shards itself: --fsdp --offload-parameters"
            )
        if self.streams and not (self.offload_gradients and self.attach):
            raise ValueError(
                f"weights stream by attach(model, weights=...) and with gradients on the host, found --weights "
                f"{self.weights} {'with --no-attach' if self.offload_gradients else 'without --offload-gradients'}; "
                f"{'leave that out' if self.offload_gradients else 'add it'}"
            )
        others = {"--ranks": self.ranks > 1, "--fsdp": self.fsdp, "--dtype fp16": self.scales_loss}
        against = [name for name, found in {**others, "--no-attach": not self.attach}.items() if found]
        if self.in_backward and against:
            raise ValueError(
                "--updates backward is for an attached model on one GPU without FSDP2 and GradScaler, found it with "
                f"{' and '.join(against)}; leave one of them out"
            )
        if self.disk_bytes is not None and self.host_bytes is None:
            raise ValueError(
                "what is on disk is what does not fit on the host, found --disk without --host; add it, such as 128GB"
            )
        if not self.reserved < self.device_bytes:
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

    def replace(self, **changes: Any) -> Question:
        """Return the question with other values of the fields that are named. Raises ValueError as its constructor."""
        return dataclasses.replace(self, **changes)

    def with_model(self, numel: int) -> Question:
        """Return the question of a model of the usual shape with `numel` parameters."""
        size = self.chosen_size and max(self.chosen_size, math.ceil(numel / MAX_SUBGROUPS))
        return self.replace(model=Transformer.of_size(numel), chosen_size=size)

    @property
    def value_bytes(self) -> int:
        """Bytes of a parameter or gradient."""
        return BYTES[VALUES[self.dtype]]

    @property
    def format(self) -> Format:
        """Format in which DOSAdam keeps the state."""
        return format_of(VALUES[self.dtype], state_format=self.state_format)

    @property
    def scales_loss(self) -> bool:
        """Whether training needs GradScaler, which needs gradients on the device."""
        return self.dtype == "fp16"

    @property
    def in_backward(self) -> bool:
        """Whether backward updates."""
        return self.updates == "backward"

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of all parameters are on the device at the end of backward."""
        return not (self.offload_gradients or (self.in_backward and not self.accumulation))

    @property
    def streams(self) -> bool:
        """Whether weights may stream."""
        return self.weights != "stay"

    @property
    def tokens(self) -> int:
        """Tokens of one rank's micro-batch."""
        return self.batch * self.sequence

    @property
    def step_tokens(self) -> int:
        """Tokens of a step of the whole job."""
        return self.tokens * self.micro_batches * self.ranks

    @property
    def flops(self) -> tuple[float, float]:
        """Floating-point operations of forward and backward of one rank's micro-batch."""
        return self.model.flops(
            self.tokens,
            self.sequence,
            checkpointing=self.checkpointing,
            eager_attention=self.eager_attention,
            trainable=self.trainable,
        )

    @property
    def trained(self) -> int:
        """Parameters of the whole model that are trained."""
        return math.ceil(self.model.numel * self.trainable)

    @property
    def state_numel(self) -> int:
        """Parameters whose optimizer state one rank owns."""
        return self.share(self.trained)

    @property
    def reserved_on_host(self) -> int:
        """Bytes of the node's memory that are not DOSAdam's."""
        if self.host_reserved is not None:
            return self.host_reserved
        return SYSTEM_BYTES + self.ranks * PROCESS_BYTES

    @property
    def subgroup_size(self) -> int:
        """Parameters of each subgroup."""
        return self.chosen_size or automatic_subgroup_size(self.state_numel, self.device_bytes)

    @property
    def subgroups(self) -> int:
        """Number of subgroups of one rank."""
        return math.ceil(self.state_numel / self.subgroup_size)

    def share(self, whole: int) -> int:
        """Part of one rank of a whole that FSDP2 divides."""
        return -(-whole // self.ranks) if self.fsdp else whole
