"""A job is one native call, of the runtime's functions in their order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dos.devices.base import Copy
from dos.devices.coalesce import FEW, Kept, parts_of
from dos.devices.pinned import lazy_zeros, pin, unpin
from dos.devices.runtime import runtime, runtime_of
from dos.kernels.extension import load_extension
from perfmodel.lanes import PIECE_BYTES
from tests.support.fake_cuda import install

TO_HOST, ARGUMENTS = 2, 3
_WORD = ctypes.POINTER(ctypes.c_uint64)


class Calls:
    """Functions of a runtime, which note their calls. fails: the number of the one that returns an error."""

    def __init__(self, fails: int = -1) -> None:
        self.log = list[tuple[Any, ...]]()
        word, kinds = ctypes.c_size_t, list[tuple[str, tuple[Any, ...]]]()
        kinds += [("wait", (word, word, ctypes.c_uint)), ("record", (word, word))]
        kinds += [("copy", (word, word, word, ctypes.c_int, word))]
        launch = ctypes.CFUNCTYPE(ctypes.c_int, word, *[ctypes.c_uint] * 7, word, ctypes.POINTER(_WORD), word)

        def noting(name: str) -> Callable[..., int]:
            def call(*arguments: int) -> int:
                self.log.append((name, *arguments))
                return 7 if len(self.log) == fails + 1 else 0

            return call

        self._kept: list[Any] = [ctypes.CFUNCTYPE(ctypes.c_int, *kind)(noting(name)) for name, kind in kinds]
        self._kept.append(ctypes.CFUNCTYPE(None, ctypes.c_int64)(noting("sleep")))
        noted = noting("launch")

        def launched(*arguments: Any) -> int:
            *given, words, _ = arguments
            return noted(*given, *[words[n].contents.value for n in range(ARGUMENTS)])

        self._kept.append(launch(launched))
        self.runtime = runtime_of(tuple(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._kept))


def test_waits_records_and_pieces_of_copies_are_queued_in_their_order() -> None:
    calls, most = Calls(), PIECE_BYTES
    copies = [(1 << 40, 2 << 40, most + 5), (3 << 40, 4 << 40, most)]
    assert calls.runtime.queue(9, (1, 2), 3, copies, TO_HOST, 4, 100) == (0, most)
    assert calls.log == [
        *(("wait", 9, 1, 0), ("wait", 9, 2, 0), ("record", 3, 9)),
        *(("sleep", 0), ("copy", 1 << 40, 2 << 40, most, TO_HOST, 9)),
        *(("sleep", 0), ("copy", (1 << 40) + most, (2 << 40) + most, 5, TO_HOST, 9)),
        *(("sleep", 0), ("copy", 3 << 40, 4 << 40, most, TO_HOST, 9)),
        ("record", 4, 9),
    ]


def test_copies_for_which_compute_waits_have_no_kernels_between_them() -> None:
    calls = Calls()
    assert calls.runtime.queue(9, (), 0, [(1, 2, 2 * PIECE_BYTES)], TO_HOST, 0, -1) == (0, -1)
    assert [call[0] for call in calls.log] == ["copy", "copy"]


def test_a_kernel_is_launched_behind_the_copies_and_its_answer_is_copied() -> None:
    calls, kernel = Calls(), load_extension().Kernel(77, 5, 128, 32, (1 << 40, 2, 3 << 40), (1, 2, 3))
    calls.runtime.queue(9, (), 3, [(5, 6, 7)], TO_HOST, 4, -1, kernel)
    assert calls.log == [
        *(("record", 3, 9), ("copy", 5, 6, 7, TO_HOST, 9)),
        *(("launch", 77, 5, 1, 1, 128, 1, 1, 32, 9, 1 << 40, 2, 3 << 40), ("copy", 1, 2, 3, TO_HOST, 9)),
        ("record", 4, 9),
    ]


@pytest.mark.parametrize("fails", range(6))
def test_an_error_ends_the_job(fails: int) -> None:
    calls, kernel = Calls(fails), load_extension().Kernel(77, 5, 128, 32, (1, 2, 3), (1, 2, 3))
    error, _ = calls.runtime.queue(9, (1,), 3, [(5, 6, 7)], TO_HOST, 4, 0, kernel)
    assert (error, len(calls.log)) == (7, fails + 1)


def test_without_a_gpu_torch_queues_all() -> None:
    assert runtime() is None or torch.cuda.is_available()


def staged(numel: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Pinned host memory."""
    install(monkeypatch, seed=None)
    host = lazy_zeros(numel, torch.float32)
    assert pin(host, torch.device("cuda", 0))
    return host


def halves(tensor: Tensor) -> list[Tensor]:
    return list(tensor.chunk(2))


def plain(copies: Sequence[Copy]) -> list[tuple[int, ...]] | None:
    found = parts_of(copies, host=0).plain
    return None if found is None else [*found]


def test_plain_copies_are_given_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    host, source = staged(1 << 16, monkeypatch), torch.randn(1 << 16)
    copies = list(zip(halves(host), halves(source), strict=True))
    assert plain(copies) == [(to.data_ptr(), n, to.nbytes) for n, (to, _) in enumerate(copies)]


@pytest.mark.parametrize(
    "source",
    [
        lambda numel: torch.randn(numel, dtype=torch.float64),
        lambda numel: torch.randn(2 * numel)[::2],
        lambda numel: torch.randn(numel)._neg_view(),
    ],
    ids=["converted", "strided", "negated"],
)
def test_others_are_not(source: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    host = staged(1 << 16, monkeypatch)
    assert plain([(host, source(len(host)))]) is None


def test_neither_are_joined_ones_nor_those_of_memory_that_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    host = staged(1 << 16, monkeypatch)
    small = [(each, each.clone()) for each in host[: 8 * (FEW + 1)].split(8)]
    assert plain(small) is None
    assert plain(small[:FEW]) is not None
    assert plain([(torch.zeros(8), host[:8])]) is None


def test_kept_copies_are_looked_at_again_once_memory_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    host = staged(1 << 16, monkeypatch)
    copies = Kept([(host, torch.randn(len(host)))])
    first = parts_of(copies, host=0)
    assert parts_of(copies, host=0) is first
    assert first.plain is not None
    unpin(host, host[:0])
    assert plain(copies) is None
