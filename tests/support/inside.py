"""The one place where tests look into an optimizer, for what users can neither see nor set.

How small a saved tensor may be that leaves (models of tests are small); what is asked of a device that a helper has
made; a policy that is to be asked again although nothing has changed; what is in memory between two steps, where
metrics() tells of the last one; which objects are to go with the optimizer; the moment between backward's write of a
gradient and our hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import Tensor

from dos import DOSAdam
from dos.activations.offload import ActivationOffload
from dos.in_backward import InBackward
from dos.owners.gradients import Gradients
from dos.session import Session


def session_of(optimizer: DOSAdam) -> Session:
    return optimizer._session


def device_of(optimizer: DOSAdam) -> Any:
    return optimizer._device


def offload_of(optimizer: DOSAdam) -> ActivationOffload:
    on_device = session_of(optimizer).assembly.on_device
    return on_device.activations


def state_on_device(optimizer: DOSAdam) -> int:
    """Bytes now."""
    return session_of(optimizer).ledger.stores.device.nbytes


def plan_anew(optimizer: DOSAdam) -> None:
    """Have the policy asked again although nothing has changed."""
    decisions = session_of(optimizer).assembly.decisions
    if decisions is not None:
        decisions._asked.clear()


class StoppedError(Exception):
    """On purpose."""


@contextlib.contextmanager
def stopped_at(number: int, *, taken: bool = False) -> Iterator[list[Tensor]]:
    """Raise in backward when this number of gradients was written, and before our hook sees the last of them.

    taken: or after it. Yields a list, to which the tensor is appended that has the gradient.
    """
    ready, left, leaves = Gradients.gradient_ready, number, list[Tensor]()

    def stop(gradients: Gradients, parameter: Tensor, leaf: Tensor) -> None:
        nonlocal left
        left -= 1
        if left != -1 or taken:
            ready(gradients, parameter, leaf)
        if left == -1:
            leaves.append(leaf)
            raise StoppedError

    with patch.object(Gradients, "gradient_ready", stop):
        yield leaves


def in_backward(optimizer: DOSAdam) -> InBackward:
    """The updates during backward of an optimizer that has them."""
    found = session_of(optimizer).assembly.in_backward
    assert found is not None
    return found
