"""Updates of parameters that are on the host: in place, at once, or beside the caller's next forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from dos.guard import Guard
from dos.lifetime import on_own_thread
from dos.machine.threads import leave_a_core
from dos.state.subgroup import Subgroup
from dos.step.work import Placed, SubgroupUpdate, prepare_updates


class InPlace:
    """Updates the subgroups whose parameters are on the host.

    guard: of the optimizer; the caller holds its lock. It is broken if an update fails.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._thread: ThreadPoolExecutor | None = None
        self._running: dict[Subgroup, Future[None]] = {}

    def start(self, updates: Iterable[SubgroupUpdate]) -> None:
        """Update these one after the other, beside the caller."""
        if self._thread is None:
            self._thread = _thread()
            self._guard.working.add(self)
        for update in updates:
            self._running[update.subgroup] = self._thread.submit(_apply, update)

    def wait_for(self, subgroup: Subgroup) -> None:
        """Return once this subgroup's parameters are updated. Raises RuntimeError, with the cause, if that failed."""
        running = self._running.get(subgroup)
        if running is not None:
            try:
                running.result()
            except Exception as error:
                raise self._guard.failure(error) from error

    def wait(self) -> None:
        """Return once all are. Raises as `wait_for`, when nothing is running any more."""
        for running in self._running.values():  # interrupted here, it is called again
            running.exception()
        try:
            for subgroup in self._running:
                self.wait_for(subgroup)
        finally:
            self._running = {}

    def finish(self) -> None:
        """The same, for an owner who is gone or a process that forks: what went wrong is said by the next `wait`."""
        if not on_own_thread():
            for running in list(self._running.values()):
                with contextlib.suppress(Exception):
                    running.exception()

    drain = finish

    def after_fork(self) -> None:
        """Renew what a forked child does not inherit: the thread."""
        if self._thread is not None:
            self._thread = _thread()


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="dos-in-place", initializer=leave_a_core)


def _apply(update: SubgroupUpdate) -> None:
    with torch.no_grad():
        prepare_updates([Placed(update, update.subgroup.state)])()
