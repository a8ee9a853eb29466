"""The order of the tests, who runs which, and fixtures."""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from dos import EmulatedDevice
from dos.planning.monitor import MemoryMonitor
from tests.support.fake_cuda import Runtime, install
from tests.support.races import checking
from tests.support.ranks import TORCH_2_6, Ranks, needs_fsdp2
from tests.support.training import FAST

# No limits of time, because machines are busy. Without DOS_EXAMPLES the same examples are drawn each time.
settings.register_profile(
    "tests",
    max_examples=int(os.environ.get("DOS_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="DOS_EXAMPLES" not in os.environ,
    print_blob=True,
)
settings.load_profile("tests")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background ignores Ctrl-C

LONGEST = (
    "test_simdev.py",
    "test_ddp.py",
    "test_same_bits.py",
    "test_stateful.py",
    "test_homes.py",
    "test_changing_memory.py",
    "test_full_finetune_example.py",
    "test_package.py",
)
"""The first of those that need ranks, and others that take long: begun first, so that workers end together."""


UNWATCHED = {
    *("test_stateful.py", "test_happens_before.py"),  # have a checker of their own
    # A gradient that comes too late is copied to the host under the update of before; backward raises, no step follows.
    "test_a_use_that_no_backward_before_had_is_refused",
    "test_dispatch_modes_are_counted_but_in_backward",  # by the checker's own mode versions count what others hide
    *("test_step_calls.py", "test_hook_calls.py", "test_module_hook_calls.py"),  # count calls
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_itemcollected(item: pytest.Item) -> None:
    """With DOS_RACES=1 all tests of the library are watched but UNWATCHED."""
    names = {item.path.name, item.name, getattr(item, "originalname", "")}
    if os.environ.get("DOS_RACES") and "tests/dos/" in item.nodeid and not names & UNWATCHED:
        # First: what a test replaces while it is watched is put back before that ends. A mark would come too late.
        item.fixturenames.insert(0, "happens_before")  # type: ignore[attr-defined]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m clock` files are left alone that have no such test: importing all takes ten seconds."""
    if config.option.markexpr != "clock" or collection_path.suffix != ".py":
        return None
    return re.search("compares_with_a_clock", collection_path.read_text()) is None or None


gc.disable()  # until all is collected, which makes no garbage


def pytest_collection_finish() -> None:
    """What was imported stays: many tests collect what is not reachable, which is quicker without looking at that."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` each file stays with one worker, and so do all that need ranks or forks, started once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "processes" if needs_processes(config.rootpath / file) else file

    return Scheduling(config, log)


@functools.cache
def needs_processes(file: Path) -> bool:
    """Whether its tests need ranks, or programs in forks of an interpreter that has imported torch, which takes 4 s."""
    wanted = r": Ranks|@on_(pair|ranks)|from tests.support.processes import .*python"
    return re.search(wanted, file.read_text()) is not None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ranks end where no file that needs them follows: waiting, they took a sixth of all the processor's time."""
    if nextitem is None or not needs_processes(nextitem.path):
        for started in list(Ranks.started):
            started.stop()


@pytest.fixture
def device() -> EmulatedDevice:
    """An emulated accelerator that is fast and has 1 GB."""
    return EmulatedDevice(FAST, capacity=10**9)


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


@pytest.fixture
def happens_before() -> Iterator[None]:
    """Fails for two accesses of memory on emulated devices that nothing orders, whatever the timing was."""
    with checking() as checker:
        yield
    if not checker.misses_order:
        assert not checker.races, checker.report()


@pytest.fixture
def samples_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample of device memory is due because time has passed: how many are depends on how busy the machine is."""
    monkeypatch.setattr(MemoryMonitor, "_due_next", lambda monitor: setattr(monitor, "due", math.inf))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """In place of CUDA's, work begins as late as it may."""
    return install(monkeypatch, None)
