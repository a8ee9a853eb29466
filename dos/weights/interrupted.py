"""Gradients that a backward which raised has left on copies of weights that stream."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from dos.torch_internals.patches import replace_run_backward


@functools.cache
def after_interruptions(forget: Callable[[], None]) -> None:
    """Call `forget` when the next backward begins after one that raised, and no other one runs."""
    # Not when it raises: a step that follows uses the gradients that there are, as AdamW does.
    interrupted, running, beginning = False, set[object](), threading.Lock()

    def run(run_backward: Callable[..., Any], *arguments: Any, accumulate_grad: bool, **rest: Any) -> Any:
        nonlocal interrupted
        if not accumulate_grad:
            return run_backward(*arguments, accumulate_grad=False, **rest)
        this = object()  # not the thread, which runs one within another where a checkpoint is reentrant
        try:
            with beginning:  # else another thread's backward would begin meanwhile, and lose what it writes
                if interrupted and not running:
                    forget()
                    interrupted = False
                running.add(this)
            return run_backward(*arguments, accumulate_grad=True, **rest)
        except BaseException:
            interrupted = True
            raise
        finally:
            running.discard(this)

    replace_run_backward(run)
