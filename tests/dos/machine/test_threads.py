"""How many threads the kernels use, and where: on machines made of files, and on this one's own cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dos.machine import threads
from dos.machine.threads import (
    Cores,
    bound_to,
    cores_near,
    kernel_threads,
    leave_cores,
    physical_cores,
    set_kernel_threads,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a process that no launcher has started."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share, before = threads._share_of_process, torch.get_num_threads()
    share.cache_clear()
    threads._note_override.cache_clear()
    yield
    set_kernel_threads(0)
    torch.set_num_threads(before)
    share.cache_clear()


def machine(root: Path, gpus: dict[str, int], nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    """A sysfs: NUMA nodes of GPUs by PCI address, CPUs of nodes, hardware threads by CPU."""
    for address, node in gpus.items():
        for function, class_ in [("0", "0x030200"), ("1", "0x040300")]:  # the GPU, and its sound
            folder = root / "bus/pci/devices" / f"{address}.{function}"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text("0x10de\n")
            (folder / "class").write_text(f"{class_}\n")
            (folder / "numa_node").write_text(f"{node}\n")
            (folder / "local_cpulist").write_text(f"{nodes.get(node, '')}\n")
    for cpu, names in siblings.items():
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{names}\n")
    return root


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets of four cores with two hardware threads each, and two GPUs on each socket."""
    siblings = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}
    monkeypatch.setattr(threads, "usable_cores", lambda: frozenset(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(threads, "_SYSFS", tmp_path)
    gpus = {"0000:0a:00": 0, "0000:0b:00": 0, "0000:8a:00": 1, "0000:8b:00": 1}
    return machine(tmp_path, gpus, {0: "0-3,8-11", 1: "4-7,12-15"}, siblings)


@pytest.mark.parametrize(("ranks", "expected"), [(1, 4), (2, 2), (4, 2), (8, 1)])
def test_ranks_share_the_cores_near_their_device(
    node: Path, ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    near = cores_near("0000:8a:00.0", node)
    assert near == Cores(frozenset([4, 5, 6, 7, 12, 13, 14, 15]), expected)


def test_only_cores_that_may_be_used(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: frozenset([3, 4, 12]))
    assert cores_near("0000:8a:00.0", node) == Cores(frozenset([4, 12]), 1)
    monkeypatch.setattr(threads, "usable_cores", lambda: frozenset([0, 1]))
    assert cores_near("0000:8a:00.0", node) is None


def test_unknown_devices_and_topologies_have_no_near_cores(node: Path, tmp_path: Path) -> None:
    for address in (None, "0000:ff:00.0"):
        assert cores_near(address, node) is None
    empty = tmp_path / "empty"
    assert physical_cores(frozenset([0, 1, 2]), empty) == 3, "cores without a topology count one each"
    assert cores_near("0000:01:00.0", machine(empty, {"0000:01:00": -1}, {}, {})) is None, "a device without a node"


def test_bound_to_cores() -> None:
    cores = os.sched_getaffinity(0)
    torch.set_num_threads(2)
    near = Cores(frozenset([max(cores)]), 1)

    def fail() -> None:
        with bound_to(near):
            assert os.sched_getaffinity(0) == near.cpus
            assert kernel_threads() == 1
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert os.sched_getaffinity(0) == cores
    assert kernel_threads() == 2
    with bound_to(None):
        assert os.sched_getaffinity(0) == cores


def test_a_launcher_is_overruled_with_one_note(
    node: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    monkeypatch.setattr(threads, "physical_cores", lambda cpus: len(cpus) // 2)
    with caplog.at_level(logging.WARNING):
        assert [kernel_threads() for _ in range(3)] == [4, 4, 4]
    assert len(caplog.records) == 1
    assert "OMP_NUM_THREADS=1" in caplog.text
    assert "4 threads" in caplog.text


def test_a_number_of_threads_that_the_user_chose_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    assert kernel_threads() == 3
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert kernel_threads() == 1, "no launcher has set that"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(threads, "_share_of_process", lambda: 64)
    torch.set_num_threads(3)
    assert kernel_threads() == 3, "torch was told another number since"


def test_ranks_do_not_take_each_others_cores(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(16)
    monkeypatch.setattr(threads, "physical_cores", len)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert kernel_threads() == 4
    threads._share_of_process.cache_clear()
    monkeypatch.setattr(threads, "usable_cores", lambda: frozenset([8, 9, 10, 11]))
    assert kernel_threads() == 4, "a mask of this rank's own is not shared"


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 2), (3, 2), (4, 3), (16, 12)])
def test_the_cpu_lane_leaves_cores_to_threads_that_issue_work(
    cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_lane() -> int:
        with ThreadPoolExecutor(1, initializer=leave_cores) as pool:
            return pool.submit(kernel_threads).result()

    monkeypatch.setattr(threads, "_share_of_process", lambda: cores)
    torch.set_num_threads(cores)
    assert (on_lane(), kernel_threads()) == (expected, cores)
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
    assert on_lane() == cores, "as the user has chosen"


def test_a_profile_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: frozenset(range(16)))
    torch.set_num_threads(3)
    set_kernel_threads(5)
    assert kernel_threads() == 5
    set_kernel_threads(100)
    assert kernel_threads() == 16, "measured on a larger machine"
    set_kernel_threads(0)
    assert kernel_threads() == 3
    with pytest.raises(ValueError, match="expected at least 1, or 0 to choose again, found -1"):
        set_kernel_threads(-1)
