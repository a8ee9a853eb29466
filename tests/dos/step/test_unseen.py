"""Writes that raise no version where the caller's work is queued, on a runtime that runs work as late as it may."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dos import DOSAdam
from dos.state.bit_sums import Summing
from dos.step.work import SubgroupUpdate
from perfmodel import Placement
from tests.support.fake_cuda import FakeCudaDevice, install
from tests.support.random_plans import InTurn
from tests.support.training import Make, batch, bits, maker, mlp
from tests.support.unseen_writes import run

UNTIL_BACKWARD_ENDS = ("forward", "after the step")
MODES: dict[str, dict[str, Any]] = {"plain": {}, "attached": {}, "offloaded": {"offload_gradients": True}}


def making(monkeypatch: pytest.MonkeyPatch, seed: int | None, **settings: Any) -> Make:
    runtime = install(monkeypatch, seed)
    shape = {"lr": 0.01, "subgroup_size": 1500, **settings}
    return lambda parameters: DOSAdam(parameters, device=FakeCudaDevice(runtime), **shape)


def ends(dtype: torch.dtype, make: Make, **settings: Any) -> tuple[list[bytes], list[str]]:
    """Parameters after a run, and the warnings of writes that were lost."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parameters = run(make, dtype, **settings)
    return bits(parameters), [text for each in told if "raises no version" in (text := str(each.message))]


@functools.cache
def expected(dtype: torch.dtype, state_format: str | None, moments: tuple[str, ...]) -> list[bytes]:
    """Parameters after the same writes where versions count them, updated on the host."""
    return bits(run(maker(lr=0.01, state_format=state_format), dtype, counted=True, moments=moments))


@pytest.mark.parametrize(
    ("dtype", "state_format", "policy", "mode", "seed"),
    [
        (torch.float32, None, "cpu", "plain", None),
        (torch.float32, None, "cpu", "offloaded", 0),
        (torch.float32, "int8", 0.5, "attached", 0),
        (torch.bfloat16, None, "cpu", "attached", 0),
        (torch.bfloat16, "int8", "stride:2", "offloaded", None),
        (torch.bfloat16, "float32", "cpu", "plain", 0),
        (torch.float16, None, "cpu", "attached", None),
        (torch.float16, None, "cpu", "offloaded", None),
        (torch.float16, None, "resident", "attached", 0),
        (torch.float16, "int8", "stride:1", "offloaded", 0),
        (torch.float16, None, "stride:2", "plain", None),
        (torch.bfloat16, "float32", "resident", "plain", None),
    ],
)
def test_writes_count(
    dtype: torch.dtype,
    state_format: str | None,
    policy: Any,
    mode: str,
    seed: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = making(monkeypatch, seed, policy=policy, state_format=state_format, **MODES[mode])
    ours = ends(dtype, make, moments=UNTIL_BACKWARD_ENDS, attach=mode == "attached")
    assert ours == (expected(dtype, state_format, UNTIL_BACKWARD_ENDS), [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_writes_count_where_state_is_on_disk(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = making(monkeypatch, None, policy="cpu", disk=tmp_path, host_memory=70_000, memory_budget=0)
    assert ends(dtype, make, moments=UNTIL_BACKWARD_ENDS) == (expected(dtype, None, UNTIL_BACKWARD_ENDS), [])


def test_a_write_counts_where_the_plan_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows no bits of what the device has updated, and none that it remembers are the last ones."""
    cpu, device = Placement.CPU, Placement.GPU_RESIDENT
    plans = lambda: InTurn(cpu, cpu, device, cpu, device, device, cpu)  # noqa: E731  (each begins anew)
    ours = ends(torch.float16, lambda p: making(monkeypatch, 0, policy=plans())(p), moments=UNTIL_BACKWARD_ENDS)
    assert ours == (expected(torch.float16, None, UNTIL_BACKWARD_ENDS), [])


@pytest.mark.parametrize(
    ("dtype", "policy", "reads"),
    [
        (torch.float32, "cpu", 3),
        (torch.bfloat16, "cpu", 3),
        (torch.float16, "cpu", 3),
        (torch.float16, "resident", 0),
        (torch.float32, "resident", 0),
        (torch.bfloat16, "resident", 0),
    ],
)
def test_so_many_times_a_step_reads_each_parameter_for_it(
    dtype: torch.dtype, policy: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/limits.md says."""
    call, found = Summing.__call__, list[int]()

    def counted(work: Summing) -> None:
        found.extend(piece.numel for piece in work.pieces)
        call(work)

    monkeypatch.setattr(Summing, "__call__", counted)
    model = mlp(dtype, width=256)
    optimizer = making(monkeypatch, None, policy=policy)(model.parameters())
    for step in range(4):
        found.clear()
        optimizer.zero_grad()
        model(batch(step).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.synchronize()
    assert sum(found) == reads * sum(p.numel() for p in model.parameters())


def test_a_master_that_user_code_writes_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameter was not written to, wherever the state was."""
    found = []
    for policy in ("cpu", "resident", "stride:1", None):
        model = mlp(torch.float16, width=256)
        make = maker(lr=0.01) if policy is None else making(monkeypatch, None, policy=policy)
        optimizer: Any = make(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step).half()).float().square().mean().backward()
            optimizer.step()
            optimizer.synchronize()
            if step == 2:
                optimizer.state[model[0].weight]["master_param"].fill_(0.25)
        found.append(bits(model.parameters()))
        assert float(model[0].weight.detach().min()) > 0.2
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("mode", MODES)
def test_a_write_behind_gradients_that_have_left_is_said_and_later_ones_count(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runtime = mlp(width=256), install(monkeypatch, None)
    settings: dict[str, Any] = {"policy": "cpu", "subgroup_size": 1500, "lr": 0.01, **MODES[mode]}
    optimizer = DOSAdam(model.parameters(), device=FakeCudaDevice(runtime), **settings)
    if mode == "attached":
        optimizer.attach(model)
    told: list[int] = []
    weight = model[0].weight
    for step in range(9):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        if step in (4, 6):
            runtime.caller.enqueue(lambda: weight.data.zero_())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.synchronize()
        told += [step for each in caught if "raises no version" in str(each.message)]
        if step == 6:  # a step moves each element by the learning rate or so
            assert float(weight.detach().abs().max()) < 0.05
    assert told == [4]


def test_parameters_without_a_gradient_are_fetched_in_their_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = mlp(width=256), mlp(width=256)
    for model, counted in zip(ours, (False, True), strict=True):
        optimizer = making(monkeypatch, None, policy="cpu")(model.parameters())
        for step in range(8):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            if step in (4, 5):  # its subgroup has others
                model[0].bias.grad = None
            optimizer.step()
            optimizer.synchronize()
            if step == 3:
                model[0].bias.data.add_(0.5)
                if counted:
                    torch.autograd.graph.increment_version(model[0].bias)
    assert bits(ours[0].parameters()) == bits(ours[1].parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("how", ["without a gradient", "beside new memory", "both"])
def test_a_write_counts_later_or_beside_new_memory(
    how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other pieces of the subgroup say nothing of the one that user code has written to."""
    ours = mlp(dtype, width=256), mlp(dtype, width=256)
    for model, counted in zip(ours, (False, True), strict=True):
        optimizer = making(monkeypatch, None, policy="cpu", subgroup_size=10**6)(model.parameters())
        weight, bias = model[0].weight, model[0].bias
        for step in range(7):
            optimizer.zero_grad()
            model(batch(step).to(dtype)).float().square().mean().backward()
            if how != "beside new memory" and step in (3, 4):
                bias.grad = None
            optimizer.step()
            optimizer.synchronize()
            if step == 2:
                if how != "without a gradient":
                    weight.data = weight.data.clone()
                bias.data.add_(0.5)
                if counted:
                    torch.autograd.graph.increment_version(bias)
    assert bits(ours[0].parameters()) == bits(ours[1].parameters())


def test_updates_of_offloaded_gradients_do_not_wait_for_what_the_caller_has_queued_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradients have come; a comparison behind all of the caller's work would wait for that."""
    prepare, ended, before = SubgroupUpdate.prepare_on_host, list[int](), list[bool]()

    def preparing(update: SubgroupUpdate) -> Callable[[], None]:
        before.append(step in ended)
        return prepare(update)

    monkeypatch.setattr(SubgroupUpdate, "prepare_on_host", preparing)
    model, runtime = mlp(width=256), install(monkeypatch, None)
    settings: dict[str, Any] = {"policy": "cpu", "offload_gradients": True, "subgroup_size": 10**6}
    optimizer = DOSAdam(model.parameters(), device=FakeCudaDevice(runtime), **settings)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        runtime.caller.enqueue(lambda step=step: ended.append(step))
        optimizer.step()
        optimizer.synchronize()
    assert (ended, before[1:]) == ([*range(4)], [False] * 3)  # the first one fetches the parameters


def test_a_write_between_a_backward_whose_gradients_are_dropped_and_the_next_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parameters are compared at the first gradient that is kept."""
    for zero in ("optimizer", "model"):
        model = mlp(width=256)
        optimizer = making(monkeypatch, None, policy="cpu", offload_gradients=True)(model.parameters())
        optimizer.attach(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*raises no version")
            for step in range(5):
                model(batch(step)).square().mean().backward()
                {"optimizer": optimizer, "model": model}[zero].zero_grad()
                model[0].weight.data.fill_(step)
                model(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.synchronize()
                assert float((model[0].weight.detach() - step).abs().max()) < 0.05
