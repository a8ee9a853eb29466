"""Updates during backward: the bits of updates in step(), at their time; whatever they do not allow is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dos import DOSAdam, EmulatedDevice
from dos.in_backward import InBackward, Run
from dos.in_backward.expected import Expectations
from dos.step.ledger import Ledger
from dos.step.parts import MOST_HELD, turn_seconds
from perfmodel import Lane, Op, Placement, Span, Timeline, Workload
from tests.support.changes import in_other_memory, in_other_strides, negated, written
from tests.support.clock import WAIT_S
from tests.support.crossings import crossed
from tests.support.disk import TWO_WINDOWS, bytes_on_disk, dos_adam, wide
from tests.support.fake_cuda import FakeCudaDevice, install
from tests.support.inside import in_backward
from tests.support.training import FAST, SLOW, Raises, bits, everything, loss_of, maker, mlp, train

pytestmark = [
    pytest.mark.usefixtures("one_kernel_thread"),
    pytest.mark.filterwarnings(r"ignore:zero_grad\(\) between"),
]

PLACES = ["host", "cpu", "stride:2", 0.5, "resident", "adaptive"]


def attached(model: nn.Module, updates: str = "backward", place: Any = "stride:2", **settings: Any) -> DOSAdam:
    optimizer = maker(place, lr=0.01, **{"subgroup_size": 150, **settings})(model.parameters())
    optimizer.attach(model, updates=updates)
    return optimizer


def trained(
    model: nn.Module, updates: str, place: Any, steps: int = 5, micro_batches: int = 1, **settings: Any
) -> list[bytes]:
    """Everything after these steps. With updates in backward no gradient is left to read."""
    optimizer = attached(model, updates, place, **settings)
    every = [optimizer, torch.optim.SGD(model.parameters())]
    for step in range(steps):
        with optimizer.no_update():
            for i in range(1, micro_batches):
                loss_of(model, 10 * step + i).backward()
        loss_of(model, 10 * step).backward()
        if updates == "backward":
            assert all(p.grad is None for p in model.parameters())
            for each in (model, *every):
                each.zero_grad()  # in vain: what is not updated yet waits for step()
        optimizer.step()
        if updates == "step":
            optimizer.zero_grad()
    return everything(model, optimizer)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The subgroups of each part of a step that is issued in backward."""
    found: list[list[int]] = []
    plain = Ledger.issue_part

    def issue_part(self: Ledger, schedule: Any, subjects: Any, *arguments: Any) -> Any:
        found.append([*subjects])
        return plain(self, schedule, subjects, *arguments)

    monkeypatch.setattr(Ledger, "issue_part", issue_part)
    return found


FORMATS = [
    (torch.float32, None, 1, False),
    (torch.bfloat16, None, 3, False),
    (torch.bfloat16, "int8", 1, False),
    (torch.float16, None, 1, False),
    (torch.float32, None, 1, True),
    (torch.bfloat16, None, 3, True),
    (torch.bfloat16, "int8", 2, True),
]


@pytest.mark.parametrize(("place", "dtype", "state_format", "micro_batches", "offload"), crossed(PLACES, FORMATS))
def test_same_bits_as_updates_in_step(
    place: Any, dtype: torch.dtype, state_format: str | None, micro_batches: int, offload: bool, parts: list[list[int]]
) -> None:
    settings = {"micro_batches": micro_batches, "state_format": state_format, "offload_gradients": offload}
    width = 256 if state_format == "int8" else 40  # of 4,096 elements and more, in whole blocks
    settings["subgroup_size"] = 1024 if state_format == "int8" else 150
    expected = trained(mlp(dtype, width=width), "step", place, **settings)
    assert not parts
    assert trained(mlp(dtype, width=width), "backward", place, **settings) == expected
    assert place == "host" or sum(map(len, parts)) >= 4 * 5, "all but the first step, in which nothing is known"


def check_changes_are_trained_on(place: Any, change: Callable[[Tensor], None], *, ndim: int, after: int) -> None:
    """Change the last parameter of `ndim` dimensions, or its gradient, while that waits: in two steps after some."""

    def everything_after(updates: str) -> list[bytes]:
        model = mlp()
        optimizer = attached(model, updates, place, subgroup_size=10**6)
        first, last = next(model.parameters()), [p for p in model.parameters() if p.ndim == ndim][-1]
        for step in range(after + 2):
            if step == after:
                first.register_hook(lambda _: change(last))
            train(model, optimizer, 1, first_step=step)
        return everything(model, optimizer)

    assert everything_after("backward") == everything_after("step")


@pytest.mark.parametrize("place", ["host", "cpu", "resident"])
@pytest.mark.parametrize("edit", [lambda gradient: None, lambda gradient: gradient.clamp(-1e-3, 1e-3)])
def test_a_gradient_that_is_replaced_while_its_subgroup_waits_for_others_is_trained_on(edit: Any, place: Any) -> None:
    def replaced(p: Tensor) -> None:
        p.grad = edit(p.grad)

    check_changes_are_trained_on(place, replaced, ndim=1, after=2)


@pytest.mark.parametrize("place", ["host", "cpu", "resident"])
@pytest.mark.parametrize("change", [in_other_strides, negated, written, in_other_memory])
def test_what_changes_while_a_subgroup_waits_for_others_is_trained_on(change: Any, place: Any) -> None:
    """All of them are asked at once, from the third backward on."""
    check_changes_are_trained_on(place, change, ndim=2, after=4)


def without_a_version(p: Tensor, optimizer: DOSAdam, step: int) -> None:
    p.data.mul_(0.5)


def with_gaps_and_back(p: Tensor, optimizer: DOSAdam, step: int) -> None:
    rows, columns = p.shape
    memory = (
        torch.zeros(rows, 2 * columns, dtype=p.dtype) if step == 4 else p.data.as_strided((rows, columns), (columns, 1))
    )
    p.data = memory[:, :columns].copy_(0.5 * p.data)


def in_its_master(p: Tensor, optimizer: DOSAdam, step: int) -> None:
    optimizer.state[p]["master_param"].mul_(0.5)


@pytest.mark.parametrize("place", ["host", "cpu", "resident"])
@pytest.mark.parametrize("change", [without_a_version, with_gaps_and_back, in_its_master])
def test_what_changes_between_steps_is_seen_where_all_of_a_subgroup_are_asked_at_once(change: Any, place: Any) -> None:
    def everything_after(updates: str) -> list[bytes]:
        model = mlp(torch.float16)
        optimizer = attached(model, updates, place, subgroup_size=10**6)
        for step in range(8):
            train(model, optimizer, 1, first_step=step)
            if step in (4, 5):
                optimizer.synchronize()
                change(model[3].weight, optimizer, step)
        return everything(model, optimizer)

    assert everything_after("backward") == everything_after("step")


@pytest.mark.parametrize("place", ["host", "cpu", "resident"])
def test_a_parameter_that_has_taken_fewer_steps_than_others_of_its_subgroup(place: Any) -> None:
    def everything_after(updates: str) -> list[bytes]:
        model = mlp()
        optimizer = attached(model, updates, place, subgroup_size=10**6)
        *_, last = model.parameters()
        for step in range(7):
            last.requires_grad_(step != 2)
            train(model, optimizer, 1, first_step=step)
        return everything(model, optimizer)

    assert everything_after("backward") == everything_after("step")


@pytest.mark.parametrize("place", ["host", "cpu"])
def test_a_gradient_that_is_replaced_after_a_part_of_it_was_used_raises(place: Any) -> None:
    model = mlp(width=40)
    optimizer = attached(model, place=place)
    train(model, optimizer, 3)
    *others, last = model.parameters()  # of the last, one subgroup lies in the next parameter, too

    def edit(_: Tensor) -> None:
        last.grad = None if last.grad is None else last.grad + 1

    for p in others:
        p.register_hook(edit)
    with pytest.raises(RuntimeError, match=r"user code has set p.grad of a parameter of shape \(7, 40\) before step"):
        loss_of(model, 3).backward()


def test_residents_are_updated_together(parts: list[list[int]]) -> None:
    """A few at a time, so that their gradients are released meanwhile; the last ones, too."""
    trained(mlp(width=100), "backward", "resident")
    each = parts[: len(parts) // 4]
    assert [len(part) for part in each[:-1]] == [MOST_HELD] * (len(each) - 1)
    assert sorted(itertools.chain.from_iterable(each)) == [*range(sum(map(len, each)))]


def test_updates_by_the_cpu_wait_for_no_others(parts: list[list[int]]) -> None:
    """Their gradients would leave when the last one's are final, and the CPU would have nothing to do until then."""
    trained(mlp(width=100), "backward", "cpu")
    assert {len(part) for part in parts} == {1}


def test_offloaded_gradients_return_to_all_residents(parts: list[list[int]]) -> None:
    """Through a slot that has room for the largest, although a smaller subgroup comes first."""
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 7))
    trained(model, "backward", "resident", 3, offload_gradients=True, subgroup_size=1100)
    assert sorted(i for part in parts for i in part) == [0, 0, 1, 1]


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [5, 3, 1, 0, 2, 4], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("frozen", [None, 4])
def test_streamed_subgroups_are_queued_in_the_order_that_was_simulated(
    order: list[int], frozen: int | None, parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as none that goes first has yet to come, however far the host is ahead of the device."""
    monkeypatch.setattr("dos.step.parts.turns", lambda *_: order)
    monkeypatch.setattr("dos.step.parts.has_ended", lambda job: False)
    monkeypatch.setattr(InBackward, "issue_rest", lambda mode: None)  # nothing is left for it
    layers = [nn.Linear(24, size, bias=False) for size in (24, 24, 24, 24, 24, 7)]
    model = nn.Sequential(*layers)
    optimizer = attached(model, place="stride:1", subgroup_size=24 * 24)
    for step in range(4):
        parts.clear()
        if step == 2 and frozen is not None:
            layers[frozen].requires_grad_(False)
        train(model, optimizer, 1, first_step=step)
    assert [i for part in parts for i in part] == [i for i in order if i != frozen]


def test_a_turn_of_a_slot_lasts_as_long_as_the_last_fetches() -> None:
    work = Workload.of_sizes([10, 20])
    spans = [(Op.PREFETCH, 0.0, 1.0, 100), (Op.PREFETCH, 3.0, 6.0, 300), (Op.PARAMETER, 0.0, 9.0, 7)]
    measured = Timeline.of(Span(Lane.H2D, op, 0, start, end, nbytes) for op, start, end, nbytes in spans)
    assert turn_seconds(work, measured) == {Placement.GPU_STREAMED: [load.state_bytes / 100 for load in work.subgroups]}
    assert turn_seconds(work, None) == turn_seconds(work, Timeline.of(())) == {}


@pytest.mark.parametrize("policy", ["cpu", "stride:2"])
def test_state_on_disk_is_updated_in_step_and_state_at_home_in_backward(
    parts: list[list[int]], tmp_path: Path, policy: str
) -> None:
    ends = []
    for disk, updates in ((None, "step"), (tmp_path, "backward")):
        model = wide()
        optimizer = dos_adam(model.parameters(), disk, policy=policy, host_memory=2 * TWO_WINDOWS)
        optimizer.attach(model, updates=updates)
        train(model, optimizer, 5)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]
    assert bytes_on_disk(tmp_path) > 0
    on_disk, updated = optimizer.plan().on_disk, set(itertools.chain.from_iterable(parts))
    assert on_disk
    assert updated
    assert not on_disk & updated


def test_writes_to_views_of_state_on_disk_raise_before_backward_updates_anything(tmp_path: Path) -> None:
    model = wide()
    optimizer = dos_adam(model.parameters(), tmp_path, host_memory=2 * TWO_WINDOWS)
    optimizer.attach(model, updates="backward")
    train(model, optimizer, 2)
    for entry in optimizer.state.values():
        entry["exp_avg"].add_(1.0)
    before = bits(model.parameters())
    with pytest.raises(RuntimeError, match="can only be read"):
        loss_of(model, 2).backward()
    assert bits(model.parameters()) == before


@pytest.mark.parametrize("place", PLACES)
def test_a_backward_updates_and_step_ends_it(place: Any) -> None:
    model = mlp()
    optimizer = attached(model, place=place)
    train(model, optimizer, 1)
    before = bits(model.parameters())
    loss_of(model, 1).backward()
    with pytest.warns(UserWarning, match="comes too late"):
        optimizer.zero_grad()  # it does nothing
    updated = bits(model.parameters())  # read through the model, which waits
    assert all(a != b for a, b in zip(before, updated, strict=True))
    optimizer.step()
    assert bits(model.parameters()) == updated
    assert {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {2.0}


@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize("of", ["a layer", "another optimizer"])
def test_gradients_are_dropped_too_late_with_one_warning(of: str, offload_gradients: bool) -> None:
    """Of those of other models and optimizers, and after `step()`, nothing is said."""
    model, other = mlp(), mlp()
    optimizer = attached(model, offload_gradients=offload_gradients)
    zeroed = {"a layer": model[0], "another optimizer": torch.optim.SGD(model[0].parameters())}[of]
    for step in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            optimizer.zero_grad()
            model.zero_grad()
            loss_of(model, step).backward()
            other.zero_grad()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            zeroed.zero_grad()
        assert ["comes too late" in str(each.message) for each in found] == [True] * (step == 0)
        optimizer.step()


class Parts(nn.Module):
    """A weight that is used in many ways. kind: how."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.other, self.last = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 7)

    def both(self, x: Tensor) -> Tensor:
        return self.first(self.other(x)).tanh()

    def unseen(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.first(x)
        return (self.other(x) * scale).tanh()

    def functional(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = nn.functional.linear(x, self.first.weight)
        return (self.other(x) * scale).tanh()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "twice":
            x = self.both(self.first(x))
        elif self.kind.startswith("recomputed"):
            reentrant = "reentrant" in self.kind
            x = checkpoint(self.first, x.requires_grad_(), use_reentrant=reentrant)
            x = checkpoint(self.both, x, use_reentrant=reentrant)
        elif self.kind == "once outside":
            x = checkpoint(self.both, self.first(x), use_reentrant=True)
        elif self.kind.startswith("read by a function"):
            reentrant = "reentrant" in self.kind
            x = self.first(checkpoint(self.functional, x.requires_grad_(), use_reentrant=reentrant))
        else:
            x = self.first(checkpoint(self.unseen, x, use_reentrant=False))
        return self.last(x)


@pytest.mark.parametrize(
    "kind",
    [
        "twice",
        "recomputed",
        "recomputed, reentrant",
        "once outside",
        "read without a gradient",
        "read by a function",
        "read by a function, reentrant",
    ],
)
@pytest.mark.parametrize(
    ("place", "offload"),
    [("cpu", False), ("stride:2", False), *(pytest.param(place, True, marks=pytest.mark.slow) for place in PLACES[1:])],
)
def test_a_weight_waits_for_the_last_use_that_this_backward_has(place: Any, offload: bool, kind: str) -> None:
    settings = {"offload_gradients": offload, "micro_batches": 1 + offload}
    assert trained(Parts(kind), "backward", place, **settings) == trained(Parts(kind), "step", place, **settings)


RAISING = [("host", False), ("cpu", False), ("resident", False), ("cpu", True), ("resident", True)]
"""Places, and whether gradients are offloaded."""


@pytest.mark.parametrize(("place", "offload"), RAISING)
def test_a_use_that_no_backward_before_had_is_refused(place: Any, offload: bool) -> None:
    """Where a weight is needed after its update, backward raises, and the optimizer is broken."""
    for before, kind, message in (
        ("twice", "read without a gradient", "was read in the backward that has already updated it"),
        ("recomputed", "recomputed, reentrant", "was read in the backward that has already updated it"),
        ("recomputed", "once outside", "came once more"),
    ):
        model = Parts(before)
        optimizer = attached(model, place=place, offload_gradients=offload)
        train(model, optimizer, 3)
        model.kind = kind
        with pytest.raises(RuntimeError, match=message):
            loss_of(model, 3).backward()
        with pytest.raises(RuntimeError, match="step 3 was the last complete one"):
            optimizer.step()


@pytest.mark.parametrize("place", ["host", "cpu", "resident"])
def test_a_hook_of_backward_sees_the_weights_of_before(place: Any) -> None:
    """One that reads a weight of its module makes that wait for `step()`."""
    seen: dict[str, list[bytes]] = {}
    for updates in ("step", "backward"):
        model, found = mlp(), seen.setdefault(updates, [])
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.register_full_backward_hook(lambda m, *_, found=found: found.append(bits([m.weight])[0]))
        trained(model, updates, place)
    assert seen["step"] == seen["backward"]


@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_released_in_backward(place: Any) -> None:
    model = mlp()
    optimizer = attached(model, place=place)
    written: list[weakref.ref[Tensor]] = []
    for p in model.parameters():
        p.register_hook(lambda gradient: written.append(weakref.ref(gradient)))
    for step in range(3):
        loss_of(model, step).backward()
        if step:
            optimizer.synchronize()
            gc.collect()
            assert len(written) == len(list(model.parameters()))
            assert not any(gradient() is not None for gradient in written)
        optimizer.step()
        written.clear()


def test_a_backward_that_is_interrupted_as_it_begins_stops_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = attached(model)
    begin = InBackward.begin
    for step in range(4):
        if step == 2:
            with monkeypatch.context() as patch:

                def interrupted(mode: InBackward, run: Run) -> None:
                    begin(mode, run)
                    raise KeyboardInterrupt

                patch.setattr(InBackward, "begin", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    loss_of(model, step).backward()
        loss_of(model, step).backward()
        assert step == 0 or not any(p.grad is not None for p in model.parameters())
        assert step == 0 or in_backward(optimizer).issued
        optimizer.step()


def test_a_kept_graph_raises_as_in_autograd() -> None:
    model = mlp()
    optimizer = attached(model)
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward(retain_graph=True)
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_backward_reads_later_without_its_gradient_raises_as_in_autograd() -> None:
    """An operation has saved it detached, so that no gradient tells of this use: the version does, which has risen."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 7)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.linear(self.other(x), self.first.weight.detach())
            return self.last(self.first(x))

    model = Detached()
    optimizer = attached(model, place="resident")  # whose kernels raise no version
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="step 1 was the last complete one"):
        optimizer.step()


def test_a_backward_before_step_is_refused_with_nothing_changed() -> None:
    model = mlp()
    optimizer = attached(model)
    train(model, optimizer, 3)
    loss_of(model, 3).backward()
    before = bits(model.parameters())
    for context in (contextlib.nullcontext(), optimizer.no_update()):
        with context, pytest.raises(RuntimeError, match=r"call optimizer.step\(\) after each backward"):
            loss_of(model, 4).backward()
    optimizer.step()
    assert bits(model.parameters()) == before
    train(model, optimizer, 1, first_step=4)


def test_what_another_loss_does() -> None:
    """autograd.grad and another model's loss update nothing; a loss that reaches the model is surrounded."""
    model, twin, other = mlp(), mlp(), nn.Linear(24, 24)
    optimizer, plain = attached(model), attached(twin, "step")
    for step in range(5):
        for each, own in ((model, optimizer), (twin, plain)):
            with own.no_update():
                each(other(torch.ones(2, 24))).sum().backward()
            own.zero_grad()
            torch.autograd.grad(loss_of(each, step), list(each.parameters()))
            loss_of(each, step).backward()
            other(torch.ones(2, 24)).sum().backward()
            own.step()
            own.zero_grad()
    assert bits(model.parameters()) == bits(twin.parameters())


def test_parameters_of_no_attached_model_are_updated_in_step() -> None:
    models, twins = (mlp(), nn.Linear(24, 7)), (mlp(), nn.Linear(24, 7))
    twins[1].load_state_dict(models[1].state_dict())
    found = []
    for (model, beside), updates in ((models, "backward"), (twins, "step")):
        optimizer = maker("stride:2", lr=0.01, subgroup_size=150)([*model.parameters(), *beside.parameters()])
        optimizer.attach(model, updates=updates)
        for step in range(4):
            before = bits(beside.parameters())
            (loss_of(model, step) + loss_of(beside, step)).backward()
            assert bits(beside.parameters()) == before
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        found.append(bits([*model.parameters(), *beside.parameters()]))
    assert found[0] == found[1]


def test_gradients_that_come_in_some_backwards_only() -> None:
    """As of experts: what was expected and does not come, and what comes unexpectedly, is updated in step()."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.experts, self.last = nn.ModuleList(nn.Linear(24, 24) for _ in range(4)), nn.Linear(24, 7)
            self.used = 0

        def forward(self, x: Tensor) -> Tensor:
            self.used += 1
            return self.last(self.experts[self.used % 4](self.experts[self.used // 3 % 4](x)))

    for place in ("host", "stride:2"):
        expected = trained(Experts(), "step", place, 9, subgroup_size=400)
        for offload in (False, True):
            settings = {"subgroup_size": 400, "offload_gradients": offload}
            assert trained(Experts(), "backward", place, 9, **settings) == expected


def test_settings_are_those_when_backward_begins() -> None:
    found = []
    for updates in ("step", "backward"):
        model = mlp()
        optimizer = attached(model, updates)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(4):
            train(model, optimizer, 1, first_step=step)
            scheduler.step()
            optimizer.zero_grad()
        found.append(everything(model, optimizer))
    assert found[0] == found[1]
    loss_of(model, 4).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"settings of param group 0 .* lr was 0.00\d+ then and is 0.5 now"):
        optimizer.step()


def refused_step(optimizer: DOSAdam, model: nn.Module, how: str) -> None:
    """Do what these updates do not allow, after a backward."""
    if how == "clip":
        optimizer.clip_grad_norm_(1.0)
    elif how == "torch's clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif how == "clip values":
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    elif how == "norm":
        optimizer.grad_norm()
    elif how == "edit":
        optimizer.edit_gradients(lambda p, g: None)
    elif how == "scaler":
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
    elif how == "attach":
        optimizer.attach(model)
    elif how == "set":
        next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
        optimizer.step()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("clip", "neither clipped, measured nor edited"),
        ("torch's clip", "max_grad_norm=0 or None in a trainer"),
        ("clip values", "max_grad_norm=0 or None in a trainer"),
        ("norm", "neither clipped, measured nor edited"),
        ("edit", "neither clipped, measured nor edited"),
        ("scaler", "train in bfloat16 without GradScaler"),
        ("attach", r"call optimizer.step\(\) after each backward"),
        ("set", "user code has set p.grad"),
    ],
)
def test_what_comes_too_late_is_refused(how: str, message: str, first: bool) -> None:
    """In the first iteration nothing has changed then."""
    model = mlp()
    optimizer = attached(model)
    if not first:
        train(model, optimizer, 1)
    before = bits(model.parameters())
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=message):
        refused_step(optimizer, model, how)
    assert not first or bits(model.parameters()) == before


@pytest.mark.parametrize(("place", "updates"), crossed(PLACES, ["step", "backward"]))
def test_an_optimizer_that_was_replaced_and_lives_on_updates_nothing(place: Any, updates: str) -> None:
    found = []
    for lives in (True, False):
        model = mlp()
        optimizers = [attached(model, place=place)]
        for step in range(6):
            if step == 3:
                if not lives:
                    optimizers.clear()
                    gc.collect()
                optimizers.append(attached(model, updates, place))
            loss_of(model, step).backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()
        found.append(everything(model, optimizers[-1]))
    assert found[0] == found[1]


def test_a_closure_may_call_backward() -> None:
    found = []
    for updates in ("backward", "step"):
        model = mlp()
        optimizer = attached(model, updates)
        for step in range(3):

            def closure(step: int = step) -> float:
                optimizer.zero_grad()  # noqa: B023
                loss = loss_of(model, step)  # noqa: B023
                loss.backward()
                return float(loss.detach())

            assert optimizer.step(closure) > 0
        found.append(everything(model, optimizer))
    assert found[0] == found[1]


def test_a_norm_that_is_only_asked_for_is_unknown() -> None:
    model = mlp()
    optimizer = attached(model)
    for step in range(2):
        loss_of(model, step).backward()
        with pytest.warns(UserWarning, match="it is given as NaN, and nothing is clipped"):
            assert nn.utils.clip_grad_norm_(model.parameters(), math.inf).isnan()
        with pytest.raises(RuntimeError, match="comes too late"):
            nn.utils.clip_grad_norm_(model.parameters(), math.inf, error_if_nonfinite=True)
        optimizer.step()
    twin = mlp()
    plain = attached(twin, "step")
    for step in range(2):
        train(twin, plain, 1, first_step=step)
    assert everything(model, optimizer) == everything(twin, plain)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"policy": "stride:2"}, {"offload_gradients": True}, {"dtype": torch.bfloat16}]
)
def test_a_write_to_a_parameter_that_backward_has_updated_is_refused(settings: dict[str, Any], kept: bool) -> None:
    """Before it has updated any, the write counts as with updates in `step()`."""
    settings = dict(settings)
    model = mlp(settings.pop("dtype", torch.float32))
    optimizer, weight = attached(model, **settings), model[0].weight
    for step in range(3):
        loss_of(model, step).backward()
        with torch.no_grad():
            if not step:
                weight.mul_(0.5)
        optimizer.step()
    loss_of(model, 3).backward()
    if kept:
        optimizer.synchronize()
    with torch.no_grad():
        (weight if kept else model[0].weight).mul_(0.5)
    with pytest.raises(RuntimeError, match=r"wrote to a parameter of shape \(.*\) between backward and step\(\)"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_grad_norm": 1.0},
            "max_grad_norm= needs the norm .*; leave it out, or attach the model without updates=",
        ),
        ({"skip_nonfinite": True}, "skip_nonfinite=True needs the norm"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=message):
        attached(model, **settings)
    optimizer = maker("cpu")(model.parameters())
    with pytest.raises(ValueError, match="updates must be 'step' or 'backward'"):
        optimizer.attach(model, updates="forward")
    with pytest.raises(ValueError, match="uninitialised parameters can have no hooks; run a forward before"):
        attached(nn.Sequential(nn.LazyLinear(3)))


def test_gradients_that_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(24, 24, sparse=True), nn.Linear(24, 7))
    optimizer = attached(model)
    before = bits(model.parameters())
    with pytest.raises(RuntimeError, match="sparse=False"):
        model(torch.ones(2, dtype=torch.long)).sum().backward()
    assert bits(model.parameters()) == before
    model = mlp()
    optimizer = attached(model)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss_of(model, 0).backward(create_graph=True)
    for p in model.parameters():
        p.grad = None
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
        loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="register_post_accumulate_grad_hook"):
        optimizer.attach(model, updates="backward")
    handle.remove()


def test_state_is_not_read_between_backward_and_step() -> None:
    model = mlp()
    optimizer = attached(model)
    train(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    loss_of(model, 1).backward()
    for read in (optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match=r"call optimizer.step\(\) first"):
            read()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(("place", "offload"), RAISING)
def test_a_backward_that_raises_breaks_the_optimizer_if_it_has_updated(place: Any, offload: bool) -> None:
    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.raises = nn.Linear(24, 24), nn.Linear(24, 7), ""

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(Raises.apply(x.requires_grad_()) if self.raises == "last" else x)
            x = self.second(Raises.apply(x) if self.raises == "midst" else x)
            return Raises.apply(x) if self.raises == "first" else x

    model = Raising()
    optimizer = attached(model, place=place, subgroup_size=25, offload_gradients=offload)
    train(model, optimizer, 3)
    for raises in ("first", "midst"):
        model.raises = raises
        before = bits(model.parameters())
        with pytest.raises(ArithmeticError, match="in backward"):
            loss_of(model, 3).backward()
        if raises == "first":
            assert bits(model.parameters()) == before
            optimizer.zero_grad()
            model.raises = ""
            train(model, optimizer, 1, first_step=3)
    with pytest.raises(RuntimeError, match="step 4 was the last complete one"):
        optimizer.step()
    optimizer.synchronize()


def test_changes_by_user_code_between_steps() -> None:
    """Parameters, state and masters that user code writes to, memory that moves home, another attach."""
    for place in ("host", "stride:2", 0.5):
        found = []
        for updates in ("step", "backward"):
            model = mlp(torch.bfloat16)
            optimizer = attached(model, updates, place)
            for step in range(8):
                loss_of(model, step).backward()
                if step == 6:
                    optimizer.release_memory()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    if step == 2:
                        optimizer.synchronize()
                        model[0].weight.mul_(1.5)
                    if step == 3:
                        optimizer.state[model[3].weight]["exp_avg"].mul_(0.5)
                if step == 4:
                    optimizer.attach(model, updates=updates)
            found.append(everything(model, optimizer))
        assert found[0] == found[1]


def test_what_backward_expects_is_worked_out_again_only_where_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[int](), Expectations.__init__
    monkeypatch.setattr(Expectations, "__init__", lambda *arguments: (made.append(step), make(*arguments))[1])
    found = []
    for updates in ("step", "backward"):
        model = mlp()
        biases = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": biases, "lr": 0.1}]
        optimizer = DOSAdam(groups, lr=0.01, policy="cpu", subgroup_size=150, device=EmulatedDevice(FAST, 10**9))
        optimizer.attach(model, updates=updates)
        for step in range(12):
            if step == 4:
                optimizer.param_groups[0]["lr"] = 0.02  # no expectation follows from it
            if step == 6:
                first, second = (group["params"] for group in optimizer.param_groups)
                first.append(second.pop())
            if step == 8:
                model[0].weight.requires_grad_(False)
            train(model, optimizer, 1, first_step=step)
        found.append(everything(model, optimizer))
    assert found[0] == found[1]
    assert made == [1, 6, 9]


@pytest.mark.parametrize("offload", [False, True])
def test_a_model_that_is_updated_in_part_is_not_used(offload: bool) -> None:
    model = mlp()
    optimizer = attached(model, "backward", "cpu", subgroup_size=25, offload_gradients=offload)
    train(model, optimizer, 2)
    optimizer.synchronize()
    with torch.no_grad():
        model[0].weight.mul_(1.5)  # step() has to look at it
    loss_of(model, 2).backward()
    for use in (lambda: model(torch.ones(1, 24)), model.state_dict, lambda: model.eval()(torch.ones(1, 24))):
        with pytest.raises(RuntimeError, match="when some of its parameters are updated"):
            use()
    model.train()
    optimizer.step()
    model(torch.ones(1, 24))


def test_activations_and_memory() -> None:
    """Gradients are released while backward runs; saved tensors may move meanwhile; nothing is kept alive."""
    found = []
    for updates in ("step", "backward"):
        model = mlp()
        optimizer = maker("adaptive", machine=SLOW)(model.parameters())
        optimizer.attach(model, activations=1.0, updates=updates)
        train(model, optimizer, 5)
        found.append(everything(model, optimizer))
    assert found[0] == found[1]
    assert optimizer.plan() is not None
    assert optimizer.explain()
    assert optimizer.metrics()
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()
    loss_of(model, 9).backward()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("place", ["resident", "stride:1", 0.5])
def test_memory_that_moves_while_updates_wait(place: Any, offload: bool) -> None:
    """What waits is issued before state moves home, as where a saved tensor has no memory."""
    found = []
    for updates in ("step", "backward"):
        model = mlp()
        optimizer = attached(model, updates, place, subgroup_size=100, offload_gradients=offload)
        for step in range(6):
            handle = model[2].weight.register_hook(lambda _, o=optimizer: (o.release_memory(), None)[1])
            if step != 3:
                handle.remove()
            loss_of(model, step).backward()
            handle.remove()
            optimizer.step()
            optimizer.zero_grad()
        found.append(everything(model, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("place", ["cpu", "stride:2", "resident"])
def test_two_optimizers_of_one_model(place: Any) -> None:
    """Each with groups of its own settings, and a checkpoint between two steps."""
    found = []
    for updates in ("step", "backward"):
        model = mlp(torch.bfloat16)
        weights = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": weights[:1], "lr": 0.03}, {"params": weights[1:], "weight_decay": 0.3}]
        make = maker(place, lr=0.01, subgroup_size=150)
        optimizers = [make(groups), make(others)]
        for optimizer in optimizers:
            optimizer.attach(model, updates=updates)
        for step in range(6):
            loss_of(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step == 3:
                saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
                weights_then = copy.deepcopy(model.state_dict())
            if step == 4:
                model.load_state_dict(weights_then)
                for optimizer, state in zip(optimizers, saved, strict=True):
                    optimizer.load_state_dict(state)
        found.append([everything(model, optimizer) for optimizer in optimizers])
    assert found[0] == found[1]


@pytest.mark.parametrize("place", ["host", "cpu", "resident"])
@pytest.mark.parametrize("ours_first", [False, True])
def test_another_optimizer_finds_no_gradients_that_backward_has_used(place: Any, ours_first: bool) -> None:
    model = mlp()
    optimizer, rest = attached(model, place=place), list(model.parameters())[2:]
    other, sgd = DOSAdam(rest, lr=0.01), torch.optim.SGD(rest, lr=0.01)
    for step in range(2):
        loss_of(model, step).backward()
        for turn in range(2):
            if turn == ours_first:
                with pytest.raises(RuntimeError, match=rf"has used the gradients of {len(rest)} of this one's param"):
                    other.step()
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    sgd.step()
                said = [str(each.message) for each in caught]
                assert len(said) == 1 - step, "once"
                assert all("of type SGD has made" in each and "updates='backward') takes" in each for each in said)
            else:
                optimizer.step()
        optimizer.zero_grad()
        sgd.step()  # as with AdamW, there is none any more
        with optimizer.no_update():
            loss_of(model, 5 + step).backward()
        before = bits(model.parameters())
        other.step()
        assert bits(model.parameters()) != before
        optimizer.zero_grad()


@pytest.mark.parametrize("attaches", ["model", "compiled"])
def test_a_compiled_model(attaches: str) -> None:
    """Its backward is one node, after which all gradients come."""
    found = []
    for updates in ("step", "backward"):
        model = mlp()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = attached(model if attaches == "model" else compiled, updates)
        for step in range(5):
            loss_of(compiled, step).backward()
            assert updates == "step" or step == 0 or in_backward(optimizer).issued
            optimizer.step()
            optimizer.zero_grad()
        found.append(everything(model, optimizer))
    assert found[0] == found[1]


def test_switching_back_to_updates_in_step() -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = attached(model), attached(twin, "step")
    for step in range(6):
        if step == 3:
            optimizer.attach(model)
        for each, own in ((model, optimizer), (twin, plain)):
            train(each, own, 1, first_step=step)
    assert everything(model, optimizer) == everything(twin, plain)


def test_a_fork_between_backward_and_step() -> None:
    """A data loader's worker begins there; the child waits for nothing, and the parent goes on."""
    found = []
    for updates in ("step", "backward"):
        model = mlp()
        optimizer = attached(model, updates, "cpu")
        for step in range(4):
            loss_of(model, step).backward()
            child = os.fork()
            if not child:
                signal.alarm(60)  # it would wait for ever
                optimizer.synchronize()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            optimizer.step()
            optimizer.zero_grad()
        found.append(everything(model, optimizer))
    assert found[0] == found[1]


def test_ctrl_c_in_backward_leaves_half_a_step_that_is_known() -> None:
    model = mlp()
    optimizer = attached(model, subgroup_size=25)
    train(model, optimizer, 3)
    handle = model[0].weight.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, 3).backward()
    handle.remove()
    with pytest.raises(RuntimeError, match="step 3 was the last complete one"):
        optimizer.step()


def test_backwards_of_another_thread_make_updates_wait_for_step() -> None:
    """Gradients of two backwards at once cannot be told apart."""
    model, twin, other = mlp(), mlp(), nn.Linear(24, 7)
    optimizer, plain = attached(model), attached(twin, "step")
    inside, leave = threading.Event(), threading.Event()

    def wait(gradient: Tensor) -> None:
        inside.set()
        leave.wait(WAIT_S)

    other.weight.register_hook(wait)
    for step in range(4):
        beside = threading.Thread(target=lambda: loss_of(other, 0).backward())
        if step == 2:
            beside.start()
            assert inside.wait(WAIT_S)
        for each, own in ((model, optimizer), (twin, plain)):
            train(each, own, 1, first_step=step)
        if step == 2:
            leave.set()
            beside.join()
    assert everything(model, optimizer) == everything(twin, plain)


def test_a_part_that_fails_returns_when_no_thread_issues_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """User code may release memory then, to which a copy that is queued later would write."""
    model, go, issued = mlp(), threading.Event(), list[bool]()
    device = FakeCudaDevice(install(monkeypatch, seed=None))
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=device, subgroup_size=25)
    optimizer.attach(model, updates="backward")
    copy, fence = device.copy, device.fence

    def late(*arguments: Any) -> Any:
        if threading.current_thread().name.startswith("dos-issue"):
            issued.append(go.wait(WAIT_S))
        return copy(*arguments)

    def failing(callers: Any = ()) -> Any:
        if fences:
            threading.Timer(0.1, go.set).start()
            raise ArithmeticError("no fence")
        fences.append(fence(callers))
        return fences[0]

    fences = list[Any]()
    for step in range(3):
        if step == 2:
            optimizer.synchronize()
            monkeypatch.setattr(device, "copy", late)
            monkeypatch.setattr(device, "fence", failing)
        with pytest.raises(RuntimeError, match="no fence") if step == 2 else contextlib.nullcontext():
            loss_of(model, step).backward()
        if step < 2:
            optimizer.step()
    assert issued == [True]
    with pytest.raises(RuntimeError, match="undefined state"):
        optimizer.step()
