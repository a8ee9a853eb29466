"""Host memory of optimizer state, to the byte."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.format import MASTER, REST, Format


@dataclass(frozen=True)
class HostBytes:
    """The most host memory that DOSAdam takes for parameters, in bytes, which an update on the host takes.

    State that was never on the host takes nothing there yet, and state that only passes takes no staging. Not counted:
    a copy of one parameter at a time while the first step reads it, the rounding of each tensor to pages of 4 KiB where
    memory is pinned, and at most 256 MiB through which offloaded gradients of further micro-batches pass.

    master: the masters of 16-bit parameters; if those are split, the lower halves.
    moments: the rest of the state.
    gradient_staging: gradients from the accelerator.
    parameter_staging: new parameters on their way to it, from which the next update reads them where they are
        masters, or halves of them.
    """

    master: int
    moments: int
    gradient_staging: int
    parameter_staging: int

    @classmethod
    def of(cls, numel: int, state: Format, *, accelerated: bool) -> HostBytes:
        """Sum up `numel` parameters, however they are divided into tensors, groups and subgroups.

        accelerated: whether the parameters are on the accelerator; those on the host need no staging.
        """
        master_bytes = sum(field.nbytes for field in state.fields if field.name in (MASTER, REST))
        return cls(
            master=int(numel * master_bytes),
            moments=int(numel * (state.state_bytes - master_bytes)),
            gradient_staging=numel * state.value_bytes if accelerated else 0,
            parameter_staging=numel * state.value_bytes if accelerated else 0,
        )

    @property
    def total(self) -> int:
        """Bytes of state and staging."""
        return self.state + self.gradient_staging + self.parameter_staging

    @property
    def state(self) -> int:
        """Bytes that go to the device when a subgroup is streamed, and stay there when it is resident."""
        return self.master + self.moments
