"""How much memory optimizer state takes, on the host and on the device, to the byte."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perfmodel.format import BYTES, MASTER, REST, Format, format_of

FP32_BYTES = BYTES["float32"]
_TYPES = {2: "bfloat16", 4: "float32"}
"""A type of parameters by its bytes."""


@dataclass(frozen=True)
class HostBytes:
    """The most host memory that DOSAdam takes for a run of parameters, in bytes.

    master: the parameters at the precision in which they are updated; if those are split, the lower halves.
    moments: the rest of the state.
    gradient_staging: gradients from the accelerator.
    parameter_staging: new parameters on their way to it; if masters are split, their upper halves.
    """

    master: int
    moments: int
    gradient_staging: int
    parameter_staging: int

    @classmethod
    def of(cls, numel: int, state: Format, *, accelerated: bool) -> HostBytes:
        """Of so many parameters whose state is kept in one format. accelerated: as in `host_footprint`."""
        master_bytes = sum(field.nbytes for field in state.fields if field.name in (MASTER, REST))
        return cls(
            master=int(numel * master_bytes),
            moments=int(numel * (state.state_bytes - master_bytes)),
            gradient_staging=numel * state.value_bytes if accelerated else 0,
            parameter_staging=numel * state.value_bytes if accelerated and state.stages_parameters else 0,
        )

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.gradient_staging + self.parameter_staging

    @property
    def state(self) -> int:
        """Bytes that go to the device when a subgroup is streamed, and stay there when it is resident."""
        return self.master + self.moments


def host_footprint(
    numel: int,
    value_bytes: int,
    *,
    master_weights: bool = True,
    amsgrad: bool = False,
    accelerated: bool = True,
    other_gradient_dtype: bool = False,
    state_format: str | None = None,
    values: str | None = None,
) -> HostBytes:
    """Host memory that DOSAdam takes, at most, for `numel` parameters of `value_bytes` each.

    value_bytes: 4 float32, 2 bfloat16 unless `values` says float16, the type of the parameters.
    numel: of all parameters with one setting, all of them in codes with `state_format="int8"`; the bytes are the same
        however they are divided into parameters, groups and subgroups. It is what an update on the host takes. State
        that was never there takes nothing yet, and that which was only brought there or streamed no staging.
    master_weights, amsgrad, state_format: as given to DOSAdam.
    accelerated: whether the parameters are on the accelerator. Parameters on the host need no staging, and no master
        where they have the update's precision themselves.
    other_gradient_dtype: whether gradients come in another dtype than the parameters, and are staged in float32 then.

    Not counted: a copy of one parameter at a time while the first step reads it, the rounding of each tensor to pages
    of 4 KiB where memory is pinned, and at most 256 MiB through which offloaded gradients of further micro-batches
    pass.
    Raises ValueError for a negative numel, or values that are not of 2 or 4 bytes.
    """
    if numel < 0:
        raise ValueError(f"numel must be 0 or more, found {numel}")
    if value_bytes not in _TYPES:
        raise ValueError(f"value_bytes must be 2 (bfloat16, float16) or 4 (float32), found {value_bytes}")
    state = format_of(
        values or _TYPES[value_bytes],
        state_format=state_format,
        master_weights=master_weights,
        amsgrad=amsgrad,
        accelerated=accelerated,
    )
    found = HostBytes.of(numel, state, accelerated=accelerated)
    if not accelerated:
        return found
    staged = numel * FP32_BYTES if other_gradient_dtype else found.gradient_staging
    return replace(found, gradient_staging=staged)


@dataclass(frozen=True)
class DeviceBytes:
    """Device memory that training takes beside optimizer state, in bytes of one rank.

    weights, gradients: of what the rank keeps.
    activations: of all blocks, held when backward begins. logits: with the loss, beside them.
    block: one block's weights and gradients while they are gathered, and its activations.
    reserved: taken by the runtime.
    gathered: weights that are whole for a while though they are divided, in forward and backward.
    """

    weights: int
    gradients: int
    activations: int
    block: int
    reserved: int
    gathered: int = 0
    logits: int = 0

    def peak_bytes(self, accumulating: bool = False) -> int:
        """At the worst moment: as backward begins, or as it ends.

        Gradients grow as activations go, and both do so evenly, so that neither moment between is worse.
        accumulating: whether those of an earlier micro-batch are there all the time, not set to None before forward.
        """
        held, before = self.reserved + self.weights + self.gathered, self.gradients if accumulating else 0
        return held + max(before + self.activations + self.logits, self.gradients + self.block)

    @property
    def update(self) -> int:
        """While the optimizer updates."""
        return self.reserved + self.weights + self.gradients
