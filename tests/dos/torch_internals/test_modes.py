"""What dos/torch_internals/modes.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from dos.torch_internals import modes
from dos.torch_internals.modes import (
    backward_number,
    check_saved_tensors_hooks,
    disable_dynamo,
    dispatch_modes,
    in_backward,
    is_compiled,
    is_profiled,
    is_traced,
    keep_untraced,
    next_node,
    when_backward_ends,
    writes_gradient,
)
from dos.torch_internals.tensors import version_counter

CHANGED = "torch has changed what dos/torch_internals/modes.py relies on"


@pytest.mark.parametrize("profile", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_profilers_are_seen(profile: type) -> None:
    assert not is_profiled(), CHANGED
    with profile():
        assert is_profiled(), CHANGED
    assert not is_profiled(), CHANGED


def test_tensors_that_one_operation_saves_have_one_number() -> None:
    """In each thread."""

    def run() -> None:
        found: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            found.append(next_node())
            return tensor

        x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = x * y
            with torch.no_grad():
                x * y
            made = made.exp()
        first, second, third = found
        assert first == second < third, CHANGED
        numbers.append(third)

    numbers: list[int] = []
    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert numbers[0] == numbers[1], CHANGED


def test_backward_is_known_and_its_end() -> None:
    """The innermost one, where they are nested; what raises has no end."""
    seen: list[object] = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *slopes: Tensor) -> Tensor:
            outer = backward_number()
            assert in_backward(), CHANGED
            when_backward_ends(lambda: seen.append("outer"))
            with torch.enable_grad():
                y = torch.ones(2, requires_grad=True)
                z = y * 2
                z.register_hook(lambda _: seen.append(backward_number() != outer))
                z.register_hook(lambda _: when_backward_ends(lambda: seen.append("inner")))
                z.sum().backward()
            seen.append("after")
            return slopes[0]

    assert not in_backward(), CHANGED
    Nested.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [True, "inner", "after", "outer"], CHANGED
    assert not in_backward(), CHANGED


def test_backward_knows_which_gradients_it_writes() -> None:
    """Whether it has written them, or has yet to: of leaves in its graph, and of those that it was asked for."""
    x, y, z = (torch.ones(2, requires_grad=True) for _ in range(3))
    seen: list[list[bool]] = []
    hooked = (torch.ones(2, requires_grad=True) * x).sin()
    hooked.register_hook(lambda _: seen.append([writes_gradient(each) for each in (x, y, z)]))
    x.register_post_accumulate_grad_hook(lambda _: seen.append([writes_gradient(each) for each in (x, y, z)]))
    (hooked + y).sum().backward(retain_graph=True)
    (hooked + y).sum().backward(inputs=[x], retain_graph=True)
    y.requires_grad_(False)
    hooked.sum().backward()
    assert seen == [[True, True, False]] * 2 + [[True, False, False]] * 4, CHANGED


def test_compiled_modules_are_known() -> None:
    plain, inside, in_place = (nn.Linear(2, 2) for _ in range(3))
    in_place.compile()
    assert [is_compiled(each) for each in (torch.compile(inside), in_place)] == [True] * 2, CHANGED
    assert [is_compiled(each) for each in (plain, inside)] == [False] * 2, CHANGED


def test_a_method_is_kept_from_being_compiled() -> None:
    compiling = []

    @disable_dynamo
    def look() -> None:
        compiling.append(torch.compiler.is_compiling())

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        look()
        return x + 1

    compiled(torch.ones(1))
    assert compiling == [False], CHANGED


def test_a_package_is_kept_from_being_compiled() -> None:
    keep_untraced("dos")
    skipped = [trace_rules.check_file(path).skipped for path in (modes.__file__, __file__)]
    assert skipped == [True, False], CHANGED


@pytest.mark.slow
def test_the_public_decorator_would_make_the_import_slow() -> None:
    program = "import sys, torch; print(torch.{}(print) and 'torch._dynamo' in sys.modules)"
    for name, expected in (("_disable_dynamo", "False"), ("compiler.disable", "True")):
        arguments = [sys.executable, "-c", program.format(name)]
        found = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip()
        assert found == expected, f"torch.{name}: torch.compiler.disable may take its place in modes.py"


def test_functional_transforms_take_no_hooks_on_saved_tensors() -> None:
    """Those that make graphs; in others hooks work."""

    def refused(x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match=r"within torch\.func\.grad"):
            check_saved_tensors_hooks()
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()
        return x.sum()

    def accepted(x: Tensor) -> Tensor:
        check_saved_tensors_hooks()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return x.sum()

    for transform in (torch.func.grad, torch.func.jacrev, lambda call: torch.func.vmap(torch.func.grad(call))):
        transform(refused)(torch.ones(2, 2))
    for transform in (torch.func.vmap, torch.func.jacfwd, lambda call: call):
        transform(accepted)(torch.ones(2))


def test_hooks_of_backward_see_whether_it_makes_a_graph() -> None:
    x, seen = torch.ones(2, requires_grad=True), list[bool]()
    y = x.sin()
    y.register_hook(lambda _: seen.append(torch.is_grad_enabled()))
    for create_graph in (False, True):
        torch.autograd.grad(y.sum(), x, retain_graph=True, create_graph=create_graph)
    assert seen == [False, True], CHANGED


def test_tracing_is_seen() -> None:
    found = []

    def look(x: Tensor) -> Tensor:
        found.append(is_traced())
        return x + 1

    x = torch.ones(2)
    look(x)
    torch.func.vmap(look)(x)
    with FlopCounterMode(display=False):
        look(x)
    assert found == [False] * 3, CHANGED
    ways: list[Any] = [
        lambda: make_fx(look)(x),
        lambda: torch.func.functionalize(look)(x),
        lambda: torch.func.linearize(look, x),
        lambda: torch.jit.trace(look, x, check_trace=False),
    ]
    for way in ways:
        found.clear()
        way()
        assert any(found), CHANGED
    with FakeTensorMode():
        look(torch.ones(2))
    assert found[-1], CHANGED


def test_dispatch_modes_are_counted_but_in_backward() -> None:
    found, x = dispatch_modes(), torch.ones(2)
    before = found.changes
    assert not found.now()
    with FlopCounterMode(display=False):
        assert found.now()
        torch._foreach_mul_([x], 2)
        assert version_counter(x) == 0, CHANGED  # the reason for all this
    assert not found.now()
    before, start = found.changes, before
    assert before > start, CHANGED

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    y = checkpoint(torch.sin, x.requires_grad_(), use_reentrant=False, context_fn=contexts)
    after = found.changes
    y.sum().backward()  # recomputes
    assert after > before, CHANGED
    assert found.changes == after, CHANGED
