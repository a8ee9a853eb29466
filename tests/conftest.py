"""What several test modules share: machines to emulate, and a model to train."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from ranks import Ranks
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from perfmodel.hardware import HardwareProfile

settings.register_profile("tests", deadline=None, print_blob=True)  # shared machines are too noisy for deadlines
settings.load_profile("tests")

FAST = HardwareProfile(
    name="fast",
    host_bandwidth=1e15,
    cpu_update_rate=1e13,
    h2d_bandwidth=1e14,
    d2h_bandwidth=1e14,
    h2d_bandwidth_duplex=1e14,
    d2h_bandwidth_duplex=1e14,
    gpu_update_rate=1e13,
    gpu_bandwidth=1e15,
    cast_rate=1e13,
    copy_latency_s=0.0,
    launch_latency_s=0.0,
)
"""So fast that emulating it costs no time."""


def profile(**rates: float) -> HardwareProfile:
    """A fast machine but for these rates."""
    return dataclasses.replace(FAST, **rates)


LONGEST = ("test_ddp.py", "test_stateful.py", "test_interrupts.py")
"""The first of those that need ranks, and others that take a minute: begun first, so that workers end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """What was imported stays: many tests collect what nobody can reach, which is quicker without looking at that."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers each file stays with one, and so do all files that need ranks, which are started once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "ranks" if needs_ranks(config.rootpath / file) else file

    return Scheduling(config, log)


@functools.cache
def needs_ranks(file: Path) -> bool:
    return ": Ranks" in file.read_text()


@pytest.fixture
def device() -> EmulatedDevice:
    """An emulated accelerator that is fast and has 1 GB."""
    return EmulatedDevice(FAST, capacity=10**9)


TORCH_2_6 = torch.__version__.startswith("2.6.")
needs_fsdp2 = pytest.mark.skipif(TORCH_2_6, reason="FSDP2 of torch 2.6 does not run on CPUs")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four gloo ranks, for meshes of two dimensions and other numbers of ranks."""
    yield from running(4)


@pytest.fixture(scope="session")
def pair() -> Iterator[Ranks]:
    """Two gloo ranks, for all else that needs ranks: it takes half the time."""
    yield from running(2)


def running(world: int) -> Iterator[Ranks]:
    if TORCH_2_6:
        pytest.skip(needs_fsdp2.kwargs["reason"])
    found = Ranks(world)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def one_kernel_thread() -> Iterator[None]:
    """For many steps of a tiny network: threads that wait for each other in its kernels take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_core(one_kernel_thread: None) -> Iterator[None]:
    """For many short programs of many threads, which hand over to each other many times faster on one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(before)[worker % len(before)]})
    yield
    os.sched_setaffinity(0, before)


class UpdatesAfterStep(EmulatedDevice):
    """Begins no update on the host before `returned` is set: a `step` that waits for one never returns."""

    def __init__(self, profile: HardwareProfile, capacity: int) -> None:
        super().__init__(profile, capacity)
        self.returned = threading.Event()
        self.returned.set()

    def host_update(self, numel: int, traffic: int, *state_format: str) -> AbstractContextManager[float]:
        assert self.returned.wait(60), "step() waits for its updates"
        return super().host_update(numel, traffic, *state_format)


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it becomes true: a thread that was told to end, or has just answered, may take a moment."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(1e-2)
    return True


def compares_with_a_clock(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test up to three times. What else the machine does spoils a figure now and then, a wrong formula always."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(AssertionError, pytest.skip.Exception):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return run


def skip_if_the_clock_cannot_be_trusted() -> None:
    """Skip the test if other programs keep this machine from its work. Asked when a comparison has failed."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 3 * cores:
        pytest.skip(f"this machine is too busy to compare with a clock: {load:.0f} threads want its {cores} cores")
    latest = 0.0
    for _ in range(200):
        started = time.perf_counter()
        time.sleep(2e-3)
        latest = max(latest, time.perf_counter() - started)
    if latest > 5e-3:
        pytest.skip(f"this machine is too busy to compare with a clock: a sleep of 2 ms lasted {latest * 1e3:.0f} ms")


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """A small network of several kinds of parameters; the same for the same seed."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack trace of each call
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 7, bias=False)).to(dtype)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    first_step: int = 0,
    before_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Train on batches that depend on the step number alone; the losses."""
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(first_step, first_step + steps):
        generator = torch.Generator().manual_seed(1000 + step)
        inputs = torch.randn(8, 24, generator=generator).to(dtype)
        targets = torch.randint(0, 7, (8,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).float(), targets)
        loss.backward()
        if before_step is not None:
            before_step(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def plan_anew(optimizer: DOSAdam) -> None:
    """Make the controller ask its policy again although nothing has changed."""
    if optimizer._accelerator is not None:
        optimizer._accelerator._controller._last = None


def bits(tensors: Iterable[Tensor]) -> list[bytes]:
    """The tensors' contents for comparing bit by bit, NaN and signed zero included."""
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def assert_close_ulp(actual: Iterable[Tensor], expected: Iterable[Tensor], ulps: int = 64) -> None:
    """Fail unless all values agree to so many units in the last place of the largest value of each tensor."""
    for a, e in zip(actual, expected, strict=True):
        scale = e.detach().abs().max().item() if e.numel() else 0.0
        torch.testing.assert_close(
            a.detach(), e.detach(), rtol=0, atol=ulps * torch.finfo(e.dtype).eps * max(scale, 1e-6)
        )
