"""The user's choices beyond those of param groups, in one frozen value, and their checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dos.arguments import flag, is_number, share_or_count, whole_number
from dos.devices import Device
from dos.machine.profiles import check_named
from dos.planning.policies import Policy, resolve_policy
from dos.rules.base import Rule, check_number
from perfmodel.hardware import HardwareProfile

ADAPTIVE, RESIDENT = "adaptive", "resident"


@dataclass(frozen=True)
class Options:
    """The arguments of DOSAdam beyond param groups, under their names; `disk` is a tuple, empty for None.

    rule: how parameters are updated.
    Raises ValueError or TypeError for an argument that cannot be used.
    """

    policy: str | float | Policy
    subgroup_size: int | None
    profile: HardwareProfile | str | Path | None
    max_grad_norm: float | None
    rule: Rule
    offload_gradients: bool
    memory_budget: int | float | Callable[[], int] | None
    disk: tuple[Path, ...] = ()
    host_memory: int | None = None
    skip_nonfinite: bool = False

    def never_leaves(self, device: Device | None) -> bool:
        """Return whether state on the device always stays there, and has no home on the host.

        It does where device and host share their memory, because moving would release none.
        """
        shared = device is not None and device.shares_host_memory
        return self.policy == RESIDENT or (shared and self.policy == ADAPTIVE)

    def policy_on(self, device: Device) -> Policy:
        """Return the policy that plans for a device. Raises ValueError for `disk` if it shares the host's memory."""
        if not self.never_leaves(device):
            return resolve_policy(self.policy)
        if self.disk:
            raise ValueError(
                f"{device} shares the host's memory, where policy='adaptive' keeps all state; leave disk= out, or "
                "choose policy='cpu', with which what host_memory= does not hold is on disk"
            )
        return resolve_policy(RESIDENT)

    def agreed(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks, by name."""
        return {
            "max_grad_norm": str(None if self.max_grad_norm is None else float(self.max_grad_norm)),
            "skip_nonfinite": str(self.skip_nonfinite),
            "offload_gradients": str(self.offload_gradients),
            **self.rule.agreed(),
            "policy": "a callable" if callable(self.policy) else str(self.policy),
        }

    def _replace(self, name: str, value: object) -> None:
        """Put a checked value in the place of the user's."""
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        resolve_policy(self.policy)
        for name in ("offload_gradients", "skip_nonfinite"):
            self._replace(name, flag(getattr(self, name), name))
        for name, unit in (("subgroup_size", "parameters"), ("host_memory", "bytes")):
            if getattr(self, name) is not None:
                self._replace(name, whole_number(getattr(self, name), name, unit, least=1))
        if not isinstance(self.profile, HardwareProfile | str | Path | None):
            raise TypeError(f"profile must be a HardwareProfile, a file, a name, or None, found {self.profile!r}")
        if isinstance(self.profile, str | Path):
            check_named(self.profile)
        if self.disk and self.policy == RESIDENT:
            raise ValueError("policy='resident' keeps all state on the device; leave disk= out, or choose 'adaptive'")
        if self.max_grad_norm is not None:
            check_number(self.max_grad_norm, "max_grad_norm", or_bool=False)
            self._replace("max_grad_norm", float(self.max_grad_norm))
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0, or None for no clipping, found {self.max_grad_norm}")
        budget = self.memory_budget
        if budget is not None and not callable(budget):
            if not is_number(budget):
                raise TypeError(
                    f"memory_budget must be an int (bytes), a float in [0, 1] (a share of the device's memory), a "
                    f"function giving bytes, or None, found {budget!r}"
                )
            amount = share_or_count(budget)
            if amount is None:
                raise ValueError(
                    f"memory_budget must be 0 or more bytes as an int, or a share in [0, 1] as a float, found {budget}"
                )
            self._replace("memory_budget", amount)


def folders_of(disk: str | Path | Sequence[str | Path] | None) -> tuple[Path, ...]:
    """Return the folders of the argument `disk`. Raises TypeError, or ValueError for an empty name."""
    found = () if disk is None else tuple(disk) if isinstance(disk, list | tuple) else (disk,)
    if not all(isinstance(folder, str | os.PathLike) for folder in found):
        raise TypeError(f"disk must be a folder, a sequence of folders, or None, found {disk!r}")
    if not all(name and "\0" not in name for name in map(os.fspath, found)):
        raise ValueError(f"disk must name a folder, found {disk!r}; write '.' for the one that is current, or None")
    # Absolute, because user code may change the current folder before state is first written, or copies are made.
    return tuple(Path(folder).expanduser().absolute() for folder in found)
