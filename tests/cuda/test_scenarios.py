"""On a GPU: what plain training does not do, and what has found missing waits on the simulated accelerator."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.devices.cuda import CudaDevice, _leftovers_of
from dos.planning.forecast import MARGIN
from perfmodel import Lane, Op
from tests.support.gpu import DEVICE, NEEDS_GPU, SIMULATED, free_memory, late
from tests.support.inside import plan_anew
from tests.support.random_plans import RandomPlans
from tests.support.scales import LARGE, ROOM, Beside, Scales, Sines, StoppedError, run, stop, with_policy
from tests.support.training import bits

pytestmark = NEEDS_GPU

SAVED: dict[str, Any] = {"activations": ROOM, "numel": LARGE, "layers": 12, "steps": 5}


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    """Of a training without anything of the kind."""
    return run(with_policy("cpu"), model_class=Sines, **{**SAVED, "activations": None})


class Apart(Beside, Sines):
    """Saves on one stream what it has computed on another, which uses the memory again at once."""

    def forward(self, x: Tensor) -> Tensor:
        current, side = self.streams(x)
        outputs = []
        for layer in self.layers:
            with torch.cuda.stream(side):
                product = layer.weight * x
            current.wait_stream(side)
            product.record_stream(current)
            outputs.append(product.sin().float().sum())
        side.wait_stream(current)
        return torch.stack(outputs).sum()


class InVain(Sines):
    """Computes more than it returns: graphs go while their tensors travel to the host, or back."""

    def forward(self, x: Tensor) -> Tensor:
        late(Op.SAVE, 0.005)
        super().forward(2 * x)
        outputs = [layer(3 * x) for layer in self.layers]
        outputs[len(outputs) // 2].register_hook(stop)
        late(Op.RESTORE, 0.005)
        with contextlib.suppress(StoppedError):
            torch.autograd.grad(torch.stack(outputs).sum(), [*self.parameters()])
        del outputs
        return super().forward(x)


class Held(Sines):
    """Holds what was saved for longer than its operation, then lets go of it at once."""

    def forward(self, x: Tensor) -> Tensor:
        held: deque[Tensor] = deque(maxlen=3)
        outputs = []
        for layer in self.layers:
            held.append(layer.weight * x)
            outputs.append(held[-1].sin().float().sum())
        return torch.stack(outputs).sum()


@pytest.mark.parametrize("policy", ["cpu", "stride:2"])
@pytest.mark.parametrize("model_class", [Apart, InVain, Held])
def test_saved_tensors(model_class: type[Scales], policy: str, expected: list[bytes]) -> None:
    assert run(with_policy(policy), model_class=model_class, **SAVED) == expected


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("policy", [0.0, "stride:2", "random"])
def test_state_is_of_one_stream_and_used_by_others(policy: str | float, attached: bool) -> None:
    """The owner of its memory is the stream of the first step."""

    def trained(streams: list[torch.cuda.Stream], policy: Any) -> list[bytes]:
        model = Scales(12, 300_000)
        optimizer = with_policy(policy)(model)
        if attached:
            optimizer.attach(model)
        last = torch.cuda.current_stream()
        for step in range(6):
            stream = streams[step % len(streams)]
            stream.wait_stream(last)
            with torch.cuda.stream(stream):
                optimizer.zero_grad()
                model(torch.tensor(1.0 + step, dtype=torch.bfloat16, device=DEVICE)).backward()
                optimizer.step()
                if policy not in ("cpu", 0.0):
                    plan_anew(optimizer)
            last = stream
        torch.cuda.current_stream().wait_stream(last)
        optimizer.synchronize()
        return bits([*(p.detach().cpu() for p in model.parameters())])

    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    given = RandomPlans(0, slots=2) if policy == "random" else policy
    assert trained(streams, given) == trained(streams[1:2], "cpu")


@pytest.mark.parametrize("policy", [0.5, "stride:2", "random"])
def test_state_is_read_between_backward_and_step(policy: str | float) -> None:
    small: dict[str, Any] = {"layers": 12, "steps": 5, "attached": True}

    def peek(optimizer: DOSAdam) -> None:
        found.append(bits([s["exp_avg"].cpu() for s in optimizer.state_dict()["state"].values()]))
        plan_anew(optimizer)

    found: list[list[bytes]] = []
    ours = run(with_policy(RandomPlans(1, slots=2) if policy == "random" else policy), before=peek, **small)
    seen, found = found, []
    assert ours == run(with_policy("cpu"), before=peek, **small)
    assert seen == found


@pytest.mark.skipif(not SIMULATED, reason="on a GPU so little state cannot run short of memory")
@pytest.mark.parametrize("attached", [False, True])
def test_memory_falls_while_windows_are_full(attached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a slow disk."""
    from experiments.simdev.accelerator import lib

    @contextlib.contextmanager
    def slow(device: CudaDevice, lane: Lane, nbytes: int) -> Iterator[float]:
        start = time.perf_counter()
        time.sleep(2e-3)
        yield start

    def between(optimizer: DOSAdam, step: int) -> None:
        torch.cuda.empty_cache()  # what is there no other process can take
        tight = step % 5 > 1
        lib.sim_others(total - torch.cuda.memory_allocated() - left if tight else 0)
        found = optimizer.metrics()
        held.append(found.get("memory_held_bytes", 0))
        on_disk.append(found.get("disk_held_bytes", 0))

    free_memory()
    total, held, on_disk = 64 << 20, list[float](), list[float]()
    left = int(0.75 * MARGIN * total)
    model: dict[str, Any] = {"layers": 16, "steps": 12, "attached": attached}
    disk: dict[str, Any] = {"disk": tmp_path, "host_memory": 20_000_000, "profile": "h100"}
    expected = run(with_policy("cpu"), **model)
    monkeypatch.setattr(CudaDevice, "disk_io", slow)
    lib.sim_capacity(total)
    try:
        assert run(with_policy("adaptive", 100_000, **disk), between=between, **model) == expected
    finally:
        lib.sim_others(0)
        lib.sim_capacity(4 << 30)
    first = held.index(max(held))
    assert min(held[first:]) < 0.75 * max(held), f"state comes and makes room: {held}"
    assert max(on_disk[first:]) > 0, f"the host has no room for all of it: {on_disk}"


@pytest.mark.parametrize("ends", ["forward", "backward", "step"])
def test_an_optimizer_goes_while_its_copies_run(ends: str) -> None:
    """As where a notebook's cell runs again, or an exception ends forward: no copy reads memory that was unmapped."""
    x = torch.tensor(1.0, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(3):
        model: nn.Module = Sines(12, LARGE)
        optimizer = with_policy("stride:2")(model)
        optimizer.attach(model, activations=ROOM)
        for op in (Op.SAVE, Op.PREFETCH, Op.GRADIENT):
            late(op)
        loss = model(x)
        if ends != "forward":
            loss.backward()
        if ends == "step":
            optimizer.step()
        del model, optimizer, loss
        gc.collect()
        CudaDevice(torch.device(DEVICE, 0)).launch(0, lambda: None, 1)  # looks for what finished copies kept
    torch.cuda.synchronize()
    device = CudaDevice(torch.device(DEVICE, 0))
    device.launch(0, lambda: None, 1).wait()
    device.launch(0, lambda: None, 1)
    assert not _leftovers_of(device.torch_device).ends, "what finished copies kept was given back"


class Peak(Scales):
    """Needs much memory for a moment in which nobody looks."""

    nbytes = 0

    def forward(self, x: Tensor) -> Tensor:
        torch.empty(self.nbytes, dtype=torch.uint8, device=DEVICE)
        return super().forward(x)


@pytest.mark.skipif(not SIMULATED, reason="on a GPU so little state leaves such a peak its memory")
@pytest.mark.parametrize("resets", [False, True])
def test_a_peak_of_the_first_forward_leaves_state_what_is_left(resets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the user resets what the allocator says of peaks or not."""
    from experiments.simdev.accelerator import lib

    def between(optimizer: DOSAdam, step: int) -> None:
        optimizer.synchronize()
        resident.append(optimizer.metrics()["share_gpu_resident"])
        if resets:
            torch.cuda.reset_peak_memory_stats()

    free_memory()
    total, resident = 64 << 20, list[float]()
    expected = run(with_policy("cpu"))
    free_memory()
    torch.cuda.reset_peak_memory_stats()  # the peaks of earlier tests were higher, so that the counter would show none
    monkeypatch.setattr(Peak, "nbytes", total - (6 << 20))
    lib.sim_capacity(total)
    try:
        ours = run(with_policy("adaptive", 300_000, profile="h100"), model_class=Peak, between=between)
    finally:
        lib.sim_capacity(4 << 30)
    assert ours == expected
    assert all(0 < share < 1 for share in resident), f"a part has room beside the peak: {resident}"
