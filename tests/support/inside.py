"""The one place where tests look into an optimizer, for what users can neither see nor set.

How small a saved tensor may be that leaves (models of tests are small); what is asked of a device that a helper has
made; a policy that is to be asked again although nothing has changed; what is in memory between two steps, where
metrics() tells of the last one; which objects are to go with the optimizer.
"""

from __future__ import annotations

from typing import Any

from dos import DOSAdam
from dos.activations.offload import ActivationOffload
from dos.session import Session


def session_of(optimizer: DOSAdam) -> Session:
    return optimizer._session


def device_of(optimizer: DOSAdam) -> Any:
    return optimizer._device


def offload_of(optimizer: DOSAdam) -> ActivationOffload:
    on_device = session_of(optimizer).on_device
    return on_device.activations


def state_on_device(optimizer: DOSAdam) -> int:
    """Bytes now."""
    return session_of(optimizer).ledger.stores.device.nbytes


def plan_anew(optimizer: DOSAdam) -> None:
    """Have the policy asked again although nothing has changed."""
    decisions = session_of(optimizer).decisions
    if decisions is not None:
        decisions._asked = None, None
