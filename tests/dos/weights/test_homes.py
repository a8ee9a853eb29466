"""Where weights are, who may read them when, and what their memory is."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.devices import Job
from dos.weights.block import Block
from dos.weights.fetching import Fetching
from perfmodel import Op
from tests.support.blocks import RUNS, inputs, loss, net, start, train
from tests.support.crossings import crossed
from tests.support.devices import FaultyDevice, Watched, synchronize_devices
from tests.support.inside import StoppedError, session_of
from tests.support.training import FAST, bits, everything
from tests.support.ways import PartAgain, Stack

pytestmark = pytest.mark.usefixtures("one_core")


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


READERS: dict[str, Callable[[Any], list[Tensor]]] = {
    "parameters": parameters,
    "attribute": lambda model: [block.both.weight.detach().clone() for block in model.blocks],
    "state_dict": lambda model: [t.clone() for t in model.state_dict().values()],
    "deepcopy": lambda model: parameters(copy.deepcopy(model)),
    "pickle": lambda model: parameters(pickle.loads(pickle.dumps(copy.deepcopy(model.blocks)))),
    "average": lambda model: parameters(torch.optim.swa_utils.AveragedModel(model)),
}


class Late(EmulatedDevice):
    """Updates take a while."""

    def host_update(self, numel: int, traffic: int, *state_format: str) -> AbstractContextManager[float]:
        time.sleep(0.003)
        return super().host_update(numel, traffic, *state_format)

    def launch(self, subgroup: int, update: Callable[[], None], *others: Any) -> Job:
        return super().launch(subgroup, lambda: (time.sleep(0.003), update())[1], *others)


@pytest.mark.parametrize(("reader", "policy"), crossed(READERS, ["cpu", "stride:1"]))
def test_weights_read_right_after_a_step_are_those_that_it_makes(reader: str, policy: str) -> None:
    """The update has hardly begun when step() returns."""

    def read(weights: Any) -> list[bytes]:
        model, found = net(), []
        optimizer = start(model, weights, device=Late(FAST, 10**8), policy=policy)
        for step in range(2):
            train(model, optimizer, 1, first=step)
            if weights is None:
                optimizer.synchronize()
            found += READERS[reader](model)
        return bits(found)

    assert read(0) == read(None)


def test_a_copy_of_the_model_is_an_ordinary_one() -> None:
    model = net()
    start(model, 0)
    other = copy.deepcopy(model)
    other.half()
    other.float()
    other(inputs(0, other)).sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    assert type(vars(other.blocks[0].both)["_parameters"]) is dict


MOVES: Sequence[Callable[[nn.Module], object]] = (
    lambda model: model.to(torch.float32),
    lambda model: model.half(),
    lambda model: model.cpu(),
    lambda model: model.to("meta"),
)


@pytest.mark.parametrize("move", MOVES)
def test_a_model_whose_weights_stream_is_not_moved(move: Callable[[nn.Module], object]) -> None:
    model = net()
    optimizer = start(model, 0)
    before = bits(model.parameters())
    with pytest.raises(RuntimeError, match="stream between host and device, so it cannot be moved or converted"):
        move(model)
    assert bits(model.parameters()) == before
    train(model, optimizer, 1)


def test_exchanged_parameters_are_refused() -> None:
    model = net()
    start(model, 0)
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="is another parameter than when its weights began to stream"):
        model(inputs(0, model))


def test_exchanged_parameters_of_a_block_that_is_called_by_itself_are_refused() -> None:
    model = net()
    optimizer = start(model, 0)
    train(model, optimizer, 1)
    block, x = model.blocks[1], torch.zeros(8, 16, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="is another parameter than when its weights began to stream"):
        torch.func.functional_call(block, {name: 2 * p for name, p in block.named_parameters()}, (x,))
    train(model, optimizer, 1)
    block.bias = new = nn.Parameter(torch.ones_like(block.bias))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is another parameter than when its weights began to stream"):
            block(x)
        assert block.bias is new


def test_parameters_that_are_unfrozen_later_are_refused() -> None:
    model = net()
    model.blocks[2].out.requires_grad_(False)
    optimizer = start(model, 0)
    train(model, optimizer, 1)
    model.blocks[2].out.requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires gradients, and did not when its weights began to stream"):
        model(inputs(0, model))
    optimizer.attach(model, weights=0)
    before = model.blocks[2].out.weight.detach().clone()
    train(model, optimizer, 1)
    assert not torch.equal(model.blocks[2].out.weight, before)


def test_two_blocks_are_on_the_device_at_a_time_and_the_next_one_comes_while_one_computes() -> None:
    model, device = net(), Watched()
    optimizer = start(model, 0, device=device)
    train(model, optimizer, 2, micro_batches=1)
    assert device.most == 2
    assert not device.filled
    assert device.fetched == 2 * [0, 1, 2, 3, 4, 5, 3, 2, 1, 0]  # the last two stay for backward
    device.fetched.clear()
    train(model, optimizer, 1, micro_batches=2)
    assert device.fetched == [0, 1, 2, 3, 4, 5, 3, 2, 1, 0, 2, 3, 4, 5, 3, 2, 1, 0]  # and the first two for forward


@pytest.mark.parametrize("weights", [0, 0.5, "auto"])
def test_calls_for_a_block_do_not_grow_with_their_number(weights: Any) -> None:
    few, many = (calls(blocks, weights) / blocks for blocks in (6, 24))
    assert many < 1.1 * few


def calls(blocks: int, weights: Any) -> int:
    """How often a forward and backward call a function of dos/weights, in an iteration after others."""
    model, found = net(blocks=blocks), 0
    optimizer = start(model, weights, profile=FAST, policy="adaptive" if weights == "auto" else "cpu")

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call" and "dos/weights" in frame.f_code.co_filename

    train(model, optimizer, 2, micro_batches=1)
    optimizer.synchronize()
    sys.setprofile(count)
    try:
        loss(model, 2).backward()
    finally:
        sys.setprofile(None)
    return found


def test_what_blocks_take_of_the_device_is_counted_as_they_move() -> None:
    model, other = net(), net()
    optimizer, reference = start(model, 2), start(other, None)
    for step, weights in enumerate((2, 0, 6, 3)):
        if step:
            optimizer.attach(model, weights=weights)
        train(model, optimizer, 1, first=step)
        train(other, reference, 1, first=step)
        stream = session_of(optimizer).assembly.weights.stream
        for _ in range(2):
            there = [block for block in stream.blocks if block.filled]
            assert stream.nbytes == sum(block.nbytes for block in there)
            assert stream._there.streaming == sum(block.streams for block in there)
            loss(model, step).backward()
        optimizer.zero_grad()
        session_of(optimizer).assembly.weights.move(stream.blocks[1], streams=not stream.blocks[1].streams)
        assert not stream.blocks[1].kept, "memory that nobody keeps"
        there = [block for block in stream.blocks if block.filled]
        assert (stream.nbytes, stream._there.streaming) == (
            sum(block.nbytes for block in there),
            sum(block.streams for block in there),
        )
    assert everything(model, optimizer) == everything(other, reference)


@pytest.mark.parametrize("stay", [6, 8])
def test_the_next_block_that_streams_comes_while_one_before_it_computes_whatever_stays_between(stay: int) -> None:
    model, device = net(blocks=12), Watched()
    optimizer = start(model, stay, device=device)
    train(model, optimizer, 2, micro_batches=1)
    optimizer.synchronize()
    begun: list[tuple[int, list[int]]] = []

    def begins(block: int) -> None:
        begun.append((block, list(device.fetched)))

    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: begins(number))
        block.register_forward_hook(
            lambda *found, number=number: found[-1].register_hook(lambda _: begins(number)) and None
        )
    device.fetched.clear()
    train(model, optimizer, 1, first=2, micro_batches=1)
    order = list(device.fetched)
    streams = sorted(set(order))
    n = len(streams)
    assert n == 12 - stay
    assert device.most == stay + 2
    assert order == [*streams, *reversed(streams[:-2])]  # the last two are there yet when backward begins
    for block, fetched in begun[:12]:
        assert fetched == order[: sum(other < block for other in streams) + 2][:n], "forward"
    for block, fetched in begun[12:]:
        # Of two hooks on one tensor, ours, which frees the block after this one, runs last.
        assert fetched[n:] == order[n:][: sum(other > block + 1 for other in streams)], "backward"


@pytest.mark.parametrize(("run", "expected", "back"), [(RUNS[0], [0, 1], 3), (RUNS[1], [0], 5)])
def test_a_block_that_is_updated_while_the_one_before_it_computes_is_fetched_then(
    run: Any, expected: list[int], back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where autograd saves a tensor, and not in backward, which comes to it last."""
    model, device = net(run=run), Watched()
    optimizer = start(model, 0, device=device)
    train(model, optimizer, 2, micro_batches=1)
    optimizer.synchronize()
    updated, at_end, ready = False, list[int](), Fetching._ready

    def ready_once_updated(fetching: Fetching, block: Block, *, wait: bool) -> Sequence[Job] | None:
        return ready(fetching, block, wait=wait) if updated or wait else None

    def update(*_: object) -> None:
        nonlocal updated
        updated = True

    monkeypatch.setattr(Fetching, "_ready", ready_once_updated)
    device.fetched.clear()
    next(model.blocks[0].children()).register_forward_pre_hook(update)
    model.blocks[0].register_forward_hook(lambda *_: at_end.extend(device.fetched))
    loss(model, 3).backward()
    assert at_end[: len(expected)] == expected
    assert device.fetched == [*range(6), *range(back, -1, -1)]


@pytest.mark.parametrize("stay", [0, 4, 5])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_evaluation_leaves_no_copies_of_weights_that_user_code_then_puts_back(stay: int, frozen: bool) -> None:
    """Through references that it has kept, as averages do. With two blocks that stream the first is also the last."""
    model = net(torch.float32)
    model.blocks.requires_grad_(not frozen)
    optimizer = start(model, stay)
    train(model, optimizer, 1)
    kept, plain = list(model.parameters()), net(torch.float32)
    for factor in (1.0, 0.5, 2.0):
        for mine, other in zip(kept, plain.parameters(), strict=True):
            mine.data.mul_(factor)
            other.data.copy_(mine)
        assert loss(model, 7).item() == loss(plain, 7).item()


def test_no_block_is_fetched_in_vain() -> None:
    """Without a graph, each block once; where a forward has no backward, no more than the window has memory.

    Backward waits once for each.
    """
    model, device = net(), Watched()
    optimizer = start(model, 0, device=device)
    train(model, optimizer, 2, micro_batches=1)
    assert 0 < device.joins == len(device.fetched)
    optimizer.synchronize()
    device.fetched.clear()
    with torch.no_grad():
        for seed in range(2):
            loss(model, seed)
            assert not device.filled
    assert device.fetched == 2 * [0, 1, 2, 3, 4, 5]
    kept = [loss(model, seed) for seed in range(3)]
    assert device.most == 2
    del kept


def test_micro_batches_are_forwards_that_made_a_graph() -> None:
    model = net()
    optimizer = start(model, 0)
    for step in range(2):
        with torch.no_grad():
            loss(model, step)
        train(model, optimizer, 1, first=step, micro_batches=2)
    assert session_of(optimizer).assembly.on_device.facts().workload.micro_batches == 2


def test_blocks_are_freed_where_torch_autograd_grad_has_raised() -> None:
    """Of whose end no callback tells. Each block has an input of its own, so that only the end of backward frees it."""
    model, device = net(), Watched()
    optimizer = start(model, 0, device=device)
    train(model, optimizer, 1)

    def fail(*_: object) -> None:
        raise StoppedError

    handle = model.blocks[3].register_full_backward_hook(fail)
    with pytest.raises(StoppedError):
        torch.autograd.grad(loss(model, 0), list(model.parameters()))
    handle.remove()
    for _ in range(2):
        loss(model, 1).backward()
        for block in model.blocks:
            block(torch.ones(8, 16, dtype=torch.bfloat16)).sum().backward()
    assert len(device.filled) <= 2


def test_a_forward_that_goes_on_after_ctrl_c_in_a_block_ends_with_homes() -> None:
    """For KeyboardInterrupt torch calls no hook when a block ends."""
    ends = []
    for weights in (0, None):
        model = net()
        optimizer = start(model, weights)

        def run(block: nn.Module, x: Tensor, model: Any = model) -> Any:
            try:
                return block(x)
            except KeyboardInterrupt:
                return x

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        model.run = run
        handle = model.blocks[2].out.register_forward_pre_hook(interrupt)
        found = loss(model, 0)
        handle.remove()
        assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, 1)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def load_half(model: nn.Module) -> None:
    model.load_state_dict({name: 0.5 * t for name, t in model.state_dict().items()})


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.clamp_(-0.1, 0.1)


def halve_kept(model: Any) -> None:
    """Through references, which no hook sees."""
    synchronize_devices()  # such a write waits for nothing
    for p in model.kept:
        p.data.mul_(0.5)


@pytest.mark.parametrize("handle", [load_half, clamp, halve_kept])
@pytest.mark.parametrize("weights", [0, 3])
def test_user_code_that_handles_ctrl_c_in_a_block_finds_homes(
    weights: int, handle: Callable[[nn.Module], None]
) -> None:
    """What it writes is not lost with copies, as where it goes back to a checkpoint."""
    ends = []
    for each in (weights, None):
        model = net(torch.float32)
        optimizer, model.kept = start(model, each), list(model.parameters())
        train(model, optimizer, 1)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        for method in (model, lambda x, model=model: model.blocks[2](model.blocks[1](x[:, :16]))):
            hook = model.blocks[2].out.register_forward_pre_hook(interrupt)
            optimizer.synchronize()
            with pytest.raises(KeyboardInterrupt):
                method(inputs(0, model))
            hook.remove()
            handle(model)
            if handle is not halve_kept:
                assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}
            train(model, optimizer, 1, first=1)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def test_a_block_that_lists_its_parameters_while_it_runs_has_copies() -> None:
    model, found = net(), list[bool]()
    optimizer = start(model, 0)
    homes = {id(p) for p in model.parameters()}
    model.blocks[2].out.register_forward_hook(
        lambda *_: found.append(homes.isdisjoint(map(id, model.blocks[2].parameters())))
    )
    loss(model, 0).backward()
    optimizer.step()
    assert found == [True]


def test_a_part_that_lists_its_parameters_when_another_threads_backward_recomputes_it_has_copies() -> None:
    """As all parts are recomputed on a GPU, by a thread of autograd's."""
    model, found = Stack(PartAgain), list[bool]()
    optimizer, block = start(model, 0), model.blocks[2]
    homes = {id(p) for p in block.parameters()}
    block.norm.register_forward_hook(lambda *_: found.append(homes.isdisjoint(map(id, block.parameters()))))
    thread = threading.Thread(target=loss(model, 0).backward)
    thread.start()
    thread.join()
    optimizer.step()
    assert found == [True, True]


def test_another_thread_that_lists_parameters_while_a_block_runs_has_the_weights() -> None:
    """As one that saves or logs. The copies lose their memory when the block has run, and to read it is a fault."""
    model, found = net(), list[list[int]]()
    optimizer = start(model, 0)
    train(model, optimizer, 1)
    named = dict(model.named_parameters())

    def look(*_: object) -> None:
        for read in (
            lambda: [*map(id, model.parameters())],
            lambda: [*map(id, model.state_dict(keep_vars=True).values())],
        ):
            thread = threading.Thread(target=lambda read=read: found.append(read()))
            thread.start()
            thread.join()

    model.blocks[2].out.register_forward_hook(look)
    loss(model, 0)
    buffers = {id(each) for each in model.buffers()}
    assert [[key for key in each if key not in buffers] for each in found] == [[*map(id, named.values())]] * 2


def test_frozen_blocks_are_freed_as_others_are() -> None:
    model, device = net(), Watched()
    for block in list(model.blocks)[1:5]:
        block.requires_grad_(False)
    train(model, start(model, 0, device=device), 2)
    assert device.most == 2


def test_device_memory_of_weights_is_counted() -> None:
    """Those that stay all the time, those that stream while they compute."""
    model = net()
    device = EmulatedDevice(FAST, 10**7)
    weights = sum(p.nbytes for p in model.blocks.parameters())
    start(model, 1.0, device=device)
    assert weights <= device.usage().held < 1.5 * weights  # each parameter begins on a multiple of 256 bytes
    model, device = net(), EmulatedDevice(FAST, 10**7)
    optimizer = start(model, 0, device=device)
    assert device.usage().held == 0
    model(inputs(0, model)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    assert device.usage().held == 0


def test_state_gives_way_to_a_block_that_is_needed() -> None:
    """The device denies memory to weights once: state goes home, and nothing else changes."""
    device = FaultyDevice()
    model, other = net(), net()
    optimizer, reference = start(model, 0, device=device, policy=0.5), start(other, None, policy=0.5)
    train(model, optimizer, 2)
    device.fail("refill", 1)
    train(model, optimizer, 1, first=2)
    train(other, reference, 3)
    assert device.hit == "refill"
    assert everything(model, optimizer) == everything(other, reference)


def test_blocks_that_were_fetched_ahead_give_way_before_state_does() -> None:
    model, device, x = net(), FaultyDevice(), torch.ones(8, 16, dtype=torch.bfloat16)
    optimizer = start(model, 0, device=device)
    train(model, optimizer, 1)
    optimizer.synchronize()  # a block whose update runs is not fetched ahead
    blocks = session_of(optimizer).assembly.weights.stream.blocks
    with torch.no_grad():
        model.blocks[0](x)
        assert blocks[1].filled
        device.fail("refill", 1)
        model.blocks[3](x)
    assert device.hit == "refill"
    assert not blocks[1].filled


def test_backward_of_a_graph_from_before_a_step_is_refused() -> None:
    """It would compute with the weights that the step has made. All of them stream."""
    model = net().requires_grad_(False)
    model.blocks.requires_grad_()
    optimizer = start(model, 0)
    found = loss(model, 0)
    train(model, optimizer, 1, first=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


def test_a_fetch_that_is_denied_in_part_leaves_no_weights() -> None:
    model, other, device = net(), net(), FaultyDevice(torch.OutOfMemoryError)
    optimizer, reference = start(model, 0, device=device), start(other, None)
    device.fail(Op.WEIGHTS.value, 2, 4)
    train(model, optimizer, 2)
    train(other, reference, 2)
    assert device.hit == Op.WEIGHTS.value
    assert everything(model, optimizer) == everything(other, reference)


def test_blocks_move_between_steps_as_memory_changes() -> None:
    """With "auto" blocks move home where there is less, and return where there is more; no bit changes."""
    budget = 0
    model, other = net(blocks=12), net(blocks=12)
    weights = sum(p.nbytes for p in model.blocks.parameters())
    slow = FAST.replace(h2d_bandwidth=1e7, h2d_bandwidth_duplex=1e7, d2h_bandwidth=1e7, d2h_bandwidth_duplex=1e7)
    device = EmulatedDevice(slow, 10**8)
    optimizer = start(model, "auto", device=device, policy="adaptive", profile=slow, memory_budget=lambda: budget)
    reference = start(other, None)
    staying = []
    for step in range(15):
        budget = weights // 2 if 5 <= step < 10 else 8 * weights
        train(model, optimizer, 1, first=step)
        train(other, reference, 1, first=step)
        plan = optimizer.plan()
        staying.append(len(plan.blocks_on_device))
        assert session_of(optimizer).assembly.weights.staying() <= plan.blocks_on_device  # or they wait
    assert everything(model, optimizer) == everything(other, reference)
    assert staying[4] > staying[9] < staying[14], staying


def test_blocks_wait_for_memory_that_state_still_has() -> None:
    """Which a plan moves home in this step: they stay from the next one on."""
    model = net()
    optimizer = start(model, "auto")
    train(model, optimizer, 1)
    assembly = session_of(optimizer).assembly
    homes, workload = assembly.weights, assembly.on_device.facts().workload
    optimizer.synchronize()
    assert homes.follow(frozenset(), workload, 0.0)
    assert not homes.staying()
    assert not homes.follow(frozenset((0, 1)), workload, workload.weight_bytes({0}))
    assert homes.staying() == {0}
    train(model, optimizer, 1, first=1)


class Overwriting(EmulatedDevice):
    """Overwrites memory before it is released, as the allocator's next owner would."""

    def empty(self, buffer: Tensor) -> None:
        buffer.zero_()
        super().empty(buffer)


def test_tensors_that_user_code_keeps_of_weights_that_stayed_keep_their_memory() -> None:
    model = net()
    optimizer = start(model, 6, device=Overwriting(FAST, 10**8))
    train(model, optimizer, 2)
    optimizer.synchronize()
    kept = [p.detach() for p in model.blocks[2].parameters()]
    before = bits(kept)
    homes = session_of(optimizer).assembly.weights
    block, block_of = homes.stream.blocks[2], homes.stream.copies.block_of
    left = block.copies[0].detach()
    homes.move(block, streams=True)
    assert block_of(left) is None, "a tensor of another owner may be there"
    assert block_of(block.copies[0]) is block
    assert bits(kept) == before
    assert bits(model.blocks[2].parameters()) == before
    other = net()
    reference = start(other, None)
    train(other, reference, 4)
    train(model, optimizer, 2, first=2)
    assert everything(model, optimizer) == everything(other, reference)


def test_weights_that_were_frozen_later_keep_their_home_where_state_moves_to_disk(tmp_path: Path) -> None:
    model = net()
    optimizer = start(model, 6, disk=tmp_path, host_memory=10**8)
    train(model, optimizer, 2)
    model.blocks[2].requires_grad_(False)
    optimizer.attach(model, weights=0)
    before = bits(model.blocks[2].parameters())
    session = session_of(optimizer)
    for subgroup in session.registry.subgroups_of(model.blocks[2].parameters()):
        session.registry.host_store.drop(subgroup)
    assert bits(model.blocks[2].parameters()) == before


@pytest.mark.parametrize("where", ["before a block", "in a block", "between blocks", "in backward"])
def test_an_exception_leaves_homes_in_place(where: str) -> None:
    model, other = net(), net()
    optimizer, reference = start(model, 0), start(other, None)

    def fail(*_: Any) -> None:
        raise KeyError("for a test")

    for step in range(2):
        if where == "before a block":
            handle = model.blocks[2].register_forward_pre_hook(fail, prepend=True)
        elif where == "in a block":
            handle = model.blocks[2].out.register_forward_hook(fail)
        elif where == "between blocks":
            handle = model.blocks[3].register_forward_hook(fail)
        else:
            handle = model.blocks[3].register_full_backward_hook(fail)
        with pytest.raises(KeyError):
            loss(model, 99).backward()
        handle.remove()
        optimizer.zero_grad()
        assert [id(p) for p in model.parameters()] == [id(p) for g in optimizer.param_groups for p in g["params"]]
        train(model, optimizer, 1, first=step)
        train(other, reference, 1, first=step)
    assert everything(model, optimizer) == everything(other, reference)


@pytest.mark.parametrize("when", ["a fetch", "the end of a block"])
def test_ctrl_c_comes_when_the_hook_has_ended(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost or half exchanged: the forward is tried again."""
    model, other = net(), net()
    optimizer, reference = start(model, 0), start(other, None)
    name = {"a fetch": "fetch", "the end of a block": "use_homes"}[when]
    method = getattr(Block, name)
    ended = []

    def interrupted(self: Block, *args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        found = method(self, *args)
        ended.append(self)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Block, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(inputs(0, model))
    assert ended
    assert [id(p) for p in model.parameters()] == [id(p) for g in optimizer.param_groups for p in g["params"]]
    train(model, optimizer, 2)
    train(other, reference, 2)
    assert everything(model, optimizer) == everything(other, reference)


def test_the_model_outlives_its_optimizer() -> None:
    model = net()
    optimizer = start(model, 0)
    train(model, optimizer, 1)
    optimizer.synchronize()
    before = bits([model(inputs(3, model))])
    session = weakref.ref(session_of(optimizer))
    gc.disable()
    try:
        del optimizer
        assert session() is None
    finally:
        gc.enable()
    with torch.no_grad():
        assert bits([model(inputs(3, model))]) == before
    assert bits([model.eval()(inputs(3, model))]) == before


@pytest.mark.parametrize("deleted", [True, False])
def test_a_cell_that_is_run_again_trains_all_parameters_or_says_so(deleted: bool) -> None:
    """With a new optimizer for the model, which is attached or not."""
    model, other = net(), net()
    optimizer, reference = start(model, 0), start(other, None)
    train(model, optimizer, 1)
    train(other, reference, 1)
    kept = [] if deleted else [optimizer]
    device = EmulatedDevice(FAST, 10**8)
    settings = {"lr": 1e-2, "policy": "cpu", "subgroup_size": 400, "offload_gradients": True}
    optimizer = DOSAdam(model.parameters(), device=device, **settings)
    with pytest.raises(RuntimeError, match=r"deleted or replaced.* call attach\(model, weights=...\) of the new"):
        model(inputs(0, model))
    assert len(kept) == (not deleted)
    optimizer.attach(model, weights=0)
    reference = start(other, None)
    train(model, optimizer, 2, first=1)
    train(other, reference, 2, first=1)
    assert everything(model, optimizer) == everything(other, reference)


def test_model_and_optimizer_go_without_the_garbage_collector() -> None:
    model = net()
    optimizer = start(model, 0)
    train(model, optimizer, 1)
    optimizer.synchronize()
    gone = [weakref.ref(model), weakref.ref(model.blocks[0].both.weight)]
    gc.collect()
    gc.disable()
    try:
        del optimizer, model
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_parameters_are_on_the_host_where_the_optimizer_was_given_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until attach() is called; a forward or step before says so."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model = net()
    optimizer = DOSAdam(model.parameters(), device="cuda", offload_gradients=True)
    other = net()
    other(inputs(0, other))  # of another model
    with pytest.raises(RuntimeError, match=r"Linear ran on the host, and its optimizer was built for an accelerator"):
        model(inputs(0, model))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match=r"on the host, and the optimizer was built with device=cuda; call optim"):
        optimizer.step()
    del optimizer
    model(inputs(0, model))
