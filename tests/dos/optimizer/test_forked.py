"""A forked child, such as a data loader's worker, that reads what its parent has pinned, and so does not have."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dos import EmulatedDevice
from dos.devices import pinned
from tests.support import blocks
from tests.support.disk import bytes_on_disk
from tests.support.fake_cuda import Runtime, install
from tests.support.training import FAST

SAID = "this process is a forked child"


class Pins(EmulatedDevice):
    """Pins memory, as a CUDA device does."""

    def pin(self, tensor: Tensor) -> Any:
        return pinned.pin(tensor, torch.device("cuda", 0))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return install(monkeypatch, 0)


def in_child(read: Callable[[], object]) -> str:
    """What the child says: the error, or nothing."""
    end, begin = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            read()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(begin, said.encode())
            os._exit(0)
    os.close(begin)
    with os.fdopen(end) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child has crashed"
    return said


READS: dict[str, Callable[[Any, Any], object]] = {
    "state dict": lambda model, optimizer: optimizer.state_dict(),
    "state": lambda model, optimizer: optimizer.state[next(iter(optimizer.param_groups[0]["params"]))],
    "step": lambda model, optimizer: optimizer.step(),
    "norm": lambda model, optimizer: optimizer.grad_norm(),
}
OF_WEIGHTS: dict[str, Callable[[Any, Any], object]] = {
    "weights": lambda model, optimizer: [p.sum().item() for p in model.parameters()],
    "names": lambda model, optimizer: [p.sum().item() for _, p in model.named_parameters()],
    "one weight": lambda model, optimizer: next(model.blocks[0].children()).weight.sum().item(),
    "model's state dict": lambda model, optimizer: [t.sum().item() for t in model.state_dict().values()],
}


def started(weights: Any, pins: bool, tmp_path: Path | None, **options: Any) -> tuple[Any, Any]:
    model = blocks.net(options.pop("dtype", torch.float32), width=blocks.WIDE)
    device = (Pins if pins else EmulatedDevice)(FAST, 10**8)
    if tmp_path is not None:
        options |= {"disk": tmp_path, "host_memory": 400_000}
    optimizer = blocks.start(model, weights, device=device, **options)
    blocks.train(model, optimizer, 2)
    assert tmp_path is None or bytes_on_disk(tmp_path)
    return model, optimizer


BF16 = {"dtype": torch.bfloat16}
MODES: dict[str, dict[str, Any]] = {
    "attached": {"offload_gradients": False},
    "offload": {},
    "disk": {"disk": True},
    "none stays": {"weights": 0},
    "some stay, disk": {"weights": 2, "disk": True},
    "all stay": {"weights": 6},
    "split": BF16,
    "float32": {"weights": 0, **BF16, "state_format": "float32"},
    "int8": {"weights": 2, "state_format": "int8"},
    "in backward": {"updates": "backward"},
}


QUICK = ("offload", "disk", "none stays", "some stay, disk", "all stay")


@pytest.mark.parametrize("mode", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in MODES])
def test_a_child_that_reads_what_is_pinned_is_told_so(
    mode: str, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dos.rules.adamw.LEAST_CODED", 128)
    options = {**MODES[mode]}
    weights, disk = options.pop("weights", None), options.pop("disk", False)
    model, optimizer = started(weights, True, tmp_path if disk else None, **options)
    for name, read in {**READS, **({} if weights in (None, 6) else OF_WEIGHTS)}.items():
        assert in_child(lambda: read(model, optimizer)).startswith(f"RuntimeError: {SAID}"), name  # noqa: B023
    blocks.train(model, optimizer, 1, first=2)
    plain, others = started(weights, False, None, **options)
    blocks.train(plain, others, 1, first=2)
    assert blocks.everything(model, optimizer) == blocks.everything(plain, others)


USES: dict[str, Callable[[Any], object]] = {
    "sum": lambda p: p.sum(),
    "array": lambda p: p.numpy(force=True),
    "detached": lambda p: p.detach(),
    "data": lambda p: p.data,
    "saved": lambda p: torch.save(p, io.BytesIO()),
    "copied": lambda p: torch.zeros(p.shape).copy_(p),
    "shown": repr,
    "indexed": lambda p: p[0],
    "a product": lambda p: torch.zeros(1, len(p)) @ p,
}


def test_a_weight_that_the_child_already_refers_to_raises_too(runtime: Runtime) -> None:
    model, optimizer = started(0, True, None)
    kept = next(model.blocks[0].parameters())
    for name, use in USES.items():
        assert in_child(lambda: use(kept)).startswith(f"RuntimeError: {SAID}"), name  # noqa: B023
    assert in_child(lambda: (kept.shape, kept.grad, kept.numel(), isinstance(kept, torch.nn.Parameter))) == ""
    assert type(kept) is torch.nn.Parameter
    del optimizer


def test_a_child_of_a_child_is_told_so_too(
    runtime: Runtime, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = started(0, True, None)
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: print(raised.exc_value, flush=True))
    for name, read in {**READS, **OF_WEIGHTS}.items():
        assert in_child(lambda: print(in_child(lambda: read(model, optimizer)), flush=True)) == "", name  # noqa: B023
        assert capfd.readouterr().out.startswith(f"RuntimeError: {SAID}"), name


@pytest.mark.parametrize("weights", [None, 0])
def test_a_child_reads_what_is_not_pinned(weights: Any) -> None:
    model, optimizer = started(weights, False, None)
    for name, read in {**READS, **OF_WEIGHTS}.items():
        assert in_child(lambda: read(model, optimizer)) == "", name  # noqa: B023
