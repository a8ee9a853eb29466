"""Watches the steps of all optimizers of the process: gradients that no step has used are noticed, or given back."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dos.gradients.zeroing import watched

NOT_FOUND = (
    "an optimizer of type {} has made a step and found no gradient in p.grad of {} of its parameters, the first of "
    "shape {}: {} takes them for DOSAdam alone; give each parameter to one optimizer, or leave that out"
)


class Watcher(Protocol):
    """Is told of each step."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Called after a step of any optimizer."""


_count = 0
_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def steps_of_all() -> int:
    """Return the number of steps that optimizers of any kind have made since `watch_steps` was first called."""
    return _count


def watch_steps(watcher: Watcher) -> None:
    """Count steps from now on, and tell the watcher of each, as long as it lives."""
    _watchers.add(watcher)
    _hook()


@functools.cache
def _hook() -> None:
    register_optimizer_step_pre_hook(_give_back)
    register_optimizer_step_post_hook(_stepped)


def _give_back(optimizer: Optimizer, *_: Any) -> None:
    """Give an optimizer that is not ours the offloaded gradients of parameters that it has from one of ours."""
    sessions = [session for session in list(watched) if session.registry.offloaded.records]
    # Ours take these in their step, and reading their groups would wait for their updates.
    if sessions and not hasattr(optimizer, "edit_gradients"):
        without = [p for group in optimizer.param_groups for p in group["params"] if p.grad is None]
        for session in sessions:
            registry = session.registry
            wanted = {id(p) for p in without if registry.record(p) in registry.offloaded.records}
            if wanted:
                session.taking.give_back(wanted)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    global _count
    _count += 1
    for watcher in list(_watchers):
        watcher.stepped(optimizer)
