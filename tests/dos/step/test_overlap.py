"""Transfers beside backward and forward: the same bits as without, on every loop that people write."""

from __future__ import annotations

import copy
import logging
import pickle
import time
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.step.turns import Turn, Turns
from perfmodel import Op
from tests.support.devices import Copying, UpdatesAfterStep
from tests.support.processes import run_python
from tests.support.races import allowed
from tests.support.training import (
    SLOW,
    Make,
    assert_as_on_host,
    attached_after_a_step,
    backward,
    batch,
    bits,
    mlp,
    profile,
    train,
)

pytestmark = pytest.mark.usefixtures("one_kernel_thread")


def accelerated(model: nn.Module, *, attach: bool = False, **settings: object) -> DOSAdam:
    device = EmulatedDevice(SLOW, capacity=10**7)
    optimizer = DOSAdam(
        model.parameters(), **{"policy": "stride:3", "subgroup_size": 150, "device": device, **settings}
    )
    if attach:
        optimizer.attach(model)
    return optimizer


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("between", ["nothing", "scaled", "clipped", "left alone again"])
def test_gradients_leave_during_backward_once_each(
    between: str, attach: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the optimizer clips or unscales; not after user code has changed them, until it no longer does."""
    model, device = mlp(), Copying(SLOW)
    optimizer = accelerated(model, attach=attach, policy="cpu", device=device)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=between == "scaled")
    if between == "left alone again":
        with caplog.at_level(logging.INFO, logger="dos"):
            train(model, optimizer, 5, before_step=lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        assert sum("clip with max_grad_norm=" in r.message for r in caplog.records) == 1
        sent = [span.start for span in optimizer.timeline().spans if span.op is Op.GRADIENT]
        assert len(sent) == len(optimizer.plan())
        assert min(sent) >= 0, "they are sent with the step"
    train(model, optimizer, 2)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.synchronize()
        device.asked.clear()
        scaler.scale(model(torch.ones(2, 24)).square().mean()).backward()
        if between == "clipped":
            optimizer.clip_grad_norm_(0.05)
        everything = [(Op.GRADIENT, index) for index in range(len(optimizer.plan()))]
        assert sorted((asked[:2] for asked in device.asked), key=lambda asked: asked[1]) == everything
        scaler.step(optimizer)
        scaler.update()
        assert sum(asked.op is Op.GRADIENT for asked in device.asked) == len(everything), "none was sent again"


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


def test_attached_step_returns_early_and_settings_are_those_of_its_call() -> None:
    model, twin = mlp(), mlp()
    device = UpdatesAfterStep(SLOW, capacity=10**7)
    optimizer, plain = accelerated(model, attach=True, policy="cpu", device=device), DOSAdam(twin.parameters())
    train(model, optimizer, 3)
    train(twin, plain, 3)
    optimizer.synchronize()
    model(torch.ones(1, 24)).sum().backward()
    for group in (*optimizer.param_groups, *plain.param_groups):
        group["weight_decay"], group["eps"] = torch.tensor(0.5), torch.tensor(1e-3)
    device.returned.clear()
    optimizer.step()
    for key in ("weight_decay", "eps"):
        optimizer.param_groups[0][key].fill_(2.0)
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


class Replacing(nn.Module):
    """Gives its layer other memory with the same values in each forward, as flatten_parameters() does on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(24, 7)
        self.kept = list(self.layer.parameters())  # as an LSTM has, too

    def forward(self, x: Tensor) -> Tensor:
        with allowed():
            for p in self.kept:
                p.data = p.data.clone()
        return self.layer(x)


def test_memory_that_is_replaced_while_an_update_runs_on_is_refused() -> None:
    models = Replacing(), Replacing()
    plain, optimizer = (accelerated(model, attach=model is models[1]) for model in models)
    for step in range(3):
        for model, each in zip(models, (plain, optimizer), strict=True):
            model(batch(step)).square().mean().backward()
            each.step()
            each.zero_grad()
            each.synchronize()
    assert bits(models[0].parameters()) == bits(models[1].parameters())
    models[1](batch(3)).square().mean().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"of shape \(7, 24\) got other memory after step\(\)"):
        models[1](batch(4))


def test_memory_of_a_module_whose_neighbour_has_waited_is_refused_if_it_was_replaced() -> None:
    """One subgroup has all parameters: the first module waits for their update, the last one finds other memory."""
    model = mlp()
    optimizer = accelerated(model, attach=True, policy="cpu", subgroup_size=10**6)
    kept = list(model.parameters())
    train(model, optimizer, 2)
    optimizer.synchronize()
    backward(model, 2)
    optimizer.step()
    with allowed():
        kept[-1].data = kept[-1].data.clone()
    with pytest.raises(RuntimeError, match=r"of shape \(7, 40\) got other memory after step\(\)"):
        model(batch(3))


def test_values_that_user_code_puts_in_the_place_of_an_update_are_trained_on() -> None:
    """Also where it did not wait for the update: `p.data = ...` is a write of user code's, at any time."""
    ends = []
    for waits in (True, False):
        model = mlp()
        optimizer = accelerated(model, attach=True, policy="cpu")
        kept = list(model.parameters())  # through the model it would wait
        train(model, optimizer, 3)
        if waits:
            optimizer.synchronize()
        with allowed():
            for p in kept:
                p.data = torch.full_like(p, 0.01)
        optimizer.synchronize()
        train(model, optimizer, 2)
        optimizer.synchronize()
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]


def test_a_step_waits_for_no_update_of_attention() -> None:
    """Its projection never runs, for torch's attention reads the weights."""
    layers = [nn.TransformerEncoderLayer(24, 2, 40, 0.0) for _ in range(2)]
    model, device = nn.Sequential(*layers), UpdatesAfterStep(SLOW, capacity=10**7)
    optimizer = accelerated(model, attach=True, policy="cpu", device=device)
    train(model, optimizer, 1)
    backward(model, 1)
    device.returned.clear()
    optimizer.step()
    device.returned.set()
    optimizer.synchronize()


class Reading(nn.Module):
    """Reads the weight of the module that it has last, which therefore never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.read = (nn.Linear(*size, bias=False) for size in ((24, 40), (40, 7), (7, 9)))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.second(self.first(x)), self.read.weight)


def test_an_attached_model_is_updated_in_the_order_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all has arrived, behind that for which step() itself waits, because no module does.

    Else a forward would begin after all updates.
    """
    take = Turns.take

    def take_of_all(turns: Turns) -> tuple[int, Turn] | None:
        while not turns.whole:
            time.sleep(1e-3)
        for turn in turns._given:
            for job in turn.ready:
                job.wait()
        return take(turns)

    monkeypatch.setattr(Turns, "take", take_of_all)
    model, device = Reading(), Copying()
    groups = [{"params": list(module.parameters())} for module in (model.second, model.first, model.read)]
    optimizer = DOSAdam(groups, policy="cpu", device=device)
    optimizer.attach(model)
    train(model, optimizer, 2)
    optimizer.synchronize()
    sent = [asked.nbytes for asked in device.asked if asked.op is Op.PARAMETER]
    assert sent == [module.weight.nbytes for module in (model.read, model.first, model.second)] * 2


READS: dict[str, Callable[[nn.Sequential, DOSAdam], Iterable[Tensor]]] = {
    "state_dict": lambda m, o: m.state_dict().values(),
    "state_dict of a part": lambda m, o: m[0].state_dict().values(),
    "deepcopy": lambda m, o: copy.deepcopy(m).parameters(),
    "deepcopy of a part": lambda m, o: copy.deepcopy(m[0]).parameters(),
    "pickle": lambda m, o: pickle.loads(pickle.dumps(m)).parameters(),
    "deepcopy of both": lambda m, o: copy.deepcopy((m, o))[0].parameters(),
    "synchronize": lambda m, o: (o.synchronize(), m.parameters())[1],
    "optimizer.state_dict": lambda m, o: (o.state_dict(), m.parameters())[1],
    "optimizer.state.values": lambda m, o: (o.state.values(), m.parameters())[1],
    "evaluation": lambda m, o: (m.eval()(torch.ones(1, 24)), m.parameters())[1],
    "attaching a part": lambda m, o: (o.attach(m[3]), m.parameters())[1],
}


@pytest.mark.parametrize("how", READS)
def test_everything_that_reads_parameters_waits(how: str) -> None:
    model, optimizer, expected = attached_after_a_step()
    got = bits(READS[how](model, optimizer))
    assert got == expected[: len(got)]


def test_a_copy_of_an_attached_model_is_free_of_hooks_that_wait() -> None:
    model, optimizer, _ = attached_after_a_step()
    twin = copy.deepcopy(model)
    del optimizer
    plain = DOSAdam(twin.parameters())
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
    assert train(called, optimizer, 5) == train(twin, DOSAdam(twin.parameters()), 5)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits(twin.parameters())


def test_an_attached_optimizer_of_host_parameters_sees_edits_and_disturbs_no_graph() -> None:
    model, twin = mlp(torch.bfloat16), mlp(torch.bfloat16)
    optimizer, plain = DOSAdam(model.parameters()), DOSAdam(twin.parameters())
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


def test_backwards_without_a_step_pile_nothing_up() -> None:
    model, device = mlp(), Copying()
    optimizer = accelerated(model, policy="cpu", device=device)
    train(model, optimizer, 1)
    for _ in range(400):
        optimizer.zero_grad()
        model(torch.ones(1, 24)).sum().backward()
    assert len(device.asked) > 4000
    assert len(device.jobs) < 2000
    train(model, optimizer, 2)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_new_gradients_wait_for_the_step_that_reads_the_last_ones(offload: bool, by_hand: bool) -> None:
    """No forward comes in between, whose modules would wait."""

    def run(make: Make) -> Iterable[Tensor]:
        layer = mlp()[0]
        optimizer = make(layer.parameters())
        optimizer.attach(layer)
        for step in range(3):
            loss = layer(batch(step)).square().mean()
            for factor in (1.0, -3.0):
                optimizer.zero_grad()
                if by_hand:
                    for p in layer.parameters():
                        p.grad = torch.full_like(p, factor)
                    optimizer.clip_grad_norm_(1.0)
                else:
                    (factor * loss).backward(retain_graph=True)
                optimizer.step()
        optimizer.synchronize()
        return layer.parameters()

    assert_as_on_host(run, "cpu", machine=profile(cpu_update_rate=5e4), offload_gradients=offload)


def test_backward_of_a_graph_from_before_an_attached_step_is_refused_as_with_adamw() -> None:
    model = mlp()
    optimizer = accelerated(model, attach=True, policy="cpu")
    train(model, optimizer, 2)
    inputs = batch(0).requires_grad_()
    before = model(inputs).sum()
    backward(model, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(before, inputs)


def test_scripting_an_attached_model_says_how() -> None:
    model = mlp()
    optimizer = accelerated(model, policy="cpu")
    scripted = torch.jit.script(model)
    optimizer.attach(model)
    for asked in (model, copy.deepcopy(model)):
        with pytest.raises(AttributeError, match=r"script the model before attach\(\)"):
            torch.jit.script(asked)
    train(model, optimizer, 2)
    optimizer.synchronize()
    inputs = torch.randn(2, 24)
    assert torch.equal(scripted(inputs), model(inputs)), "they share their parameters"


@pytest.mark.parametrize(("reason", "said"), [("no room", "no room"), ("", "OutOfMemoryError")])
def test_a_launch_that_fails_at_once_does_not_hang(reason: str, said: str) -> None:
    model = mlp()
    device = EmulatedDevice(SLOW, capacity=10**7)
    optimizer = accelerated(model, policy="stride:2", device=device)
    train(model, optimizer, 2)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError(reason)

    device.launch = fail
    with pytest.raises(RuntimeError, match=rf"failed part way \({said}\)"):
        train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="failed part way"):
        train(model, optimizer, 1)


@pytest.mark.parametrize("shared", [False, True])
def test_two_optimizers_attached_to_one_model(shared: bool) -> None:
    def run(make: Make) -> list[Tensor]:
        model = mlp()
        optimizers = [make(model[0].parameters()), make(model[0 if shared else 2 :].parameters())]
        for optimizer in optimizers:
            optimizer.attach(model)
        for step in range(4):
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        read = copy.deepcopy(model)
        for optimizer in optimizers:
            optimizer.synchronize()
        return list(read.parameters())

    assert_as_on_host(run, "cpu", machine=SLOW)


ENDS = """
import sys, threading
from perfmodel import Op
from tests.support.devices import LateDevice
from tests.support.training import attached_after_a_step, bits, train
late = LateDevice(lambda op: 20e-3 * (op is Op.PARAMETER))  # the interpreter ends before the step would by itself
model, optimizer, expected = attached_after_a_step(device=late)
# Called after the library's and before that of executors, whose threads end what they have by themselves.
threading._threading_atexits.insert(1, lambda: print(bits(model.parameters()) == expected))
def train_on():
    threading.main_thread().join()
    train(model, optimizer, 1)
if sys.argv[1] == "thread":
    threading.Thread(target=train_on).start()
if sys.argv[1] == "exception":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["plain", "exception", "thread"])
def test_the_interpreter_ends_with_a_step_in_flight(how: str) -> None:
    """No hang, and it ends before its threads do. A thread that trains on is told why it cannot."""
    done = run_python("-c", ENDS, how, good=False)
    assert done.returncode == (3 if how == "exception" else 0), done.stderr
    assert done.stdout == "True\n"
    assert ("RuntimeError: the main thread has ended" in done.stderr) == (how == "thread")
    assert "failed part way" not in done.stderr
