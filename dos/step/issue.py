"""One step in flight: the tasks of its schedule, issued one by one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, cast

from torch import Tensor

from dos.devices import Caller, Copy, Device, Job, Mark
from dos.devices.base import HostJob, Promise
from dos.state.disk_store import DiskJob
from dos.state.stores import Store, Stores
from dos.state.subgroup import Subgroup
from dos.step.host_lane import HostLane
from dos.step.iteration import Iteration
from dos.step.turns import Turn, Turns, reject, resolve
from dos.step.unseen import UnseenWrites
from dos.step.work import Placed, SubgroupUpdate, Subject, prepare_updates
from perfmodel import Op, Span, Timeline
from perfmodel.lanes import Stream
from perfmodel.plan import Move, Tier
from perfmodel.tasks import Schedule, Task

_OF_STATE = {Stream.PREFETCH, Stream.GPU, Stream.FLUSH}
"""The streams whose jobs use slots, and rooms of state on the device."""


class Issued(NamedTuple):
    """In place of the future of a job that is issued: to make one of Python's takes fifteen calls."""

    job: Job

    def done(self) -> bool:
        return True

    def result(self) -> Job:
        return self.job


def on_disk(job: Job) -> bool:
    """Return whether the job is a transfer from or to the disk, or may wait for one before it is issued."""
    return isinstance(job, DiskJob | Promise)


def on_device(job: Job) -> Job | None:
    """Wait until the job is issued; return it as the device knows it. None for jobs of host and disk, once ended."""
    # A stream can wait only for an event that is recorded, not for one to come.
    if isinstance(job, Promise):
        job = job.future.result()
    if isinstance(job, HostJob):
        return None
    # A device knows no event of the disk's threads: this thread must wait in its place.
    if isinstance(job, DiskJob):
        job.wait()
        return None
    return job


class Step:
    """Issues a schedule; the jobs issued so far are in flight.

    iteration: the iteration of this step.
    jobs: transfers, and updates on the device. uploads: futures of the jobs that the host's lane issues.
    done: by subgroup, the job after which its new parameters are in place, once that is issued.
    backward: the work that the caller had queued on the device when the step was issued.
    caller_resumed: a mark where the caller's work on the device continues behind the step, if it does.
    turns: of the CPU lane. host: the host's part of the step; None: it has no such part.
    rooms_to_free: subgroups, each with the store whose room its state leaves in this step.
    stale_homes: the same where there is a disk and the state leaves its home there or on the host for the other.
    joined: the subgroups behind whose update a queue of the caller was ordered.
    handing_s, handed: seconds in which updates on the CPU were handed over that wait for no other task, and how many.
    queuing_s, queued: the same of what passes through slots. began: when this began, on the clock of time.perf_counter.
    ran: when the schedule's tasks ran, once `timeline` was called; origin: its 0, on the clock of time.perf_counter.
    """

    def __init__(
        self,
        device: Device,
        stores: Stores,
        lane: HostLane,
        turns: Turns,
        iteration: Iteration,
        unseen: UnseenWrites | None,
    ) -> None:
        self.schedule = Schedule(())
        self.iteration, self.turns = iteration, turns
        self.host: Future[None] | None = None
        self.joined: set[Subgroup] = set()
        self.ran = Timeline(())
        self.origin = iteration.started
        self.handing_s = self.queuing_s = self.began = 0.0
        self.handed = self.queued = 0
        self.caller_resumed: Mark | None = None
        self.jobs: list[Job] = []
        self.uploads: list[Future[Job]] = []
        self.done: dict[Subgroup, Future[Job] | Issued] = {}
        self.backward: Sequence[Job] = ()
        self.rooms_to_free: list[tuple[Subgroup, Store]] = []
        self.stale_homes: list[tuple[Subgroup, Store]] = []
        self._device = device
        self._stores = stores
        self._lane = lane
        self._subjects: Mapping[int, Subject] = {}
        self._unseen = unseen
        self._early = () if unseen is None else unseen.early
        self._deferred = set[Stream]()
        self._apart: Callable[[Callable[[], None]], object] | None = None
        self._compared = set[int]()
        """The subgroups whose parameters are compared in the job that copies their gradients."""
        self._gradient_parts: dict[Subgroup, Tensor] = {}
        """The parts of slots that receive offloaded gradients, and weights that stream."""

    def __repr__(self) -> str:
        """Say what was issued, and how much of it the CPU lane has done, without a wait."""
        ops = Counter(task.op.value for task in self.schedule.tasks[self.schedule.under_way + 1 :])
        issued = ", ".join(f"{count} {op}" for op, count in ops.items()) or "nothing"
        ended = sum(upload.done() for upload in self.uploads)
        caller = "" if self.caller_resumed is None else f", the caller is {'past it' if self.through else 'behind it'}"
        return f"<Step: issued {issued}; the CPU lane has ended {ended} of {len(self.uploads)} turns{caller}>"

    def issue(
        self,
        schedule: Schedule,
        subjects: Mapping[int, Subject],
        begun: Sequence[Job] = (),
        callers: Collection[Caller] = (),
        behind: Sequence[Job] = (),
        apart: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """Issue all tasks of a schedule that are not in flight: of the step, or, while backward runs, of a part of it.

        subjects: by index. begun: the transits that are the first tasks of the schedule. callers: the queues of the
        caller in which gradients were written, if not all in the present one. behind: jobs that use the slots of this
        part, and must end before. apart: runs what issues copies of gradients on a thread of its own, so that
        backward's hook need not.
        """
        self.schedule, self._subjects, self._apart = schedule, subjects, apart
        self.jobs += begun
        if self._stores.disk is not None:
            self._stores.host.windows.begin()
        tasks, under_way = self.schedule.tasks, self.schedule.under_way
        # By number of the task. Tasks that are issued here wait for the end of backward, not for its pieces.
        jobs: dict[int, Sequence[Job]] = dict.fromkeys(range(under_way - len(begun)), ())
        jobs |= {len(jobs) + place: (job,) for place, job in enumerate(begun)}
        # The gradients of this step are complete once the caller's stream has come this far.
        self.backward = self._device.fence(callers)
        jobs[under_way] = (*self.backward, *behind)
        turns: list[Turn] = []
        on_host = self.schedule.on_host

        def hand_over(numbers: Sequence[int]) -> None:
            """Hand over updates all of whose tasks before them are issued."""
            for number in numbers:
                # The host's lane does not wait for the end of backward on the device: gradients that have already
                # arrived would wait for it, too.
                ready = [job for other in tasks[number].after if other != under_way for job in jobs[other]]
                turns.append(self._turn(tasks[number], ready))
                # New parameters that must be copied to the device have a task of their own.
                jobs[number] = (Promise(turns[-1].done),) if turns[-1].work.subgroup.arena.streams else ()
                self._give(turns[-1])

        self.began = time.perf_counter()
        # First, and not in the schedule's order: the lane would wait while the device's jobs are issued.
        hand_over(on_host.get(under_way, ()))
        self.handing_s, self.handed = time.perf_counter() - self.began, len(turns)
        for number in range(under_way + 1, len(tasks)):
            task = tasks[number]
            if task.stream is Stream.PARAMETER:
                jobs[number] = (Promise(cast("Future[Job]", self.done[self._of(task)[1]])),)
            elif task.stream is not Stream.CPU:
                if task.window is not None:
                    self._enter(task)
                after, began = [job for other in task.after for job in jobs[other]], time.perf_counter()
                self.jobs.append((self._update if task.op is Op.UPDATE else self._transfer)(task, after))
                jobs[number] = self.jobs[-1:]
                if task.stream in _OF_STATE:
                    used = [self._subjects[i].subgroup for i in (task.subgroup, *task.others) if i is not None]
                    self._stores.device.use(task.stream, self.jobs[-1], used, task.slot)
                if task.slot is not None:
                    self.queuing_s, self.queued = self.queuing_s + time.perf_counter() - began, self.queued + 1
            if number in on_host:
                hand_over(on_host[number])
        # Else the turns would refer to the gradients' memory until the caller waits for the step.
        for turn in turns:
            turn.work.release()
        if self.schedule.ways:
            self.rooms_to_free = [*self.rooms_to_free, *self._left_rooms()]
        # Released here: they refer to gradients, whose memory the next backward needs while the ledger has this step.
        self._subjects = {}
        self._compared.clear()
        self._gradient_parts.clear()

    def _give(self, turn: Turn) -> None:
        self.turns.give(turn)
        if self.host is None:
            self._begin_host()
            self.turns.let_begin(turn)

    def _begin_host(self) -> None:
        """Let the host begin its part of the step, if it has not."""
        if self.host is None:
            self.host = self._lane.submit(self._run_host)

    def _run_host(self) -> None:
        """Run the host's part of the step: update, then release memory that only the step needed."""
        self._lane.update(self.turns)
        if not self.turns.whole:
            return  # the memory may be used by a job that failed while it was issued, and is in none of `uses`
        self._stores.device.release_slots()
        for subgroup, store in self.rooms_to_free:
            store.drop(subgroup)
        # The caller's thread trims later: trimming waits for the device, which runs the next forward now.
        self._stores.device.trims |= bool(self.rooms_to_free)

    def close(self) -> None:
        """End the issue of the step: no further part of it comes."""
        if not self.turns.open:
            return
        # Without any of these the host has no part in the step, and the next step may be queued behind it.
        if self.rooms_to_free or self.stale_homes or self._stores.device.slots or any(map(on_disk, self.jobs)):
            self._begin_host()
        self.turns.close()

    @property
    def through(self) -> bool:
        """Whether a step behind which the caller's work was ordered has ended, or failed. Does not wait."""
        try:
            return self.caller_resumed is not None and self.caller_resumed.at() is not None
        except Exception:
            return True  # the failure is raised where the jobs are waited for

    def spans(self, errors: list[Exception]) -> list[Span]:
        """Wait for all jobs, the host lane's included, and return their spans. errors: receives their exceptions."""
        jobs = list(self.jobs)
        # The host's lane issues these later: without the wait the last ones would be missed, and run on.
        for upload in self.uploads:
            try:
                jobs.append(upload.result())
            except Exception as error:
                errors.append(error)
        return spans_of(jobs, errors)

    def timeline(self, spans: Sequence[Span], unused: Sequence[Span] = ()) -> Timeline:
        """Return the spans in seconds since `step()` was called, or backward ended on the device, whichever was later.

        Transfers before have negative times. unused: spans of transits that no step has used.
        """
        self.origin = self.iteration.started
        # A device whose work is queued may end backward long after the host has called step().
        for job in self.backward:
            self.origin = max(self.origin, job.wait().end)
        self.ran = Timeline.of([span.since(self.origin) for span in spans])
        return Timeline.of([*self.ran.spans, *[span.since(self.origin) for span in unused]]) if unused else self.ran

    def fail(self, error: Exception) -> None:
        """Reject the futures of jobs that will not be issued any more, so that no caller waits for them."""
        if self.turns.open:
            self.turns.close(error)
        # A hook of a module would otherwise wait for ever for a job that no thread issues.
        for future in self.done.values():
            if isinstance(future, Future):
                reject(future, error)

    def _turn(self, task: Task, ready: Sequence[Job]) -> Turn:
        i, subgroup, update = self._of(task)
        done = Future[Job]()
        self.done[subgroup] = done
        self.uploads.append(done)
        ready = [*ready, *update.arriving] if update.arriving else ready
        reading = subgroup.arena.reading
        if reading is not None:
            # A forward after these gradients may still fetch the weights that the host is about to overwrite.
            ready = [*ready, reading]
        if subgroup.arena.streams:
            return Turn(i, update, ready, (), done)
        after, confirm = self.backward, None
        if self._unseen is not None:
            early = update.offloaded and self._unseen.compared_early(update)
            if i in self._compared:
                pass  # behind the copy of the gradients, for which the update waits
            elif self._subjects[i].sends or (update.offloaded and not early):
                # Then the update waits for the end of backward on the device.
                ready = [*ready, *self._unseen.compare_late(i, update, after)]
            else:
                ready = [*ready, *self._early] if early else ready
                confirm = self._unseen.confirm(i, update, after)
        return Turn(i, update, ready, after, done, confirm)

    def _transfer(self, task: Task, after: Sequence[Job]) -> Job:
        """Issue a copy of state between stores, of gradients to the host, or of both to a slot."""
        assert task.subgroup is not None, "what is transferred is of a subgroup"
        subgroup, update, _, late = self._subjects[task.subgroup]
        device, copies = self._stores.device, list[Copy]()
        number, move = task.subgroup, task.move
        if task.op is Op.GRADIENT and update is not None:
            then: tuple[Callable[[], None], ...] = ()
            items = update.items if late is None else late
            if items and self._unseen is not None:  # the job waits for all of the caller's work, as `compare_late` does
                compare = self._unseen.compare(subgroup, update.copied_pieces)
                then = () if compare is None else (compare,)
                self._compared.add(task.subgroup)
            # The copies refer to the gradients, which `release` takes from the update.
            return self._issue(
                task.stream,
                lambda after: self._device.copy(task.op, number, update.downloads(items), after, *then),
                after,
            )
        if task.op is Op.PREFETCH and task.slot is not None:
            if task.move is not None:
                device.occupy(subgroup, task.slot)
            if update is not None and update.offloaded:
                self._gradient_parts[subgroup] = device.gradient_part(subgroup, task.slot)
                copies = update.fetch_gradients(self._gradient_parts[subgroup])
        elif task.op is Op.FLUSH and update is not None and subgroup in self._gradient_parts:
            copies = update.flush_weights(self._gradient_parts[subgroup])
        if move is None:
            job = self._issue(task.stream, lambda after: self._device.copy(task.op, number, copies, after), after)
        elif Tier.DISK in move:
            # The disk's threads can wait for jobs of any lane; only jobs that the device queues need `_issue`.
            return self._stores.copy(move, number, subgroup, after)
        else:
            job = self._issue(
                task.stream, lambda after: self._stores.copy(move, number, subgroup, after, copies), after
            )
        # The next fetch of the weights, and user code, read their home, which this job writes.
        if task.op is Op.FLUSH and subgroup.arena.streams and update is not None:
            self.done[subgroup] = _issued(job)
        return job

    def _issue(self, stream: Stream, issue: Callable[[Sequence[Job]], Job], after: Sequence[Job]) -> Job:
        """Issue a job now if it waits only for work on the device, else on the thread that reads from disk, in order.

        A device queues work behind its own work, and cannot wait for the host's. Later jobs of the same stream are
        issued on that thread, too: else they would overtake, and the stream's order would not be the plan's. Copies of
        gradients are issued `apart`, in order, and wait for backward alone.
        """
        disk, submit = self._stores.disk, self._apart if stream is Stream.GRADIENT else None
        if submit is None:
            if disk is None or not (stream in self._deferred or any(map(on_disk, after))):
                return issue(after)
            self._deferred.add(stream)
            submit = disk.reading.submit
        later: Future[Job] = Future()

        def run() -> None:
            try:
                resolve(later, issue([job for job in map(on_device, after) if job is not None]))
            except BaseException as error:
                # Not raised here, on the disk's thread, but where the job is waited for.
                reject(later, error)

        submit(run)
        return Promise(later)

    def _enter(self, task: Task) -> None:
        """Give the window that the task fills to the task's subgroup."""
        assert task.window is not None, "it is asked for these alone"
        assert task.subgroup is not None, "what passes through a window is of a subgroup"
        subgroup, update = self._subjects[task.subgroup][:2]
        windows = self._stores.host.windows
        if task.op is not Op.WRITE or windows.of(subgroup) is None:
            window = windows.enter(subgroup, task.window)
            if update is not None and not update.at_home:
                update.place = window

    def _left_rooms(self) -> Iterator[tuple[Subgroup, Store]]:
        """Yield the rooms that state leaves in this step, except homes, which stay, or are `stale_homes`."""
        for i, way in self.schedule.ways.items():
            subgroup = self._subjects[i].subgroup
            home = self._stores.disk is not None and self._stores.host.has(subgroup)
            if home and (way == Move(Tier.DISK, Tier.HOST) or way.source is Tier.HOST is not way.destination):
                self.stale_homes.append((subgroup, self._stores.of[way.source]))
            elif way.source not in (way.destination, subgroup.arena.tier, Tier.DISK):
                yield subgroup, self._stores.of[way.source]

    def _update(self, task: Task, after: Sequence[Job]) -> Job:
        """Launch the update of one subgroup, or of residents together."""
        i, first, _ = self._of(task)
        updates = [self._placed(each) for each in (task, *(task._replace(subgroup=i) for i in task.others))]
        # User code may release gradients as soon as step() has returned: the device keeps their memory until the update
        # has read them.
        reads = [values for each in updates if not each.update.offloaded for values in each.update.columns.values]
        name = first.arena.format.name

        def launch(after: Sequence[Job]) -> Job:
            # Before the device records the start, so that the host's time does not count as the kernel's.
            update = prepare_updates(updates)
            vain = () if self._unseen is None else self._unseen.before_update([each.update for each in updates])
            # Comparisons still read the parameters.
            return self._device.launch(i, update, task.size, [*after, *self._early, *vain], reads, name)

        job = self._issue(task.stream, launch, after)
        done = _issued(job)
        self.done |= {each.update.subgroup: done for each in updates if not each.update.subgroup.arena.streams}
        return job

    def _placed(self, task: Task) -> Placed:
        _, subgroup, update = self._of(task)
        device, gradients = self._stores.device, None
        if update.offloaded:
            gradients = self._gradient_parts[subgroup]
        return Placed(update, device.fetch(subgroup), gradients)

    def _of(self, task: Task) -> tuple[int, Subgroup, SubgroupUpdate]:
        assert task.subgroup is not None, "an update is of a subgroup"
        subject = self._subjects[task.subgroup]
        assert subject.update is not None, "nothing is updated without a gradient"
        return task.subgroup, subject.subgroup, subject.update


def _issued(job: Job) -> Future[Job] | Issued:
    """Return a future of the job, done once it is issued; for a `Promise` that is later."""
    return job.future if isinstance(job, Promise) else Issued(job)


def spans_of(jobs: Iterable[Job], errors: list[Exception]) -> list[Span]:
    """Wait for the jobs and return their spans. errors: receives their exceptions."""
    spans = []
    # All are waited for, even after a failure: user code may release memory once this has raised.
    for job in jobs:
        try:
            spans.append(job.wait())
        except Exception as error:
            errors.append(error)
    return spans
