"""What waits for events of a device is taken once they have ended, and nobody needs Python meanwhile."""

from __future__ import annotations

import ctypes
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from dos.kernels.update import Arrivals
from tests.support.clock import WAIT_S

NOT_READY = 600
STRLEN: Any = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
"""A native query: an event has ended once the text at its address has another length than this."""


class Event:
    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(b"x" * NOT_READY)
        self.address = ctypes.addressof(self._text)

    def end(self) -> None:
        self._text[0] = b"\0"


@contextmanager
def with_the_lock() -> Iterator[None]:
    """Until the end no other thread of Python runs, unless this one calls what lets go of the lock."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def taken_with_the_lock_held(arrivals: Any) -> bool:
    """Whether work is taken before any thread but this one has had Python's lock."""
    end = time.monotonic() + 2
    while arrivals.waiting() and time.monotonic() < end:
        ctypes.PyDLL(None).usleep(100)
    return arrivals.waiting() == 0


def taken_without_python(threads: int, pause: float) -> bool:
    arrivals, events = Arrivals(STRLEN), [Event(), Event()]
    with ThreadPoolExecutor(threads) as pool:
        found = [pool.submit(arrivals.take) for _ in range(threads)]
        time.sleep(pause)  # all wait, unless other programs have all cores
        with with_the_lock():
            arrivals.give(7, 0, [each.address for each in events], 0)
            events[1].end()
            ctypes.PyDLL(None).usleep(5000)
            waited = arrivals.waiting() == 1
            events[0].end()
            taken = taken_with_the_lock_held(arrivals) and not any(each.done() for each in found)
        arrivals.close()
        assert sorted(each.result(WAIT_S)[0] for each in found) == [-1, 7][2 - threads :]
    assert waited, "one of its two events had not ended"
    return taken


@pytest.mark.parametrize("threads", [1, 2])
def test_a_device_is_asked_and_work_is_taken_without_python(threads: int) -> None:
    """Neither an event that ends nor what is handed over wakes a thread for Python's lock."""
    assert any(taken_without_python(threads, 0.02 * 2**attempt) for attempt in range(9))


def test_of_what_has_arrived_the_first_of_the_plan_is_taken() -> None:
    """Whatever arrives in whatever order, with events, jobs of threads or both."""
    rng = random.Random(0)
    for _ in range(30):
        arrivals, count = Arrivals(STRLEN), rng.randrange(1, 40)
        ranks = rng.sample(range(100), count)
        events = [[Event() for _ in range(rng.randrange(3))] for _ in range(count)]
        later = [[Event() for _ in range(rng.randrange(2))] for _ in range(count)]
        untold = [rng.randrange(2) for _ in range(count)]
        for number in range(count):
            arrivals.give(number, ranks[number], [e.address for e in events[number]], untold[number])
        arrived, taken = set[int](), set[int]()
        for number in rng.sample(range(count), count):
            if untold[number]:
                arrivals.tell(number, [e.address for e in later[number]])
                for event in later[number]:
                    event.end()
            for event in events[number]:
                event.end()
            arrived.add(number)
            arrived |= {n for n in range(count) if not events[n] and not untold[n]}
            while rng.random() < 0.6 and arrived - taken and len(taken) < count - 1:
                best = min(arrived - taken, key=ranks.__getitem__)
                assert arrivals.take() == (best, len(taken))
                taken.add(best)
        arrivals.close()
        while len(taken) < count:
            found = arrivals.take()[0]
            assert found == min(set(range(count)) - taken, key=ranks.__getitem__)
            taken.add(found)
        assert arrivals.take() == (-1, count)


def test_without_a_query_events_count_as_ended() -> None:
    arrivals = Arrivals(0)
    arrivals.give(3, 0, [Event().address], 0)
    assert arrivals.take() == (3, 0)


def test_a_thread_that_waits_for_all_learns_that_all_have_ended() -> None:
    arrivals = Arrivals(STRLEN)
    arrivals.give(0, 0, [], 0)
    assert not arrivals.wait(0.001)
    arrivals.take()
    assert not arrivals.wait(0.001)
    arrivals.end()
    assert arrivals.wait(0.001)
