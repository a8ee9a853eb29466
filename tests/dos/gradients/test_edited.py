"""Gradients that user code drops, sets or edits, wherever they are: the bits of a loop that has them in `p.grad`."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from tests.support.blocks import WIDE, loss, net, start
from tests.support.inside import session_of
from tests.support.races import allowed
from tests.support.training import Make, assert_close_ulp, attached_after_a_step, bits, loss_of, maker, mlp

pytestmark = pytest.mark.usefixtures("one_core")

MODES: dict[str, dict[str, Any]] = {
    "attached": {"weights": None, "offload_gradients": False},
    "resident": {"weights": None, "offload_gradients": False, "policy": "resident"},
    "offload": {"weights": None},
    "streamed": {"weights": None, "policy": "stride:2"},
    "all weights stream": {"weights": 0},
    "some weights stay": {"weights": 3, "state_format": "float32"},
    "all weights stay": {"weights": 6},
    "auto": {"weights": "auto", "policy": "adaptive", "capacity": 40_000},
    "disk": {"weights": 0, "host_memory": 500_000},
    "codes": {"weights": None, "state_format": "int8"},
    "codes, and weights stream": {"weights": 2, "policy": "stride:2", "state_format": "int8"},
}


@pytest.fixture(autouse=True)
def _small_weights_are_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dos.rules.adamw.LEAST_CODED", 128)


def new_model(dtype: torch.dtype, mode: str) -> Any:
    return net(dtype, width=WIDE if mode == "disk" else 16)


def begin(mode: str, folder: Path, dtype: torch.dtype, **more: Any) -> tuple[Any, DOSAdam]:
    model = new_model(dtype, mode)
    where = {"disk": folder} if mode == "disk" else {}
    return model, start(model, **MODES[mode], **where, **more)


def reference(dtype: torch.dtype, mode: str = "offload", **more: Any) -> tuple[Any, DOSAdam]:
    """All gradients are in `p.grad`, where user code finds them. mode: whose state has the same bits."""
    model = new_model(dtype, mode)
    coded = {"state_format": "int8"} if MODES.get(mode, {}).get("state_format") == "int8" else {}
    return model, DOSAdam(model.parameters(), lr=1e-2, **coded, **more)


def by_modules(model: nn.Module, _: Any) -> None:
    for child in model.children():
        child.zero_grad()


DROPS: dict[str, Callable[[nn.Module, Any], None]] = {
    "model": lambda model, _: model.zero_grad(),
    "model, in place": lambda model, _: model.zero_grad(set_to_none=False),
    "modules": by_modules,
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "torch's method": lambda _, optimizer: torch.optim.Optimizer.zero_grad(optimizer),
    "another optimizer": lambda model, _: torch.optim.SGD(model.parameters()).zero_grad(),
}


def with_bad_batches(model: Any, optimizer: Any, drop: Callable[[nn.Module, Any], None]) -> list[bytes]:
    for step in range(3):
        for micro in range(2):
            (loss(model, 10 * step + micro) * (math.nan if step == 1 else 1)).backward()
        if step != 1:
            optimizer.step()
        drop(model, optimizer)
    optimizer.synchronize()
    return bits(model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_batch_is_dropped_in_any_way(mode: str, tmp_path: Path) -> None:
    ways = DROPS if mode == "offload" else {"model": DROPS["model"]}
    expected = with_bad_batches(*reference(torch.float32, mode), DROPS["optimizer"])
    for way, drop in ways.items():
        assert with_bad_batches(*begin(mode, tmp_path, torch.float32), drop) == expected, way


def test_a_module_drops_the_gradients_of_its_own_parameters(tmp_path: Path) -> None:
    model, optimizer = begin("offload", tmp_path, torch.float32)
    twin, other = reference(torch.float32)
    for each in (model, twin):
        loss(each, 0).backward()
        each.blocks[2].zero_grad()
        loss(each, 1).backward()
        each.blocks[3].zero_grad()
    optimizer.step()
    other.step()
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())


@pytest.mark.parametrize("weights", [None, 0])
def test_zeroing_by_the_model_waits_for_no_update(weights: Any) -> None:
    if weights is None:
        model, optimizer, _ = attached_after_a_step(offload_gradients=True)
    else:
        model = net()
        optimizer = start(model, weights)
        loss(model, 0).backward()
        optimizer.step()
    assert (unfinished := list(session_of(optimizer).ledger.unfinished))
    model.zero_grad()
    assert session_of(optimizer).ledger.unfinished == unfinished
    optimizer.synchronize()


def test_gradients_that_are_edited_while_an_update_reads_them_are_told_of() -> None:
    """Where code has kept parameters: to read them from the module, or zeroing by torch's methods, waits.

    Steps after such an edit wait for their updates.
    """

    def zero(parameters: Iterable[Tensor]) -> None:
        with allowed():
            for p in parameters:
                p.grad.zero_()

    ways: dict[str, Callable[[nn.Module, DOSAdam], object]] = {
        "module": lambda model, _: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
        "optimizer": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
        "zero_grad of the module": lambda model, _: model.zero_grad(set_to_none=False),
        "synchronize": lambda _, optimizer: (optimizer.synchronize(), kept[0].grad.zero_()),
        "dropped": lambda *_: [setattr(p, "grad", None) for p in kept],
        "kept": lambda *_: zero(kept),
    }
    told, waits = {}, {}
    for name, way in ways.items():
        model, optimizer, _ = attached_after_a_step()
        kept = list(session_of(optimizer).assembly.parameters)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            way(model, optimizer)
            for step in range(2):  # gradients that are kept are added to
                loss_of(model, step).backward()
                optimizer.step()
            waits[name] = not session_of(optimizer).ledger.unfinished
            optimizer.synchronize()
        told[name] = sum("wrote in place to gradients after step()" in str(each.message) for each in caught)
    assert told == dict.fromkeys(ways, 0) | {"kept": 1}
    assert waits == {name: bool(count) for name, count in told.items()}


def gan(make: Any, drop: Callable[[nn.Module], None]) -> list[bytes]:
    """The discriminator gets gradients of the generator's loss, which it drops, and no model is attached."""
    torch.default_generator.manual_seed(0)
    fakes, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    first, second = make(fakes.parameters()), make(judge.parameters())
    for step in range(3):
        real = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        drop(judge)
        fake = fakes(real[:, :4])
        (nn.functional.softplus(-judge(real)) + nn.functional.softplus(judge(fake.detach()))).mean().backward()
        second.step()
        drop(fakes)
        nn.functional.softplus(-judge(fake)).mean().backward()
        first.step()
    return bits([*fakes.parameters(), *judge.parameters()])


def by_module(model: nn.Module) -> None:
    model.zero_grad()  # as it is now: the first optimizer that offloads replaces the method


def by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def test_two_optimizers_that_get_gradients_of_one_loss() -> None:
    offloads = maker("cpu", offload_gradients=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gan(offloads, by_module) == gan(DOSAdam, by_module)
    with pytest.warns(UserWarning, match=r"which this optimizer has not used .* `?p.grad = None`? does not") as caught:
        gan(offloads, by_hand)
    assert len(caught) == 1, "once"


@pytest.mark.parametrize("mode", ["offload", "all weights stream"])
@pytest.mark.parametrize("ours_first", [False, True])
def test_another_optimizer_that_finds_no_gradients_is_told_of(mode: str, ours_first: bool, tmp_path: Path) -> None:
    model, optimizer = begin(mode, tmp_path, torch.float32)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    apart = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    both = [optimizer, other] if ours_first else [other, optimizer]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            loss(model, step).backward()
            apart.step()
            assert len(caught) == min(step, 1)
            for each in both:
                each.step()
            for each in both:
                each.zero_grad()
            other.step()  # without a gradient, as with AdamW
    (told,) = [str(each.message) for each in caught]
    assert "an optimizer of type SGD has made a step and found no gradient in p.grad of" in told


def test_another_optimizer_of_ours_zeroes_some_of_the_parameters() -> None:
    """Of which it has no gradient itself."""

    def trained(make: Make, make_other: Make) -> list[Tensor]:
        model = mlp()
        both, other = make(model.parameters()), make_other(model[0].parameters())
        for step in range(4):
            loss_of(model, step).backward()
            if step % 2:
                other.zero_grad()
            both.step()
            both.zero_grad()
        return list(model.parameters())

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    ours = trained(maker("cpu", lr=0.01, offload_gradients=True), maker("cpu", lr=0.01))
    assert_close_ulp(ours, trained(adamw, adamw))


@pytest.mark.parametrize("mode", ["offload", "all weights stream", "all weights stay"])
def test_a_gradient_that_user_code_sets(mode: str, tmp_path: Path) -> None:
    model, optimizer = begin(mode, tmp_path, torch.float32)
    twin, other = reference(torch.float32)
    for each in (model, twin):  # beside none
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
        loss(each, 0).backward()
    optimizer.step()
    other.step()
    other.zero_grad()
    for each in (model, twin):  # with several micro-batches
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
        loss(each, 2).backward()
        loss(each, 3).backward()
    optimizer.step()
    other.step()
    other.zero_grad()
    for each in (model, twin):
        loss(each, 1).backward()
    optimizer.synchronize()
    before = bits(model.parameters())
    chosen = next(model.blocks[1].parameters())
    chosen.grad = torch.ones_like(chosen)
    for use in (optimizer.step, optimizer.grad_norm, lambda: optimizer.edit_gradients(lambda _, g: g)):
        with pytest.raises(RuntimeError, match=r"has set p\.grad .* edit gradients with optimizer\.edit_gradients"):
            use()
    assert bits(model.parameters()) == before
    chosen.grad = None
    optimizer.step()
    other.step()
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())


def test_gradients_of_chosen_inputs_and_of_hooks_are_no_users_own() -> None:
    """Backward writes them, though in other ways; hooks of user code find them added up."""

    def limit(parameter: Tensor) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    ends = []
    for offloads in (True, False):
        model = mlp()
        chosen = model[0].weight
        hooked = model[3].weight
        hooked.register_post_accumulate_grad_hook(limit)
        optimizer = maker("cpu", lr=0.01, offload_gradients=offloads)(model.parameters())
        model[0].bias.register_post_accumulate_grad_hook(limit)
        for step in range(3):
            for micro in range(3):
                of = [chosen, hooked] if micro == 1 else None
                model(torch.ones(2, 24) + 4 * step + micro).square().mean().backward(inputs=of)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]


EDITS: list[Callable[[Tensor, Tensor], Tensor | None]] = [
    lambda p, g: g.mul_(0.3).add_(p.detach().to(g.dtype).abs()),
    lambda p, g: g.sign(),
    lambda p, g: None if p.ndim == 1 else g,
    lambda p, g: (g.clamp_(-1e-3, 1e-3), None)[1],
    lambda p, g: g,
    lambda p, g: (g.data.clamp_(-1e-3, 1e-3), None)[1],
]


IN_PLACE = (3, 5)
"""The edits that return nothing and keep all gradients."""


def edited(model: Any, optimizer: Any, *, by_hand: bool) -> list[bytes]:
    """With another edit in each step, after several micro-batches, and before clipping."""
    for step, edit in enumerate(EDITS):
        for micro in range(2):
            loss(model, 10 * step + micro).backward()
        if by_hand:
            for parameter in model.parameters():
                given = edit(parameter, parameter.grad)
                parameter.grad = parameter.grad if step in IN_PLACE else given
        else:
            optimizer.edit_gradients(edit)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    entries = [optimizer.state[p] for p in model.parameters()]
    moments = [entry[key] for entry in entries for key in ("exp_avg", "exp_avg_codes") if key in entry]
    return bits([*model.parameters(), *moments])


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [*((mode, torch.float32) for mode in MODES if mode != "resident"), ("offload", torch.bfloat16)],
)
def test_edits_have_the_bits_of_edits_of_p_grad(mode: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = edited(*reference(dtype, mode), by_hand=True)
    assert edited(*begin(mode, tmp_path, dtype), by_hand=False) == expected


def test_an_edit_may_read_state_and_weights(tmp_path: Path) -> None:
    """As noise by the second moment, and decay, do."""

    def edit(parameter: Tensor, gradient: Tensor) -> Tensor:
        decay = model.blocks[0].both.weight.detach().float().sum()
        return gradient * (1 + optimizer.state[parameter]["exp_avg_sq"].mean() + decay)

    ends = []
    for model, optimizer in (begin("all weights stream", tmp_path, torch.float32), reference(torch.float32)):
        for step in range(3):
            loss(model, step).backward()
            if step:
                optimizer.edit_gradients(edit)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]


def test_edits_that_no_version_counts_reach_gradients_that_were_sent() -> None:
    def edit(_: Tensor, gradient: Tensor) -> Tensor:
        gradient.data.mul_(-1)
        return gradient

    ends = []
    for place in ("cpu", "host"):
        model = mlp()
        optimizer = maker(place, lr=0.01)(model.parameters())
        for step in range(4):
            model(torch.ones(2, 24) + step).square().mean().backward()
            if step == 3:
                optimizer.edit_gradients(edit)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("offloads", [True, False])
def test_edits_after_clipping_see_clipped_gradients(offloads: bool) -> None:
    """As of noise that is added to clipped gradients; the norm and clipping that come later see the edits."""
    ends = []
    for ours in (True, False):
        model = mlp()
        make = maker("cpu", lr=0.01, offload_gradients=offloads) if ours else maker("host", lr=0.01)
        optimizer = make(model.parameters())
        for step in range(3):
            model(torch.ones(2, 24) + step).square().mean().backward()
            if ours:
                optimizer.clip_grad_norm_(0.01)
                optimizer.edit_gradients(lambda _, g: g.add_(0.1))
                norm = optimizer.clip_grad_norm_(0.5)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                for parameter in model.parameters():
                    parameter.grad.add_(0.1)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        ends.append([norm, *model.parameters()])
    assert_close_ulp(*ends, ulps=512)


def test_what_an_edit_must_not_return(tmp_path: Path) -> None:
    model, optimizer = begin("offload", tmp_path, torch.float32)
    with pytest.warns(UserWarning, match="found no gradient to edit"):
        optimizer.edit_gradients(lambda _, g: g)
    loss(model, 0).backward()
    before, norm = bits(model.parameters()), optimizer.grad_norm()
    with pytest.raises(TypeError, match="returned float, expected the gradient as a tensor"):
        optimizer.edit_gradients(lambda _, g: 1.0)
    with pytest.raises(ValueError, match=r"returned Tensor of shape .* expected the gradient's own form"):
        optimizer.edit_gradients(lambda _, g: g.double())
    turns = itertools.count()
    with pytest.raises(ValueError, match=r"that it edited in place and for .* return the gradient from every call"):
        optimizer.edit_gradients(lambda _, g: (g.mul_(1), None)[1] if next(turns) % 2 else None)
    assert optimizer.grad_norm() == norm
    with pytest.warns(UserWarning, match="returned None for every gradient"):
        optimizer.edit_gradients(lambda _, g: None)
    assert optimizer.grad_norm() == 0
    assert bits(model.parameters()) == before


@pytest.mark.parametrize("mode", ["host", *MODES])
def test_steps_with_gradients_that_are_not_finite_are_skipped(mode: str, tmp_path: Path) -> None:
    """With and without clipping, in turn."""
    # Not with the larger model of "disk": norms in float64 and in float32 differ in their last bits.
    clips: dict[str, Any] = {"max_grad_norm": 0.1} if ["host", *MODES].index(mode) % 2 and mode != "disk" else {}
    if mode == "host":
        model, optimizer = reference(torch.float32, skip_nonfinite=True, **clips)
    else:
        model, optimizer = begin(mode, tmp_path, torch.float32, skip_nonfinite=True, **clips)
    twin, other = reference(torch.float32, mode, **clips)
    assert optimizer.metrics() == {"skipped_steps": 0}
    for step in range(5):
        bad = {0: math.nan, 3: math.inf}.get(step)
        (loss(model, step) * (bad or 1)).backward()
        optimizer.step()
        if bad is None:
            loss(twin, step).backward()
            other.step()
        elif step == 0:
            assert not optimizer.state, "as before the first step"
        optimizer.zero_grad()
        other.zero_grad()
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {3.0}
    assert optimizer.metrics()["skipped_steps"] == 2
