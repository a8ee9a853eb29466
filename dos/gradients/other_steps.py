"""Counts the steps of all optimizers of the process, by which gradients that no step has used are noticed."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_count = 0


def steps_of_all() -> int:
    """Return the number of steps that optimizers of any kind have made since `count_steps` was first called."""
    return _count


@functools.cache
def count_steps() -> None:
    """Count steps from now on."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(*_: Any) -> None:
    global _count
    _count += 1
