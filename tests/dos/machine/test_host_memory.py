"""Host memory as /proc and control groups tell it, in fake trees; and that nothing begins without enough of it."""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from dos.machine import host_memory
from dos.machine.host_memory import available_bytes, check_host_memory, container_bytes
from tests.support.processes import run_python
from tests.support.training import FAST, bits, mlp, train

GIB = 2**30
UNLIMITED_V1 = "9223372036854771712"


class Host:
    """A fake /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"

    def meminfo(self, available: int) -> None:
        lines = f"MemTotal:       99999999 kB\nMemFree:  12 kB\nMemAvailable:   {available // 1024} kB\n"
        self._write(self.proc / "meminfo", lines)

    def groups(self, *lines: str) -> None:
        self._write(self.proc / "self/cgroup", "".join(f"{line}\n" for line in lines))

    def group(self, path: str, files: Mapping[str, object]) -> None:
        for name, content in files.items():
            self._write(self.cgroup / path / name, f"{content}\n")

    @staticmethod
    def _write(path: Path, content: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    fake = Host(tmp_path)
    monkeypatch.setattr(host_memory, "_PROC", fake.proc)
    monkeypatch.setattr(host_memory, "_CGROUP", fake.cgroup)
    return fake


def v2(most: int | str, used: int, inactive: int = 0, active: int = 0) -> dict[str, object]:
    """A group's files; all in GiB."""
    stat = f"anon 5\nactive_file {active * GIB}\ninactive_file {inactive * GIB}\nworkingset 3"
    return {"memory.max": most if most == "max" else most * GIB, "memory.current": used * GIB, "memory.stat": stat}


def high(most: int | str, above: int | str, used: int) -> dict[str, object]:
    """The files of a group that is slowed down above some GiB."""
    return v2(most, used) | {"memory.high": above if above == "max" else above * GIB}


def v1(most: int | None, used: int, inactive: int = 0) -> dict[str, object]:
    stat = f"inactive_file 77\ntotal_active_file 0\ntotal_inactive_file {inactive * GIB}"
    limit = UNLIMITED_V1 if most is None else most * GIB
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used * GIB, "memory.stat": stat}


def test_no_limit_of_a_control_group_is_none(host: Host) -> None:
    host.groups("4:memory:/a")
    host.group("memory/a", v1(None, 1))
    assert container_bytes() is None
    host.group("memory/a", v1(3, 1))
    assert container_bytes() == 2 * GIB


def test_figures_that_are_none(host: Host) -> None:
    assert available_bytes() is None, "there are no files"
    check_host_memory(10**18)
    for content in ("", "MemAvailable:\n", "MemAvailable: many kB\n", "\x00\n"):
        host._write(host.proc / "meminfo", content)
        assert available_bytes() is None
        host.groups("", "nonsense", "0", "0::")
        host.group("", {"memory.max": "lots", "memory.current": "", "memory.stat": "active_file"})
    host.meminfo(3 * GIB)
    assert available_bytes() == 3 * GIB, "of what is known"


JOB = ["0::/job/task"]
STEP = "slurm/job_7/step_0"
JOB_V1 = ["12:cpu,cpuacct:/elsewhere", "9:hugetlb,memory:/job", "1:name=systemd:/job", "0::/job"]
OTHERS_V1 = {"memory": v1(None, used=50), "elsewhere": v1(1, used=1)}


@pytest.mark.parametrize(
    ("machine", "lines", "groups", "available"),
    [
        (100, JOB, {"job/task": v2(8, used=5)}, 3),
        (100, JOB, {"job/task": v2(8, used=5, inactive=2, active=1)}, 6),  # page cache can be dropped
        (100, JOB, {"job/task": v2(8, used=9)}, 0),
        (100, JOB, {"job/task": v2("max", used=5)}, 100),
        (2, JOB, {"job/task": v2(8, used=5)}, 2),  # the machine has less than the group may take
        # As batch systems set limits: on the job, while the process is in a step's task.
        (
            100,
            [f"0::/{STEP}/task_0"],
            {"slurm/job_7": v2(16, 10, inactive=1), STEP: v2("max", 10), f"{STEP}/task_0": v2(12, 2)},
            7,
        ),
        # As systemd and clusters set limits: MemoryHigh, of a unit or of a slice above it.
        (100, JOB, {"job/task": high("max", 6, used=2)}, 4),
        (100, JOB, {"job/task": high(9, 6, used=2)}, 4),
        (100, JOB, {"job/task": high(5, 6, used=2)}, 3),
        (100, JOB, {"job/task": high(9, "max", used=2)}, 7),
        (100, JOB, {"job/task": high("max", 6, used=7)}, 0),
        (100, JOB, {"job/task": high(9, "max", used=2), "job": high("max", 8, used=3)}, 5),
        # A container sees its own group as the root.
        *((100, [f"0::{path}"], {"": v2(4, used=1)}, 3) for path in ("/", "/docker/0123abc", "/../../other")),
        (100, JOB_V1, {"memory/job": v1(8, used=5, inactive=1), **OTHERS_V1}, 4),
        (100, JOB_V1, {"memory/job": v1(None, used=5), **OTHERS_V1}, 100),
    ],
)
def test_control_groups(
    machine: int, lines: list[str], groups: dict[str, dict[str, object]], available: int, host: Host
) -> None:
    host.meminfo(machine * GIB)
    host.groups(*lines)
    for path, files in groups.items():
        host.group(path, files)
    assert available_bytes() == available * GIB


LIMITS = [(resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")]


@pytest.mark.parametrize(("kind", "name"), LIMITS)
def test_limits_of_the_process_count_what_it_has_mapped(
    kind: int, name: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda one: (10 * GIB if one == kind else unlimited, unlimited))
    host.meminfo(30 * GIB)
    assert available_bytes() == 30 * GIB, "it is not known what the process has mapped"
    sizes = {resource.RLIMIT_AS: (4, 1), resource.RLIMIT_DATA: (20, 4)}[kind]
    host._write(host.proc / "self/status", "VmSize: {} kB\nVmData: {} kB\n".format(*(n << 20 for n in sizes)))
    assert available_bytes() == 6 * GIB
    assert host_memory.host_share() == int(0.9 * 6 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert host_memory.host_share() == int(0.9 * 6 * GIB), "each rank has limits of its own"
    check_host_memory(6 * GIB, processes=3)
    check_host_memory(8 * GIB, mapped=2 * GIB)
    with pytest.raises(MemoryError, match=rf"needs 7\.00 GiB more .* 6\.00 GiB are left of 10\.00 GiB; .*{name}"):
        check_host_memory(7 * GIB)
    with pytest.raises(MemoryError, match=r"needs 18\.00 GiB for each of 3 processes .* 30\.00 GiB are available"):
        check_host_memory(18 * GIB, processes=3, mapped=18 * GIB)


def test_a_system_that_grants_no_more_than_it_has(host: Host) -> None:
    host.meminfo(30 * GIB)
    with (host.proc / "meminfo").open("a") as file:
        file.write(f"CommitLimit: {20 << 20} kB\nCommitted_AS: {16 << 20} kB\n")
    assert available_bytes() == 30 * GIB
    host._write(host.proc / "sys/vm/overcommit_memory", "2\n")
    assert available_bytes() == 4 * GIB
    with pytest.raises(MemoryError, match=r"4\.00 GiB are left of 20\.00 GiB; raise vm.overcommit_ratio, or set"):
        check_host_memory(5 * GIB)


LIMITED = """
import pathlib, resource, sys
import pytest, torch
from dos import DOSAdam, EmulatedDevice
from dos.machine import host_memory
from tests.support.training import FAST

limit, field, state_format, room = sys.argv[1:]
kind = getattr(resource, limit)
parameter = torch.nn.Parameter(torch.ones(4 << 20))
device = EmulatedDevice(FAST, capacity=10**9)
optimizer = DOSAdam([parameter], policy="cpu", device=device, state_format=state_format)
parameter.grad = torch.ones_like(parameter)
used, before = host_memory._field(pathlib.Path("/proc/self/status"), field), resource.getrlimit(kind)
resource.setrlimit(kind, ((used << 10) + (int(room) << 20), before[1]))
try:
    with pytest.raises(MemoryError, match="more of address space"):
        optimizer.step()
finally:
    resource.setrlimit(kind, before)
assert parameter.detach().min() == parameter.detach().max() == 1
optimizer.step()
optimizer.synchronize()
assert parameter.detach().max() < 1
"""
"""In a process of its own: one that has run other tests has mapped memory that it can use again."""


@pytest.mark.parametrize(("limit", "field"), [("RLIMIT_AS", "VmSize:"), ("RLIMIT_DATA", "VmData:")])
@pytest.mark.parametrize(("state_format", "room"), [("float32", "60"), ("int8", "12")])
def test_a_step_that_may_not_map_its_state_changes_nothing(
    limit: str, field: str, state_format: str, room: str
) -> None:
    run_python("-c", LIMITED, limit, field, state_format, room)


def test_needed_memory_is_logged_first(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.meminfo(3 * GIB)
    with caplog.at_level(logging.INFO, logger="dos"):
        check_host_memory(2 * GIB)
    assert [r.message for r in caplog.records] == [
        "optimizer state (DOSAdam): 2.00 GiB of host memory needed, 3.00 GiB available"
    ]
    with pytest.raises(MemoryError, match=r"state \(DOSAdam\) needs 4\.00 GiB of host memory and 3\.00 GiB are"):
        check_host_memory(4 * GIB)


def test_processes_of_one_host_share_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.meminfo(GIB)
    parameters = [nn.Parameter(torch.zeros(GIB // 40))]  # 12 bytes of state and 8 beside it for each of them
    device = EmulatedDevice(FAST, 10**9)
    DOSAdam(parameters, device=device)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(MemoryError, match=r"needs 0\.\d+ GiB for each of 4 processes of host memory and 1\.00 GiB are"):
        DOSAdam(parameters, device=device)


def test_state_that_accelerate_will_divide_is_asked_for_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.meminfo(GIB)
    for name, value in {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true"}.items():
        monkeypatch.setenv(name, value)
    DOSAdam([nn.Parameter(torch.zeros(GIB // 40))], device=EmulatedDevice(FAST, 10**9))


def test_construction_asks_whether_the_host_could_hold_all_state(host: Host) -> None:
    """Wherever it is at first: one day it may have to leave the device."""
    parameters = list(mlp().parameters())
    needed = 16 * sum(p.numel() for p in parameters)
    host.meminfo(needed // 1024 * 1024)
    device = EmulatedDevice(FAST, capacity=10**6)
    with pytest.raises(MemoryError, match=r"needs 0\.00 GiB of host memory.*policy='resident'"):
        DOSAdam(parameters, device=device)
    DOSAdam(parameters, device=device, policy="resident")
    host.meminfo(needed + 1024)
    optimizer = DOSAdam(parameters[:2], device=device)
    with pytest.raises(MemoryError):
        optimizer.add_param_group({"params": torch.zeros(100_000, requires_grad=True)})
    optimizer.add_param_group({"params": parameters[2:]})


def test_parameters_that_join_later_are_counted_alone(host: Host) -> None:
    """What the others have is theirs already."""
    model = mlp()
    host.meminfo(GIB)
    optimizer = DOSAdam(model[0].parameters(), policy="cpu", device=EmulatedDevice(FAST, capacity=10**6))
    train(model, optimizer, 1)
    few = 16 * sum(p.numel() for p in model[3].parameters())
    host.meminfo(few + 1024)
    optimizer.add_param_group({"params": model[3].parameters()})
    host.meminfo(few // 1024 * 1024)
    before = bits(model.parameters())
    with pytest.raises(MemoryError):
        train(model, optimizer, 1, first_step=1)
    assert bits(model.parameters()) == before
    host.meminfo(few + 1024)
    train(model, optimizer, 1, first_step=1)
    assert bits(model[3].parameters()) != before[-1:]
