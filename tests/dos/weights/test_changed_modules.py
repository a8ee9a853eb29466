"""Models that are attached again after user code has changed their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from dos import DOSAdam, EmulatedDevice
from dos.state.host_tensor import HostTensor
from tests.support.crossings import crossed
from tests.support.inside import session_of
from tests.support.training import FAST, assert_close_ulp, batch, bits

pytestmark = pytest.mark.usefixtures("one_core")

STAY = ["auto", 0, 2, 1.0]
"""How many blocks stay."""


class Blocks(nn.Module):
    """Blocks of one linear layer each, and a head."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(count)])
        self.head = nn.Linear(24, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return self.head(x)


def streaming(model: nn.Module, **settings: Any) -> DOSAdam:
    device = EmulatedDevice(FAST, capacity=10**9)
    return DOSAdam(model.parameters(), lr=0.01, device=device, offload_gradients=True, subgroup_size=300, **settings)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int = 2) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def replace_weight(model: Blocks, optimizer: torch.optim.Optimizer) -> None:
    old, new = model.blocks[1].weight, nn.Parameter(torch.full((24, 24), 0.01))
    model.blocks[1].weight = new
    group = optimizer.param_groups[0]
    group["params"] = [new if p is old else p for p in group["params"]]
    optimizer.state.pop(old, None)  # else no state dict could be saved, as with AdamW


def tie(model: Blocks, _: Any) -> None:
    model.blocks[2].weight = model.blocks[1].weight


def use_outside(model: Blocks, _: Any) -> None:
    model.head.register_parameter("also", model.blocks[3].bias)


def remove(model: Blocks, _: Any) -> None:
    del model.blocks[3]


def remove_both(model: Blocks, optimizer: torch.optim.Optimizer) -> None:
    gone = set(map(id, model.blocks[3].parameters()))
    del model.blocks[3]
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if id(p) not in gone]


def append(model: Blocks, optimizer: torch.optim.Optimizer) -> None:
    model.blocks.append(nn.Linear(24, 24))
    nn.init.eye_(model.blocks[-1].weight)
    nn.init.zeros_(model.blocks[-1].bias)
    optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})


def exchange_blocks(model: Blocks, _: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def freeze(model: Blocks, _: Any) -> None:
    model.blocks[1].requires_grad_(False)


def changed(change: Callable[[Any, Any], None], weights: Any) -> tuple[Blocks, Any]:
    """A model that was changed after its first steps, and its optimizer. weights: of `attach`; None: AdamW's."""
    model = Blocks()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01) if weights is None else streaming(model)
    if weights is not None:
        optimizer.attach(model, weights=weights)
    steps(model, optimizer, 0)
    change(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize(("change", "weights"), crossed([remove, remove_both, append, exchange_blocks, freeze], STAY))
def test_what_attach_can_follow_trains_on_as_adamw(change: Callable[[Any, Any], None], weights: Any) -> None:
    ends = []
    for ours in (True, False):
        model, optimizer = changed(change, weights if ours else None)
        if ours:
            optimizer.attach(model, weights=weights)
        steps(model, optimizer, 2)
        if ours:
            optimizer.synchronize()
        ends.append([p.detach() for p in model.parameters()])
    assert_close_ulp(*ends, 256)


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2

    def right_inverse(self, x: Tensor) -> Tensor:
        return x * 2


def put_in(block: nn.Module) -> None:
    parametrize.register_parametrization(block, "weight", Half())


def take_out(block: nn.Module) -> None:
    parametrize.remove_parametrizations(block, "weight")


def mask(block: nn.Module) -> None:
    prune.l1_unstructured(block, "weight", amount=0.5)


def end_mask(block: nn.Module) -> None:
    prune.remove(block, "weight")


@pytest.mark.parametrize("weights", [0, 6])
@pytest.mark.parametrize(("first", "then"), [(put_in, take_out), (mask, end_mask), (lambda block: None, put_in)])
def test_a_weight_that_has_another_place_in_its_block_is_read_and_followed_by_attach(
    first: Callable[[nn.Module], object], then: Callable[[nn.Module], object], weights: int
) -> None:
    ends = []
    for ours in (True, False):
        model = Blocks()
        first(model.blocks[1])
        optimizer: Any = streaming(model, policy="cpu") if ours else torch.optim.AdamW(model.parameters(), lr=0.01)
        if ours:
            optimizer.attach(model, weights=weights, blocks=model.blocks)
        steps(model, optimizer, 0)
        then(model.blocks[1])
        read = [model.blocks[1].weight.detach().clone()]
        if ours:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="has got another place in its block than when its weights"):
                    model(batch(9))
            optimizer.attach(model, weights=weights, blocks=model.blocks)
        steps(model, optimizer, 2)
        ends.append([*read, *(p.detach() for p in model.parameters())])
    assert_close_ulp(*ends, 256)


class Around(nn.Module):
    """As PEFT puts around a model, and takes away when adapters are merged."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(("first", "then"), [(0, 1), (1, 0), (1, 2)], ids=["around", "within", "beside"])
@pytest.mark.parametrize(("weights", "frozen", "anew"), crossed([0, 2, "auto"], [(False, False), (True, True)]))
def test_the_blocks_of_another_model_stream_for_the_one_that_is_attached_last(
    first: int, then: int, weights: Any, frozen: bool, anew: bool
) -> None:
    ends = []
    for ours in (True, False):
        model = Blocks()
        models = [model, Around(model), Around(model)]
        model.blocks.requires_grad_(not frozen)
        make: Any = streaming if ours else lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = make(model)
        for number, chosen in enumerate((models[first], models[then])):
            if ours:
                optimizer.attach(chosen, weights=weights)
            steps(chosen, optimizer, 3 * number, 3)
            optimizer.zero_grad()
            if anew and not number:
                optimizer = make(model.requires_grad_())
        if ours:
            optimizer.synchronize()
        ends.append([p.detach() for p in model.parameters()])
    assert_close_ulp(*ends, 256)


def test_modules_around_a_weight_change_nothing() -> None:
    ends = []
    for ours in (True, False):
        model = Blocks()
        model.blocks[2] = nn.Sequential(model.blocks[2], nn.Tanh())
        optimizer: Any = streaming(model) if ours else torch.optim.AdamW(model.parameters(), lr=0.01)
        if ours:
            optimizer.attach(model, weights=0, blocks=model.blocks)
        steps(model, optimizer, 0)
        model.blocks[2][0] = nn.Sequential(model.blocks[2][0], nn.Identity())
        steps(model, optimizer, 2)
        ends.append([p.detach() for p in model.parameters()])
    assert_close_ulp(*ends, 256)


def load_amsgrad(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Its maximum needs memory that the state does not have."""
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["max_exp_avg_sq"] = entry["exp_avg_sq"].clone()
    saved["param_groups"][0]["amsgrad"] = True
    optimizer.load_state_dict(saved)


def leave(model: Blocks, optimizer: torch.optim.Optimizer) -> None:
    """The model keeps a block, and the optimizer does not."""
    gone = set(map(id, model.blocks[3].parameters()))
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if id(p) not in gone]
    for p in model.blocks[3].parameters():
        optimizer.state.pop(p, None)


@pytest.mark.parametrize(("change", "weights"), crossed([load_amsgrad, leave], STAY))
def test_blocks_stream_on_where_state_is_made_anew_or_left_out(
    change: Callable[[Any, Any], None], weights: Any
) -> None:
    """Without another attach(): each block still has subgroups of its own, at home where it streams."""
    ends, found = [], []
    for ours in (True, False):
        model, optimizer = changed(change, weights if ours else None)
        steps(model, optimizer, 2, 3)
        if ours:
            optimizer.synchronize()
            session = session_of(optimizer)
            found = [
                {s.arena.streams for s in session.registry.subgroups_of(m.parameter for m in block.members)}
                == {block.streams}
                for block in session.assembly.weights.stream.blocks
            ]
        ends.append([p.detach() for p in model.parameters()])
    assert all(found)
    assert len(found) == 6
    assert_close_ulp(*ends, 256)


def test_the_state_of_blocks_that_the_model_has_lost_goes_with_the_next_attach() -> None:
    model = Blocks()
    optimizer = streaming(model)
    optimizer.attach(model, weights=0)
    steps(model, optimizer, 0)
    remove_both(model, optimizer)
    optimizer.state.clear()
    optimizer.attach(model, weights=0)
    steps(model, optimizer, 2)
    assert {id(r.parameter) for r in session_of(optimizer).registry.records.values()} == set(
        map(id, model.parameters())
    )


REFUSED = [
    (replace_weight, r"\(24, 24\) has its state beside that of a block's weights, and is none of them"),
    (tie, r"\(24, 24\) was one of a block's weights, and is now used by several blocks or by none"),
    (use_outside, r"\(24,\) was one of a block's weights, and is now used by several blocks or by none"),
]


@pytest.mark.parametrize(("change", "error", "weights"), crossed(REFUSED, STAY))
def test_what_attach_cannot_follow_it_refuses_before_anything_changes(
    change: Callable[[Any, Any], None], error: str, weights: Any
) -> None:
    model = Blocks()
    optimizer = streaming(model)
    optimizer.attach(model, weights=weights)
    steps(model, optimizer, 0)
    change(model, optimizer)
    before = bits(model.parameters())
    with pytest.raises(RuntimeError, match=error):
        optimizer.attach(model, weights=weights)
    assert bits(model.parameters()) == before
    # As the message says.
    saved = optimizer.state_dict()
    again = streaming(model)
    again.attach(model, weights=weights)
    if change is not replace_weight and len(saved["param_groups"][0]["params"]) == len(list(model.parameters())):
        again.load_state_dict(saved)
    steps(model, again, 2)
    again.synchronize()
    assert bits(model.parameters()) != before


def test_blocks_that_are_cut_otherwise_are_refused_where_they_share_state() -> None:
    layers = nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)])
    optimizer = streaming(layers)
    halves = nn.Sequential(layers[:2], layers[2:])
    optimizer.attach(halves, weights=0, blocks=list(halves))
    halves(batch(0)).square().mean().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has its state beside that of another block's parameters"):
        optimizer.attach(layers, weights=0, blocks=list(layers))


@pytest.mark.parametrize("change", [None, append, remove, exchange_blocks])
def test_frozen_weights_are_at_home_once_while_the_model_is_attached_again(
    change: Callable[[Any, Any], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Blocks()
    model.blocks.requires_grad_(False)
    optimizer = streaming(model, policy="cpu")
    optimizer.attach(model, weights=0)
    steps(model, optimizer, 0)
    store, held = session_of(optimizer).registry.host_store, list[int]()
    make = HostTensor.make

    def making(tensor: HostTensor, first: int, last: int, **settings: Any) -> None:
        make(tensor, first, last, **settings)
        held.append(store.nbytes)

    monkeypatch.setattr(HostTensor, "make", making)
    before, values = store.nbytes, bits(model.blocks.parameters())
    if change is not None:
        change(model, optimizer)
    for _ in range(2):
        optimizer.attach(model, weights=0)
    new = sum(p.nbytes for p in model.blocks[-1].parameters()) + 128  # of a block that was appended, and its alignment
    assert max(held, default=0) <= before + new * (change is append)
    if change is None:
        assert (held, bits(model.blocks.parameters())) == ([], values)
    steps(model, optimizer, 2)
