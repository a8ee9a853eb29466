"""The hooks of `attach(activations=...)`: they go with the forward, however it ends, and with the attachment."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from perfmodel import Op
from tests.support.activations import Net, optimizer_of, saved, transfers
from tests.support.devices import Copying
from tests.support.inside import device_of, offload_of, session_of
from tests.support.training import bits


def leaves(optimizer: DOSAdam) -> bool:
    """Whether anything leaves that is saved now."""
    before = saved(optimizer)
    x = torch.randn(64, 64, requires_grad=True)
    _ = x.exp().exp().sum()
    return saved(optimizer) > before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_takes_its_hooks_off(error: type[BaseException]) -> None:
    model = Net()
    optimizer = optimizer_of(model, 1 << 20)  # by bytes: of a share, what a cut forward begins leaves no more

    def fail(*_: Any) -> None:
        raise error

    handle = model.blocks[2].register_forward_hook(fail)
    with pytest.raises(error):
        model(torch.randn(8, 24))
    handle.remove()
    if error is KeyboardInterrupt:  # torch calls no hooks then; the next forward makes up for it
        assert leaves(optimizer)
        model(torch.randn(8, 24))
    assert not leaves(optimizer)


@pytest.mark.parametrize("within", [False, True])
def test_a_model_outlives_its_optimizer_which_goes_at_once_and_its_hooks_with_the_next_forward(within: bool) -> None:
    model = Net()
    optimizer = optimizer_of(model, 1.0)
    model(torch.randn(8, 24)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()
    device, gone = device_of(optimizer), weakref.ref(session_of(optimizer).assembly.on_device)
    held = [optimizer]
    del optimizer
    if within:
        model.blocks[1].register_forward_hook(lambda *_: held.clear())
        model(torch.randn(8, 24))
    held.clear()
    assert gone() is None
    device.asked.clear()
    model(torch.randn(8, 24)).sum().backward()
    assert not device.asked, "nothing leaves any more"
    left = [n for module in model.modules() for n, v in vars(module).items() if "_dos" in n or ("hooks" in n and v)]
    assert left == (["_forward_hooks"] if within else []), "those of the test"


def test_an_exception_leaves_a_context() -> None:
    optimizer = optimizer_of(Net(), 1.0)
    context = optimizer.offload_activations(1.0)
    with pytest.raises(ZeroDivisionError), context:
        leaves(optimizer) / 0
    assert not leaves(optimizer)


def test_one_context_surrounds_several_forwards() -> None:
    optimizer = optimizer_of(Net(), 1.0)
    context = optimizer.offload_activations(1.0)
    for _ in range(2):
        with context:
            assert leaves(optimizer)
        assert not leaves(optimizer)


def test_attaching_again_takes_the_first_hooks_off() -> None:
    model = Net()
    optimizer = optimizer_of(model, 1.0)
    optimizer.attach(model)
    model(torch.randn(8, 24)).sum().backward()
    assert saved(optimizer) == 0


class Refuses(nn.Sequential):
    def register_state_dict_pre_hook(self, hook: Any) -> Any:
        raise RuntimeError("this model takes no hooks")


def test_a_model_that_cannot_be_attached_leaves_the_first_one_attached() -> None:
    model = Net()
    optimizer = optimizer_of(model, 1.0)
    with pytest.raises(RuntimeError, match="takes no hooks"):
        optimizer.attach(Refuses(model))
    model(torch.randn(8, 24)).sum().backward()
    optimizer.step()
    assert saved(optimizer) > 0
    assert session_of(optimizer).assembly.on_device.attached


def test_what_is_attached_before_its_parameters_are_there_leaves() -> None:
    model = nn.Sequential(nn.LazyLinear(24), nn.Sigmoid(), nn.LazyLinear(24))
    optimizer = DOSAdam(model.parameters(), device=Copying())
    optimizer.attach(model, activations=1.0)
    for _ in range(2):
        model(torch.randn(20_000, 24)).sum().backward()
        optimizer.step()
    assert saved(optimizer) > 0


def test_what_runs_in_another_thread_stays() -> None:
    optimizer = optimizer_of(Net(), 1.0)
    found: list[bool] = []
    with optimizer.offload_activations(1.0):
        thread = threading.Thread(target=lambda: found.append(leaves(optimizer)))
        thread.start()
        thread.join()
    assert found == [False]


def test_backward_may_run_in_another_thread() -> None:
    model = Net()
    optimizer = optimizer_of(model, 1.0)
    loss = model(torch.randn(8, 24, generator=torch.Generator().manual_seed(0))).square().mean()
    assert saved(optimizer) > 0
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    expected = Net()
    expected(torch.randn(8, 24, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    assert bits(p.grad for p in model.parameters()) == bits(p.grad for p in expected.parameters())


def test_copies_and_pickles_of_the_model_offload_nothing() -> None:
    model = nn.Sequential(nn.Linear(24, 64), nn.Sigmoid(), nn.Linear(64, 7))
    optimizer = optimizer_of(model, 1.0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.randn(8, 24)).sum().backward()
    assert saved(optimizer) == 0


@pytest.mark.parametrize("how", ["around", "whole", "within"])
def test_of_a_compiled_model_leaves_what_its_graphs_hand_over(how: str) -> None:
    """Compiled by a backend that needs no compiler."""

    def trained(activations: float | None) -> tuple[list[bytes], int]:
        torch.compiler.reset()
        model: Any = Net(2)
        optimizer = optimizer_of(model)
        if how == "within":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        else:
            model = torch.compile(model, backend="aot_eager")
        if activations is not None and how == "whole":
            optimizer.attach(model, activations=activations)
        elif activations is not None:
            optimizer.attach(model)
            optimizer.offload_activations(activations)
        for step in range(3):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            if how == "whole" or activations is None:
                loss = model(x).square().mean()
            else:
                with optimizer.offload_activations(activations):
                    loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        optimizer.synchronize()
        return bits(model.parameters()), saved(optimizer)

    found, left = trained(1.0)
    assert left > 0
    assert found == trained(None)[0]


class WithBuffer(nn.Module):
    """buffer: without one piece of memory."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.register_buffer("buffer", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x)) @ self.buffer.to_dense()


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_a_model_with_a_buffer_of_any_layout_trains_as_without(layout: str) -> None:
    def trained(activations: float | None) -> list[bytes]:
        torch.default_generator.manual_seed(0)
        model = WithBuffer(getattr(torch.eye(24), layout)())
        optimizer = optimizer_of(model, activations)
        for number in range(2):
            step(model, optimizer, number)
            optimizer.step()
        optimizer.synchronize()
        assert (saved(optimizer) > 0) == (activations is not None)
        return bits(model.parameters())

    assert trained(1.0) == trained(None)


def test_an_ensemble_under_vmap_trains_as_without_and_its_parameters_stay() -> None:
    def trained(activations: float | None) -> tuple[list[bytes], list[int]]:
        torch.default_generator.manual_seed(0)
        models = [nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)) for _ in range(3)]
        parameters, _ = torch.func.stack_module_state(models)
        optimizer = optimizer_of(models[0], activations)
        x = torch.randn(2, 24)
        found = torch.func.vmap(lambda each: torch.func.functional_call(models[0], each, (x,)))(parameters)
        found.square().sum().backward()
        return bits(p.grad for p in parameters.values()), transfers(optimizer)

    found, left = trained(1.0)
    assert found == trained(None)[0]
    assert left
    assert max(left) < 3 * 24 * 24 * 4


def test_a_gradient_of_torch_func_is_refused_and_training_goes_on() -> None:
    model = nn.Sequential(nn.Linear(24, 64), nn.Sigmoid(), nn.Linear(64, 7))
    optimizer = optimizer_of(model, 1.0)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (torch.randn(8, 24),)).square().sum()

    with pytest.raises(RuntimeError, match=r"ran within torch.func.grad, .* use torch.autograd.grad"):
        torch.func.grad(loss)(dict(model.named_parameters()))
    step(model, optimizer, 0)
    optimizer.step()
    assert saved(optimizer) > 0
    assert not leaves(optimizer)


def step(model: nn.Module, optimizer: DOSAdam, number: int) -> Tensor:
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("number", [1, 4, 9])
@pytest.mark.parametrize("op", [Op.SAVE, Op.RESTORE])
def test_ctrl_c_in_forward_or_backward_changes_no_later_bit(
    op: Op, number: int, presses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """number: of the copy at which it comes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    left, copied = [0], Copying.copy

    def copy(device: Copying, of: Op, *rest: Any) -> Any:
        left[0] -= of is op
        for _ in range(presses if of is op and left[0] == 0 else 0):
            signal.raise_signal(signal.SIGINT)
        return copied(device, of, *rest)

    monkeypatch.setattr(Copying, "copy", copy)
    (model, optimizer), (twin, other) = [(net, optimizer_of(net, 1.0)) for net in (Net(2), Net(2))]
    for batch, network, its in ((0, twin, other), (1, twin, other), (0, model, optimizer)):
        step(network, its, batch)
    left[0] = number
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, 1)
    assert left[0] <= 0
    step(model, optimizer, 1)
    assert bits(p.grad for p in model.parameters()) == bits(p.grad for p in twin.parameters())
    assert not leaves(optimizer)
    offload = offload_of(optimizer)
    assert offload.pool.used == 0
