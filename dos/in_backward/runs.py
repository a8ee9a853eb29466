"""The backwards that user code runs: where each begins and ends, and what it has written."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dos.torch_internals.modes import in_backward
from dos.torch_internals.patches import replace_run_backward


@dataclass(eq=False)
class Run:
    """One backward that user code has begun, with those that it runs within itself, as reentrant checkpointing does.

    double: whether it makes a graph of its own. updates: whether it is a step; False within `no_update()`.
    checked: whether its gradients can be used. began: whether it has written a gradient of the attached model.
    issued: whether it has updated anything. alone: whether no other thread ran a backward meanwhile. gathers: whether
        most gradients need no more than to be counted; see `Runs.gather`.
    times: how often it has written each gradient. read: that number when the parameter was read last in it. beside: how
        many of `times` it has written to the weight itself, where weights stream: the others are its copy's. All by
        the id of the parameter.
    """

    double: bool
    updates: bool = False
    checked: bool = False
    began: bool = False
    issued: bool = False
    alone: bool = True
    gathers: bool = False
    times: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    beside: dict[int, int] = field(default_factory=dict)


def accumulating() -> bool:
    """Return whether Accelerate says that the present backward only adds up gradients, as in `accelerator.accumulate`.

    All its objects share this record of it.
    """
    state = sys.modules.get("accelerate.state")
    return state is not None and not state.GradientState().sync_gradients


_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
"""The sessions that update in backward; weak, because torch's function stays replaced."""


def watch_backwards(session: Any) -> None:
    """Tell this session from now on when a backward begins, ends or raises."""
    _sessions.add(session)
    _wrap_torch()


def stop_watching(session: Any) -> None:
    """Tell this session no more."""
    _sessions.discard(session)


@functools.cache
def _wrap_torch() -> None:
    replace_run_backward(_run)


def _run(
    run_backward: Callable[..., Any],
    outputs: Sequence[Tensor],
    gradients: Any,
    retain_graph: bool,
    create_graph: bool,
    *arguments: Any,
    accumulate_grad: bool,
    **rest: Any,
) -> Any:
    """Run a backward as torch does, between what sessions have to know of it."""

    def run() -> Any:
        given = outputs, gradients, retain_graph, create_graph, *arguments
        return run_backward(*given, accumulate_grad=accumulate_grad, **rest)

    # torch.autograd.grad() writes no p.grad. A backward within another one belongs to that.
    if not accumulate_grad or not _sessions or in_backward():
        return run()
    runs = [(session, Run(create_graph)) for session in list(_sessions)]
    # All are told, even if one raises: a backward that has not ended for a session would stop its updates.
    with contextlib.ExitStack() as ends:
        try:
            for session, each in runs:
                session.runs.run_begins(each)
            found = run()
        except BaseException as error:
            for session, each in runs:
                ends.callback(session.runs.run_failed, each, error)
            raise
        for session, each in runs:
            ends.callback(session.runs.run_ends, each)
    return found
