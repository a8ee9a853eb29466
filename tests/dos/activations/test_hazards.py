"""Saved tensors where streams run late, or in any order, and memory is given away when it is freed."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.activations.offload import ActivationOffload
from dos.activations.saved import Saved
from dos.devices import Copy, Job
from perfmodel import Op
from tests.support.fake_cuda import FakeCudaDevice, FakeStream, Runtime, install
from tests.support.inside import offload_of

N = 512
LAYERS = 12
SEEDS = [None, *range(8)]


class Pages(np.ndarray):
    """An array that can be referenced weakly."""


class Reusing(FakeCudaDevice):
    """What is let go of is given to what comes next in the stream that allocated it, as by the caching allocator."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.kept: dict[int, list[FakeStream]] = defaultdict(list)
        self.arrays: dict[int, Any] = {}
        self.left: set[int] = set()
        self.free_arrays: dict[tuple[FakeStream, int], list[Any]] = defaultdict(list)

    def _empty(self, nbytes: int) -> Tensor:
        owner: Any = self.runtime.current_stream()
        free = self.free_arrays[owner, nbytes]
        whole = free.pop() if free else np.empty(nbytes, np.uint8)
        owner.enqueue(lambda: whole.fill(0xFF))  # what the stream did there before
        pages = whole.view(Pages)
        self.arrays[whole.ctypes.data] = whole
        weakref.finalize(pages, self._reuse, whole, owner)
        return torch.from_numpy(pages)

    def _reuse(self, whole: Any, owner: FakeStream) -> None:
        if any(stream is not owner for stream in self.kept.pop(whole.ctypes.data, ())):
            return  # the allocator waits until they have come to it, and here for good
        owner.enqueue(lambda: whole.fill(0xFF))
        self.free_arrays[owner, len(whole)].append(whole)

    def keep(self, buffer: Tensor, op: Op | None = None) -> None:
        stream: Any = self.runtime.current_stream() if op is None else self._streams[op]
        self.kept[buffer.untyped_storage().data_ptr()].append(stream)

    def raw(self, tensor: Tensor) -> Tensor:
        """The tensor as work that is queued knows it: by its address, which keeps no memory."""
        address = tensor.untyped_storage().data_ptr()
        memory = torch.from_numpy(self.arrays[address])
        first = tensor.data_ptr() - address
        return memory[first : first + tensor.nbytes].view(tensor.dtype)

    def copy(self, op: Op, subgroup: int, copies: Sequence[Copy], after: Sequence[Job] = ()) -> Job:
        assert op in (Op.SAVE, Op.RESTORE)
        to_host = op is Op.SAVE
        self.left.update(source.untyped_storage().data_ptr() for _, source in copies if to_host)
        copies = [(d, self.raw(s)) if to_host else (self.raw(d), s) for d, s in copies]
        return super().copy(op, subgroup, copies, after)

    def new(self, work: Callable[[], Tensor], *reads: Tensor) -> Tensor:
        """A tensor that is computed once the caller's stream comes to it. reads: what is there until it is queued."""
        found = self._empty(4 * N).view(torch.float32)
        made = self.raw(found)

        def run() -> None:
            with torch.no_grad():
                made.copy_(work())

        self.runtime.current_stream().enqueue(run)
        return found


class Layer(torch.autograd.Function):
    """tanh(3 x), from its input and output in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Reusing) -> Tensor:
        given = device.raw(x)
        out = device.new(lambda: torch.tanh(3 * given))
        ctx.device = device
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        saved = ctx.saved_tensors  # there until the work is queued
        x, out = map(ctx.device.raw, saved)
        gradient = ctx.device.raw(gradients[0])
        return ctx.device.new(lambda: gradient * (1 - out * out) * 3 + 0 * x, *saved), None


def expected() -> Tensor:
    slope, outs = torch.ones(N), [torch.linspace(-1, 1, N)]
    for _ in range(LAYERS):
        outs.append(torch.tanh(3 * outs[-1]))
    for out in reversed(outs[1:]):
        slope = slope * (1 - out * out) * 3
    return slope


def start(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> tuple[Runtime, Reusing, DOSAdam, ActivationOffload]:
    runtime = install(monkeypatch, seed)
    runtime.caller = FakeStream(runtime)  # which is late, too
    device = Reusing(runtime)
    optimizer = DOSAdam(nn.Linear(2, 2).parameters(), device=device, policy="cpu")
    optimizer.offload_activations(100 * N * 4)
    offload = offload_of(optimizer)
    offload.least_bytes = 64
    return runtime, device, optimizer, offload


def forward(device: Reusing, optimizer: DOSAdam) -> tuple[Tensor, Tensor]:
    with optimizer.offload_activations(1.0):
        return layers(device)


def layers(device: Reusing) -> tuple[Tensor, Tensor]:
    values = torch.linspace(-1, 1, N)
    x = y = device.new(lambda: values).requires_grad_()
    for _ in range(LAYERS):
        y = Layer.apply(y, device)
    return x, y


def ones(device: Reusing) -> Tensor:
    return device.new(lambda: torch.ones(N))


def read(runtime: Runtime, tensor: Tensor, stream: Any = None) -> Tensor:
    runtime.complete((stream or runtime.current_stream()).record())
    return tensor.detach().clone()


@pytest.mark.parametrize("layers_each", [1, LAYERS // 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_streams_of_forward_may_change(seed: int | None, layers_each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has saved is let go of in another."""
    runtime, device, optimizer, _ = start(monkeypatch, seed)
    streams = [runtime.caller, FakeStream(runtime), FakeStream(runtime)]
    values = torch.linspace(-1, 1, N)
    x = device.new(lambda: values).requires_grad_()
    with optimizer.offload_activations(1.0):
        y = x
        for number in range(LAYERS):
            before, now = (streams[n // layers_each % 3] for n in (number, number + 1))
            now.wait_record(before.record())
            runtime.use(now)
            y = Layer.apply(y, device)
    runtime.caller.wait_record(runtime.current_stream().record())
    runtime.use(runtime.caller)
    (slope,) = torch.autograd.grad(y, x, ones(device))
    assert torch.equal(read(runtime, slope), expected())


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_brought_back_for_nothing_is_not_given_away_before_it_has_come(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes at the entry to `__del__`, of which Python says that it was ignored."""
    runtime, device, optimizer, offload = start(monkeypatch, seed)
    x, y = forward(device, optimizer)
    offload.follow_plan(None)  # the pool has its size
    monkeypatch.setattr(Saved, "__del__", lambda saved: None)
    y.grad_fn.next_functions[0][0].register_prehook(stop)
    with pytest.raises(ValueError, match="stop"):
        torch.autograd.grad(y, x, ones(device))
    others = []
    del x, y
    offload.follow_plan(None)
    for number in range(20):  # which get the memory that the failed backward had
        others.append((device.new(lambda number=number: torch.full((N,), float(number))), number))
    assert all(torch.equal(read(runtime, other), torch.full((N,), float(number))) for other, number in others)


def stop(*_: Any) -> None:
    raise ValueError("stop")


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_stays_until_the_copy_out_of_it_has_ended(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device, optimizer, _ = start(monkeypatch, seed)
    x, y = forward(device, optimizer)
    first = forward(device, optimizer)
    del first  # its copies may run still, and its blocks are used again
    x2, y2 = forward(device, optimizer)
    for given, found in ((x2, y2), (x, y)):
        (slope,) = torch.autograd.grad(found, given, ones(device))
        assert torch.equal(read(runtime, slope), expected())
    assert runtime.waits < 10, "the host waits for the device only to read"


@pytest.mark.parametrize("seed", SEEDS)
def test_another_stream_may_read_still_what_has_left(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device, optimizer, _ = start(monkeypatch, seed)
    side = FakeStream(runtime)
    values = torch.linspace(-1, 1, N)
    x = device.new(lambda: values).requires_grad_()
    with optimizer.offload_activations(1.0):
        first = y = Layer.apply(x, device)
        for _ in range(LAYERS):  # with which the first has left
            y = Layer.apply(y, device)
        side.wait_record(runtime.caller.record())
        with runtime.stream(side):
            beside = Layer.apply(first, device)
        del first  # autograd holds it, for all that its user knows
        for _ in range(LAYERS):
            y = Layer.apply(y, device)
    read(runtime, y)
    with runtime.stream(side):
        assert torch.equal(read(runtime, beside), torch.tanh(3 * torch.tanh(3 * values)))


def test_what_was_saved_before_a_capture_does_not_leave_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device, optimizer, offload = start(monkeypatch, None)
    with optimizer.offload_activations(1.0):
        _, y = layers(device)
        before = offload.pool.used
        runtime.capturing = True
        _ = Layer.apply(y.detach().requires_grad_(), device)
        assert offload.pool.used == before
        runtime.capturing = False
        _ = Layer.apply(y.detach().requires_grad_(), device)
        assert offload.pool.used > before


@pytest.mark.parametrize("within", [False, True])
def test_nothing_leaves_while_a_graph_is_captured(within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device, optimizer, offload = start(monkeypatch, None)
    with optimizer.offload_activations(1.0) if within else contextlib.nullcontext():
        runtime.capturing = True
        _, y = forward(device, optimizer) if not within else layers(device)
        runtime.capturing = False
    assert offload.pool.used == 0
    assert isinstance(y, Tensor)


@pytest.mark.parametrize("interrupted", [False, True])
def test_memory_that_a_copy_still_reads_is_kept_from_being_unmapped(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, device, optimizer, offload = start(monkeypatch, None)
    x, y = forward(device, optimizer)
    # x is its user's, and has left.
    reads = (
        device.left
        - {x.untyped_storage().data_ptr()}
        - {array.ctypes.data for free in device.free_arrays.values() for array in free}
    )
    assert reads
    kept: set[int] = set()
    keep = device.keep

    def noted(buffer: Tensor, op: Op | None = None) -> None:
        kept.update({buffer.untyped_storage().data_ptr()} if op is Op.SAVE else ())
        keep(buffer, op)

    monkeypatch.setattr(device, "keep", noted)
    if interrupted:  # as above
        monkeypatch.setattr(Saved, "__del__", lambda saved: None)
    del x, y
    if interrupted:
        offload.follow_plan(None)
    assert reads <= kept


def test_the_host_has_not_two_regions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device, optimizer, offload = start(monkeypatch, None)
    x, y = forward(device, optimizer)
    torch.autograd.grad(y, x, ones(device))
    del x, y
    register, most = runtime.cudaHostRegister, []

    def noted(*arguments: int) -> int:
        most.append(len(runtime.regions))
        return register(*arguments)

    monkeypatch.setattr(runtime, "cudaHostRegister", noted)
    read(runtime, ones(device), device._streams[Op.SAVE])
    offload.follow_plan(None)
    assert most == [0]
    x, y = forward(device, optimizer)
    (slope,) = torch.autograd.grad(y, x, ones(device))
    assert torch.equal(read(runtime, slope), expected())
