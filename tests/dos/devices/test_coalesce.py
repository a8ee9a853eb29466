"""Small pieces share a copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dos.devices import coalesce
from dos.devices.base import Copy
from dos.devices.coalesce import FEW, RUN_BYTES, SMALL_BYTES, joined, parts_of, queue_parts

SMALL, LARGE = 100, SMALL_BYTES // 4


def pieces(host: Tensor, sizes: list[int], gaps: dict[int, int] | None = None) -> list[Copy]:
    """Copies from tensors of their own to places in `host`, one after the other but for gaps after some."""
    found, start = [], 0
    for i, size in enumerate(sizes):
        found.append((host[start : start + size], torch.randn(size)))
        start += size + (gaps or {}).get(i, 0)
    return found


def queue(copies: list[Copy], *, to_host: bool) -> None:
    queue_parts(parts_of(copies, host=1 - to_host).parts, [copy[to_host] for copy in copies], to_host=to_host)


def runs(copies: list[Copy]) -> list[list[Tensor]]:
    """The sides on the host, by what small ones have in common."""
    return [[side for _, side in run] for run in coalesce._runs(copies, 0)]


@pytest.mark.parametrize(
    ("sizes", "gaps", "expected"),
    [
        ([SMALL] * 5, {}, [5]),
        ([SMALL] * 5, {1: 3}, [2, 3]),
        ([SMALL, SMALL, LARGE, SMALL, SMALL], {}, [2, 1, 2]),
        ([LARGE, LARGE], {}, [1, 1]),
        ([LARGE - 1] * (2 * RUN_BYTES // SMALL_BYTES), {}, [RUN_BYTES // SMALL_BYTES] * 2),
        ([], {}, []),
    ],
)
def test_runs(sizes: list[int], gaps: dict[int, int], expected: list[int]) -> None:
    host = torch.zeros(sum(sizes) + sum(gaps.values()))
    copies = pieces(host, sizes, gaps)
    # In the order in which backward makes gradients: from the last to the first.
    found = runs([*reversed(copies)])
    assert [len(run) for run in found] == expected
    assert [side.data_ptr() for run in found for side in run] == [copy[0].data_ptr() for copy in copies]


def test_neighbours_of_another_type_or_memory_are_not_joined() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    other = torch.zeros(8)
    sides = [memory[:32].view(torch.float32), memory[32:].view(torch.bfloat16), other]
    assert [len(run) for run in runs([(side, side.clone()) for side in sides])] == [1, 1, 1]


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_copies_touch_nothing_between_pieces(to_host: bool, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if full:  # the device, so that pieces go one by one

        def raises(*args: object, **kwargs: object) -> None:
            raise torch.OutOfMemoryError("full")

        monkeypatch.setattr(torch, "empty_like", raises)
    torch.manual_seed(0)
    sizes = [7, 1, 300, 3, 2, LARGE + 5, 20, 9, 11]
    host = torch.randn(sum(sizes) + 4)
    copies = pieces(host, sizes, {7: 4})
    before = host.clone()
    if to_host:
        queue(copies, to_host=True)
    else:
        copies = [(theirs, ours) for ours, theirs in copies]
        queue(copies, to_host=False)
        assert torch.equal(host, before)
    for destination, source in copies:
        assert torch.equal(destination, source)
    assert torch.equal(host[-15:-11], before[-15:-11]), "what is between pieces was overwritten"


def test_the_copies_of_a_job_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = list[int](), coalesce.queue_copies
    monkeypatch.setattr(coalesce, "queue_copies", lambda to, source: calls.append(len(to)) or plain(to, source))
    host = torch.zeros(20 * LARGE)
    copies = [(part, torch.full((LARGE,), float(n))) for n, part in enumerate(host.split(LARGE))]
    queue(copies, to_host=True)
    assert calls == [20]
    assert host.view(20, LARGE)[:, 0].tolist() == [*range(20)]


@pytest.mark.parametrize(("count", "staged"), [(FEW, 0), (FEW + 1, 1)])
def test_a_few_small_neighbours_go_apart(count: int, staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = list[int](), torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda of, **more: made.append(len(of)) or plain(of, **more))
    copies = pieces(torch.zeros(count * SMALL), [SMALL] * count)
    queue(copies, to_host=True)
    assert len(made) == staged
    assert all(torch.equal(destination, source) for destination, source in copies)


def test_gradients_become_wider_on_the_way() -> None:
    host = torch.zeros(60)
    copies = [(host[i : i + 10], torch.randn(10).bfloat16()) for i in range(0, 60, 10)]
    assert len(runs(copies)) == 1
    queue(copies, to_host=True)
    assert torch.equal(host, torch.cat([source for _, source in copies]).float())


def test_neighbours_on_both_sides_are_one_copy() -> None:
    here, there, other = torch.randn(12), torch.zeros(12), torch.randn(4)
    parts = [(there[:3], here[:3]), (there[3:5], here[3:5]), (there[5:6], here[6:7]), (there[6:10], other)]
    found = joined([parts[2], parts[0], parts[3], parts[1]])
    assert [len(source) for _, source in found] == [5, 1, 4]
    for destination, source in found:
        destination.copy_(source)
    assert torch.equal(there, torch.cat([here[:5], here[6:7], other, torch.zeros(2)]))


def test_pieces_that_lie_apart_are_not_joined() -> None:
    here, there = torch.randn(6), torch.zeros(6)
    assert len(joined([(there[:3], here[3:]), (there[3:], here[:3])])) == 2
    assert joined([]) == []
