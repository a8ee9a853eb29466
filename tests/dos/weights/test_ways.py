"""Ways to reach a weight that streams, each with the bits of a model that stays, or refused at its first use."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from dos.weights import inputs as inputs_of_backward
from tests.support.blocks import RUNS, HomesTouched, inputs, loss, net, recomputed, start, train, whole
from tests.support.devices import FaultyDevice
from tests.support.training import bits, everything
from tests.support.ways import WAYS, Around, Keeps, Merged, Output, PartAgain, Parts, Stack

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.filterwarnings("ignore:None of the inputs")]


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "run"), WAYS)
def test_a_weight_is_on_the_device_however_it_is_reached(kind: Callable[[], nn.Module], run: Any, turn: int) -> None:
    """No operation in a block reads its home, which on an emulated device would give the right bits.

    Blocks stream; and some stay, all stay, or the plan says, attached again after each step. turn: which of these.
    """

    def end(weights: Any, again: Any = None) -> list[bytes]:
        model = Stack(kind, run)
        optimizer, touched = start(model, weights), HomesTouched(model)
        for step in range(2):
            with touched:
                found = loss(model, step)
            with touched.backward():
                found.backward()
            optimizer.step()
            optimizer.zero_grad()
            if again is not None:
                optimizer.attach(model, weights=again)
        assert weights != 0 or again is not None or not touched.found
        return everything(model, optimizer)

    again = WAYS.index((kind, run)) % 2 == turn
    assert end(0) == end(None) == (end(1, again=0) if again else end("auto", again=1.0))


def test_a_hook_of_backward_that_lists_parameters_has_homes() -> None:
    """Though a part was recomputed, for which the block's modules have copies."""
    model, found = Stack(PartAgain), list[int]()
    optimizer, block = start(model, 0), model.blocks[2]
    homes = [id(p) for p in block.parameters()]
    block.one.register_full_backward_hook(lambda *_: found.extend(id(p) for p in block.parameters()))
    loss(model, 0).backward()
    assert found == homes
    optimizer.step()


class Aside(PartAgain):
    """The loss uses what it computes, and returns nothing of: no hook on its output tells that backward comes to it."""

    def forward(self, x: Tensor) -> Tensor:
        self.aside = super().forward(x)
        return x.detach().requires_grad_()


@pytest.mark.parametrize("weights", [0, 2])
def test_a_part_that_is_recomputed_of_a_block_that_has_returned_nothing_of_it(weights: int) -> None:
    def end(weights: Any) -> list[bytes]:
        model = Stack(Aside)
        optimizer = start(model, weights)
        for step in range(2):
            loss(model, step)
            model.blocks[0].aside.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    assert end(weights) == end(None)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [Keeps, PartAgain])
def test_a_model_that_is_checkpointed_whole(kind: Callable[[], nn.Module], use_reentrant: bool) -> None:
    """What its forward in backward has fetched is still needed when that ends."""

    def end(weights: Any) -> list[bytes]:
        model = Stack(kind)
        optimizer = start(model, weights)
        for step in range(2):
            x = inputs(step, model).requires_grad_()
            checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    assert end(0) == end(2) == end(None)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("weights", [0, 2])
def test_inputs_that_require_grad(run: Any, weights: int) -> None:
    """The first block's input is a leaf, whose gradient is there before all nodes of the block have run."""

    def end(weights: Any) -> list[bytes]:
        model = Stack(Merged, run)
        model.first = nn.Identity()
        optimizer = start(model, weights)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*everything(model, optimizer), *bits([x.grad])]

    assert end(weights) == end(None)


def through_inputs(model: nn.Module, found: Tensor) -> None:
    found.backward(inputs=list(model.parameters()))


def through_some_inputs(model: nn.Module, found: Tensor) -> None:
    found.backward(inputs=list(model.parameters())[3:9])


def through_edges(model: nn.Module, found: Tensor) -> list[Tensor]:
    edges = [torch.autograd.graph.get_gradient_edge(p) for p in model.parameters()]
    return [*torch.autograd.grad(found, edges)]


def through_grad(model: nn.Module, found: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(found, list(model.parameters()))]


@pytest.mark.parametrize("weights", [0, 2])
@pytest.mark.parametrize("way", [through_inputs, through_some_inputs, through_grad, through_edges])
def test_backward_of_chosen_parameters(way: Callable[..., list[Tensor] | None], weights: int) -> None:
    def end(weights: Any) -> list[bytes]:
        model = Stack(Parts)
        optimizer = start(model, weights)
        found: list[Tensor] = []
        for step in range(2):
            found += way(model, loss(model, step)) or []
            if not found:
                optimizer.step()
                optimizer.zero_grad()
        return [*bits(found), *everything(model, optimizer)]

    assert end(weights) == end(None)


def test_parameters_that_a_loss_does_not_use() -> None:
    model = Stack(Parts)
    optimizer = start(model, 0)
    parameters = list(model.parameters())
    unused = nn.Parameter(torch.ones(()))
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(loss(model, 0), [*parameters, unused])
    found = torch.autograd.grad(loss(model, 0), [*parameters, unused], allow_unused=True)
    assert [g is None for g in found] == [*(False for _ in parameters), True]
    assert not optimizer.state


@pytest.mark.parametrize("chosen", [(), (object(),)])
def test_backward_of_all_or_of_what_does_not_stream_is_torchs_own(
    chosen: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not even look for copies if none are asked for."""
    patches, called, asked = list[Any](), list[Any](), list[Any]()
    monkeypatch.setattr(inputs_of_backward, "replace_run_backward", patches.append)
    inputs_of_backward.serve_inputs(lambda parameters: asked.append(parameters) or {})
    arguments = ["outputs"], None, False, False, chosen, False
    patches[0](lambda *found, **options: called.append((found, options)), *arguments, accumulate_grad=False)
    assert called == [(arguments, {"accumulate_grad": False})]
    assert asked == [chosen] * len(chosen)


def penalty(model: nn.Module) -> None:
    x = inputs(0, model).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (slope.square().sum() + model(x).sum()).backward()


@pytest.mark.parametrize("run", [whole, recomputed])
def test_double_backward_is_for_blocks_that_stay(run: Any) -> None:
    model, other = Stack(Parts, run), Stack(Parts, run)
    optimizer, reference = start(model, 0), start(other, None)
    with pytest.raises(RuntimeError, match="create_graph=True reached a block whose weights stream"):
        penalty(model)
    optimizer.zero_grad()
    optimizer.attach(model, weights=1.0)
    for each, its in ((model, optimizer), (other, reference)):
        penalty(each)
        its.step()
    assert everything(model, optimizer) == everything(other, reference)


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight.t()


class ReturnsInside(Returns):
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        found, weight = super().forward(x)
        return found, Output(weight.detach())  # which torch does not know


@pytest.mark.parametrize("kind", [Returns, ReturnsInside])
def test_a_block_that_returns_its_parameter(kind: type[nn.Module]) -> None:
    def first(block: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = block(x)[0]
        return found

    model, other = Stack(kind, first), Stack(kind, first)
    optimizer, reference = start(model, 0), start(other, None)
    with pytest.raises(RuntimeError, match=f"{kind.__name__}, returned one of its own parameters or a view of it"):
        loss(model, 0)
    optimizer.attach(model, weights=1.0)
    train(model, optimizer, 1)
    train(other, reference, 1)
    assert everything(model, optimizer) == everything(other, reference)


@pytest.mark.parametrize("weights", [0, 1.0])
def test_backward_of_a_forward_from_before_attach(weights: float) -> None:
    model = Stack(Parts)
    optimizer = start(model, weights)
    found = loss(model, 0)
    optimizer.attach(model, weights=weights)
    with pytest.raises(RuntimeError, match="a model that was attached again after this forward"):
        found.backward()
    optimizer.zero_grad()
    train(model, optimizer, 1)


def test_backward_of_a_model_that_was_deleted() -> None:
    """Of a block that ran by itself, so that no hook on saved tensors refers to what fetches its weights."""
    found = []
    for weights in (0, None):
        model = Stack(Keeps)
        optimizer = start(model, weights)
        x = torch.ones(3, 16, requires_grad=True)
        y = model.blocks[0](x).sum()
        del model, optimizer
        y.backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_block_that_is_compiled_later() -> None:
    model = Stack(Parts)
    start(model, 0)
    model.blocks[0].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"was compiled after attach\(\)"):
        loss(model, 0)


def test_blocks_whose_backward_is_compiled_too() -> None:
    """What runs as autograd saves a tensor is not compiled with the block."""

    def compiled() -> nn.Module:
        block = Merged()
        block.compile(backend="aot_eager")
        return block

    ends = []
    for weights in (0, 2, None):
        model = Stack(compiled)
        optimizer = start(model, weights)
        train(model, optimizer, 1)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1] == ends[2]


def test_functional_transforms_that_take_no_hooks() -> None:
    model = net(torch.float32)
    optimizer = start(model, 0)
    with pytest.raises(
        RuntimeError, match=r"ran within torch.func.grad, vjp, jacrev or hessian, which do not support the hooks"
    ):
        torch.func.jacrev(lambda x: model(x).sum(0))(inputs(0, model))
    with pytest.raises(RuntimeError, match=r"ran within torch.func.grad, vjp, jacrev or hessian"):
        torch.func.grad(lambda x: model.blocks[0](x).sum())(torch.ones(3, 16))
    train(model, optimizer, 1)


class Traces:
    """Ways in which torch traces a model, or compiles it with what is around its blocks."""

    @staticmethod
    def make_fx(model: nn.Module, x: Tensor) -> None:
        make_fx(model)(x)

    @staticmethod
    def functionalize(model: nn.Module, x: Tensor) -> None:
        torch.func.functionalize(model)(x)

    @staticmethod
    def jit(model: nn.Module, x: Tensor) -> None:
        torch.jit.trace(model, x, check_trace=False)

    @staticmethod
    def fake_block(model: Any, x: Tensor) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.blocks[0](model.first(x))

    @staticmethod
    def compile(model: nn.Module, x: Tensor) -> None:
        torch.compile(model, backend="eager")(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", [each for name, each in vars(Traces).items() if isinstance(each, staticmethod)])
def test_a_model_that_is_traced(way: Any) -> None:
    model, other = Stack(Parts), Stack(Parts)
    optimizer, reference = start(model, 2), start(other, None)
    with pytest.raises(RuntimeError, match=r"traced or compiled it as a whole .* trace copy\.deepcopy\(model\)"):
        way(model, inputs(0, model))
    train(model, optimizer, 1)
    train(other, reference, 1)
    assert everything(model, optimizer) == everything(other, reference)


def test_a_model_whose_blocks_all_stay_is_compiled() -> None:
    model = Stack(Parts)
    optimizer = start(model, 4)
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"traced or compiled it as a whole .* trace copy\.deepcopy\(model\)"):
        Traces.compile(model, inputs(0, model))
    train(model, optimizer, 1)


def test_functional_call_with_other_tensors() -> None:
    model = Stack(Parts)
    optimizer = start(model, 2)
    for block in (0, 1):  # one that streams, and one that stays
        name = f"blocks.{block}.one.weight"
        with pytest.raises(RuntimeError, match=r"give functional_call\(\) and torch\.export a copy\.deepcopy"):
            torch.func.functional_call(model, {name: torch.zeros(16, 16)}, (inputs(0, model),))
    train(model, optimizer, 1)


@pytest.mark.parametrize("weights", [0, 2])
def test_blocks_that_are_frozen_after_attach_have_no_graph(weights: int) -> None:
    model = Stack(Parts)
    optimizer = start(model, weights)
    train(model, optimizer, 1)
    model.requires_grad_(False)
    assert not loss(model, 1).requires_grad
    model.blocks[1].requires_grad_()
    found = loss(model, 1)
    assert found.requires_grad
    found.backward()
    optimizer.step()


@pytest.mark.parametrize("weights", [0, 2])
def test_blocks_that_are_frozen_between_forward_and_backward(weights: int) -> None:
    """Autograd drops their gradients."""

    def end(weights: Any) -> list[bytes]:
        model = Stack(Parts)
        optimizer = start(model, weights)
        for step in range(3):
            found = loss(model, step)
            model.blocks[:2].requires_grad_(step != 1)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.blocks.requires_grad_()
        return everything(model, optimizer)

    assert end(weights) == end(None)


def test_a_model_is_saved_whole() -> None:
    model = Stack(Parts)
    optimizer = start(model, 0)
    train(model, optimizer, 1)
    file = io.BytesIO()
    torch.save(model.blocks, file)
    torch.save({"model": model.blocks}, io.BytesIO())
    saved = [torch.load(io.BytesIO(file.getvalue()), weights_only=False), pickle.loads(pickle.dumps(model.blocks))]
    model.run = None  # a function of this module's, by reference
    saved += [pickle.loads(pickle.dumps(model)).blocks]
    for each in saved:
        again = copy.deepcopy(pickle.loads(pickle.dumps(each.float())))
        assert bits(again.parameters()) == bits(model.blocks.parameters())
        again.half()


class Pairs(Stack):
    """Two blocks in one checkpoint wait for each other, and no hook sees what was recomputed."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in (0, 2):
            x = checkpoint(nn.Sequential(self.blocks[i], self.blocks[i + 1]), x, use_reentrant=self.reentrant)
        found: Tensor = self.last(x)
        return found


def read_all(model: Any, device: FaultyDevice) -> None:
    """In backward, of all blocks."""
    for block in model.blocks:
        block.norm.register_full_backward_hook(lambda *_: [each.one.weight.sum() for each in model.blocks] and None)


def synchronize(model: Any, device: FaultyDevice) -> None:
    """While a block runs."""
    for block in model.blocks:
        block.norm.register_forward_hook(lambda *_: model.optimizer().synchronize())


def deny(*numbers: int) -> Callable[..., None]:
    return lambda model, device: device.fail("refill", *numbers)


@pytest.mark.parametrize(
    ("disturb", "reentrant"), [(read_all, False), (synchronize, False), (deny(5, 6), False), (deny(7, 9), True)]
)
def test_a_block_that_is_used_is_kept(disturb: Callable[..., None], reentrant: bool) -> None:
    """Where user code reads homes, or waits, and where the device denies memory for another block."""
    model, other, device = Pairs(Parts), Pairs(Parts), FaultyDevice(torch.OutOfMemoryError)
    model.reentrant = other.reentrant = reentrant
    optimizer, reference = start(model, 0, device=device), start(other, None)
    model.optimizer = weakref.ref(optimizer)
    disturb(model, device)
    for each, its in ((model, optimizer), (other, reference)):
        train(each, its, 1, micro_batches=1)
    assert everything(model, optimizer) == everything(other, reference)


def test_a_backward_within_another_releases_no_block_of_that() -> None:
    def end(weights: Any) -> list[bytes]:
        model = Stack(PartAgain)
        model.blocks = nn.ModuleList(each for block in model.blocks[2:] for each in (block, Around(block)))
        outer = model.blocks[1::2]
        optimizer = start(model, None)
        if weights is not None:
            optimizer.attach(model, weights=weights, blocks=list(model.blocks))
        for step in range(2):
            x = model.first(inputs(step, model))
            for block in outer:
                x = block(x)
            model.last(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    assert end(0) == end(None)
