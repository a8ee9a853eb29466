"""State that is fetched to slots during backward: behind what wrote it, and up to a copy that fails."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.devices import LANE_OF, Job
from perfmodel import Op, Placement
from tests.support.devices import CopyingAtOnce, FaultyDevice, LateDevice
from tests.support.fake_cuda import FakeCudaDevice, install
from tests.support.random_plans import InTurn
from tests.support.training import backward, bits, everything, mlp, train

pytestmark = pytest.mark.usefixtures("one_kernel_thread")

CPU, STREAMED, _ = Placement


def late(late_op: Op) -> LateDevice:
    """One kind of copies begins 20 ms late."""
    return LateDevice(lambda op: 20e-3 * (op is late_op))


def start(policy: Any, device: EmulatedDevice) -> tuple[nn.Sequential, DOSAdam]:
    model = mlp()
    return model, DOSAdam(model.parameters(), policy=policy, subgroup_size=150, device=device)


def train_both(model: nn.Sequential, optimizer: DOSAdam, steps: int, unused: Collection[int] = ()) -> None:
    """Fail unless so many steps leave parameters and state as on the host. unused: one weight has no gradient there."""
    train(model, optimizer, steps, before_step=functools.partial(drop_gradient, model, unused))
    assert_as_on_host(model, optimizer, steps, unused)


def drop_gradient(model: nn.Sequential, unused: Collection[int], step: int) -> None:
    if step in unused:
        model[0].weight.grad = None


def assert_as_on_host(model: nn.Sequential, optimizer: DOSAdam, steps: int, unused: Collection[int] = ()) -> None:
    twin = mlp()
    reference = DOSAdam(twin.parameters())
    train(twin, reference, steps, before_step=functools.partial(drop_gradient, twin, unused))
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert bits([optimizer.state[p]["exp_avg_sq"]]) == bits([reference.state[q]["exp_avg_sq"]])


def test_what_is_written_to_views_that_were_loaded_is_not_lost() -> None:
    """State is not fetched in backward then, as after user code has read it: here it was read before the last step."""
    ends = []
    for device in (CopyingAtOnce(), None):
        model = mlp()
        optimizer = DOSAdam(model.parameters(), policy="stride:1", subgroup_size=150, device=device)
        train(model, optimizer, 3)
        saved = optimizer.state_dict()
        train(model, optimizer, 1)
        optimizer.load_state_dict(saved)
        backward(model, 4)
        for entry in saved["state"].values():
            entry["exp_avg"].mul_(0.5)
        optimizer.step()
        optimizer.synchronize()
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]


def note_freed(device: FakeCudaDevice, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """A list to which each buffer is added that the device is given back, with what is in it then."""
    free, freed = device.free, list[tuple[Tensor, Tensor]]()

    def noted(buffer: Tensor) -> None:
        free(buffer)
        freed.append((buffer, buffer.clone()))

    monkeypatch.setattr(device, "free", noted)
    return freed


@pytest.mark.parametrize("reads", ["before backward", "after it"])
@pytest.mark.parametrize("placements", [(CPU, STREAMED), (STREAMED,)], ids=["half", "all"])
def test_what_user_code_writes_to_state_that_may_be_arriving_counts(
    placements: tuple[Placement, ...], reads: str
) -> None:
    """Where it was read before backward, nothing tells of the write, and so it does not come in backward."""

    def run(model: nn.Sequential, optimizer: DOSAdam) -> list[bytes]:
        for step in range(4):
            optimizer.zero_grad()
            early = reads == "before backward" and step > 0
            views = [optimizer.state[p]["exp_avg"] for p in model.parameters() if early]
            backward(model, step)
            for view in views if early else [optimizer.state[p]["exp_avg"] for p in model.parameters() if step]:
                view.mul_(-30.0)
            optimizer.step()
        return everything(model, optimizer)

    twin = mlp()
    device = CopyingAtOnce() if reads == "before backward" or placements == (STREAMED,) else late(Op.PREFETCH)
    assert run(*start(InTurn(*placements), device)) == run(twin, DOSAdam(twin.parameters()))


def test_memory_is_not_given_away_while_a_copy_that_failed_is_still_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of several pieces, the last of which could not be issued."""
    device = FakeCudaDevice(install(monkeypatch, None))
    freed, copy = note_freed(device, monkeypatch), device.copy

    def fail(op: Op, *rest: Any) -> Job:
        job = copy(op, *rest)
        if op is Op.PREFETCH:
            monkeypatch.setattr(device, "copy", copy)
            raise ValueError
        return job

    model = mlp()
    optimizer = DOSAdam(model.parameters(), policy=InTurn(*[CPU] * 3, STREAMED), subgroup_size=150, device=device)
    train(model, optimizer, 1)
    monkeypatch.setattr(device, "copy", fail)
    with pytest.raises(ValueError):  # noqa: PT011
        train(model, optimizer, 2)
    for op in LANE_OF:
        copy(op, 0, []).wait()
    assert freed
    assert all(torch.equal(buffer, then) for buffer, then in freed)


def test_state_that_is_still_on_its_way_home_is_not_sent_back() -> None:
    """Attached, the last step may still flush when backward begins, which therefore waits for it first."""
    model, optimizer = start(InTurn(STREAMED), late(Op.FLUSH))
    optimizer.attach(model)
    train_both(model, optimizer, 3)


@pytest.mark.parametrize("before", ["step", "state", "release"])
def test_a_copy_that_fails_leaves_no_memory_that_only_looks_like_state(before: str) -> None:
    device = FaultyDevice()
    model, optimizer = start(InTurn(*[CPU] * 3, STREAMED), device)
    train(model, optimizer, 3)
    device.fail("prefetch", 1)
    with pytest.raises(ValueError):  # noqa: PT011
        train(model, optimizer, 1, first_step=3)
    if before == "state":
        assert all(bool(torch.isfinite(entry["exp_avg"]).all()) for entry in optimizer.state.values())
    elif before == "release":
        optimizer.release_memory()
        assert device.usage().held == 0
    train(model, optimizer, 2, first_step=3)
    assert_as_on_host(model, optimizer, 5)
