"""The checker of what orders accesses: silent for programs as they are, and it tells of each wait that is left out.

Each job of the device has ended when it is issued, so that nothing overlaps in time: what is found, clocks alone show.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dos import DOSAdam
from dos.activations.saved import CopiesInFlight, Saved
from dos.gradients import offload
from dos.gradients.offload import OffloadedGradients
from dos.owners.waiting import Waiting
from dos.state.device_store import DeviceStore
from dos.state.disk_store import DiskStore
from dos.state.stores import Stores
from dos.step.host_lane import HostLane
from dos.step.issue import Step
from dos.step.ledger import Ledger
from dos.step.transit import Transits
from dos.step.unseen import UnseenWrites
from dos.weights.block import Block
from perfmodel import Placement
from perfmodel.builder import ScheduleBuilder
from tests.support.activations import Net
from tests.support.blocks import loss, net, start, whole
from tests.support.blocks import train as train_blocks
from tests.support.inside import offload_of
from tests.support.races import AtOnce, checking
from tests.support.random_plans import ChangingPlans, InTurn
from tests.support.training import FAST, backward, batch, mlp, train

pytestmark = pytest.mark.usefixtures("one_core")


def device(capacity: int = 10**8) -> AtOnce:
    return AtOnce(FAST, capacity)


def updates(policy: Any, micro_batches: int = 1, **settings: Any) -> None:
    """Steps of an attached model, with a look at its state between them."""
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=device(), policy=policy, subgroup_size=150, **settings)
    optimizer.attach(model)
    for step in range(4):
        backward(model, step, micro_batches)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state[model[0].weight]["exp_avg"].mul_(0.5)
    backward(model, 4)
    optimizer.state[model[0].weight]["exp_avg"].mul_(0.5)
    optimizer.step()
    optimizer.synchronize()


def on_host(_: Path) -> None:
    updates("cpu")


def streamed(_: Path) -> None:
    updates("stride:1")


def both(_: Path) -> None:
    updates(0.5, micro_batches=2)


def resident(_: Path) -> None:
    updates("resident")


def adaptive(_: Path) -> None:
    updates("adaptive")


def changing(_: Path) -> None:
    updates(ChangingPlans(3, 2))


def leaving(_: Path) -> None:
    updates(InTurn(*[Placement.GPU_RESIDENT, Placement.CPU] * 3))


def sent_in_vain(_: Path) -> None:
    """Gradients leave for the host, and the step updates on the device after all, where masters are whole."""
    model, cpu = mlp(torch.float16, width=256), Placement.CPU
    plans = InTurn(cpu, cpu, Placement.GPU_RESIDENT, cpu)
    optimizer = DOSAdam(model.parameters(), device=device(), policy=plans, subgroup_size=1500)
    for step in range(3):
        model(batch(step).half()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def added_up(_: Path) -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters(), device=device(), policy="cpu", subgroup_size=150, offload_gradients=True)
    for step in range(3):
        backward(model, 10 * step, 3)
        optimizer.zero_grad()  # they are not used
        backward(model, 10 * step, 2)
        optimizer.step()
    optimizer.synchronize()


def on_disk(folder: Path) -> None:
    model = mlp(width=200)
    optimizer = DOSAdam(
        model.parameters(), device=device(), policy="cpu", subgroup_size=1024, disk=folder, host_memory=100_000
    )
    optimizer.attach(model)
    train(model, optimizer, 3)
    optimizer.synchronize()


def saved_tensors(_: Path) -> None:
    model = Net()
    optimizer = DOSAdam(model.parameters(), lr=1e-2, device=device(), policy="cpu")
    offload_of(optimizer).least_bytes = 64
    optimizer.attach(model, activations=1.0)
    for seed in range(3):
        out = model(torch.ones(8, 24))
        if seed != 1:  # the graph is dropped
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        del out
    optimizer.synchronize()


def weights(policy: str) -> None:
    model = net(torch.float32, 5)
    optimizer = start(model, 1, device=device(), policy=policy)
    train_blocks(model, optimizer)
    for block in model.blocks:
        block.out.weight.data.mul_(0.5)
    loss(model, 7).backward()
    loss(model, 8)
    optimizer.step()
    block = model.blocks[2].out.weight
    assert block.sum().isfinite()
    loss(model, 9)
    with torch.no_grad():
        model.blocks[0].out.weight.mul_(0.5)
    optimizer.synchronize()
    model.run = stopped
    with pytest.raises(ArithmeticError):
        loss(model, 10)
    model.run = whole
    with torch.no_grad():
        model.blocks[1].out.weight.mul_(0.5)


def stopped(block: Any, x: Tensor) -> Tensor:
    block(x)
    raise ArithmeticError("in forward")


def weights_on_host(_: Path) -> None:
    weights("cpu")


def weights_streamed(_: Path) -> None:
    weights("stride:1")


def weights_alone(_: Path) -> None:
    """All that is trained streams; a forward runs between backward and step."""
    model = net(torch.float32, 5)
    for rest in (model.first, model.last):
        rest.requires_grad_(False)
    optimizer = start(model, 0, device=device())
    train_blocks(model, optimizer)
    loss(model, 7).backward()
    loss(model, 8)
    optimizer.step()
    optimizer.synchronize()


class Fault(NamedTuple):
    """A wait that is left out.

    line: where it is in the source of `name`; instead: what is there then. usual: whether `make test` leaves it out.
    """

    owner: Any
    name: str
    line: str
    instead: str
    program: Callable[[Path], None]
    usual: bool = False


PROGRAMS = (
    on_host,
    streamed,
    both,
    resident,
    adaptive,
    changing,
    leaving,
    sent_in_vain,
    added_up,
    on_disk,
    saved_tensors,
    weights_on_host,
    weights_streamed,
    weights_alone,
)
USUAL = (streamed, sent_in_vain, added_up, on_disk, saved_tensors, weights_streamed)
FAULTS = [
    Fault(Transits, "send", "self._device.fence(callers), *behind", "(), *behind", on_host, True),
    Fault(Transits, "fill_slots", "self._device.fence())", "())", streamed),
    Fault(Ledger, "_join", "self.device.join(job)", "pass", on_host),
    Fault(Ledger, "_join", "self.device.join(job)", "pass", resident, True),
    Fault(DeviceStore, "release_slots", "self.slots[-1].wait()", "pass", changing),
    Fault(DeviceStore, "drop", "self.resident[subgroup].buffer.wait()", "pass", leaving),
    Fault(Stores, "bring_home", "job.wait()", "pass", adaptive, True),
    Fault(DeviceStore, "release_slots", "self.slots[-1].wait()", "pass", streamed),
    Fault(Step, "issue", "jobs[under_way] = (*self.backward, *behind)", "jobs[under_way] = ()", streamed),
    Fault(Step, "_turn", "ready = [*ready, reading]", "pass", weights_alone),
    Fault(HostLane, "_prepare", "job.wait()", "pass", on_host, True),
    Fault(ScheduleBuilder, "add", "(buffer.readers or buffer.writers) + after", "after", streamed, True),
    Fault(ScheduleBuilder, "add", "(buffer.readers or buffer.writers)", "buffer.writers", streamed),
    Fault(ScheduleBuilder, "add", "after = buffer.writers + after", "pass", streamed),
    Fault(OffloadedGradients, "_free_passage", "reader.exception()", "pass", added_up, True),
    Fault(OffloadedGradients, "forget_all", "total.arrived.exception()", "pass", added_up),
    Fault(offload, "_add_arrived", "job.wait()", "pass", added_up),
    Fault(DiskStore, "_queue", "job.wait()", "pass", on_disk, True),
    Fault(Saved, "save", "(*self._device.fence(self._callers), *after)", "after", saved_tensors, True),
    Fault(Saved, "release", "self._device.join(self._host[1])", "pass", saved_tensors),
    Fault(Saved, "restore", "(*self._device.fence([self._queue]), saving)", "(saving,)", saved_tensors),
    Fault(Saved, "read", "self._device.join(self._back[1])", "pass", saved_tensors, True),
    Fault(CopiesInFlight, "release", "device.keep(*lost)", "pass", saved_tensors),
    Fault(Block, "fetch", "(*self._device.fence([self._queue]), *after)", "after", weights_on_host),
    Fault(Block, "fetch", "(*self._device.fence([self._queue]), *after)", "()", weights_streamed, True),
    Fault(Block, "join", "self._device.join(self._job)", "pass", weights_on_host),
    Fault(Block, "release", "self.join()", "pass", weights_on_host),
    Fault(Block, "finish_reading", "reading.wait()", "pass", weights_on_host),
    Fault(UnseenWrites, "before_update", "if vain else ()", "if vain and not found else ()", sent_in_vain),
    Fault(Waiting, "finish_homes_within", "job.wait()", "pass", weights_streamed),
]


def ran(cases: Sequence[Any], usual: Callable[[Any], bool], name: Callable[[Any], str]) -> list[Any]:
    """All cases; those that are not usual are slow tests."""
    return [pytest.param(c, id=name(c), marks=() if usual(c) else pytest.mark.slow) for c in cases]


@pytest.mark.parametrize("program", ran(PROGRAMS, USUAL.__contains__, lambda program: program.__name__))
def test_programs_are_ordered(program: Callable[[Path], None], tmp_path: Path) -> None:
    with checking() as checker:
        program(tmp_path)
    assert not checker.races, checker.report()
    assert not is_in_torch_dispatch_mode()


@pytest.mark.parametrize("fault", ran(FAULTS, lambda f: f.usual, lambda f: f"{f.name}-{f.line}-{f.program.__name__}"))
def test_a_wait_that_is_left_out_is_told(fault: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leave_out(monkeypatch, fault)
    with checking(most_named=0) as checker, contextlib.suppress(Exception):  # some lose what the program needs
        fault.program(tmp_path)
    assert checker.races


def test_both_accesses_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leave_out(monkeypatch, FAULTS[0])
    with checking() as checker:
        FAULTS[0].program(tmp_path)
    lines = [
        r"nothing orders two accesses of \d+ bytes at 0x\w+ \(gradient of Linear.weight .*\):",
        r"  write by \w+, the caller's queue, issued at .*\.py:\d+ \w+ < .*",
        r"  read by gradient of subgroup \d+ \(copy_\), dos-emulated-gradient, .*transit.py:\d+ send <.*",
    ]
    found = [text.splitlines() for text in checker.races.values()]
    assert any(all(map(re.fullmatch, lines, each)) for each in found), checker.report()


class File:
    """Is made where the last one was, as a file may be."""


def test_no_file_has_the_addresses_of_one_that_is_gone() -> None:
    with checking() as checker:
        assert len({checker.file_address(File()) for _ in range(20)}) == 20


def test_no_garbage_is_collected_by_a_thread_that_others_wait_for() -> None:
    """A callback of the collector may wait for a job, whose thread tells the checker of an access."""
    within, before = list[bool](), gc.get_threshold()
    with checking() as checker:

        def called(*_: object) -> None:
            within.append(checker._within == threading.get_ident())

        gc.callbacks.append(called)
        gc.set_threshold(100, 10**6)  # the youngest alone, which takes no time
        try:
            on_host(Path())
        finally:
            gc.callbacks.remove(called)
            gc.set_threshold(*before)
    assert set(within) == {False}


def leave_out(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Compile the function anew, with the change."""
    function = inspect.unwrap(vars(fault.owner)[fault.name])
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.line) == 1, "the guard is not where it was"
    code = compile(
        "from __future__ import annotations\n" + source.replace(fault.line, fault.instead),
        inspect.getfile(function),
        "exec",
    )
    found = dict(vars(sys.modules[function.__module__]))
    exec(code, found)
    patch.setattr(fault.owner, fault.name, found[fault.name])
