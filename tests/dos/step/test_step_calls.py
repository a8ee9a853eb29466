"""The cost of `step()` before its first work, and of hooks in backward, in calls of Python for each parameter."""

from __future__ import annotations

import functools
import gc
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import dos
from dos import DOSAdam, EmulatedDevice
from dos.devices import coalesce
from dos.parameters import active
from dos.state.subgroup import Piece
from dos.step import work
from dos.step.turns import Turns
from dos.step.unseen import UnseenWrites
from dos.step.work import SubgroupUpdate
from tests.support.fake_cuda import FakeCudaDevice, FakeStream, install
from tests.support.training import FAST

pytestmark = pytest.mark.usefixtures("samples_as_asked")

SIZE, EACH = 256, 8
"""Elements of a parameter, and parameters of a subgroup."""
FEW, MANY = 5 * EACH, 15 * EACH
PACKAGE = str(Path(dos.__file__).parent)
OURS = re.compile("dos-(?!emulated)")
"""The names of our threads, but those that are a device."""


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """Finalizers that the collector calls would count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fewest_of_a_step(
    optimizer: DOSAdam, backward: Callable[[], object], counts: Callable[[FrameType, str], bool]
) -> int:
    """The fewest events of the caller's thread in `step()` that count, of the last three of seven steps.

    backward: called before each step.
    """
    found, least = 0, sys.maxsize

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += counts(frame, event)

    for step in range(7):
        backward()
        found = 0
        sys.setprofile(count if step >= 4 else None)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        optimizer.zero_grad()
        least = min(least, found) if step >= 4 else least
    return least


def calls(parameters: int, device: Any, attached: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls until the first turn of the CPU lane is handed over, in a step whose gradients have all left.

    With those of C. The last steps look at all parameters at once; the fewest count, because threads that wait call
    more. Without those that make a schedule, which most steps take from the last one: here times vary by too much.
    """
    model = nn.ParameterList(torch.randn(SIZE) for _ in range(parameters))
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=SIZE * EACH, device=device)
    if attached:
        optimizer.attach(model)
    give = Turns.give

    def given(turns: Turns, turn: Any) -> None:
        sys.setprofile(None)
        give(turns, turn)

    def backward() -> None:
        sum(p.square().sum() for p in model).backward()
        optimizer.synchronize()

    def counts(frame: FrameType, event: str) -> bool:
        return event in ("call", "c_call") and "/perfmodel/" not in frame.f_code.co_filename

    with monkeypatch.context() as patched:
        patched.setattr(Turns, "give", given)
        return fewest_of_a_step(optimizer, backward, counts)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(("queues", "most"), [(True, 2), (False, 14)])
def test_calls_before_the_first_work_of_a_step(
    queues: bool, most: int, attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All for its subgroup where the device queues; where it does not, bits are compared."""
    device = FakeCudaDevice(install(monkeypatch, seed=None)) if queues else EmulatedDevice(FAST, 10**9)
    few, many = (calls(parameters, device, attached, monkeypatch) for parameters in (FEW, MANY))
    assert (many - few) / (MANY - FEW) <= most


def test_a_step_makes_no_input_of_each_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is like the last one, the columns of the last look have all but the gradients."""
    model = nn.ParameterList(torch.randn(SIZE) for _ in range(FEW))
    device = FakeCudaDevice(install(monkeypatch, seed=None))
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=SIZE * EACH, device=device)
    made, new_input = list[Any](), work.new_input
    for module in (work, active):
        monkeypatch.setattr(module, "new_input", lambda fields: made.append(fields) or new_input(fields))
    for step in range(6):
        sum(p.square().sum() for p in model).backward()
        optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
        assert step < 4 or not made
        made.clear()


OF_MODEL = 24
"""Parameters of a subgroup, as of the contest's model (experiments/dry)."""


def calls_for_gradients(parameters: int, updates: str, device: Any) -> int:
    """The fewest calls of a whole backward on this thread, whose hooks run there, and of our threads until the next.

    Without those of devices that are emulated or not there.
    """
    found, here, backward = 0, threading.get_ident(), False

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        if event == "call" and (
            backward if threading.get_ident() == here else OURS.match(threading.current_thread().name)
        ):
            found += "/tests/" not in frame.f_code.co_filename

    least = sys.maxsize
    threading.setprofile(count)
    try:
        model = nn.ParameterList(torch.randn(SIZE) for _ in range(parameters))
        optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=SIZE * OF_MODEL, device=device)
        optimizer.attach(model, updates=updates)
        for step in range(7):
            loss = sum(p.square().sum() for p in model)
            optimizer.synchronize()
            found, backward = 0, True
            sys.setprofile(count if step >= 4 else None)
            try:
                loss.backward()
            finally:
                sys.setprofile(None)
            backward = False
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            least = min(least, found) if step >= 4 else least
    finally:
        threading.setprofile(None)
    return least


@pytest.mark.parametrize(
    ("updates", "queues", "most"),
    [("step", False, 16), ("step", True, 20), ("backward", False, 18), ("backward", True, 21)],
)
def test_calls_for_a_gradient_on_all_threads(
    updates: str, queues: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the share of a gradient in what its subgroup takes: the CPU lane's turn and copies, too."""
    device = FakeCudaDevice(install(monkeypatch, seed=None)) if queues else EmulatedDevice(FAST, 10**9)
    few, many = (calls_for_gradients(count * OF_MODEL, updates, device) for count in (4, 12))
    assert (many - few) / (8 * OF_MODEL) <= most


def calls_of_a_step(subgroups: int, policy: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The fewest calls of our functions on the caller's thread. piece: bytes of a piece of a copy.

    Slots have the same memory in each step, as they mostly have on a GPU.
    """
    for module in ("coalesce", "cuda", "runtime"):
        monkeypatch.setattr(f"dos.devices.{module}.PIECE_BYTES", piece)
    device = FakeCudaDevice(install(monkeypatch, seed=None))
    slots = Counter[int]()
    memory = functools.cache(lambda nbytes, number: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(device, "_empty", lambda nbytes: (slots.update([nbytes]), memory(nbytes, slots[nbytes]))[1])
    model = nn.Sequential(*[nn.Linear(16, SIZE // 16, bias=False) for _ in range(subgroups * EACH)])
    optimizer = DOSAdam(model.parameters(), policy=policy, subgroup_size=SIZE * EACH, device=device)
    optimizer.attach(model)

    def backward() -> None:
        loss = model(torch.randn(4, 16)).square().sum()
        optimizer.synchronize()
        loss.backward()
        slots.clear()

    def counts(frame: FrameType, event: str) -> bool:
        return event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    return fewest_of_a_step(optimizer, backward, counts)


@pytest.mark.parametrize("piece", [SIZE, 1 << 25])
@pytest.mark.parametrize(("policy", "most"), [("stride:1", 155), ("resident", 29)])
def test_calls_for_a_subgroup_on_the_device(
    policy: str, most: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many pieces its state has on its way."""
    few, many = (calls_of_a_step(count, policy, piece, monkeypatch) for count in (4, 12))
    assert (many - few) / 8 - EACH <= most, "besides one for each parameter, behind the step's work"


def runtime_calls(subgroups: int, updates: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The fewest jobs on the device, waits on its queues and copies in an iteration."""
    found = Counter[str]()

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            found[name] += 1
            return function(*arguments)

        monkeypatch.setattr(owner, name, call)

    device = FakeCudaDevice(install(monkeypatch, seed=None))
    for owner, name in ((FakeCudaDevice, "_queue"), (FakeStream, "wait_event"), (coalesce, "queue_copies")):
        counted(owner, name)
    model = nn.ParameterList(torch.randn(SIZE) for _ in range(subgroups * EACH))
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=SIZE * EACH, device=device)
    optimizer.attach(model, updates=updates)
    iterations = list[Counter[str]]()
    for _ in range(7):
        loss = sum(p.square().sum() for p in model)
        optimizer.synchronize()
        found.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        iterations.append(Counter(found))
    return Counter({name: min(each[name] for each in iterations[4:]) for name in found})


@pytest.mark.parametrize(
    ("updates", "most"),
    [
        ("step", {"_queue": 3, "wait_event": 4, "queue_copies": 2}),
        ("backward", {"_queue": 2, "wait_event": 3, "queue_copies": 2}),
    ],
)
def test_calls_of_the_runtime_for_a_subgroup(
    updates: str, most: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients to the host and parameters back, each in one call; in `step()` their bits are compared once more."""
    found = runtime_calls(12, updates, monkeypatch)
    assert all(found[name] <= 12 * count for name, count in most.items()), found


def test_the_first_update_waits_for_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters are compared once more behind it, those of the others beside the update before theirs."""
    model = nn.ParameterList(torch.randn(SIZE) for _ in range(FEW))
    device = FakeCudaDevice(install(monkeypatch, seed=None))
    optimizer = DOSAdam(model.parameters(), policy="cpu", subgroup_size=SIZE * EACH, device=device)
    done, confirm, finish = list[tuple[str, Piece]](), UnseenWrites._confirm, SubgroupUpdate.finish_on_host

    def confirmed(unseen: UnseenWrites, number: int, sums: Any, pieces: list[Piece], after: Any) -> Any:
        done.append(("compared", pieces[0]))
        return confirm(unseen, number, sums, pieces, after)

    def finished(update: SubgroupUpdate) -> None:
        done.append(("updated", update.pieces[0]))
        finish(update)

    monkeypatch.setattr(UnseenWrites, "_confirm", confirmed)
    monkeypatch.setattr(SubgroupUpdate, "finish_on_host", finished)
    for _ in range(5):
        sum(p.square().sum() for p in model).backward()
        done.clear()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
    # Each on one thread, while the threads of several turns alternate.
    updated = [piece for what, piece in done if what == "updated"]
    behind = [piece for piece in updated if done.index(("updated", piece)) < done.index(("compared", piece))]
    assert (len(updated), len(behind)) == (FEW // EACH, 1)
