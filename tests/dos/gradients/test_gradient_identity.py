"""The step uses the gradients that are there now, as they are now, whatever left before and however they are stored."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from dos import DOSAdam
from tests.support.training import Make, Raises, assert_as_adamw, backward, batch, bits, maker, mlp

pytestmark = pytest.mark.usefixtures("one_kernel_thread")

POLICIES: list[str | float] = ["cpu", 0.5]


def write_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)


def replace_memory_twice(model: nn.Module) -> None:
    """The second time the allocator most likely gives the first address again."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
        parameter.data = parameter.data + 0.25


@pytest.mark.parametrize("write", [write_in_place, replace_memory_twice])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_a_batch_that_was_given_up_are_not_used(
    policy: str | float, write: Callable[[nn.Module], None]
) -> None:
    """Whether its backward went through or raised half way."""

    def run(make: Make) -> Iterable[Tensor]:
        model = mlp()
        optimizer = make(model.parameters())
        for step in range(4):
            if step % 2:
                with pytest.raises(ArithmeticError):
                    model[3](Raises.apply(model[:3](batch(10 * step)))).square().mean().backward()
            else:
                backward(model, 10 * step)
            write(model)
            optimizer.zero_grad()
            backward(model, 10 * step + 1)
            optimizer.step()
            optimizer.zero_grad()
        return model.parameters()

    assert_as_adamw(run, policy)


def other_values(gradient: Tensor, _: Tensor) -> Tensor:
    return gradient.mul_(3)


def other_memory(gradient: Tensor, _: Tensor) -> Tensor:
    gradient.data = gradient.data * 3
    return gradient


def other_memory_at_the_same_address(gradient: Tensor, _: Tensor) -> Tensor:
    """As an allocator may give it."""
    array = gradient.detach().numpy()
    array *= 3
    gradient.data = torch.from_numpy(array)
    return gradient


def another_part_of_the_same_memory(gradient: Tensor, _: Tensor) -> Tensor:
    both = torch.stack([gradient.data, -gradient.data])
    gradient.data = both[0]
    gradient.data = both[1]
    return gradient


def twin_of_the_same_version(gradient: Tensor, _: Tensor) -> Tensor:
    twin = gradient.data
    assert gradient._version > 0
    for _ in range(gradient._version):
        twin.mul_(1.5)
    return twin


def other_half(gradient: Tensor, buffer: Tensor) -> Tensor:
    buffer.data[1] = 3 * gradient  # which does not count as a write to the gradient, though its memory is of one piece
    gradient.data = buffer[1]
    return gradient


def transposed(gradient: Tensor, _: Tensor) -> Tensor:
    gradient.data = gradient.data.t()
    return gradient


def negated_where_it_is(gradient: Tensor, _: Tensor) -> Tensor:
    gradient.data = torch._neg_view(gradient.data)
    return gradient


EDITS = [other_values, other_memory, other_memory_at_the_same_address, another_part_of_the_same_memory]
EDITS += [twin_of_the_same_version, other_half, transposed, negated_where_it_is]


@pytest.mark.parametrize("edit", EDITS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("policy", "last"), [("cpu", 2), ("cpu", 4), (0.5, 2)])
def test_each_guard_of_a_gradient_that_has_left(
    policy: str | float, last: int, edit: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """All but one of object, address and reading, storage and version are as they were when it left.

    last: the step before which it is edited: from 4 on a step looks at all gradients at once.
    """
    starts = [torch.randn(24, 24, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]

    def run(make: Make) -> Iterable[Tensor]:
        model = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in starts))
        buffers = torch.zeros(len(starts), 2, 24, 24)
        for parameter, start, buffer in zip(model.parameters(), starts, buffers, strict=True):
            parameter.data = start.clone()
            if edit is other_half:  # the memory of others is their own, and may come back
                parameter.grad = buffer[0]
        optimizer = make(model.parameters())
        for step in range(last + 2):
            optimizer.zero_grad(set_to_none=False)
            backward(model, step)
            if step == last:
                for parameter, buffer in zip(model.parameters(), buffers, strict=True):
                    parameter.grad = edit(parameter.grad, buffer)
            optimizer.step()
        return model.parameters()

    assert_as_adamw(run, policy)


MODES: dict[str, tuple[tuple[str, ...], ...]] = {
    "around the clip": (("backward",), ("clip",), ("step",)),
    "until the clip": (("backward", "clip"), ("step",)),
    "from the clip on": (("backward",), ("clip", "step")),
    "around all": (("backward", "clip", "step"),),
    "between backwards": (("backward",), ("clip",), ("last layer",), ("step",)),
}
"""The parts of an iteration, those together that one mode surrounds."""


@pytest.mark.parametrize("foreach", [torch.nn.utils.clip_grad_norm_, "scaled by hand"])
@pytest.mark.parametrize("parts", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_edited_under_a_mode_that_hides_it_from_versions(
    policy: str | float, parts: str, foreach: Any
) -> None:
    """As where user code counts the operations of an iteration."""

    def run(make: Make) -> Iterable[Tensor]:
        model = mlp()
        optimizer = make(model.parameters())

        def clip() -> None:
            if callable(foreach):
                foreach(model.parameters(), 1e-3)
            else:
                torch._foreach_mul_([p.grad for p in model.parameters()], 1e-3)

        def last_layer() -> None:
            model[3](torch.ones(2, 40)).sum().backward()

        acts: dict[str, Callable[[], Any]] = {"clip": clip, "last layer": last_layer, "step": optimizer.step}
        for step in range(5):
            optimizer.zero_grad()
            for together in MODES[parts]:
                hides = step > 1 and "clip" in together
                with FlopCounterMode(display=False) if hides else contextlib.nullcontext():
                    for part in together:
                        acts.get(part, functools.partial(backward, model, step))()
        return model.parameters()

    assert_as_adamw(run, policy)


def test_gradients_leave_early_where_forward_chooses_what_to_save(caplog: pytest.LogCaptureFixture) -> None:
    """Such a checkpoint enters modes, in forward and as it is recomputed."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    model = mlp()
    optimizer = maker("cpu")(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        checkpoint(model, batch(step), use_reentrant=False, context_fn=contexts).sum().backward()
        optimizer.step()
    assert "cannot leave during backward" not in caplog.text


def with_other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data = torch.ones_like(parameter)


def zeroed_by_the_model(model: nn.Module) -> None:
    """As trainers do, of which the optimizer is not told; backward then adds to the same tensors."""
    model.zero_grad(set_to_none=False)
    backward(model, 1)


def made_anew(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("change", [with_other_memory, zeroed_by_the_model, made_anew])
def test_a_clip_factor_is_of_the_gradient_as_it_was(change: Callable[[nn.Module], None]) -> None:
    """The same object, memory and version."""

    def run(make: Make) -> Iterable[Tensor]:
        model = mlp()
        optimizer = make(model.parameters())
        backward(model, 0)
        if isinstance(optimizer, DOSAdam):
            optimizer.clip_grad_norm_(1e-9)
        change(model)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.step()
        said = any("is not clipped" in str(each.message) and each.filename == __file__ for each in found)
        assert said == (isinstance(optimizer, DOSAdam) and change is not made_anew)
        return model.parameters()

    assert_as_adamw(run, "cpu")


class Conjugated(nn.Module):
    """Its gradient is lazily negated: a real parameter is the imaginary part of a number that is conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self) -> Tensor:
        z = torch.complex(torch.ones(12), self.weight) * torch.complex(torch.tensor(1.0), self.scalar)
        return (z.conj() * torch.linspace(1, 2, 12)).imag.pow(3).sum()


def negated(gradient: Tensor) -> Tensor:
    """The same values, stored with the other sign."""
    return torch._neg_view(-gradient.detach())


@pytest.mark.parametrize(
    ("place", "offload"), [("host", False), ("cpu", False), ("cpu", True), ("stride:1", True), (0.0, False)]
)
def test_lazily_negated_gradients_keep_their_sign(place: str | float, offload: bool) -> None:
    def run(make: Make) -> Iterable[Tensor]:
        model = Conjugated()
        optimizer = make(model.parameters())
        for step in range(4):
            model().backward()
            if step == 2 and not (offload and place != "host"):
                for parameter in model.parameters():
                    parameter.grad = negated(parameter.grad)
                    assert parameter.grad.is_neg()
            optimizer.step()
            optimizer.zero_grad()
        return model.parameters()

    assert_as_adamw(run, place, subgroup_size=5, offload_gradients=offload)


@pytest.mark.parametrize("place", ["host", "cpu", "stride:1", 0.0])
@pytest.mark.parametrize("after", [0, 1])
def test_lazily_negated_parameters_are_updated_with_their_sign(place: str | float, after: int) -> None:
    """after: so many steps they come to be so."""

    def run(make: Make) -> Iterable[Tensor]:
        parameters = [nn.Parameter(torch.linspace(-1, 1, 9)), nn.Parameter(torch.ones(4))]
        optimizer = make(parameters)
        for step in range(4):
            if step == after:
                parameters[0].data = negated(parameters[0])
                assert parameters[0].is_neg()
            optimizer.zero_grad()
            (parameters[0] * torch.linspace(1, 2, 9)).sum().backward()
            parameters[1].grad = torch.ones(4)
            optimizer.step()
        return parameters

    assert_as_adamw(run, place, subgroup_size=5)


def test_a_gradient_that_has_no_memory() -> None:
    def run(make: Make) -> Iterable[Tensor]:
        parameter = nn.Parameter(torch.ones(5))
        optimizer = make([parameter])
        for gradient in (torch.ones(5), torch._efficientzerotensor(5)):
            parameter.grad = gradient
            optimizer.step()
        return [parameter]

    assert_as_adamw(run, "host")


@pytest.mark.parametrize(
    ("dtype", "place", "offload"),
    [
        (torch.bfloat16, "host", False),
        (torch.float64, "cpu", False),
        (torch.float16, "cpu", True),
        (torch.bfloat16, "adaptive", True),
        (torch.float64, 0.0, False),
    ],
)
def test_a_default_dtype_changes_nothing(dtype: torch.dtype, place: str | float, offload: bool) -> None:
    ends = []
    for default in (torch.float32, dtype):
        model, batches = mlp(), [batch(step) for step in range(3)]
        torch.set_default_dtype(default)
        try:
            optimizer = maker(place, max_grad_norm=0.05, offload_gradients=offload)(model.parameters())
            norms = [optimizer.grad_norm()]
            for inputs in batches:
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                norms.append(optimizer.clip_grad_norm_(0.1))
                optimizer.step()
            states = [t for entry in optimizer.state.values() for t in entry.values()]
            assert {t.dtype for t in [*norms, *states]} == {torch.float32}
            ends.append(bits([*norms, *model.parameters(), *states]))
        finally:
            torch.set_default_dtype(torch.float32)
    assert ends[0] == ends[1]
