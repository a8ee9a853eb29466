"""The state of torch now, and what it compiles: flags without a public reader in torch 2.6 to 2.13."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd import profiler

disable_dynamo = torch._disable_dynamo
"""Keeps torch.compile out of a method, as torch does with those of its optimizers.

`torch.compiler.disable` imports torch._dynamo at once, which takes seconds; this does when the method is called.
"""

next_node: Callable[[], int] = torch.autograd._get_sequence_nr
"""The number of the autograd node that this thread makes next: the same while one operation saves its tensors."""


def in_backward() -> bool:
    """Whether this thread runs a backward: of a recomputed forward, too."""
    return backward_number() != -1


backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread runs, the innermost one where they are nested; -1: none."""


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call this at the end of the backward that runs, the innermost one, unless that raises."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_profiled() -> bool:
    """Whether a profiler of torch records."""
    return profiler._is_profiler_enabled


def is_compiled(module: nn.Module) -> bool:
    """Whether the module runs as one compiled whole, through torch.compile(module) or module.compile()."""
    dynamo = sys.modules.get("torch._dynamo")  # nothing is compiled before this is imported, which takes seconds
    return dynamo is not None and (isinstance(module, dynamo.OptimizedModule) or module._compiled_call_impl is not None)
