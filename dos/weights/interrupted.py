"""Gradients that a backward which raised has left on copies of weights that stream."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from dos.torch_internals.modes import in_backward
from dos.torch_internals.patches import replace_run_backward


@functools.cache
def after_interruptions(forget: Callable[[], None]) -> None:
    """Call `forget` when the next backward begins after one that raised, and none runs in another thread."""
    # Not when it raises: a step that follows uses the gradients that there are, as AdamW does.
    interrupted, running, beginning = False, set[int](), threading.Lock()

    def run(run_backward: Callable[..., Any], *arguments: Any, accumulate_grad: bool, **rest: Any) -> Any:
        nonlocal interrupted
        if not accumulate_grad or in_backward():  # one within another, as of reentrant checkpointing
            return run_backward(*arguments, accumulate_grad=accumulate_grad, **rest)
        thread = threading.get_ident()
        try:
            with beginning:  # else another thread's backward would begin meanwhile, and lose what it writes
                if interrupted and not running:
                    forget()
                    interrupted = False
                running.add(thread)
            return run_backward(*arguments, accumulate_grad=True, **rest)
        except BaseException:
            interrupted = True
            raise
        finally:
            running.discard(thread)

    replace_run_backward(run)
