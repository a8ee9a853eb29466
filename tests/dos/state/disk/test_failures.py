"""What goes wrong on disk in training: it is said with a remedy, and no torn state is used; what users ask too much.

`step/test_faults.py` has transfers that fail at random.
"""

from __future__ import annotations

import copy
import errno
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam
from dos.state.disk import DiskError, DiskSpace, Extent
from tests.support.disk import (
    SMALL,
    TWO_WINDOWS,
    Transfer,
    bytes_on_disk,
    change,
    dos_adam,
    fail_at,
    files,
    replace_transfer,
    truncate,
    wide,
)
from tests.support.programs import REFUSED
from tests.support.training import backward, bits, everything, mlp, train

pytestmark = pytest.mark.usefixtures("one_core")

LOST = "load the last checkpoint"


def started(disk: Path, steps: int = 2, **settings: Any) -> tuple[nn.Module, DOSAdam]:
    model = wide(torch.bfloat16)
    optimizer = dos_adam(model.parameters(), disk, **settings)
    train(model, optimizer, steps)
    return model, optimizer


def go_on(model: nn.Module, optimizer: DOSAdam) -> None:
    """Three steps more."""
    train(model, optimizer, 3, first_step=2)
    optimizer.synchronize()


def assert_refuses(optimizer: DOSAdam) -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.step()
    with pytest.raises(RuntimeError, match=REFUSED):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=REFUSED):
        _ = optimizer.state
    optimizer.zero_grad()
    optimizer.synchronize()


Fault = Callable[[Path, pytest.MonkeyPatch], str]
"""What goes wrong with the state in a folder from now on; what is to be said then."""


def fails(name: str, at: int) -> Fault:
    """The read or write of this number."""

    def fault(folder: Path, patch: pytest.MonkeyPatch) -> str:
        fail_at(patch, name, at, DiskError(errno.EIO, "the cable came off"))
        return "the cable came off"

    return fault


def is_foreign(folder: Path, patch: pytest.MonkeyPatch) -> str:
    (file,) = files(folder)
    change(file, 0, b"x" * file.stat().st_size)
    return f"{file}: .*something else.*{LOST}"


def is_truncated(folder: Path, patch: pytest.MonkeyPatch) -> str:
    (file,) = files(folder)
    truncate(file, 0)
    return f"{file}: .*{LOST}"


@pytest.mark.parametrize(
    ("policy", "attach", "fault", "read"),
    [
        ("cpu", False, fails("read", 1), ""),
        ("cpu", True, fails("write", 3), ""),
        ("stride:2", True, fails("read", 2), ""),
        (0.5, False, fails("write", 1), ""),
        ("stride:2", False, is_truncated, ""),
        (0.5, False, is_foreign, ""),
        *(("cpu", False, is_foreign, read) for read in ("", "one entry", "all")),
    ],
)
def test_a_step_that_fails_on_disk_says_so_and_refuses_what_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str | float, attach: bool, fault: Fault, read: str
) -> None:
    """In the first line that users see. read: what user code has read by then."""
    model, optimizer = started(tmp_path, policy=policy)
    if attach:
        optimizer.attach(model)
    if read:
        first = next(model.parameters())
        _ = optimizer.state[first] if read == "one entry" else optimizer.state_dict()
    said = fault(tmp_path, monkeypatch)
    with pytest.raises((RuntimeError, OSError), match=said):
        go_on(model, optimizer)
    assert_refuses(optimizer)


@pytest.mark.parametrize("attach", [False, True])
def test_a_write_to_state_on_disk_is_refused_until_it_is_loaded(tmp_path: Path, attach: bool) -> None:
    """Before anything changes; what is loaded is what was written."""
    (model, optimizer), (twin, other) = (started(tmp_path / name) for name in ("one", "other"))
    for each, its in ((optimizer, model), (other, twin)) if attach else ():
        each.attach(its)
        train(its, each, 1, first_step=2)
    optimizer.state_dict()["state"][0]["exp_avg"].mul_(2)
    before = bits(model.parameters())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"can only be read; to change state load it: .*load_state_dict"):
            train(model, optimizer, 1, first_step=3)
        assert bits(model.parameters()) == before
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    saved = copy.deepcopy(other.state_dict())
    saved["state"][0]["exp_avg"].mul_(2)
    other.load_state_dict(saved)
    train(twin, other, 1, first_step=3)
    for each, its in ((optimizer, model), (other, twin)):
        train(its, each, 2, first_step=4)
    assert everything(model, optimizer) == everything(twin, other)


def test_views_are_watched_until_a_step_begins(tmp_path: Path) -> None:
    """Not only until one is prepared, which is skipped or refused then."""
    model, optimizer = started(tmp_path, skip_nonfinite=True)
    view, last = optimizer.state_dict()["state"][0]["exp_avg"], [*model.parameters()][-1]
    backward(model, 3)
    assert last.grad is not None
    gradient = last.grad
    last.grad = gradient.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    last.grad = gradient.fill_(math.inf)
    optimizer.step()
    optimizer.zero_grad()
    view.mul_(2)
    with pytest.raises(RuntimeError, match="can only be read"):
        train(model, optimizer, 1, first_step=4)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1, first_step=5)


def test_a_write_that_torch_does_not_count_is_found_in_the_file(tmp_path: Path) -> None:
    model, optimizer = started(tmp_path)
    optimizer.state_dict()["state"][0]["exp_avg"].data.mul_(2)
    with pytest.raises(RuntimeError, match=f"something else.*{LOST}"):
        go_on(model, optimizer)
    assert_refuses(optimizer)


@pytest.mark.parametrize("fault", [fails("write", 2), is_foreign, is_truncated])
def test_state_that_cannot_be_read_or_written_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """What the device has is written then. After that has failed, it can be tried again."""
    pair, twins = (started(tmp_path / name, policy=0.5) for name in ("one", "other"))
    said = fault(tmp_path / "one", monkeypatch)
    with pytest.raises(DiskError, match=said):
        pair[1].state_dict()
    if fault not in (is_foreign, is_truncated):
        for each in (pair, twins):
            train(*each, 1, first_step=2)
        assert everything(*pair) == everything(*twins)


def test_the_message_of_a_failed_write_says_whether_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it can be tried again, but not once a step has failed for it, which refuses all that comes after."""
    model, optimizer = started(tmp_path, policy=0.5)

    def refuses(real: Transfer) -> Transfer:
        return lambda write, requests, threads: (
            ([0] * len(requests), 0, 0, errno.EIO) if write else real(write, requests, threads)
        )

    replace_transfer(monkeypatch, refuses)
    with pytest.raises(DiskError, match="in memory yet: try again, or, where a step has failed part way, load the"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"step failed part way .*where a step has failed part way, load the last"):
        go_on(model, optimizer)
    assert_refuses(optimizer)


@pytest.mark.parametrize(("at", "reads"), [(1, True), (3, False)])
def test_a_backward_that_fails_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, reads: bool) -> None:
    """While homes leave for gradients of what joins. No state is lost, and backward can be tried again.

    reads: user code has views of state meanwhile, and writes to them then.
    """
    ends = []
    for disk in (None, tmp_path):
        model = mlp(width=2000)
        *rest, last = model.parameters()
        nbytes = TWO_WINDOWS + 4 * sum(p.numel() for p in model.parameters())
        optimizer = dos_adam([last], disk, offload_gradients=True, host_memory=nbytes)
        train(model, optimizer, 2)
        model.zero_grad()
        optimizer.add_param_group({"params": rest})
        views = [optimizer.state[last]["exp_avg"]] if reads else []
        if disk is not None:
            fail_at(monkeypatch, "write", at, DiskError(errno.EIO, "the cable came off"))
            with pytest.raises(DiskError, match="the cable came off"):
                backward(model, 5)
            optimizer.zero_grad()
        for view in views:
            view.mul_(0.5)
        if not reads:
            ends.append(everything(model, optimizer))
        train(model, optimizer, 2, first_step=5)
        ends.append(everything(model, optimizer))
    assert ends[: len(ends) // 2] == ends[len(ends) // 2 :]
    assert bytes_on_disk(tmp_path) > 0


def test_one_entry_shows_its_own_state_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is read from disk for it."""
    model, optimizer = started(tmp_path)
    *_, last = model.parameters()
    expose, seen = DiskSpace.expose, set[Extent]()
    monkeypatch.setattr(
        DiskSpace, "expose", lambda space, extent, *at, **how: (seen.add(extent), expose(space, extent, *at, **how))
    )
    assert optimizer.state[last]
    some = len(seen)
    optimizer.state[last] = dict(optimizer.state.get(last))
    assert len(seen) == some
    assert optimizer.state_dict()
    assert 1 <= some < len(seen)


def test_a_folder_that_is_named_from_a_folder_which_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the device is met, and before a copy is made."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.LazyLinear(600), nn.Linear(600, 30))
    optimizer = dos_adam(model.parameters(), Path("state"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    assert len(files(tmp_path / "state")) == 2
    assert not files(tmp_path / "elsewhere")
    del copied


@pytest.mark.parametrize(("offload", "nbytes"), [(False, 20_000), (True, 20_000), (True, 6 * 20_400)])
def test_a_budget_that_holds_no_two_windows(tmp_path: Path, offload: bool, nbytes: int) -> None:
    """Beside gradients, if those have to be there. What the message says is enough."""
    model = wide()
    optimizer = dos_adam(model.parameters(), tmp_path, host_memory=nbytes, offload_gradients=offload)
    advice = r"choose (more|(\d+) or more).* or a smaller subgroup_size"
    with pytest.raises(MemoryError, match=f"host_memory={nbytes}.*; {advice}") as said:
        train(model, optimizer, 2)
    assert not bytes_on_disk(tmp_path)
    least = re.search(advice, str(said.value))[2]
    if least is not None:
        other = wide()
        train(other, dos_adam(other.parameters(), tmp_path, host_memory=int(least), offload_gradients=offload), 2)


@pytest.mark.parametrize("policy", ["cpu", "stride:2"])
def test_a_budget_that_is_too_small_for_what_joins(tmp_path: Path, policy: str) -> None:
    """What there was goes on without it."""
    weights = [nn.Parameter(torch.ones(n)) for n in (5 * SMALL, 10)]
    optimizer = dos_adam(weights[:1], tmp_path, policy=policy, host_memory=2 * 16 * SMALL)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.add_param_group({"params": weights[1:], "amsgrad": True})
    optimizer.step()
    assert optimizer.state[weights[1]]["step"] == 1
