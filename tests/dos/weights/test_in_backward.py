"""Weights that stream and are updated during backward: the bits of updates in step(), at their time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.step.ledger import Ledger
from dos.step.work import Subject
from perfmodel import Placement, Plan, Workload
from tests.support import ways
from tests.support.blocks import RUNS, HomesTouched, inputs, loss, net, start
from tests.support.crossings import crossed
from tests.support.inside import in_backward, session_of
from tests.support.training import bits, everything

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.filterwarnings(r"ignore:zero_grad\(\) between")]

WEIGHTS = (0, 2, 1.0, "auto")
Step = Callable[[Any, DOSAdam, int], None]


def plain(model: Any, optimizer: DOSAdam, step: int) -> None:
    loss(model, step).backward()


def run(
    model: Any, weights: Any, updates: str, backward: Step = plain, steps: int = 4, whole: bool = False, **options: Any
) -> list[bytes]:
    """Everything after these steps. whole: whether backward is to update all, but for the first."""
    optimizer = start(model, weights, updates=updates, **options)
    for step in range(steps):
        backward(model, optimizer, step)
        if updates == "backward":
            assert all(p.grad is None for p in model.parameters())
            if whole and step:
                expect_all_updated(optimizer)
            model.zero_grad()  # in vain: what is not updated yet waits for step()
        optimizer.step()
        if updates == "step":
            optimizer.zero_grad()
    return everything(model, optimizer)


def expect_all_updated(optimizer: DOSAdam) -> None:
    subgroups = session_of(optimizer).registry.accelerated
    assert in_backward(optimizer).issued == {piece for subgroup in subgroups for piece in subgroup.pieces}


PROGRAMS = [
    ("cpu", torch.float32, None, RUNS[0], 1),
    ("adaptive", torch.bfloat16, None, RUNS[1], 3),
    ("stride:1", torch.bfloat16, "int8", RUNS[2], 2),
    ("resident", torch.float16, None, RUNS[2], 1),
    (0.5, torch.bfloat16, "float32", RUNS[0], 2),
]


@pytest.mark.parametrize(
    ("weights", "policy", "dtype", "state_format", "way", "micro_batches"), crossed(WEIGHTS, PROGRAMS, every=5)
)
def test_same_bits_as_updates_in_step(
    weights: Any, policy: Any, dtype: torch.dtype, state_format: str | None, way: Any, micro_batches: int
) -> None:
    def backward(model: Any, optimizer: DOSAdam, step: int) -> None:
        with optimizer.no_update():
            for i in range(1, micro_batches):
                loss(model, 100 * step + i).backward()
        loss(model, 100 * step).backward()

    options = {"policy": policy, "state_format": state_format, "backward": backward}
    expected = run(net(dtype, run=way), None, "step", **options)
    assert run(net(dtype, run=way), weights, "backward", whole=True, **options) == expected


@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=[pytest.mark.slow] if i % 18 else []) for i in range(len(ways.WAYS))]
)
def test_no_operation_of_backward_reads_a_home(number: int) -> None:
    """While it is updated: the host, or the device, writes there.

    Blocks that backward recomputes, or fetches again, when it has some of their gradients wait in part.
    """
    kind, way = ways.WAYS[number]
    touched = None

    def backward(model: Any, optimizer: DOSAdam, step: int) -> None:
        nonlocal touched
        touched = HomesTouched(model) if touched is None else touched
        with touched:
            found = loss(model, step)
        with touched.backward():
            found.backward()

    options = {"policy": ("cpu", "stride:1")[number % 2], "steps": 3}
    expected = run(ways.Stack(kind, way), None, "step", **options)
    waits = kind in (ways.Keeps, ways.Within)
    assert run(ways.Stack(kind, way), 0, "backward", backward, whole=not waits, **options) == expected
    assert touched is not None
    assert not touched.found


@pytest.mark.parametrize(
    ("kind", "when", "way", "policy"),
    [
        (ways.Parts, "now and then", RUNS[1], "cpu"),
        (ways.PartReentrant, "at first", RUNS[0], "stride:1"),
        pytest.param(ways.Parts, "at first", RUNS[2], "stride:1", marks=pytest.mark.slow),
        pytest.param(ways.PartReentrant, "now and then", RUNS[1], "cpu", marks=pytest.mark.slow),
    ],
)
def test_a_penalty_on_all_weights_whose_gradients_come_beside_those_of_blocks(
    kind: Callable[[], nn.Module], when: str, way: Any, policy: str
) -> None:
    """Before them or behind, in the same backward; also where no backward before had any, or all had."""

    def backward(model: Any, optimizer: DOSAdam, step: int) -> None:
        penalized = step % 2 if when == "now and then" else step < 2
        before = sum(p.square().sum() for p in model.parameters()) if penalized and step < 2 else 0.0
        found = loss(model, step)
        behind = sum(p.square().sum() for p in model.parameters()) if penalized and step >= 2 else 0.0
        (found + 0.01 * (before + behind)).backward()

    expected = run(ways.Stack(kind, way), None, "step", backward, policy=policy)
    assert run(ways.Stack(kind, way), 0, "backward", backward, policy=policy) == expected


class Adapted(nn.Module):
    """A frozen layer beside a weight that is trained, of which a use may be cut from the graph, and yet in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.weight = nn.Parameter(torch.randn(16, 16) / 8)

    def forward(self, x: Tensor, cut: bool) -> Tensor:
        found: Any = ways.Unsaved.apply(x, self.weight.detach() if cut else self.weight)
        return torch.tanh(self.base(x) + found)


class Again(ways.Stack):
    """Uses all blocks twice. cut: whether backward computes no gradients of their weights for the first use."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__(Adapted)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for cut in (self.cut, False):
            for block in self.blocks:
                x = block(x, cut)
        return self.last(x)


@pytest.mark.parametrize(("cut", "policy", "weights"), [(False, "stride:1", 1), (True, "cpu", 0)])
def test_a_block_that_this_backward_needs_again_is_updated_later(cut: bool, policy: str, weights: int) -> None:
    """Its home has the weights of before until it was fetched for the last time."""
    expected = run(Again(cut=cut), None, "step", policy=policy)
    assert run(Again(cut=cut), weights, "backward", policy=policy, whole=not cut) == expected


def test_a_block_that_is_needed_as_in_no_backward_before_is_refused() -> None:
    model = Again(cut=False)
    optimizer = start(model, 0, updates="backward")
    for step in range(3):
        model.cut = step == 2
        found = loss(model, step)
        if step == 2:
            with pytest.raises(RuntimeError, match="was read in the backward that has already updated it"):
                found.backward()
        else:
            found.backward()
            optimizer.step()
    with pytest.raises(RuntimeError, match="step 2 was the last complete one"):
        optimizer.step()


def test_nothing_is_fetched_ahead_that_is_updated() -> None:
    model, found = net(), list[Any]()
    optimizer = start(model, 0, updates="backward")
    parameters = [*model.blocks[5].parameters()]
    waiting = session_of(optimizer).waiting
    loss(model, 0).backward()
    optimizer.step()
    model.blocks[1].register_full_backward_hook(lambda *_: found.append(waiting.weights_ready(parameters, wait=False)))
    loss(model, 1).backward()
    assert found == [None]


@pytest.mark.parametrize("weights", [0, 1.0])
def test_a_hook_of_backward_sees_the_weights_of_before(weights: Any) -> None:
    """One that reads a weight of its block makes that wait for `step()`."""
    seen: dict[str, list[bytes]] = {}
    for updates in ("step", "backward"):
        model, found = ways.Stack(ways.Parts), seen.setdefault(updates, [])
        for block in model.blocks:
            read = lambda m, *_, found=found: found.extend(bits(m.parameters()))  # noqa: E731
            block.register_full_backward_hook(read)
        run(model, weights, updates, policy="resident")
    assert seen["step"] == seen["backward"]


@pytest.mark.parametrize("early", [False, True])
def test_an_exception_leaves_homes_in_place(early: bool) -> None:
    """And half a step where updates had begun, as the error says; else backward is tried again."""
    model, other = net(), net()
    optimizer, reference = start(model, 0, updates="backward"), start(other, None)

    def fail(*_: object) -> None:
        raise KeyError("for a test")

    for step in range(3):
        if step == 2:
            at = model.last.register_full_backward_pre_hook if early else model.blocks[2].register_full_backward_hook
            handle = at(fail)
            with pytest.raises(KeyError):
                loss(model, step).backward()
            handle.remove()
            assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
            if not early:
                with pytest.raises(RuntimeError, match="step 2 was the last complete one"):
                    optimizer.step()
                return
        loss(model, step).backward()
        optimizer.step()
        loss(other, step).backward()
        reference.step()
        reference.zero_grad()
    assert everything(model, optimizer) == everything(other, reference)


def test_what_user_code_does_between_backward_and_step_and_attach() -> None:
    """It evaluates with the new weights, asks for gradients of others, and attaches again in all ways."""
    found: dict[str, list[Any]] = {}
    for updates in ("step", "backward"):
        model, seen = net(), found.setdefault(updates, [])
        optimizer = start(model, 0, updates=updates, policy="stride:1")
        ways_on = [(0, updates), (2, "step"), ("auto", updates)]
        for step in range(6):
            if step % 2 == 0:
                weights, each = ways_on[step // 2]
                optimizer.attach(model, weights=weights, updates=each)
            loss(model, step).backward()
            if updates == "step" or each == "step":
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                seen.append(bits([model(inputs(99, model))])) if step % 2 else None
            if updates == "backward" and each == "backward":
                optimizer.step()
            slopes = torch.autograd.grad(loss(model, 7), list(model.parameters()))
            seen.append(bits(slopes))
            with optimizer.no_update():
                loss(model, 8).backward()
            optimizer.zero_grad()
        seen.append(everything(model, optimizer))
    assert found["step"] == found["backward"]


def test_an_update_waits_for_the_last_transfer_that_reads_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may fetch a block ahead that backward does not use again: no queue has waited for that."""
    found = list[bool]()
    plain = Ledger.issue_part

    def issue_part(self: Ledger, schedule: Any, subjects: Mapping[int, Subject], *arguments: Any) -> Any:
        behind = arguments[3]
        arenas = [subject.subgroup.arena for subject in subjects.values()]
        found.extend(arena.reading in behind for arena in arenas if arena.streams)
        return plain(self, schedule, subjects, *arguments)

    monkeypatch.setattr(Ledger, "issue_part", issue_part)
    run(net(), 3, "backward", steps=2, policy="stride:1")
    assert found
    assert all(found)


class Moving:
    """A policy that lets other blocks stay each time, and is followed where there is room."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, work: Workload) -> Plan:
        self.count += 1
        n = len(work.subgroups)
        plan = Plan((Placement.CPU,) * n, tuple(range(n)), 0)
        return dataclasses.replace(plan, blocks_on_device=work.staying(self.count % 3 * 2))


def test_blocks_move_in_a_step_that_backward_has_issued() -> None:
    model, moved = net(), set[int]()

    def backward(model: Any, optimizer: DOSAdam, step: int) -> None:
        homes = session_of(optimizer).assembly.weights
        if homes is not None:
            moved.add(len(homes.staying()))
        loss(model, step).backward()

    expected = run(net(), None, "step", steps=8)
    assert run(model, "auto", "backward", backward, steps=8, policy=Moving(), whole=True) == expected
    assert moved == {0, 2, 4}


def test_the_plan_says_when_weights_are_updated() -> None:
    for updates in ("step", "backward"):
        model = net()
        optimizer = start(model, 2, updates=updates)
        for step in range(3):
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        assert ("each backward, in which updates write them there" in optimizer.explain()) == (updates == "backward")


def test_a_gradient_that_is_refused_is_dropped_with_its_copy() -> None:
    model, other = net(), net()
    optimizer = start(model, 1.0, updates="backward")
    for each in (model, other):
        each.last.requires_grad_(False)
    with pytest.raises(RuntimeError, match="computes a second derivative"):
        loss(model, 0).backward(create_graph=True)
    assert all(record.leaf.grad is None for record in session_of(optimizer).registry.records.values())
    loss(model, 0).backward()
    optimizer.step()
    assert everything(model, optimizer) == run(other, None, "step", steps=1)
