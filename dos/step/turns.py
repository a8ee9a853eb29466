"""The turns of the CPU lane: which subgroup is updated next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from dos.devices import Job
from dos.devices.base import has_ended
from dos.kernels.update import Arrivals, Order
from dos.step.work import SubgroupUpdate

_T = TypeVar("_T")

PATIENCE_S = 0.05
"""Seconds that the caller waits without a look for signals."""
BEGIN_S = 2e-3
"""The most seconds that the caller leaves Python's lock to the threads that begin the first turn."""


class Turn(NamedTuple):
    """One subgroup's update on the host.

    number: the subgroup's position in the plan.
    ready: the jobs that copy its gradients to the host, and its state if that was elsewhere.
    after: the jobs that still read its old parameters on the device: the upload waits for them.
    done: receives the job that copies new parameters to the device, or has updated them at home, or the exception.
    confirm: returns another job for which the upload waits. See `UnseenWrites.confirm`.
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
    (`perfmodel.lanes.run_tasks`). A thread that waits for a turn needs neither Python nor its lock (csrc/arrivals.h).

    planned: as given. error: the first exception of a turn or the step; no turn begins after it. open: whether more
        turns may be handed over. whole: whether all of the step was issued.
    order: of the updates. served: whether a thread runs native updates in their order.
    late: whether a turn is taken just before the update ahead of it ends, because gradients still arrive.
    threads: of updates; see `Plan.threads`.
    """

    def __init__(self, planned: Sequence[int], query: int = 0, *, late: bool = False, threads: int = 0) -> None:
        """planned: the numbers of all subgroups, as the plan orders them. query: as `Device.event_query`."""
        self.error: BaseException | None = None
        self.whole = self.served = False
        self.open = True
        self.planned, self.late, self.threads = planned, late, threads
        self.order = Order()
        self._query = query
        self._arrivals = Arrivals(query)
        self._given: list[Turn] = []
        """All of them, because a thread may still ask events of a turn that another one has taken."""
        self._rank = {number: rank for rank, number in enumerate(planned)}
        self._noting, self._taking = Lock(), Lock()
        self._place = -1
        """Of the turn that was taken last."""
        self._abandoned = False

    def again(self) -> Turns:
        """Return turns of the same plan, for a forked child, in which no thread takes those of its parent."""
        return Turns(self.planned, self._query, late=self.late, threads=self.threads)

    def give(self, turn: Turn) -> None:
        """Hand over a turn."""
        number, events, futures = len(self._given), list[int](), list[Future[Any]]()
        for job in turn.ready:
            _sort(job, events, futures)
        self._given.append(turn)
        # The only change: after an exception before or behind it, as of Ctrl-C, no thread waits in vain.
        self._arrivals.give(number, self._rank[turn.number], events, len(futures))
        for future in futures:
            future.add_done_callback(partial(_tell, self._arrivals, number))
        if self._abandoned:
            self.abandon()

    def let_begin(self, turn: Turn) -> None:
        """Wait until the update of this turn, the first one, has begun, if it can begin now.

        Else they would get Python's lock from the caller again and again, each time late, and the lane would idle.
        """
        if all(map(has_ended, turn.ready)):
            self.order.await_begin(BEGIN_S)

    def close(self, error: BaseException | None = None) -> None:
        """Hand over no more turns. error: the exception with which the step has failed."""
        self.open, self.whole = False, error is None
        if error is not None:
            self.fail(error)
        self._arrivals.close()

    def wait(self) -> None:
        """Block until all turns that were handed over have ended."""
        while not (self._arrivals.wait(PATIENCE_S) or self._abandoned):
            pass

    def abandon(self) -> None:
        """Fail the turns that nobody has answered, and those that follow: after `error` no thread takes them."""
        assert self.error is not None, "it ended the threads"
        self._abandoned = True
        for turn in self._given:
            reject(turn.done, self.error)

    def take(self) -> tuple[int, Turn] | None:
        """Wait for the next turn, and return it with its place among all; None if no more follow."""
        with self._taking:  # else a thread that waits for arrivals would choose ahead of another one's choice
            if self.late and self.served:
                self.order.await_end(self._place)
            number, place = self._arrivals.take()
            if number >= 0:
                self._place = place
        return None if number < 0 else (place, self._given[number])

    @property
    def waiting(self) -> int:
        """The number of turns that no thread has taken."""
        return int(self._arrivals.waiting())

    @contextmanager
    def place(self, place: int) -> Iterator[None]:
        """Surround the preparation and the update of the turn at a place; the next turn may update after it."""
        try:
            self.check()
            yield
        except BaseException as failure:
            # A turn that failed while preparing waits, too: else a later turn could update before an earlier one.
            self.order.enter(place)
            self.fail(failure)
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
        if error is not None:
            self.fail(error)
        self._arrivals.end()

    def fail(self, error: BaseException) -> None:
        """Let no turn begin any more. Those that nobody answers are left for `abandon`."""
        with self._noting:
            self.error = self.error or error
        self._arrivals.fail()
        self.order.stop()


def _sort(job: Job, events: list[int], futures: list[Future[Any]]) -> None:
    """Add the event, or the future, by which a job tells that it has ended, to one of the lists; none if it has.

    A job that has failed, or that cannot be asked, has ended, too: the thread that waits for it finds out.
    """
    event = getattr(job, "event", 0)
    future = None if event else getattr(job, "future", None)
    if event:
        events.append(event)
    elif isinstance(future, Future):
        futures.append(future)


def _tell(arrivals: Any, number: int, future: Future[Any]) -> None:
    """Tell that a future of a job which a turn waits for is done: the job has ended, or was issued by another thread.

    It refers to no turn: the future keeps it as long as the job lives.
    """
    events, futures = list[int](), list[Future[Any]]()
    if future.exception() is None:
        _sort(future.result(), events, futures)
    if futures:  # a job of a thread, which was issued by another one
        futures[0].add_done_callback(partial(_tell, arrivals, number))
    else:
        arrivals.tell(number, events)


def resolve(future: Future[_T], result: _T) -> None:
    """Set the result of the future, unless it is answered."""
    with suppress(InvalidStateError):
        future.set_result(result)


def reject(future: Future[_T], error: BaseException) -> None:
    """Set the exception of the future, unless it is answered."""
    with suppress(InvalidStateError):
        future.set_exception(error)
