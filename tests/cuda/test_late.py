"""On a GPU: one kind of copies, or one of the caller's streams, is always late, so that whoever does not wait is seen.

What random delays find now and then is found here each time. Models are small, because what matters is the order.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dos import DOSAdam
from dos.devices import LANE_OF
from dos.devices.cuda import CudaDevice
from perfmodel import Op, Placement
from tests.support.gpu import DEVICE, NEEDS_GPU, SHRINK, late
from tests.support.inside import plan_anew
from tests.support.random_plans import Changes, InTurn, RandomPlans
from tests.support.scales import LARGE, ROOM, Scales, Sines, SinesOnTwoStreams, StoppedError, run, stop, with_policy
from tests.support.training import bits

pytestmark = NEEDS_GPU

CPU, STREAMED, RESIDENT = Placement

SMALL: dict[str, Any] = {"layers": 4, "numel": 80_000, "steps": 4}
SUBGROUP = 80_000
SAVED: dict[str, Any] = {"numel": LARGE, "layers": 12, "steps": 3}


class Neighbours:
    """The caller's own tensors, in memory that state may have had. Nothing else may write there."""

    def __init__(self) -> None:
        self._taken: list[tuple[Tensor, float]] = []

    def take(self, value: float) -> None:
        # As large as the state of a subgroup, of which slots are made, and smaller.
        for numel in (SUBGROUP // SHRINK * 10 // 4, SUBGROUP // SHRINK):
            self._taken += [(torch.full((numel,), value, device=DEVICE), value) for _ in range(4)]

    def check(self) -> None:
        torch.cuda.synchronize()
        assert all(bool((tensor.cpu() == value).all()) for tensor, value in self._taken), "others wrote there"


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    return run(with_policy("cpu", SUBGROUP), **SMALL)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("op", [op for op in LANE_OF if op not in (Op.SAVE, Op.RESTORE)])
def test_all_of_one_kind(op: Op, attached: bool, expected: list[bytes]) -> None:
    """Under other plans as backward begins, in the step, and in the next iteration."""

    def before(optimizer: DOSAdam) -> None:
        late(op, 0.15)
        plan_anew(optimizer)

    def between(optimizer: DOSAdam, step: int) -> None:
        others.take(float(step))
        late(op, 0.01)
        plan_anew(optimizer)

    others = Neighbours()
    policy = with_policy(Changes(3), SUBGROUP)
    assert run(policy, before=before, between=between, attached=attached, **SMALL) == expected
    others.check()


@pytest.mark.parametrize("back", [RESIDENT, STREAMED])
def test_state_that_backward_fetched_in_vain(back: Placement, expected: list[bytes]) -> None:
    """The step wants it on the host: the room to which it still travels is not given away before it has come."""

    def before(optimizer: DOSAdam) -> None:
        plan_anew(optimizer)

    def between(optimizer: DOSAdam, step: int) -> None:
        others.take(float(step))
        plan_anew(optimizer)
        torch.cuda.synchronize()
        late(Op.PREFETCH, 0.2)

    others = Neighbours()
    policy = with_policy(InTurn(*[CPU] * 3, *[back, CPU] * 4), SUBGROUP)
    assert run(policy, before=before, between=between, **SMALL) == expected
    others.check()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("plan", [RESIDENT, STREAMED])
def test_what_user_code_writes_to_state_counts(plan: Placement, kept: bool) -> None:
    """Between backward and step. kept: to views that it has from before, so that nothing tells of it."""

    def before(optimizer: DOSAdam) -> None:
        for view in views if kept else [s["exp_avg"] for s in optimizer.state.values()]:
            view.mul_(-1.5)
        plan_anew(optimizer)

    def between(optimizer: DOSAdam, step: int) -> None:
        views[:] = [s["exp_avg"] for s in optimizer.state.values()] if kept else []
        plan_anew(optimizer)
        torch.cuda.synchronize()
        late(Op.PREFETCH, 0.2)

    def trained(policy: Any) -> list[bytes]:
        views.clear()
        return run(with_policy(policy, SUBGROUP), before=before, between=between, attached=True, **SMALL)

    views: list[Tensor] = []
    # In every other iteration it is at home as backward begins, which fetches it.
    assert trained(InTurn(CPU, *[plan, plan, CPU, CPU] * 2)) == trained("cpu")


# Streams of the caller


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("policy", ["cpu", "stride:1", 0.0])
def test_new_parameters_come_behind_what_the_caller_has_queued(policy: str | float, attached: bool) -> None:
    def before(optimizer: DOSAdam) -> None:
        if slow:
            torch.cuda._sleep(50_000_000)
        read.extend(p.detach().clone() for p in optimizer.param_groups[0]["params"])
        if not slow:
            torch.cuda.synchronize()

    def trained() -> list[bytes]:
        read.clear()
        found = run(with_policy(policy, SUBGROUP), before=before, attached=attached, **SMALL)
        return [*found, *bits([t.cpu() for t in read])]

    read: list[Tensor] = []
    slow = False
    expected = trained()
    slow = True
    assert trained() == expected


class Sides(SinesOnTwoStreams):
    """Two streams, on one of which backward is late."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for layer in self.layers[1::2]:
                layer.register_forward_hook(_backward_is_late)
            self.training = False
        return super().forward(x)


def _backward_is_late(module: object, inputs: object, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_sleep)


def _sleep(gradient: Tensor) -> None:
    torch.cuda._sleep(2_000_000)


@pytest.fixture(scope="module")
def expected_of_sines() -> list[bytes]:
    return run(with_policy("cpu"), model_class=Sines, **SAVED)


def test_gradients_of_one_subgroup_that_two_streams_write(expected_of_sines: list[bytes]) -> None:
    assert run(with_policy("cpu", 10**9), model_class=Sides, **SAVED) == expected_of_sines


class Busy(SinesOnTwoStreams):
    """Takes all memory that is given back on either stream at once, and writes there. Copies of one kind are late."""

    op = Op.SAVE

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        late(self.op, 0.2)
        current, side = self.streams(x)
        outputs, taken = [], []
        for i, layer in enumerate(self.layers):
            with torch.cuda.stream(side if i % 2 else current):
                outputs.append(layer(x))
            for stream in (current, side):
                with torch.cuda.stream(stream):
                    taken += [torch.full_like(self.layers[1].weight, float("nan")) for _ in range(2)]
        current.wait_stream(side)
        for output in outputs[1::2]:
            output.record_stream(current)
        return torch.stack(outputs).sum()


class BusyBack(Busy):
    op = Op.RESTORE


@pytest.mark.parametrize("model_class", [Sides, Busy, BusyBack])
def test_saved_tensors_of_two_streams(model_class: type[Scales], expected_of_sines: list[bytes]) -> None:
    saved = {"activations": ROOM, "model_class": model_class, **SAVED}
    assert run(with_policy("cpu"), **saved) == expected_of_sines


@contextlib.contextmanager
def _offloading() -> Iterator[Callable[[Tensor], Tensor]]:
    """A model whose saved tensors leave, and which is not updated."""
    model = Sines(12, LARGE)
    optimizer = with_policy("cpu")(model)
    optimizer.attach(model, activations=ROOM)
    yield model


def _gradients(model: Any) -> list[bytes]:
    found = bits([p.grad.cpu() for p in model.parameters()])
    model.zero_grad()
    return found


def test_a_forward_beside_the_last_backward() -> None:
    """On another stream: its saved tensors go to host memory which that backward has given back, and still reads."""
    with _offloading() as model:
        x, other = (torch.tensor(value, dtype=torch.bfloat16, device=DEVICE) for value in (1.0, 2.0))
        model(x).backward()
        expected = _gradients(model)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            loss = model(x)
            late(Op.RESTORE, 0.4)
            loss.backward()  # here, for the stream that calls it waits for all of it
        beside = model(other)
        torch.cuda.synchronize()
        assert _gradients(model) == expected
        del beside


def test_what_was_brought_back_in_vain() -> None:
    """An error ends backward: memory to which tensors still travel is not given away."""
    with _offloading() as model:
        x = torch.tensor(1.0, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(2):
            loss = model(x)
            torch.cuda.synchronize()
            late(Op.RESTORE, 0.2)
            last = model.layers[-1].weight
            handle = last.register_hook(stop)
            with contextlib.suppress(StoppedError):
                loss.backward()
            handle.remove()
            del loss
            taken = [torch.full((LARGE // SHRINK,), 7.0, dtype=torch.bfloat16, device=DEVICE) for _ in range(12)]
            torch.cuda.synchronize()
            assert all(bool((tensor.cpu() == 7).all()) for tensor in taken)
            model.zero_grad()


def test_slots_are_filled_behind_what_their_owner_does(expected: list[bytes]) -> None:
    """Memory of state belongs to the stream of the last step, which may still use what it has freed."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    model = Scales(SMALL["layers"], SMALL["numel"])
    optimizer = with_policy("stride:1", SUBGROUP)(model)
    optimizer.attach(model)
    for step in range(SMALL["steps"]):
        mine, other = streams[step % 2], streams[1 - step % 2]
        mine.wait_stream(other)
        with torch.cuda.stream(other):
            freed = [torch.empty(SUBGROUP // SHRINK * 10, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
            torch.cuda._sleep(400_000_000 if step == 2 else 0)
            for tensor in freed:
                tensor.fill_(0xFF)
            del freed, tensor
        late(Op.UPDATE, 0.8 if step == 2 else 0)
        with torch.cuda.stream(mine):
            optimizer.zero_grad()
            model(torch.tensor(1.0 + step, dtype=torch.bfloat16, device=DEVICE)).backward()
            optimizer.step()
    torch.cuda.synchronize()
    optimizer.synchronize()
    state = [t.cpu() for s in optimizer.state_dict()["state"].values() for t in s.values()]
    assert bits([*(p.detach().cpu() for p in model.parameters()), *state]) == expected


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("op", [Op.PREFETCH, Op.FLUSH])
def test_windows_of_state_on_disk(op: Op, attached: bool, tmp_path: Path) -> None:
    """A window is not filled from which backward's prefetch still reads, or to which state still comes."""

    def between(optimizer: DOSAdam, step: int) -> None:
        plan_anew(optimizer)
        late(op, 0.01)

    model: dict[str, Any] = {"layers": 9, "numel": 16_000, "steps": 6, "attached": attached}
    disk: dict[str, Any] = {"disk": tmp_path, "host_memory": 100_000 * SHRINK}
    ours = run(with_policy(RandomPlans(20, slots=1), 1024 * SHRINK, **disk), between=between, **model)
    assert ours == run(with_policy("cpu", 1024 * SHRINK), **model)


def test_the_device_is_asked_by_native_code() -> None:
    """As the CPU lane's threads ask: where the function has another name, these wait in the order of the plan."""
    device = CudaDevice(torch.device(DEVICE))
    assert device.event_query
    query = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(device.event_query)
    with ThreadPoolExecutor(1, initializer=device.bind_host_thread) as thread:
        torch.cuda._sleep(200_000_000)
        job: Any = device.mark()
        assert thread.submit(query, job.event).result() == 600, "not ready"
        job.wait()
        assert thread.submit(query, job.event).result() == 0
