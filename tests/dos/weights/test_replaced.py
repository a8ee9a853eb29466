"""Memory that user code gives to the weights of blocks: its values are taken over, or an error says what was lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dos import DOSAdam, EmulatedDevice
from tests.support.blocks import WIDE, inputs, loss, net, start
from tests.support.crossings import crossed
from tests.support.devices import UpdatesAfterStep
from tests.support.disk import bytes_on_disk
from tests.support.inside import session_of
from tests.support.races import allowed
from tests.support.training import FAST, assert_close_ulp, bits

pytestmark = pytest.mark.usefixtures("one_core")


def clone(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def halve(model: Any) -> None:
    for p in model.blocks[1].parameters():
        p.data = p.data * 0.5


def merge(model: Any) -> None:
    """As PEFT merges an adapter with `safe_merge=True`."""
    for block in model.blocks:
        weights = block.out.weight.data.clone()
        weights += 0.01
        block.out.weight.data = weights


def from_vector(model: Any) -> None:
    parameters = list(model.blocks.parameters())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters) * 0.9, parameters)


@torch.no_grad()
def set_source(model: Any) -> None:
    for p in model.blocks[2].parameters():
        p.set_(p * 0.7)


def share(model: Any) -> None:
    for p in model.blocks[2].parameters():
        p.share_memory_()


def frozen(model: Any) -> None:
    model.blocks[3].both.weight.data = model.blocks[3].both.weight.data + 0.1


def exchange(model: Any) -> None:
    """The memory of each is where another one's values are to be."""
    weights = [block.out.weight for block in model.blocks]
    memory = [weight.data for weight in weights]
    for weight, other in zip(weights, memory[1:] + memory[:1], strict=True):
        weight.data = other


def turn(model: Any) -> None:
    model.blocks[1].out.weight.data = model.blocks[1].out.weight.data.t()
    model.blocks[1].out.weight.data = model.blocks[1].out.weight.data.contiguous()


WAYS = (clone, halve, merge, exchange, from_vector, set_source, turn, share, frozen)
WHEN = ("before forward", "before step", "after step")
MODES: list[tuple[torch.dtype, Any, Any]] = [
    (torch.float32, 0, "cpu"),
    (torch.bfloat16, 0, "stride:1"),
    (torch.bfloat16, 2, "cpu"),
    (torch.float32, 2, "stride:1"),
    (torch.bfloat16, 4, "cpu"),
    (torch.float32, 4, "resident"),
]


def run(dtype: torch.dtype, optimizer_of: Callable[[nn.Module], Any], when: str, width: int = 16) -> list[Tensor]:
    """Train with a frozen weight, replace memory in each step in another way, and return all weights after each."""
    model = net(dtype, blocks=4, width=width)
    model.blocks[3].both.weight.requires_grad_(False)
    optimizer = optimizer_of(model)
    loss(model, 100).backward()
    optimizer.step()
    found = []
    for step, way in enumerate(WAYS):
        optimizer.zero_grad()
        if when == "before forward":
            way(model)
        loss(model, step).backward()
        if when == "before step":
            way(model)
        optimizer.step()
        if when == "after step":
            if isinstance(optimizer, DOSAdam):
                optimizer.synchronize()
            way(model)
        found += [p.clone() for p in model.state_dict().values()]
    return found


@functools.cache
def expected(dtype: torch.dtype, when: str) -> list[Tensor]:
    """With all weights on the device: bits that follow AdamW, which has no masters, where it is comparable."""
    device = EmulatedDevice(FAST, 10**8)
    found = run(dtype, lambda model: DOSAdam(model.parameters(), lr=1e-2, device=device, policy="cpu"), when)
    if dtype == torch.float32:
        assert_close_ulp(found, run(dtype, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), when))
    return found


@pytest.mark.parametrize(
    ("weights", "when", "settings"),
    [
        ("auto", "before forward", {"policy": "adaptive", "capacity": 40_000}),
        (2, "before step", {"host_memory": 200_000}),
        (0, "after step", {"policy": "stride:1", "state_format": "int8"}),
        (None, "before step", {"host_memory": 150_000}),
    ],
)
def test_with_moments_in_codes_on_disk_and_planned(
    weights: Any, when: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dos.rules.adamw.LEAST_CODED", 128)
    coded = {"state_format": settings.get("state_format")}
    where = {"disk": tmp_path} if "host_memory" in settings else {}
    width = WIDE if where else 16
    kept: list[DOSAdam] = []

    def make(model: nn.Module) -> DOSAdam:
        kept.append(start(model, weights, **settings, **where))
        return kept[0]

    found = run(torch.bfloat16, make, when, width)
    assert not where or bytes_on_disk(tmp_path)
    on_host = lambda model: DOSAdam(model.parameters(), lr=1e-2, **coded)  # noqa: E731
    assert bits(found) == bits(run(torch.bfloat16, on_host, when, width))


@pytest.mark.parametrize(("dtype", "weights", "policy", "when"), crossed(MODES, WHEN))
def test_it_is_trained_as_by_adamw(dtype: torch.dtype, weights: Any, policy: Any, when: str) -> None:
    found = run(dtype, lambda model: start(model, weights, policy=policy), when)
    assert bits(found) == bits(expected(dtype, when))


@pytest.mark.parametrize("weights", [0, 2])
def test_weights_that_were_exchanged_are_taken_over_where_the_model_is_attached_again(weights: int) -> None:
    model = net(torch.float32, blocks=4)
    optimizer = start(model, weights)
    loss(model, 0).backward()
    optimizer.step()
    optimizer.synchronize()
    before = [block.out.weight.clone() for block in model.blocks]
    exchange(model)
    torch.utils.swap_tensors(model.blocks[0].out.bias, model.blocks[1].out.bias)
    biases = [block.out.bias.clone() for block in model.blocks]
    optimizer.attach(model, weights=weights)
    assert bits(block.out.weight for block in model.blocks) == bits(before[1:] + before[:1])
    assert bits(block.out.bias for block in model.blocks) == bits(biases)


@pytest.mark.parametrize("weights", [0, 6])
@pytest.mark.parametrize("replace", ["dtype", "shape"])
def test_memory_that_cannot_have_the_values_is_refused(weights: int, replace: str) -> None:
    model = net(torch.float32)
    optimizer = start(model, weights)
    loss(model, 0).backward()
    optimizer.step()
    optimizer.synchronize()
    p = model.blocks[1].out.weight
    before = p.data
    p.data = {"dtype": before.double(), "shape": before[:4]}[replace]
    with pytest.raises(RuntimeError, match=r"a parameter has got other memory, as by p.data = ..., of .*give it"):
        loss(model, 1)
    p.data = before
    optimizer.zero_grad()
    loss(model, 1).backward()
    optimizer.step()


@pytest.mark.parametrize("weights", [0, 6])
def test_an_update_that_runs_meanwhile_is_not_lost_in_silence(weights: int) -> None:
    """A reference that user code has kept does not wait for the update that writes the former memory."""
    device = UpdatesAfterStep(FAST, 10**8)
    model = net(torch.float32)
    optimizer = start(model, weights, device=device)
    kept = model.blocks[1].out.weight
    for step in range(2):
        loss(model, step).backward()
        device.returned.clear()
        optimizer.step()
        if step == 1:
            with allowed():
                kept.data = kept.data.clone()
        device.returned.set()
    with pytest.raises(RuntimeError, match=r"got other memory after step\(\), as by .*synchronize\(\)"):
        loss(model, 2)


def test_memory_that_is_replaced_between_forward_and_backward() -> None:
    """Backward computes with the former values, until a forward has taken the others over."""
    ends = []
    for weights in (0, None):
        model = net(torch.float32)
        optimizer = start(model, weights)
        for step in range(2):
            found = loss(model, step)
            halve(model)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(bits(model.parameters()))
        found = loss(model, 2)
        halve(model)
        loss(model, 3)
        if weights is not None:
            with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
                found.backward()
    assert ends[0] == ends[1]


def test_parameters_have_storages_of_their_own() -> None:
    for weights in (0, 2, "auto"):
        model = net(blocks=4)
        optimizer = start(model, weights, policy="adaptive")
        for step in range(2):
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            storages = [p.untyped_storage() for p in model.parameters()]
            assert len({storage.data_ptr() for storage in storages}) == len(storages)
            parameters: list[Tensor] = list(model.blocks.parameters())
            assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)


@pytest.mark.parametrize(("dtype", "weights", "policy"), MODES)
def test_weights_that_are_put_back_after_an_evaluation(dtype: torch.dtype, weights: Any, policy: str) -> None:
    """Averages that keep `p.data`, set their own, and put it back: with weights that stream, nothing is other.

    What was kept may be put back again after later steps, which have written to it.
    """
    ends = []
    for streams in (weights, None):
        model = net(dtype, blocks=4)
        optimizer = start(model, streams, policy=policy)
        shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen, backup = [], dict[str, Tensor]()
        for step in range(4):
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, p in model.named_parameters():
                shadow[name] = (0.5 * shadow[name] + 0.5 * p.data).clone()
            for name, p in model.named_parameters():
                if step != 2:
                    backup[name] = p.data
                p.data = shadow[name]
            with torch.no_grad():
                seen += [loss(model, 50), loss(model, 51)]
            for name, p in model.named_parameters():
                p.data = backup[name]
            if step % 2:  # before a forward
                seen += [p.clone() for p in model.state_dict().values()]
            seen.append(loss(model, 52).detach())
        ends.append(bits([*model.parameters(), *seen]))
        backup |= {name: p.data for name, p in model.named_parameters()}
        for _ in range(2):
            clone(model)
            loss(model, 0)
            backup.clear()
        homes = session_of(optimizer).assembly.weights
        assert homes is None or not any(block.kept for block in homes.stream.blocks), "values that nobody can put back"
    assert ends[0] == ends[1]


@pytest.mark.parametrize("weights", [0, 4])
def test_memory_that_is_put_back_though_nothing_took_its_place(weights: int) -> None:
    """Also where the weight has moved since, so that the memory that was kept has old values."""
    ends = []
    for streams in (weights, None):
        model = net(torch.float32, blocks=4)
        optimizer = start(model, streams)
        kept = {p: p.data for p in model.parameters()}
        for step in range(4):
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            homes = session_of(optimizer).assembly.weights
            if homes is not None and step % 2 == 0:
                for block in homes.stream.blocks:
                    homes.move(block, streams=not block.streams)
            for p, data in kept.items():
                p.data = data
        ends.append(bits([*model.parameters()]))
    assert ends[0] == ends[1]


class Copied(TorchDispatchMode):
    """Counts tensors that are copied to the host."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("keeps", [False, True])
def test_values_that_nobody_can_put_back_are_not_copied(keeps: bool) -> None:
    model = net(torch.float32, blocks=4)
    optimizer = start(model, 0)
    kept = [p.data for p in model.blocks.parameters()]
    optimizer.synchronize()
    if not keeps:
        kept.clear()
    clone(model)
    with Copied() as copied, torch.no_grad():
        model(inputs(0, model))
    assert copied.count == len(kept)
