"""The ledger: where each subgroup's state is, and the transfers and steps in flight."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from dos.debug import DEBUG, log
from dos.devices import Caller, Device, Job
from dos.guard import Guard, Phase, on_own_thread
from dos.state.homes import Homes
from dos.state.record import ParameterRecord
from dos.state.stores import Stores
from dos.state.subgroup import Subgroup
from dos.step.host_lane import HostLane, InPlaceLane
from dos.step.issue import Issued, Step, on_device, spans_of
from dos.step.iteration import Iteration
from dos.step.transit import Transits, drain_streams
from dos.step.turns import Turns
from dos.step.unseen import UnseenWrites
from dos.step.work import Subject
from perfmodel import Op, Placement, Plan, Timeline, Workload
from perfmodel.plan import Tier
from perfmodel.schedule import schedule_step
from perfmodel.tasks import Schedule, SubgroupState


class Ledger:
    """The one owner of two questions about a session: where is state, and what is in flight?

    `Stores.at` returns where state is.

    In flight may be:

    - *transits* of gradients to the host, and *slots* of the device that backward has filled for the step to come;
    - *the step* that was issued last, until `settle`, and *queued* steps before it, all of whose work is on the device
      ahead of the work that the caller queues there, so that the next backward need not wait for them;
    - updates `in_place`, of parameters on the host;
    - *parameters* that any of these update. `join` orders a caller that reads one behind its update.

    The caller holds the guard's lock. The phase becomes BROKEN if a step or an update fails.

    device, stores, lane: of the accelerator; set by `open`.
    unseen: finds writes to parameters that raise no version; None where the caller waits for the device, and `step()`
        itself compares.
    pending: the records of parameters in flight, each with the caller's queues that are ordered behind its update.
    ended: called with each step that has succeeded, and its timeline.
    held: issues the rest of what backward has reserved memory for; None: nothing waits.
    """

    device: Device
    stores: Stores
    transits: Transits
    lane: HostLane
    ended: Callable[[Step, Timeline], None]
    unseen: UnseenWrites | None

    def __init__(self, guard: Guard) -> None:
        self.held: Callable[[], None] | None = None
        self.unseen = None
        self.pending: dict[ParameterRecord, frozenset[Caller]] = {}
        self.step: Step | None = None
        self._open = False
        self._guard = guard
        self._scheduled: tuple[tuple[Any, ...], Schedule] | None = None
        """The last schedule, and what it was made of."""
        self.parts: dict[tuple[int, ...], tuple[tuple[Any, ...], Schedule]] = {}
        """Schedules of parts by their subgroups, and what each was made of."""
        self._queued: deque[Step] = deque()
        self.in_place = InPlaceLane(guard)
        guard.working.add(self)

    def __repr__(self) -> str:
        """Say what is in flight, and behind what, without a wait."""
        parts = [f"step {self._guard.steps}: {self.step}" if self.step else "no step"]
        parts += [f"queued on the device: {step}" for step in self._queued]
        if self._open:
            parts += [f"{transit}" for transit in self.transits.all]
            parts += [f"slot {number}: {slot}" for number, slot in enumerate(self.stores.device.slots)]
        if self.in_place.running:
            ended = sum(running.done() for running in self.in_place.running.values())
            parts.append(f"{ended} of {len(self.in_place.running)} updates in place have ended")
        if self.step is not None and self.step.turns.open:
            parts.append(f"{self.step.turns.waiting} turns that the CPU lane has not taken")
        if self.pending:
            parts.append(f"{len(self.unfinished)} of {len(self.pending)} parameters behind which no queue is")
        return f"<Ledger, {self._guard.phase.name}: {'; '.join(parts)}>"

    def open(self, device: Device, homes: Homes) -> None:
        """Begin to use the accelerator, once the first parameter there was found."""
        self.device, self.stores = device, Stores(device, homes)
        self.transits = Transits(device, self.stores)
        self.unseen = UnseenWrites(device) if device.queues else None
        self.lane = HostLane(device, self.unseen)
        self._open = True

    # Where state is.

    def spill_to_disk(self, subgroups: Iterable[Subgroup]) -> None:
        """Move state of these to disk if offloaded gradients do not fit on the host beside it; see `Stores.spill`."""
        self.stores.host.lower_share()
        if self.stores.disk is not None and self.stores.host.room < 0:
            self.settle()
            self.stores.spill(subgroups)

    def forget(self, subgroups: Iterable[Subgroup]) -> None:
        """Release the state of these, whose parameters are forgotten. Nothing may be in flight."""
        self.stores.drop_empty()
        for subgroup in subgroups:
            for tier, store in self.stores.of.items():
                if tier is not subgroup.arena.tier and store.has(subgroup):
                    store.drop(subgroup)
            self.stores.host.windows.leave(subgroup)
            if self.unseen is not None:
                self.unseen.forget(subgroup)

    def cancel_all(self) -> None:
        """Cancel all transits that backward has begun. Resident state stays."""
        # First, because a copy that raised while it was issued has no transit, and a part of it may run.
        self.drain()
        self.stores.device.release_slots()

    # Steps.

    def issue(
        self,
        plan: Plan,
        subjects: Sequence[Subject],
        before: Sequence[SubgroupState],
        workload: Workload,
        iteration: Iteration,
    ) -> None:
        """Issue a step whose memory is reserved.

        subjects, before: by index. workload: the one for which the plan was made. iteration: of the step.
        Raises RuntimeError, with nothing running any more, if a job cannot be issued.
        """
        step = self._begin(plan, iteration)
        with self._failing():
            self._follow_parameters(plan, subjects, before)
            adopted = self.transits.adopt(plan, subjects)
            # The device may have had memory for fewer slots than planned. A plan that streams a subgroup without a
            # gradient has none, but the schedule needs the number of a slot.
            slots = len(self.stores.device.slots) or int(Placement.GPU_STREAMED in plan.placements)
            granted = dataclasses.replace(plan, slots=slots)
            made_of = granted, workload, [*before], [task for task, _ in adopted]
            if self._scheduled is None or self._scheduled[0] != made_of:  # in most steps it is the last one's
                self._scheduled = made_of, schedule_step(*made_of)
            # The host begins to update while later tasks are issued.
            step.issue(self._scheduled[1], dict(enumerate(subjects)), [job for _, job in adopted])
            step.close()
            if DEBUG:
                log("issued:", step)

    def issue_part(
        self,
        schedule: Schedule,
        subjects: Mapping[int, Subject],
        plan: Plan,
        iteration: Iteration,
        callers: Collection[Caller],
        behind: Sequence[Job],
        arriving: Sequence[Job] = (),
    ) -> Step:
        """Issue a part of a step while backward runs, whose memory is reserved. `close` or `settle` ends the step.

        subjects: of the schedule, by index. callers: the queues in which backward wrote their
        gradients. behind: jobs that use the slots of this part, and must end before. arriving: gradients on the host
        that the device reads. No transit of state may be in flight.
        Returns the step. Raises as `issue`.
        """
        step = self._begin(plan, iteration, late=True) if self.step is None else self.step
        with self._failing():
            for each in arriving:
                each.wait()  # the device cannot wait for the host's thread, which adds gradients up
            apart = self.lane.issue if self.device.queues else None
            step.issue(schedule, subjects, (), callers, behind, apart)
            for subject in subjects.values():
                if subject.update is not None:
                    self.pending.update(dict.fromkeys([piece.record for piece in subject.update.pieces], frozenset()))
            return step

    def close(self) -> None:
        """End the issue of a step: no further part of it comes."""
        if self.step is not None:
            self.step.close()

    def abandon(self, failure: Exception) -> None:
        """End a step of which backward has issued a part, and whose other part will never come. Blocks."""
        self.held = None
        if self.step is not None:
            self.step.fail(failure)
        self.drain()  # user code releases gradients and loads checkpoints: no job may run any more
        with contextlib.suppress(Exception):  # user code gets the exception of its own backward
            self.settle()

    def _begin(self, plan: Plan, iteration: Iteration, *, late: bool = False) -> Step:
        """Begin a step. late: as for `Turns`."""
        if self.stores.homes.exposed or self.stores.disk is not None:
            self.stores.homes.begin_step()
        turns = Turns(plan.order, self.device.event_query, late=late, threads=plan.threads)
        self.step = Step(self.device, self.stores, self.lane, turns, iteration, self.unseen)
        return self.step

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Surround the issuing of jobs: if one fails, the step has, and nothing runs any more when that is raised."""
        try:
            yield
        except BaseException as error:
            failure = self._guard.failure(error)
            if self.step is not None:
                self.step.fail(failure)  # part of the step is in flight; no caller may wait for the other part
            # User code releases gradients and loads checkpoints once this has raised: no job may run any more.
            self.drain()
            if isinstance(error, Exception):
                raise failure from error
            raise

    def _follow_parameters(self, plan: Plan, subjects: Sequence[Subject], before: Sequence[SubgroupState]) -> None:
        """Let masters that the host updates follow parameters to which user code wrote since the last step."""
        for i in plan.served(Placement.CPU):
            subgroup, update = subjects[i].subgroup, subjects[i].update
            if update is None or update.from_disk or not update.any_written:
                continue  # state on disk follows once it was read
            if before[i].state is Tier.HOST:
                copies = update.download_written()
                if copies:
                    # Behind user code's writes on the device; the host reads the copies in `follow_on_host`.
                    self.device.copy(Op.GRADIENT, 0, copies, self.device.fence()).wait()
                if copies or subgroup.arena.streams:
                    update.follow_on_host()
            elif before[i].gradient is Tier.HOST:
                update.follow(self.stores.of[before[i].state].fetch(subgroup))  # before the state moves to the host

    @property
    def unfinished(self) -> list[ParameterRecord]:
        """The records in flight behind whose updates no queue of the caller was ordered."""
        return [record for record, behind in self.pending.items() if not behind]

    @property
    def running(self) -> bool:
        """Whether a step was issued that is neither settled nor queued."""
        return bool(self.step or self.in_place.running or self.pending)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight on the device."""
        return not (self.step or self._queued or (self._open and (self.transits.all or self.stores.device.slots)))

    def join(self, subgroup: Subgroup) -> None:
        """Order the work that the caller queues from now on behind the update of this subgroup; block for one in place.

        Raises RuntimeError if the update failed, with the cause.
        """
        if subgroup in self.in_place.running:
            self.in_place.join(subgroup)
        elif self.step is not None and subgroup in self.step.done:
            if DEBUG:
                log("joins:", subgroup.numel)
            again = subgroup in self.step.joined  # a second wait for the same update takes no time
            with contextlib.nullcontext() if again else self.step.iteration.held_up():
                self._join([self.step.done[subgroup]])
            self.step.joined.add(subgroup)

    def _join(self, done: Iterable[Future[Any] | Issued]) -> None:
        try:
            for future in done:
                job = on_device(future.result())
                if job is not None:
                    # The caller reads the new parameters, and overwrites gradients that the update reads.
                    self.device.join(job)
        except Exception as error:
            raise self._guard.failure(error) from error

    def updates(self, subgroups: Iterable[Subgroup], *, wait: bool) -> list[Job] | None:
        """Return the jobs on the device after which the homes of these have the weights of the last step.

        Weights that the host updates are at home already. wait: whether to wait for the host; else returns None where
        the host has yet to update some. Raises RuntimeError if an update failed, with the cause.
        """
        step = self.step
        found = [] if step is None else [step.done[s] for s in subgroups if s in step.done]
        # The CPU may still write the homes that a fetch would read, and no stream can wait for that.
        if not wait and not all(future.done() for future in found):
            return None
        try:
            jobs = (on_device(future.result()) for future in found)
            return [job for job in jobs if job is not None]
        except Exception as error:
            raise self._guard.failure(error) from error

    def order_caller(self) -> None:
        """Order the work that the caller queues on the device from now on behind the whole step.

        Blocks until the host's part has ended, and slots and the rooms that state leaves are released.
        Raises RuntimeError if the step failed, with the cause.
        """
        step = self.step
        if step is None:
            return
        with step.iteration.held_up():
            # Behind each update, because the caller's next kernel may read any parameter; once per launch, which may
            # update several subgroups.
            self._join(dict.fromkeys(step.done.values()))
            if step.host is not None:
                self._join([step.host])  # releases slots and rooms, whose memory the next forward may need
            step.caller_resumed = self.device.mark()

    def queue(self) -> bool:
        """Queue this step, so that another may begin before it has ended; return False if `settle` is needed instead.

        A step can be queued if all its work is on the device, ahead of the work that the caller queues there.
        """
        if not self._open:
            return False
        self._read_queued(wait=False)
        step, others = self.step, self.in_place.running or self.transits.all
        # The host's work for a step is in no queue of the device: another step could overtake it.
        if step is None or others or step.host or step.caller_resumed is None or step.through:
            return False
        self._queued.append(step)
        self.step = None
        return True

    def _read_queued(self, *, wait: bool) -> None:
        """Report the queued steps that have ended. wait: whether to wait for all of them."""
        while self._queued and (wait or self._queued[0].through):
            errors: list[Exception] = []
            spans = self._queued[0].spans(errors)
            if errors:
                raise self._guard.failure(errors[0]) from errors[0]
            step = self._queued.popleft()
            self._guard.complete += 1
            self.ended(step, step.timeline(spans))

    def settle(self) -> None:
        """Block until nothing is in flight.

        Raises RuntimeError, with the first cause, if a job of any lane failed, once all have ended.
        """
        held, self.held = self.held, None
        if held is not None:  # else state would move whose place, and room, its update has taken down
            held()
            self.held = held
        self.close()
        if DEBUG and self.running:
            log("waits:", self)
        if not self.idle:
            self._settle_step()
        if self.in_place.running:
            self.in_place.settle()
        if not self._guard.broken:
            self._guard.complete = self._guard.steps

    def _settle_step(self) -> None:
        self._read_queued(wait=True)
        errors: list[Exception] = []
        step = self.step
        with contextlib.nullcontext() if step is None else step.iteration.held_up():
            spans = [] if step is None else step.spans(errors)
            unused = spans_of((transit.job for transit in self.transits.all), errors)
            try:
                if step is not None and step.host is not None:
                    step.host.result()  # releases slots and the rooms that state leaves
            except Exception as error:
                errors.append(error)
        self.stores.device.release_slots()
        if step is None:
            errors = []  # of gradients that no step uses; a step that uses them raises
        elif not errors:
            # Only now, and only without errors: where a transfer has failed, the old home has the only whole state.
            for subgroup, home in step.stale_homes:
                home.drop(subgroup)
        # After all waits: if Ctrl-C ends one of them, the next call waits again.
        self.transits.all = []
        self.step = None
        spans += self.lane.take_spans()
        if errors:
            raise self._guard.failure(errors[0]) from errors[0]
        # A step that failed while it was issued is not complete, although its jobs have ended.
        if step is not None and self._guard.phase is not Phase.BROKEN:
            self.ended(step, step.timeline(spans, unused))

    def finish(self) -> None:
        """Settle for an optimizer that was collected, and raise nothing."""
        if on_own_thread():
            return  # the optimizer was collected on our thread, which would wait for itself
        with contextlib.suppress(Exception):
            if self._queued:  # streams are in order: all steps before have ended with the last one
                self._queued[-1].spans([])
                self._queued.clear()
            self.settle()

    def drain(self) -> None:
        """Block until all work issued so far has ended, even failed work. The next `settle` raises failures."""
        # A lane's own thread that forks would wait for itself.
        if on_own_thread():
            return
        # After a fork the child would have half an update in place, which none of its threads completes.
        self.in_place.drain()
        if not self._open:
            return
        disk = self.stores.disk
        threads = [self.lane, *(() if disk is None else (disk.reading, disk.writing))]
        if self.step is not None and self.step.turns.open and self.step.host is not None:
            # User code forks while this thread issues a step, as in a signal handler: the lane waits for more turns.
            self.step.turns.wait()
            threads.remove(self.lane)
        # Threads first: they issue jobs on the streams that are drained below. Each runs its jobs in order.
        for submit in (self.lane.issue, self.lane.add, *(thread.submit for thread in threads)):
            with contextlib.suppress(Exception):
                submit(lambda: None).result()
        drain_streams(self.device)

    def after_fork(self) -> None:
        """Renew threads, which a forked child does not inherit."""
        self.in_place.renew()
        if self._open:
            self._guard.lost |= self.stores.host.lost
            self.lane.renew()
            if self.stores.disk is not None:
                self.stores.disk.renew()
            step = self.step
            if step is not None and step.turns.open:  # all have ended; the lane's thread, which waited, is the parent's
                step.turns, step.host = step.turns.again(), None
