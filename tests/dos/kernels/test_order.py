"""Native updates of several threads run one at a time in their order, and need no Python in between."""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dos.kernels.adam import AdamArrays, AdamStep
from dos.kernels.update import AdamBatch, Order, prepare
from tests.support.clock import WAIT_S, compares_with_a_clock

STEP = AdamStep(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)


def runs(count: int, numel: int = 300) -> list[AdamArrays]:
    torch.manual_seed(0)
    return [AdamArrays(torch.randn(numel), torch.randn(numel), *torch.zeros(2, numel)) for _ in range(count)]


def prepared(run: AdamArrays, isa: str | None = None, threads: int = 1) -> Any:
    batch = AdamBatch([run])
    batch.choose([STEP])
    return prepare([batch], [STEP], threads=threads, isa=isa)


@contextmanager
def served(count: int) -> Iterator[tuple[Any, Callable[[int, Any], Future[Any]]]]:
    """An order that a thread serves; what hands over an update for a place, on a thread of its own."""
    order = Order()
    with ThreadPoolExecutor(count + 1) as threads:
        serving = threads.submit(order.serve)
        try:
            yield order, lambda place, update: threads.submit(update.in_order, order, place)
        finally:
            order.stop()
            order.close()
            serving.result(WAIT_S)


def test_updates_run_one_at_a_time_in_their_order_with_the_same_bits() -> None:
    expected, found = runs(12), runs(12)
    for run in expected:
        prepared(run)()
    before = time.perf_counter()
    with served(12) as (_, give):
        given = {place: give(place, prepared(found[place])) for place in random.Random(0).sample(range(12), 12)}
        times = [given[place].result(WAIT_S) for place in range(12)]
    after = time.perf_counter()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.param, other.param)
    moments = [before, *itertools.chain.from_iterable(times), after]
    assert moments == sorted(moments)


def without_the_lock(pause: float) -> bool:
    """Whether two updates have run, one after the other, before any thread but this one had Python's lock."""
    found = runs(2, numel=100_000)
    values = [run.param.numpy() for run in found]  # to read them keeps the lock
    before = [each[0] for each in values]
    interval = sys.getswitchinterval()
    with served(2) as (order, give):
        given = [give(place, prepared(run)) for place, run in enumerate(found, 1)]
        time.sleep(pause)  # both are handed over, unless other programs have all cores
        sys.setswitchinterval(1000)
        try:
            order.leave(0)
            end = time.monotonic() + 2
            while any(is_[0] == was for is_, was in zip(values, before, strict=True)) and time.monotonic() < end:
                ctypes.PyDLL(None).usleep(100)
            first = not any(each.done() for each in given)
        finally:
            sys.setswitchinterval(interval)
        assert all(each.result(WAIT_S) for each in given)
    return first


def test_between_two_updates_no_thread_needs_pythons_lock() -> None:
    assert any(without_the_lock(0.02 * 2**attempt) for attempt in range(9))


def test_a_place_waits_for_those_before_it_that_python_takes() -> None:
    (found,) = runs(1)
    before = found.param.clone()
    with served(1) as (order, give):
        given = give(2, prepared(found))
        order.leave(0)
        order.enter(1)
        assert torch.equal(found.param, before)
        order.leave(1)
        order.leave(1)  # once more changes nothing
        assert given.result(WAIT_S) is not None
        order.enter(3)
    assert not torch.equal(found.param, before)


@compares_with_a_clock
def test_threads_that_wait_for_the_next_update_soon_sleep() -> None:
    (run,) = runs(1, numel=2 * 16384)  # a few microseconds for two threads
    update, count = prepared(run, threads=2), 50
    with served(1) as (_, give):
        before = time.process_time()
        for place in range(count):
            assert give(place, update).result(WAIT_S)
            time.sleep(3e-3)
        used = (time.process_time() - before) / count * 1e3
    assert used < 0.9, f"each wait needs less than 0.9 ms of processor time, found {used:.2f} ms"


def test_a_stopped_order_updates_nothing_more() -> None:
    first, later = runs(2)
    before = first.param.clone(), later.param.clone()
    with served(2) as (order, give):
        given = give(1, prepared(first))
        order.stop()
        assert given.result(WAIT_S) is None
        assert give(0, prepared(later)).result(WAIT_S) is None
    assert torch.equal(first.param, before[0])
    assert torch.equal(later.param, before[1])


def test_what_an_update_raises_is_raised_where_it_was_handed_over() -> None:
    with served(1) as (order, give):
        unknown = prepared(runs(1)[0], isa="none")
        with pytest.raises(ValueError, match="instruction set"):
            give(0, unknown).result(WAIT_S)
        order.enter(0)


def test_who_awaits_the_end_of_an_update_waits_for_no_other_one() -> None:
    first, later = runs(2)
    with served(3) as (order, give), ThreadPoolExecutor(1) as threads:
        order.await_end(0)  # nobody knows how long an update lasts
        assert give(0, prepared(first)).result(WAIT_S)
        order.await_end(0)
        awaited = threads.submit(order.await_end, 1)
        time.sleep(0.02)
        assert not awaited.done(), "the update has not begun"
        assert give(1, prepared(later)).result(WAIT_S)
        awaited.result(WAIT_S)
        awaited = threads.submit(order.await_end, 2)
        order.enter(2)
        order.leave(2)
        awaited.result(WAIT_S)
        awaited = threads.submit(order.await_end, 3)
        order.stop()
        awaited.result(WAIT_S)
