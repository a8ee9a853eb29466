"""The present modes of torch: flags without a public reader in torch 2.6 to 2.13."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from dos.torch_internals.patches import replace_method

_P = ParamSpec("_P")
_T = TypeVar("_T")


def without_gradients(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate as `torch.no_grad`, which takes eight calls of Python also where gradients are off, as in `step()`."""

    @functools.wraps(method)
    def off(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        if not torch.is_grad_enabled():
            return method(*arguments, **keywords)
        with torch.no_grad():
            return method(*arguments, **keywords)

    return off


disable_dynamo = torch._disable_dynamo
"""Keeps torch.compile out of a method, as torch does for its optimizers.

`torch.compiler.disable` imports torch._dynamo at once, which takes seconds; this does when the method is called.
"""


@functools.cache
def keep_untraced(package: str) -> None:
    """Keep torch.compile out of a package for good.

    A compiled module traces what runs within it, hooks on saved tensors too, and fails where it cannot.
    """
    from torch._dynamo import trace_rules  # takes seconds, unless an optimizer of torch's has been built

    trace_rules.add(package)


next_node: Callable[[], int] = torch.autograd._get_sequence_nr
"""The number of the autograd node that this thread makes next: the same while one operation saves its tensors."""


def in_backward() -> bool:
    """Return whether this thread runs a backward, or a forward that a backward recomputes."""
    return backward_number() != -1


backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread runs, the innermost one where they are nested; -1: none."""


def writes_gradient(leaf: Tensor) -> bool:
    """Return whether the backward that this thread runs writes the gradient of this leaf; also if it has done so."""
    return leaf.requires_grad and torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)


def check_saved_tensors_hooks() -> None:
    """Raise RuntimeError within torch.func.grad, vjp, jacrev, hessian, whose graphs have no hooks on saved tensors."""
    functorch = torch._C._functorch
    if any(each.key() == functorch.TransformType.Grad for each in functorch.get_interpreter_stack() or ()):
        raise RuntimeError(
            "an attached model ran within torch.func.grad, vjp, jacrev or hessian, which do not support the hooks on "
            "saved tensors of attach(activations=) and attach(weights=); use torch.autograd.grad, or attach the model "
            "without them"
        )


_compiling: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
"""None: nothing is compiled; False: compiled code has called what is not traced. Torch 2.6 may not have it."""

_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("PROXY", "FAKE", "FUNCTIONAL"))
"""The modes of make_fx, export and linearize, of fake tensors, and of both."""


def is_compiled_around() -> bool:
    """Return whether torch.compile compiles what is around the code that runs, and each function that this calls."""
    compiling = _compiling()
    return compiling is not None and compiling is not False


def is_traced() -> bool:
    """Return whether torch traces what runs, with tensors that may have no memory, or compiles what is around it."""
    functorch = torch._C._functorch
    return (
        is_compiled_around()
        or torch._C._get_tracing_state() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACERS)))
        or any(e.key() == functorch.TransformType.Functionalize for e in functorch.get_interpreter_stack() or ())
    )


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call `call` when the backward that runs, the innermost one, ends, unless it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class DispatchModes:
    """Modes as `FlopCounterMode`, under which `torch._foreach_` functions, and so torch's clipping, raise no version.

    changes: how many have begun or ended. now: returns how many there are.
    """

    changes = 0
    now = staticmethod(torch._C._len_torch_dispatch_stack)


@functools.cache
def dispatch_modes() -> DispatchModes:
    """Return an object that counts them, from the first call on."""
    found = DispatchModes()

    def change(before: Callable[..., Any], mode: Any, *args: Any) -> Any:
        # Not in backward: a checkpoint that chooses what to save enters modes there, and writes to no gradient.
        found.changes += not in_backward()
        return before(mode, *args)

    for name in ("__enter__", "__exit__"):
        replace_method(TorchDispatchMode, name, change)
    return found


def is_profiled() -> bool:
    """Return whether a profiler of torch records."""
    return profiler._is_profiler_enabled


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module runs compiled as a whole, through torch.compile(module) or module.compile()."""
    dynamo = sys.modules.get("torch._dynamo")  # no module is compiled before this is imported, which takes seconds
    return dynamo is not None and (isinstance(module, dynamo.OptimizedModule) or module._compiled_call_impl is not None)
