"""Transfers beside backward and forward: the same bits as without, on every loop that people write."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from perfmodel import Op
from tests.support import ROOT
from tests.support.devices import UpdatesAfterStep
from tests.support.training import SLOW, bits, mlp, profile, train

pytestmark = pytest.mark.usefixtures("one_kernel_thread")


def accelerated(model: nn.Module, *, attach: bool = False, **settings: object) -> DOSAdam:
    device = EmulatedDevice(SLOW, capacity=10**7)
    optimizer = DOSAdam(
        model.parameters(), **{"policy": "stride:3", "subgroup_size": 150, "device": device, **settings}
    )
    if attach:
        optimizer.attach(model)
    return optimizer


def on_host(model: nn.Module, **settings: object) -> DOSAdam:
    return DOSAdam(model.parameters(), **{k: v for k, v in settings.items() if k != "policy"})


POLICIES = ["adaptive", "cpu", "stride:1", "stride:3", 0.5]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlap_changes_no_bit(policy: str | float, attach: bool, dtype: torch.dtype) -> None:
    model, twin = mlp(dtype), mlp(dtype)
    optimizer = accelerated(model, attach=attach, policy=policy)
    assert train(model, optimizer, 8) == train(twin, on_host(twin), 8)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())


def test_gradients_leave_during_backward_once_each() -> None:
    model = mlp()
    optimizer = accelerated(model, policy="cpu")
    train(model, optimizer, 2)
    sent = []
    real = optimizer._accelerator._engine.send_gradients

    def send(index, copies, callers):
        sent.append(index)
        return real(index, copies, callers)

    optimizer._accelerator._engine.send_gradients = send
    train(model, optimizer, 1, before_step=lambda _: sent.append("step"))
    subgroups = len(optimizer.plan())
    assert sorted(sent[:subgroups]) == list(range(subgroups))
    assert sent[subgroups:] == ["step"]
    assert sum(s.op is Op.GRADIENT for s in optimizer.timeline().spans) == subgroups, "none was sent again"


def test_prefetch_begins_before_the_step() -> None:
    model = mlp()
    optimizer = accelerated(model, policy="stride:1")
    train(model, optimizer, 2)
    fetched = []
    train(
        model, optimizer, 1, before_step=lambda _: fetched.append(len(optimizer._accelerator._engine.early.prefetched))
    )
    assert fetched == [2]


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_accumulation(policy: str | float, attach: bool) -> None:
    ends = []
    for make in (on_host, lambda m: accelerated(m, attach=attach, policy=policy)):
        model = mlp()
        optimizer = make(model)
        for step in range(5):
            optimizer.zero_grad()
            for micro in range(4 if step != 3 else 2):
                inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + micro))
                model(inputs).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]


def test_accumulation_sends_only_the_last_after_one_iteration() -> None:
    model = mlp()
    optimizer = accelerated(model, policy="cpu")
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(4):
            model(torch.ones(2, 24)).square().mean().backward()
        optimizer.step()
    gradients = [s for s in optimizer.timeline().spans if s.op is Op.GRADIENT]
    assert len(gradients) == len(optimizer.plan())


def _scale(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.mul_(0.5)


def _replace(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad * 0.5


def _replace_where_it_lay(model: nn.Module) -> None:
    """The new gradient may get the old one's address and version: only its identity tells."""
    for p in model.parameters():
        halved = (p.grad * 0.5).numpy().copy()
        p.grad = None
        p.grad = torch.from_numpy(halved).clone()


def _drop_some(model: nn.Module) -> None:
    model[2].weight.grad = None


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize("edit", [_scale, _replace, _replace_where_it_lay, _drop_some, _clip])
@pytest.mark.parametrize("attach", [False, True])
def test_gradients_changed_after_backward_are_sent_again(edit, attach: bool) -> None:
    model, twin = mlp(), mlp()
    optimizer = accelerated(model, attach=attach, policy="cpu")
    train(model, optimizer, 6, before_step=lambda step: edit(model) if step in (2, 4) else None)
    train(twin, on_host(twin), 6, before_step=lambda step: edit(twin) if step in (2, 4) else None)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())


def test_what_is_always_changed_is_no_longer_sent_early_and_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = accelerated(model, policy="cpu")
    with caplog.at_level(logging.INFO, logger="dos"):
        train(model, optimizer, 5, before_step=lambda _: _clip(model))
    assert sum("clip with max_grad_norm=" in r.message for r in caplog.records) == 1
    assert sum(s.op is Op.GRADIENT for s in optimizer.timeline().spans) == len(optimizer.plan())
    # Once they are left alone they leave early again.
    train(model, optimizer, 1)
    sent = []
    real = optimizer._accelerator._engine.send_gradients
    optimizer._accelerator._engine.send_gradients = lambda *a: (sent.append(a[0]), real(*a))[1]
    train(model, optimizer, 1)
    assert len(sent) == len(optimizer.plan())


def test_a_step_skipped_after_backward_and_zeroing_in_place() -> None:
    for set_to_none, attach in itertools.product((True, False), (False, True)):
        ends = []
        for make in (on_host, lambda m, attach=attach: accelerated(m, attach=attach, policy="cpu")):
            model = mlp()
            optimizer = make(model)
            for step in range(7):
                optimizer.zero_grad(set_to_none=set_to_none)
                inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
                model(inputs).square().mean().backward()
                if step not in (2, 4):
                    optimizer.step()
            optimizer.synchronize()
            ends.append(bits(model.parameters()))
        assert ends[0] == ends[1]


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(attach: bool, unscale: bool) -> None:
    ends = []
    for make in (on_host, lambda m: accelerated(m, attach=attach)):
        model = mlp()
        optimizer = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for step in range(8):
            optimizer.zero_grad()
            inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(inputs).square().mean()).backward()
            if step in (3, 4):
                model[0].weight.grad[1, 1] = torch.nan if step == 3 else torch.inf
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        counts = {entry["step"].item() for entry in optimizer.state.values()}
        assert counts == {6.0}
        ends.append((bits(model.parameters()), scaler.get_scale()))
    assert ends[0] == ends[1]


def test_grad_scaler_without_unscaling_keeps_the_overlap() -> None:
    model = mlp()
    optimizer = accelerated(model, policy="cpu")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    train(model, optimizer, 1)
    real = optimizer._accelerator._engine.send_gradients
    optimizer._accelerator._engine.send_gradients = lambda *a: (sent.append(a[0]), real(*a))[1]
    sent: list[int] = []
    for _ in range(4):
        sent.clear()
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 24)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(sent) == len(optimizer.plan()), "they left early again after a scaled step"
    assert sum(s.op is Op.GRADIENT for s in optimizer.timeline().spans) == len(optimizer.plan()), "and only once"


@pytest.mark.parametrize("edit", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_gradients_that_left_before_a_scaler_changed_them_are_sent_again(unscale: bool, edit: bool) -> None:
    """GradScaler writes without counting a version; the early copies are long over when it does."""
    ends = []
    for make in (on_host, lambda m: accelerated(m, policy="cpu", device=EmulatedDevice(profile(), 10**7))):
        model = mlp()
        optimizer = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(5):
            optimizer.zero_grad()
            inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(inputs).square().mean()).backward()
            time.sleep(0.02)
            if unscale:
                scaler.unscale_(optimizer)
            if edit and step == 3:
                model[0].weight.grad.mul_(0.5)
            scaler.step(optimizer)
            scaler.update()
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("attach", [False, True])
def test_clipping_through_the_optimizer_agrees_with_torch_and_keeps_the_overlap(attach: bool) -> None:
    reference, model = mlp(), mlp()
    norms: list[list[Tensor]] = [[], []]
    optimizer = accelerated(model, attach=attach, policy="cpu")
    clipped = {1, 2, 5}

    def theirs(step: int) -> None:
        if step in clipped:
            norms[0].append(nn.utils.clip_grad_norm_(reference.parameters(), 0.05))

    def ours(step: int) -> None:
        if step in clipped:
            norms[1].append(optimizer.clip_grad_norm_(0.05))

    train(reference, torch.optim.AdamW(reference.parameters()), 7, before_step=theirs)
    train(model, optimizer, 7, before_step=ours)
    optimizer.synchronize()
    torch.testing.assert_close(norms[1], norms[0])
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert sum(s.op is Op.GRADIENT for s in optimizer.timeline().spans) == len(optimizer.plan())


def test_attached_step_returns_early_and_settings_are_those_of_its_call() -> None:
    model, twin = mlp(), mlp()
    device = UpdatesAfterStep(SLOW, capacity=10**7)
    optimizer, plain = accelerated(model, attach=True, policy="cpu", device=device), on_host(twin)
    train(model, optimizer, 3)
    train(twin, plain, 3)
    optimizer.synchronize()
    model(torch.ones(1, 24)).sum().backward()
    device.returned.clear()
    optimizer.step()
    device.returned.set()
    optimizer.param_groups[0]["lr"] = 123.0
    optimizer.synchronize()
    plain.zero_grad()
    for p in twin.parameters():
        p.grad = None
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        b.grad = a.grad
    plain.step()
    assert bits(model.parameters()) == bits(twin.parameters())


class Odd(nn.Module):
    """Ties weights, calls a module twice, one never, uses a module's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(24))
        self.first = nn.Linear(24, 24)
        self.twice = nn.Linear(24, 24)
        self.never = nn.Linear(24, 24)
        self.reached_into = nn.Linear(24, 24)
        self.tied = nn.Linear(24, 24, bias=False)
        self.tied.weight = self.first.weight
        self.sometimes = nn.Linear(24, 24)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x * self.scale)
        x = self.twice(self.twice(x)).tanh()
        x = nn.functional.linear(x, self.reached_into.weight)
        if self.calls % 3 == 0:
            x = self.sometimes(x)
        return self.tied(x)


@pytest.mark.parametrize("policy", POLICIES)
def test_odd_models(policy: str | float) -> None:
    ends = []
    for make in (on_host, lambda m: accelerated(m, attach=True, policy=policy)):
        model = Odd()
        optimizer = make(model)
        losses = []
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step == 4:
                model.eval()
                with torch.no_grad():
                    losses.append(model(x).sum().item())
                model.train()
        ends.append((losses, bits(model.state_dict().values())))
    assert ends[0] == ends[1]


def attached_after_a_step() -> tuple[nn.Sequential, DOSAdam, list[bytes]]:
    """A model whose update is still in flight, and what its parameters will be."""
    model, twin = mlp(), mlp()
    optimizer = accelerated(model, attach=True, policy="cpu")
    train(model, optimizer, 3)
    train(twin, on_host(twin), 3)
    assert optimizer._unfinished
    return model, optimizer, bits(twin.parameters())


@pytest.mark.parametrize(
    "read",
    [
        lambda m, o: m.state_dict().values(),
        lambda m, o: m[0].state_dict().values(),
        lambda m, o: copy.deepcopy(m).parameters(),
        lambda m, o: copy.deepcopy(m[0]).parameters(),
        lambda m, o: pickle.loads(pickle.dumps(m)).parameters(),
        lambda m, o: copy.deepcopy((m, o))[0].parameters(),
        lambda m, o: (o.synchronize(), m.parameters())[1],
        lambda m, o: (o.state_dict(), m.parameters())[1],
        lambda m, o: (o.state.values(), m.parameters())[1],
        lambda m, o: (m.eval()(torch.ones(1, 24)), m.parameters())[1],
    ],
    ids=[
        "state_dict", "state_dict of a part", "deepcopy", "deepcopy of a part", "pickle", "deepcopy of both",
        "synchronize", "optimizer.state_dict", "optimizer.state.values", "evaluation",
    ],
)  # fmt: skip
def test_everything_that_reads_parameters_waits(read) -> None:
    model, optimizer, expected = attached_after_a_step()
    n = len(list(read(model, optimizer)))
    model, optimizer, expected = attached_after_a_step()
    got = bits(read(model, optimizer))
    assert got == (expected if n == len(expected) else expected[:n])


def test_loading_weights_waits_and_wins() -> None:
    model, optimizer, _ = attached_after_a_step()
    donor = mlp(seed=9).state_dict()
    model.load_state_dict(donor)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(donor.values())


def test_a_copy_of_an_attached_model_is_free_of_hooks_that_wait() -> None:
    model, optimizer, _ = attached_after_a_step()
    twin = copy.deepcopy(model)
    del optimizer
    plain = on_host(twin)
    train(twin, plain, 1)
    again = pickle.loads(pickle.dumps(twin))
    assert bits(again.parameters()) == bits(twin.parameters())


@pytest.mark.parametrize("how", ["wrapped", "in place", "a part"])
def test_compiled_models(how: str) -> None:
    model, twin = mlp(), mlp()
    optimizer = accelerated(model, policy="cpu")
    called = model
    if how == "wrapped":
        called = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model[0].compile(backend="eager")
    optimizer.attach(called)
    assert train(called, optimizer, 5) == train(twin, on_host(twin), 5)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())


def test_parameters_that_no_forward_waits_for_are_finished_by_the_step() -> None:
    """Lightning's training_step is no forward and uses the root's own parameter; another parameter is in no model."""

    class Odder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.positions = nn.Parameter(torch.randn(300, 24))
            self.layer = nn.Linear(24, 7)

        def training_step(self, x: Tensor, outside: Tensor) -> Tensor:
            return (self.layer(x + self.positions[:8]) * outside).square().mean()

    ends = []
    for accelerate in (False, True):
        model, outside = Odder(), nn.Parameter(torch.ones(7))
        parameters = [*model.parameters(), outside]
        device = EmulatedDevice(SLOW, capacity=10**7)
        ours = {"device": device, "policy": "cpu", "subgroup_size": 1000} if accelerate else {}
        optimizer = DOSAdam(parameters, **ours)
        if accelerate:
            optimizer.attach(model)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            model.training_step(x, outside).backward()
            optimizer.step()
        optimizer.synchronize()
        ends.append(bits(parameters))
    assert ends[0] == ends[1]


def test_an_attached_optimizer_of_host_parameters_sees_edits_and_disturbs_no_graph() -> None:
    model, twin = mlp(torch.bfloat16), mlp(torch.bfloat16)
    optimizer, plain = on_host(model), on_host(twin)
    optimizer.attach(model)

    def edit(m: nn.Module) -> None:
        with torch.no_grad():
            m[0].weight[0, 0] = 3.0

    train(model, optimizer, 4, before_step=lambda _: edit(model))
    train(twin, plain, 4, before_step=lambda _: edit(twin))
    assert bits(model.parameters()) == bits(twin.parameters())
    loss = model(torch.ones(1, 24, dtype=torch.bfloat16)).sum()
    model.state_dict()
    loss.backward()


@pytest.mark.parametrize("policy", ["cpu", "stride:1", 0.5])
def test_an_interrupted_step_is_finished_first(policy: str | float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = mlp(), mlp()
    optimizer, plain = accelerated(model, policy=policy), on_host(twin)
    train(model, optimizer, 2)
    train(twin, plain, 3)
    accelerator = optimizer._accelerator
    real, interrupts = accelerator.wait, iter([True])

    def wait() -> None:
        if next(interrupts, False):
            raise KeyboardInterrupt
        real()

    monkeypatch.setattr(accelerator, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 1, first_step=2)
    assert bits(model.parameters()) == bits(twin.parameters())
    train(model, optimizer, 2, first_step=3)
    train(twin, plain, 2, first_step=3)
    assert bits(model.parameters()) == bits(twin.parameters())


@pytest.mark.parametrize("attach", [False, True])
def test_an_optimizer_that_is_gone_leaves_nothing_behind(attach: bool) -> None:
    model, twin = mlp(), mlp()
    device = EmulatedDevice(SLOW, capacity=10**7)
    optimizer = DOSAdam(model.parameters(), policy=0.5, subgroup_size=150, device=device)
    if attach:
        optimizer.attach(model)
    train(model, optimizer, 3)
    train(twin, on_host(twin), 3)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert bits(model.parameters()) == bits(twin.parameters()), "work in flight was finished"
    gc.collect()
    assert device.memory().free == device.capacity


def test_backwards_without_a_step_pile_nothing_up() -> None:
    model = mlp()
    optimizer = accelerated(model, policy="cpu", device=EmulatedDevice(profile(), capacity=10**7))
    train(model, optimizer, 1)
    for _ in range(400):
        optimizer.zero_grad()
        model(torch.ones(1, 24)).sum().backward()
    assert len(optimizer._accelerator._engine.early.begun) < 2000
    train(model, optimizer, 2)


def test_a_launch_that_fails_at_once_does_not_hang() -> None:
    model = mlp()
    optimizer = accelerated(model, policy="stride:2")
    train(model, optimizer, 2)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("temporaries of the update")

    optimizer._accelerator.device.launch = fail
    with pytest.raises(RuntimeError, match="failed part way"):
        train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="failed part way"):
        train(model, optimizer, 1)


def test_two_optimizers_attached_to_one_model() -> None:
    model, twin = mlp(), mlp()
    ends = []
    for m, make in ((model, accelerated), (twin, lambda _, params: DOSAdam(params))):
        if make is accelerated:
            device = EmulatedDevice(SLOW, capacity=10**7)
            make = lambda _, params, device=device: DOSAdam(params, policy="cpu", device=device)  # noqa: E731
        optimizers = [make(m, m[0].parameters()), make(m, [*m[2].parameters(), *m[3].parameters()])]
        for optimizer in optimizers:
            optimizer.attach(m)
        for step in range(4):
            m(torch.full((2, 24), 1.0 + step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(bits(copy.deepcopy(m).parameters()))
        for optimizer in optimizers:
            optimizer.synchronize()
    assert ends[0] == ends[1]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_forked_child_reads_finished_parameters(in_flight: bool) -> None:
    model, optimizer, expected = attached_after_a_step()
    if not in_flight:
        optimizer.synchronize()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            read = bits(model.state_dict().values()), bits(copy.deepcopy(model).parameters())
            code = 0 if read == (expected, expected) else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child hangs")
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    train(model, optimizer, 1, first_step=3)


@pytest.mark.parametrize("how", ["plain", "atexit", "exception", "thread"])
def test_the_interpreter_ends_with_a_step_in_flight(how: str) -> None:
    """No hang, and what is saved at exit is finished. A thread that trains on is told why it cannot."""
    script = f"""
import atexit, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from tests.dos.step.test_overlap import *
model, optimizer, expected = attached_after_a_step()
def save():
    print("finished" if bits(model.state_dict().values()) == expected else "half")
if {how!r} == "atexit":
    atexit.register(save)
if {how!r} == "thread":
    def train_on():
        threading.main_thread().join()
        train(model, optimizer, 1)
    threading.Thread(target=train_on).start()
if {how!r} == "exception":
    raise SystemExit(3)
"""
    command, environment = [sys.executable, "-c", script], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (3 if how == "exception" else 0), done.stderr
    assert done.stdout == ("finished\n" if how == "atexit" else "")
    assert ("RuntimeError: the main thread has ended" in done.stderr) == (how == "thread")
    assert "failed part way" not in done.stderr
