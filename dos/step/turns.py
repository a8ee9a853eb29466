"""The turns of the CPU lane: which subgroup is updated next."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Condition
from typing import NamedTuple

from dos.devices import Job
from dos.devices.base import has_ended
from dos.kernels.update import Order
from dos.step.work import SubgroupUpdate

POLL_S = 2e-4
"""Seconds between two looks for gradients that have arrived: a device tells nobody."""
MISSES, ALL = 4, 16
"""Turns that have not arrived of which a look ends, as those that were handed over behind them mostly arrive later; but
the first look for a turn, and then every so many, asks all."""


class Turn(NamedTuple):
    """One subgroup's update on the host.

    number: the subgroup's position in the plan.
    ready: the jobs that copy its gradients to the host, and its state if that was elsewhere.
    after: the jobs that still read its old parameters on the device: the upload waits for them.
    done: receives the job that copies new parameters to the device, or has updated them at home, or the exception.
    confirm: called before the update; returns another job for which the upload waits. See `UnseenWrites.confirm`.
    """

    number: int
    work: SubgroupUpdate
    ready: Sequence[Job]
    after: Sequence[Job]
    done: Future[Job]
    confirm: Callable[[], Job] | None = None


class Turns:
    """The turns of one step. Several threads take them while the caller still hands over later ones.

    Turns update one at a time, in the order in which they are taken: of those whose gradients and state have arrived,
    the first of the plan. So none waits for what another one lacks. The simulator has the same rule
    (`perfmodel.lanes.run_tasks`).

    planned: as given. error: the first exception of a turn or the step; no turn begins after it. whole: whether all
        of the step was issued. order: of the updates. served: whether a thread runs native updates in their order.
    """

    def __init__(self, planned: Sequence[int]) -> None:
        """planned: the numbers of all subgroups, as the plan orders them."""
        self.error: BaseException | None = None
        self.whole = self.served = False
        self.planned = planned
        self.order = Order()
        self._changed = Condition()
        self._waiting: deque[Turn] = deque()
        """Turns that had not arrived when they were last asked."""
        self._arrived: list[tuple[int, Turn]] = []
        """A heap, by place in the plan: the next one is the first."""
        self._place = {number: place for place, number in enumerate(planned)}
        self._closed = self._asking = False
        self._taken = self._ended = 0

    def give(self, turn: Turn) -> None:
        """Hand over a turn; those that are expected first come first."""
        with self._changed:
            # The only change: after an exception before or behind it, as of Ctrl-C, nobody waits in vain.
            self._waiting.append(turn)
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """Hand over no more turns. error: the exception with which the step has failed."""
        with self._changed:
            self._closed, self.whole = True, error is None
            self._note(error)
            self._changed.notify_all()

    def wait(self) -> None:
        """Block until all turns that were handed over have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self.waiting and self._ended == self._taken)

    def take(self) -> tuple[int, Turn] | None:
        """Wait for the next turn, and return it with its place among all; None if no more follow."""
        with self._changed:
            looks = 0
            while (turn := self._next(math.inf if looks % ALL == 0 else MISSES)) is None:
                looks += 1
                if self._closed and not self.waiting:
                    return None
                asks = not self._asking and bool(self._waiting)  # one thread is enough
                self._asking |= asks
                try:
                    self._changed.wait(POLL_S if asks else None)
                finally:
                    self._asking &= not asks
            self._taken += 1
            self._changed.notify_all()  # another thread may have to ask from now on
            return self._taken - 1, turn

    @property
    def waiting(self) -> int:
        """The number of turns that nobody has taken."""
        return len(self._waiting) + len(self._arrived)

    def _next(self, misses: float) -> Turn | None:
        """Return the next turn that has arrived, if any; after an error any, and the last one of all in any case.

        misses: after which no more are asked.
        """
        if self.error is None and not (self._closed and self.waiting == 1):
            self._look(misses)
        elif self._waiting:
            return self._waiting.popleft()  # the thread that takes it tells of the error, or waits for it
        return heapq.heappop(self._arrived)[-1] if self._arrived else None

    def _look(self, misses: float) -> None:
        """Find turns that have arrived. misses: as for `_next`."""
        late = list[Turn]()
        while self._waiting and len(late) < misses:
            turn = self._waiting.popleft()
            if all(map(has_ended, turn.ready)):
                heapq.heappush(self._arrived, (self._place[turn.number], turn))
            else:
                late.append(turn)
        self._waiting.extendleft(reversed(late))

    @contextmanager
    def place(self, place: int) -> Iterator[None]:
        """Surround the preparation and the update of the turn at a place; the next turn may update after it."""
        try:
            self.check()
            yield
        except BaseException as failure:
            # A turn that failed while preparing waits, too: else a later turn could update before an earlier one.
            self.order.enter(place)
            with self._changed:
                self._note(failure)
            raise
        finally:
            self.order.leave(place)

    def wait_for(self, place: int) -> None:
        """Block until all turns before this place have updated. Raises the exception of the first that failed."""
        # Two updates at once would share the cores and host DRAM, whose measured rates would be wrong.
        self.order.enter(place)
        self.check()

    def serve(self) -> None:
        """Run native updates in their order on this thread, until `order` is closed."""
        self.served = True  # not before: where this thread cannot start, the others update
        self.order.serve()

    def check(self) -> None:
        """Raise `error` if there is one."""
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None = None) -> None:
        """Note that a turn has ended, or failed with `error`."""
        with self._changed:
            self._note(error)
            self._ended += 1
            self._changed.notify_all()

    def _note(self, error: BaseException | None) -> None:
        self.error = self.error or error
        if self.error is not None:
            self.order.stop()
