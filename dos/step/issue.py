"""One step in flight: the tasks of its schedule, issued one by one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from dos.devices import Copy, Device, Job, Mark
from dos.devices.base import HostJob
from dos.state.disk_store import DiskJob
from dos.state.stores import Store, Stores
from dos.state.subgroup import Subgroup
from dos.step.futures import reject, resolve
from dos.step.host_lane import Turn
from dos.step.iteration import Iteration
from dos.step.transit import Transit
from dos.step.work import Placed, SubgroupUpdate, Subject, prepare_updates
from perfmodel import Op, Span, Timeline
from perfmodel.lanes import Stream
from perfmodel.plan import Move, Tier
from perfmodel.tasks import Schedule, Task


@dataclass(eq=False)
class Promise:
    """A job that is issued later."""

    future: Future[Job]

    def wait(self) -> Span:
        return self.future.result().wait()


def on_disk(job: Job) -> bool:
    """Whether it is a transfer from or to the disk, or waits for one before it is issued."""
    return isinstance(job, DiskJob | Promise)


def on_device(job: Job) -> Job | None:
    """The job as the device knows it, once that is issued; None: it was of the disk or the host, and has ended."""
    if isinstance(job, Promise):
        job = job.future.result()
    if isinstance(job, HostJob):
        return None
    if isinstance(job, DiskJob):
        job.wait()
        return None
    return job


class Step:
    """Issues a schedule; what it has issued so far is in flight.

    iteration: of which it is the step.
    jobs: of transfers and of updates on the device. uploads: those of the host's lane, to come.
    done: by subgroup, the job after which its new parameters are there, once that is issued.
    backward: what the caller had queued on the device when the step was issued.
    last: the jobs after which nothing uses slots and rooms that state leaves, by stream, for streams are in order.
    ordered: where the caller's work on the device goes on behind the step, if it does.
    leaving: the subgroups whose state will have left these stores once the step is over.
    homes: where there is a disk, those whose state will have left its home there or on the host for another one.
    joined: the subgroups behind whose update some queue of the caller's was ordered.
    ran: when the schedule's tasks ran, once `timeline` was asked; origin: its 0, on the clock of time.perf_counter.
    """

    def __init__(
        self,
        device: Device,
        stores: Stores,
        schedule: Schedule,
        subjects: Sequence[Subject],
        begun: Sequence[Transit],
        iteration: Iteration,
    ) -> None:
        """begun: the transits that the schedule has as its first tasks."""
        self.schedule = schedule
        self.iteration = iteration
        self.joined: set[Subgroup] = set()
        self.ran = Timeline(())
        self.origin = iteration.started
        self.ordered: Mark | None = None
        self.jobs = [transit.job for transit in begun]
        self.uploads: list[Future[Job]] = []
        self.done: dict[Subgroup, Future[Job]] = {}
        self.backward: Sequence[Job] = ()
        fetched = [transit.job for transit in begun if transit.to is Tier.DEVICE]
        self.last = {Stream.PREFETCH: fetched[-1]} if fetched else {}
        self.leaving: list[tuple[Subgroup, Store]] = []
        self.homes: list[tuple[Subgroup, Store]] = []
        self._device = device
        self._stores = stores
        self._subjects = subjects
        self._promised = set[Stream]()
        self._beside: dict[Subgroup, Tensor] = {}
        """The parts of slots to which offloaded gradients come, and with them weights that stream."""

    def issue(self, give: Callable[[Turn], object]) -> None:
        """Issue what is not under way yet. give: is handed what the host's lane has to do, as soon as it can begin."""
        windows = self._stores.host.windows
        # Other state went through these windows in the last step; only what it kept is found there.
        windows.begin()
        for subgroup, update, *_ in self._subjects if windows.kept else ():
            if update is not None and not update.at_home:
                update.place = windows.of(subgroup)
        tasks, under_way = self.schedule.tasks, self.schedule.under_way
        # By number of the task. What is issued here waits for backward's end, not for its pieces.
        jobs: dict[int, Sequence[Job]] = dict.fromkeys(range(under_way - len(self.jobs)), ())
        jobs |= {len(jobs) + place: (job,) for place, job in enumerate(self.jobs)}
        # The gradients of this step are complete once the caller's stream has come this far.
        self.backward = jobs[under_way] = self._device.fence()
        turns: list[Turn] = []
        on_host = deque(n for n in range(under_way + 1, len(tasks)) if tasks[n].stream is Stream.CPU)

        def hand_over() -> None:
            """Hand over updates in their order, up to the first that comes behind a task yet to be issued."""
            while on_host and jobs.keys() >= {*tasks[on_host[0]].after}:
                number = on_host.popleft()
                # The host has come past the call of step(), and the device may still be behind it:
                # waiting for the end of backward there would hold up gradients that are here.
                ready = [job for other in tasks[number].after if other != under_way for job in jobs[other]]
                turns.append(self._turn(tasks[number], ready))
                # New parameters that have to go up do so in a task of their own.
                jobs[number] = (Promise(turns[-1].done),) if self._streams(tasks[number]) else ()
                give(turns[-1])

        # First, and not as they come in the schedule: the lane would wait while the device is given its work.
        hand_over()
        for number in range(under_way + 1, len(tasks)):
            task = tasks[number]
            if task.stream is Stream.PARAMETER:
                jobs[number] = (Promise(self.done[self._of(task)[1]]),)
            elif task.stream is not Stream.CPU:
                self._enter(task)
                after = tuple(itertools.chain.from_iterable(jobs[other] for other in task.after))
                self.jobs.append((self._update if task.op is Op.UPDATE else self._transfer)(task, after))
                jobs[number] = self.jobs[-1:]
                # Behind these nothing uses slots, or rooms that state leaves. Jobs of the disk use windows alone.
                if (task.move is not None or task.slot is not None) and not isinstance(self.jobs[-1], DiskJob):
                    self.last[task.stream] = self.jobs[-1]
            hand_over()
        # Else the gradients' memory would be held until the caller waits for the step.
        for turn in turns:
            turn.work.release()
        self.leaving, kept = list(self._vacated()), self.schedule.kept
        windows.kept = {self._subjects[i].subgroup: window for i, window in kept.items()}
        # They hold gradients, whose memory the next backward needs while the ledger still holds this step.
        self._subjects = ()
        self._beside.clear()

    @property
    def through(self) -> bool:
        """Whether a step behind which the caller's work was ordered has come to its end, or failed; does not wait."""
        try:
            return self.ordered is not None and self.ordered.at() is not None
        except Exception:
            return True  # what went wrong is raised where its jobs are waited for

    def spans(self, errors: list[Exception]) -> list[Span]:
        """When its jobs ran, those of the host's lane included; blocks. errors: receives what went wrong."""
        jobs = list(self.jobs)
        for upload in self.uploads:
            try:
                jobs.append(upload.result())
            except Exception as error:
                errors.append(error)
        return spans_of(jobs, errors)

    def timeline(self, spans: Sequence[Span], unused: Sequence[Span] = ()) -> Timeline:
        """These spans in seconds since the step was called, or backward ended on the device, whichever was later.

        Transfers of before have negative times. unused: of transits that no step has used, beside its own.
        """
        # A device whose work is queued may only now have come to the end of backward.
        self.origin = max([self.iteration.started, *(job.wait().end for job in self.backward)])
        self.ran = _timeline(spans, self.origin)
        return _timeline([*spans, *unused], self.origin) if unused else self.ran

    def fail(self, error: Exception) -> None:
        """Fail what will not be issued any more, so that no caller waits for it."""
        for future in self.done.values():
            reject(future, error)

    def _streams(self, task: Task) -> bool:
        """Whether the weights of the task's subgroup are on the host."""
        return task.subgroup is not None and self._subjects[task.subgroup].subgroup.arena.streams

    def _turn(self, task: Task, ready: Sequence[Job]) -> Turn:
        i, subgroup, update = self._of(task)
        done = self.done[subgroup] = Future()
        self.uploads.append(done)
        reading = subgroup.arena.reading
        if reading is not None:
            # A forward that came after these gradients may still fetch the weights that the host overwrites.
            ready = [*ready, reading]
        return Turn(i, update, ready, () if subgroup.arena.streams else self.backward, done)

    def _transfer(self, task: Task, after: Sequence[Job]) -> Job:
        """State goes from one store to another; gradients go to the host, or come up to a slot, perhaps with state."""
        assert task.subgroup is not None, "what is transferred is of a subgroup"
        subgroup, update, _, late = self._subjects[task.subgroup]
        device, copies = self._stores.device, list[Copy]()
        if task.op is Op.GRADIENT and update is not None:
            copies = update.downloads(late)
        elif task.op is Op.PREFETCH and task.slot is not None:
            if task.move is not None:
                device.occupy(subgroup, task.slot)
            if update is not None and update.offloaded:
                self._beside[subgroup] = device.beside(subgroup, task.slot)
                copies = update.fetch_gradients(self._beside[subgroup])
        elif task.op is Op.FLUSH and update is not None and subgroup in self._beside:
            copies = update.flush_weights(self._beside[subgroup])
        number, move = task.subgroup, task.move
        if move is None:
            job = self._issue(task.stream, lambda after: self._device.copy(task.op, number, copies, after), after)
        elif Tier.DISK in move:
            # The disk's threads wait for whatever comes before; only what the device queues needs `_issue`.
            return self._stores.copy(move, number, subgroup, after)
        else:
            job = self._issue(
                task.stream, lambda after: self._stores.copy(move, number, subgroup, after, copies), after
            )
        # A fetch, or user code, that reads the weights next reads the home, which is written only now.
        if task.op is Op.FLUSH and self._streams(task) and update is not None:
            self.done[subgroup] = _issued(job)  # the weights are at home then
        return job

    def _issue(self, stream: Stream, issue: Callable[[Sequence[Job]], Job], after: Sequence[Job]) -> Job:
        """Issue what waits for work on the device alone now, all else on the thread that reads from disk, in order.

        A device queues work behind its own, and cannot wait for the host's. What comes later in the same stream is
        issued there, too: it would overtake, and the stream would have another order than the plan was chosen for.
        """
        disk = self._stores.disk
        if disk is None or not (stream in self._promised or any(map(on_disk, after))):
            return issue(after)
        self._promised.add(stream)
        later: Future[Job] = Future()

        def run() -> None:
            try:
                resolve(later, issue([job for job in map(on_device, after) if job is not None]))
            except BaseException as error:
                # No caller waits on the disk's thread. It is raised where the job is waited for.
                reject(later, error)

        disk.reading.submit(run)
        return Promise(later)

    def _enter(self, task: Task) -> None:
        """Let the subgroup of a task have the window that this fills."""
        if task.window is None or task.subgroup is None:
            return
        subgroup, update = self._subjects[task.subgroup][:2]
        windows = self._stores.host.windows
        if task.op is not Op.WRITE or windows.of(subgroup) is None:
            window = windows.enter(subgroup, task.window)
            if update is not None and not update.at_home:
                update.place = window

    def _vacated(self) -> Iterator[tuple[Subgroup, Store]]:
        """The rooms that state leaves in this step, but for homes, which stay if there is no disk."""
        ways: dict[int, Move] = {}
        for task in self.schedule.tasks:
            if task.move is not None and task.subgroup is not None:
                ways[task.subgroup] = Move(ways.get(task.subgroup, task.move).source, task.move.destination)
        for i, way in ways.items():
            subgroup = self._subjects[i].subgroup
            home = self._stores.disk is not None and self._stores.host.houses(subgroup)
            if home and (way == Move(Tier.DISK, Tier.HOST) or way.source is Tier.HOST is not way.destination):
                self.homes.append((subgroup, self._stores.of[way.source]))
            elif way.source not in (way.destination, subgroup.arena.tier, Tier.DISK):
                yield subgroup, self._stores.of[way.source]

    def _update(self, task: Task, after: Sequence[Job]) -> Job:
        """Of one subgroup, or of residents together."""
        i, first, _ = self._of(task)
        updates = [self._placed(each) for each in (task, *(task._replace(subgroup=i) for i in task.others))]
        # User code may free gradients as soon as step() has returned: the device holds them until the update has read
        # them.
        reads = [g.values for each in updates if not each.update.offloaded for _, g in each.update.items]
        name = first.arena.format.name

        def launch(after: Sequence[Job]) -> Job:
            # Before the device notes the start: what the host spends on this would count as the kernel's time.
            update = prepare_updates(updates)
            return self._device.launch(i, update, task.size, after, reads, name)

        job = self._issue(task.stream, launch, after)
        done = _issued(job)
        self.done |= {each.update.subgroup: done for each in updates if not each.update.subgroup.arena.streams}
        return job

    def _placed(self, task: Task) -> Placed:
        _, subgroup, update = self._of(task)
        device, gradients = self._stores.device, None
        if update.offloaded:
            gradients = self._beside[subgroup]
        return Placed(update, device.fetch(subgroup), gradients)

    def _of(self, task: Task) -> tuple[int, Subgroup, SubgroupUpdate]:
        assert task.subgroup is not None, "an update is of a subgroup"
        subject = self._subjects[task.subgroup]
        assert subject.update is not None, "nothing is updated without a gradient"
        return task.subgroup, subject.subgroup, subject.update


def _issued(job: Job) -> Future[Job]:
    """The job once it is issued, which a `Promise` is later."""
    if isinstance(job, Promise):
        return job.future
    done: Future[Job] = Future()
    done.set_result(job)
    return done


def spans_of(jobs: Iterable[Job], errors: list[Exception]) -> list[Span]:
    """When they ran; blocks. errors: receives what went wrong."""
    spans = []
    for job in jobs:
        try:
            spans.append(job.wait())
        except Exception as error:
            errors.append(error)
    return spans


def _timeline(spans: Iterable[Span], origin: float) -> Timeline:
    return Timeline.of(span.since(origin) for span in spans)
