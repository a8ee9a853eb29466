"""The ledger: where each subgroup's state is, and what is in flight."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future

from dos.devices import LANE_OF, Caller, Copy, Device, Job
from dos.devices.coalesce import joined
from dos.guard import Guard, Phase, on_own_thread
from dos.state.homes import Homes
from dos.state.record import ParameterRecord
from dos.state.stores import Stores
from dos.state.subgroup import Subgroup
from dos.state.windows import window_bytes
from dos.step.host_lane import HostLane, InPlaceLane, Turn, Turns
from dos.step.issue import Step, on_device, on_disk, spans_of
from dos.step.iteration import Iteration
from dos.step.transit import Transit, wait_for_all
from dos.step.work import SubgroupUpdate, Subject
from perfmodel import Op, Placement, Plan, Timeline, Workload
from perfmodel.plan import Move, Tier
from perfmodel.schedule import schedule_step
from perfmodel.tasks import SubgroupState

MOST_EARLY = 1000
"""Transits in flight without a step before the first that have ended are forgotten."""


class Ledger:
    """The one owner of two questions about a session: where is state, and what is in flight?

    State is where `at` says. Memory to which it is on its way does not count until a step has inherited the transit.

    In flight are, in the order in which they come:

    - *transits*, which backward has begun for the step to come: gradients to the host, state to the device. The step
      inherits those that it uses, and the others are cancelled;
    - *the step* that was issued last, until `settle`, and *queued* ones before it, of which all is on the device ahead
      of what the caller queues there, so that the next backward need not wait for them;
    - *updates in place*, of parameters on the host;
    - *parameters* that any of these update. A caller that reads one is ordered behind its update by `join`.

    The caller holds the guard's lock. The phase becomes BROKEN if a step or an update fails.

    device, stores, lane: of the accelerator; there are none before `open`.
    exposed: whether user code was given the state at home since the last step. It may write there until the next one,
        and that would be lost in state that was fetched before.
    pending: the records of parameters in flight, each with the caller's queues that are ordered behind its update.
    ended: called with each step that has ended as it should, and its times.
    trims: whether state has moved off the device, whose memory is cached there.
    """

    device: Device
    stores: Stores
    lane: HostLane
    ended: Callable[[Step, Timeline], None]

    def __init__(self, guard: Guard) -> None:
        self.exposed = False
        self.trims = False
        self.pending: dict[ParameterRecord, frozenset[Caller]] = {}
        self.step: Step | None = None
        self._open = False
        self._guard = guard
        self._transits: list[Transit] = []
        self._state: dict[Subgroup, Transit] = {}
        """Of the transits, those that bring state to the device."""
        self._freed: deque[Transit] = deque()
        """Of the transits, gradients that only their copies keep on the device."""
        self._freed_bytes = 0
        self._considered: Plan | None = None
        """The plan of which `_streamed` are the subgroups that slots may be filled with."""
        self._streamed: list[int] = []
        self._queued: deque[Step] = deque()
        self._lane_done: Future[None] | None = None
        """The host's part of the step; None: it has none."""
        self._turns: Turns | None = None
        """Of a step that is being issued."""
        self._in_place: dict[Subgroup, Future[None]] = {}
        self._beside = InPlaceLane()
        self._numbers = itertools.count()
        guard.working.add(self)

    def open(self, device: Device, homes: Homes) -> None:
        """Take in the accelerator, when the first parameter there was met."""
        self.device, self.stores = device, Stores(device, homes)
        self.lane = HostLane(device)
        self._open = True

    # Where state is.

    def at(self, subgroup: Subgroup) -> Tier | None:
        """The tier of the subgroup's newest state; None: nowhere, it was never updated."""
        # The device's store has the room as soon as it is reserved. What is there is no state until the copy has ended.
        coming = self._state.get(subgroup)
        if coming is not None and coming.slot is None:
            return coming.source
        return next((tier for tier, store in self.stores.of.items() if store.has(subgroup)), None)

    def bring_home(self, subgroups: Iterable[Subgroup]) -> None:
        """Move the state of all these to where it has its home. Blocks. User code may write there from now on.

        Raises MemoryError or OSError if there is no room.
        """
        self.settle()
        # User code writes to its views when it likes: backward's thread would prefetch state that is older than what it
        # writes.
        self.exposed = True
        self.stores.device.expect_denials(False)
        # A fetch that is under way has read what user code is about to write over, and the step would use the copy.
        self.cancel()
        subgroups, stores = list(subgroups), self.stores
        # What a window keeps is newer than the file, and user code gets views of the file.
        self.write_kept()
        places, homes = {s: self.at(s) for s in subgroups}, stores.homes.tiers(subgroups, subgroups)
        away = [(s, Move(tier, homes[s])) for s, tier in places.items() if tier not in (None, homes[s])]
        to_disk = [s for s, move in away if move == Move(Tier.DEVICE, Tier.DISK)]
        away = [(s, move) for s, move in away if Tier.DISK not in move]
        stores.homes.reserve_on_host([s for s, _ in away])
        after = self.device.fence()  # the caller's stream may still read state that it was given views of
        if to_disk:
            self.to_disk(to_disk, Tier.DEVICE, after)
        for job in [stores.copy(move, 0, s, after) for s, move in away]:
            job.wait()  # the host reads the state from here on, and the device's room is released below
        for subgroup, move in away:
            stores.of[move.source].drop(subgroup)

    def spill_to_disk(self, subgroups: Iterable[Subgroup]) -> None:
        """Move state of these from the host to disk, the last first, until offloaded gradients have room there.

        Raises OSError if the disk has no room either.
        """
        stores = self.stores
        stores.host.lower_share()
        if stores.disk is None or stores.host.room >= 0:
            return
        # Homes are given back below: neither a step nor a fetch may still read or write there.
        self.settle()
        self.cancel()
        self.write_kept()
        at_home = [subgroup for subgroup in subgroups if self.at(subgroup) is Tier.HOST]
        missing = max(0, window_bytes(at_home) - stores.host.windows.nbytes) - stores.host.room
        moving = []
        while at_home and missing > 0:
            moving.append(at_home.pop())
            missing -= stores.host.home_bytes(moving[-1], made=True)
        try:
            self.to_disk(moving, Tier.HOST)
        finally:
            # Some of it is in files now: what user code writes to its views must get there, even where a later write
            # has failed.
            stores.homes.show_again()

    def to_disk(self, subgroups: Sequence[Subgroup], source: Tier, after: Sequence[Job] = ()) -> None:
        """Move state from its home on the host, or from the device, to disk. Blocks.

        after: ends before the state on the device is read. Nothing else is in flight, and windows keep nothing.
        Raises OSError, with nothing changed, if there is no room.
        """
        stores = self.stores
        assert stores.disk is not None, "there is nowhere else"
        stores.disk.reserve(subgroups)
        windows, nbytes = stores.host.windows, window_bytes(subgroups)
        if subgroups and not windows.fit(1, nbytes):
            windows.make(1, nbytes, self.device)  # beyond the limit, if need be: there will be room
        for subgroup in subgroups:
            windows.enter(subgroup, 0)
            if source is Tier.DEVICE:
                stores.copy(Move(Tier.DEVICE, Tier.HOST), 0, subgroup, after).wait()
            stores.copy(Move(Tier.HOST, Tier.DISK), 0, subgroup, ()).wait()
            windows.leave(subgroup)
            # Not before the write has ended: if that fails, this is the only copy of the state.
            stores.of[source].drop(subgroup)

    def write_kept(self) -> None:
        """Write to disk what windows keep between steps. Nothing is in flight."""
        windows = self.stores.host.windows
        for subgroup in list(windows.kept):
            self.stores.copy(Move(Tier.HOST, Tier.DISK), 0, subgroup, ()).wait()
            # A write that failed has raised: until the state is on disk the window keeps it.
            windows.leave(subgroup)

    def forget(self, subgroups: Iterable[Subgroup]) -> None:
        """Release the state of these, whose parameters are gone."""
        # Transits and the last step may still read or write the memory that is released below.
        self.abandon()
        for subgroup in subgroups:
            for tier, store in self.stores.of.items():
                if tier is not subgroup.arena.tier and store.has(subgroup):
                    store.drop(subgroup)
            self.stores.host.windows.leave(subgroup)

    # Transits: what backward begins for the step to come.

    def send(
        self,
        index: int,
        subgroup: Subgroup | None,
        copies: Sequence[Copy],
        callers: Collection[Caller] = (),
        *,
        freed: bool = False,
    ) -> Transit:
        """Copy gradients of one subgroup to the host, after what the caller has queued on the device.

        subgroup: the first in which they lie; None: they have no elements.
        callers: the queues in which backward wrote them, if not all in the present one.
        freed: whether the copy alone keeps their memory on the device from now on; see `hold_back`.
        """
        if len(self._transits) > MOST_EARLY:  # backward after backward; departures keep those that they use
            wait_for_all(self._transits)
            # Those of state stay: `at` has to know what is still on its way, and the step inherits them.
            self._transits = sorted(self._state.values(), key=lambda transit: transit.number)
        # Reads what backward writes in any of these queues.
        job = self.device.copy(Op.GRADIENT, index, joined(copies), self.device.fence(callers))
        nbytes = sum(source.nbytes for _, source in copies)
        transit = Transit(next(self._numbers), Op.GRADIENT, subgroup, Tier.DEVICE, Tier.HOST, job, nbytes)
        self._transits.append(transit)
        if freed:
            self._freed.append(transit)
            self._freed_bytes += nbytes
        return transit

    def hold_back(self, nbytes: int, most: int) -> None:
        """Block while gradients that only copies keep on the device take more than `most` bytes, with `nbytes` more.

        Else backward, faster than the link, would keep on the device what is to be freed there.
        """
        while self._freed and self._freed_bytes + nbytes > most:
            wait_for_all([self._freed[0]])
            self._freed_bytes -= self._freed.popleft().nbytes

    def _fetch(self, index: int, subgroup: Subgroup, slot: int | None = None) -> None:
        """Copy state from the host to the device, into a slot or into room that is reserved there.

        Never while a step is in flight, which may still be writing what would be read here.
        """
        # The caller's stream may still use what was in this memory before.
        job = self.stores.copy(Move(Tier.HOST, Tier.DEVICE), index, subgroup, self.device.fence())
        number, nbytes = next(self._numbers), subgroup.state.nbytes
        transit = Transit(number, Op.PREFETCH, subgroup, Tier.HOST, Tier.DEVICE, job, nbytes, slot)
        self._transits.append(transit)
        self._state[subgroup] = transit

    def fetch_residents(self, plan: Plan, subgroups: Sequence[Subgroup], left: float) -> None:
        """Fetch state that comes to stay, beside backward, as far as there is memory. What is on disk the step reads.

        left: bytes that it may take.
        Not while user code may write to it: that would be lost.
        """
        if self.exposed:
            return
        store = self.stores.device
        store.expect_denials(True)  # the step will try again
        for i in plan.served(Placement.GPU_RESIDENT):
            subgroup = subgroups[i]
            if subgroup in self._state or self.at(subgroup) is not Tier.HOST:
                continue
            left -= subgroup.load().state_bytes
            if left < 0:
                return
            # After one denial no more is tried: each attempt makes the allocator empty its cache, in the middle of
            # backward.
            if store.reserve([subgroup]):
                return
            try:
                self._fetch(i, subgroup)
            except BaseException:
                self.drain()  # a part of the copy may run
                store.drop(subgroup)  # no state comes there, and room without a transit is where state is
                raise

    def fill_slots(self, plan: Plan, subgroups: Sequence[Subgroup], spare: Callable[[], float]) -> None:
        """Fill the plan's slots while backward runs, if they are not there yet and take at most `spare` bytes."""
        store = self.stores.device
        if store.slots or self.exposed:
            return
        if self._considered is not plan:  # asked at each of many gradients
            self._considered = plan
            self._streamed = [i for i in plan.served(Placement.GPU_STREAMED) if self.at(subgroups[i]) is Tier.HOST]
        streamed = self._streamed
        if not streamed:
            return
        nbytes, count = max(subgroups[i].state.carved_bytes for i in streamed), min(plan.slots, len(streamed))
        # In slots beyond that state would take what backward needs yet, and the user's own code would run out of
        # memory.
        if nbytes * count > spare():
            return
        store.get_slots(count, nbytes)
        for slot, i in enumerate(streamed[: len(store.slots)]):
            store.occupy(subgroups[i], slot)
            self._fetch(i, subgroups[i], slot)

    @property
    def in_slots(self) -> list[Subgroup]:
        """Whose state transits bring to slots, in the order of the slots."""
        return [subgroup for subgroup, transit in self._state.items() if transit.slot is not None]

    def comes(self, subgroup: Subgroup) -> bool:
        """Whether a transit brings the subgroup's state to room of its own on the device."""
        return subgroup in self._state and self._state[subgroup].slot is None

    def cancel(self, subgroups: Iterable[Subgroup] | None = None) -> None:
        """Cancel fetches of state to room of its own, of these or of all, and release the room. State stays put."""
        coming = [s for s in (self._state if subgroups is None else subgroups) if self.comes(s)]
        for subgroup in coming:
            # The copy writes to the room until it ends: the allocator would give the room to other code under it.
            wait_for_all([self._state[subgroup]])
            if self.stores.device.has(subgroup):
                self.stores.device.drop(subgroup)
            del self._state[subgroup]

    def cancel_slots(self) -> None:
        """Cancel fetches of state to slots, and release the slots."""
        passing = self.in_slots
        # As in `cancel`: the allocator would give slots away to which state still travels.
        wait_for_all(self._state[subgroup] for subgroup in passing)
        for subgroup in passing:
            del self._state[subgroup]
        self.stores.device.free_slots()

    def abandon(self) -> None:
        """Cancel what backward has begun, once nothing of it is running. Resident state stays."""
        # First: no transit names a copy that raised, of which a part may run.
        self.drain()
        self.cancel_slots()
        self.cancel()

    def end_transits(self) -> None:
        """Block until the transits have ended."""
        wait_for_all(self._transits)

    def _inherit(
        self, plan: Plan, subjects: Sequence[Subject], found: Sequence[SubgroupState]
    ) -> tuple[list[SubgroupState], list[Transit]]:
        """Hand the transits that the step uses over to it. Returns what it finds with them, and them in order."""
        # Gradients of what is updated on the device after all were sent in vain.
        used = [s.departed if p is Placement.CPU else () for s, p in zip(subjects, plan.placements, strict=True)]
        fetched = [self._state.get(s.subgroup) for s in subjects]
        begun = {t.number: t for departed in used for t in departed} | {t.number: t for t in fetched if t is not None}
        places = {number: place for place, number in enumerate(sorted(begun))}
        # The step waits for those that it uses. The others stay here, for `settle` waits for what no step uses.
        self._transits = [transit for transit in self._transits if transit.number not in begun]
        self._state, self._considered = {}, None
        self._freed.clear()
        self._freed_bytes = 0
        return [
            each._replace(
                departed=tuple(places[transit.number] for transit in departed),
                fetched=None if state is None else places[state.number],
            )
            for each, departed, state in zip(found, used, fetched, strict=True)
        ], [begun[number] for number in places]

    # Steps.

    def issue(
        self,
        plan: Plan,
        subjects: Sequence[Subject],
        found: Sequence[SubgroupState],
        workload: Workload,
        iteration: Iteration,
    ) -> None:
        """Issue a step whose memory is reserved.

        subjects, found: by index. workload: that the plan was made for. iteration: of the step.
        Raises RuntimeError, with nothing running any more, if that fails part way.
        """
        self.exposed = False
        # User code may write to its views until a step begins, so that none need be mapped anew any more.
        self.stores.homes.shown.clear()
        turns = Turns()
        try:
            self._follow_parameters(plan, subjects, found)
            found, begun = self._inherit(plan, subjects, found)
            # The device may have had memory for fewer slots.
            # None is streamed without a gradient, but a plan that says so needs the number of a slot.
            slots = len(self.stores.device.slots) or int(Placement.GPU_STREAMED in plan.placements)
            granted = dataclasses.replace(plan, slots=slots)
            indices = {subject.subgroup: i for i, subject in enumerate(subjects)}
            tasks = [transit.task(indices[transit.subgroup]) for transit in begun if transit.subgroup]
            schedule = schedule_step(granted, workload, found, tasks)
            self.step = step = Step(self.device, self.stores, schedule, subjects, begun, iteration)
            self._lane_done, self._turns = None, turns

            def begin() -> None:
                if self._lane_done is None:
                    self._lane_done = self.lane.submit(functools.partial(self._run_host_lane, turns, step))

            def give(turn: Turn) -> None:
                turns.give(turn)
                begin()

            # The host updates what it can while the rest is issued.
            step.issue(give)
            # Without any of these the host has no part in the step, so that the next one may be queued behind it.
            if step.leaving or step.homes or self.stores.device.slots or any(map(on_disk, step.jobs)):
                begin()
            turns.close()
        except BaseException as error:
            failure = self._guard.failure(error)
            turns.close(failure)
            if self.step is not None:
                self.step.fail(failure)  # part of the step is under way; nothing may wait for the rest
            self._turns = None
            # Once this has raised, user code frees gradients and loads checkpoints: nothing that was issued may run
            # then.
            self.drain()
            if isinstance(error, Exception):
                raise failure from error
            raise
        self._turns = None

    def _follow_parameters(self, plan: Plan, subjects: Sequence[Subject], found: Sequence[SubgroupState]) -> None:
        """Let masters that the host updates follow parameters to which user code wrote since the last step."""
        for i in plan.served(Placement.CPU):
            subgroup, update = subjects[i].subgroup, subjects[i].update
            if update is None or update.from_disk:
                continue  # they follow when the state has been read
            if found[i].state is Tier.HOST:
                copies = update.download_written()
                if copies:
                    self.device.copy(Op.GRADIENT, 0, copies, self.device.fence()).wait()
                if copies or subgroup.arena.streams:
                    update.follow_on_host()
            elif found[i].gradient is Tier.HOST:
                update.follow(self.stores.of[found[i].state].fetch(subgroup))  # from where it comes here first

    def _run_host_lane(self, turns: Turns, step: Step) -> None:
        """Run the host's part of a step: update, then release memory that only the step needed."""
        self.lane.update(turns)
        if not turns.whole:
            return  # what failed while it was issued may still use that memory, and is not among the jobs
        # Memory is released below. The device may still read and write there, though the host's updates have ended.
        for job in step.last.values():
            with contextlib.suppress(Exception):  # raised by `settle`, which waits for the same jobs
                job.wait()
        self.stores.device.free_slots()
        for subgroup, store in step.leaving:
            store.drop(subgroup)
        # The caller's thread gives the memory back, in `trim`: that waits for the device, which runs the next forward
        # now.
        self.trims |= bool(step.leaving)

    def update_beside(self, updates: Iterable[SubgroupUpdate]) -> None:
        """Update parameters on the host, one subgroup after the other, beside the caller."""
        for update in updates:
            self._in_place[update.subgroup] = self._beside.submit(update)

    @property
    def unfinished(self) -> list[ParameterRecord]:
        """The parameters in flight behind whose updates no queue of the caller's was ordered."""
        return [record for record, behind in self.pending.items() if not behind]

    @property
    def running(self) -> bool:
        """Whether a step was issued that is neither settled nor queued."""
        return bool(self.step or self._in_place or self.pending)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight on the device."""
        return not (self._transits or self.step or self._queued)

    def join(self, subgroup: Subgroup) -> None:
        """Order what the caller queues from now on behind the update of this subgroup; on the host, block until then.

        Raises RuntimeError if that failed, with the cause.
        """
        if subgroup in self._in_place:
            self._join_in_place(subgroup)
        elif self.step is not None and subgroup in self.step.done:
            again = subgroup in self.step.joined  # a caller that waits for the same update again is not held up
            with contextlib.nullcontext() if again else self.step.iteration.held_up():
                self._join([self.step.done[subgroup]])
            self.step.joined.add(subgroup)

    def _join(self, done: Iterable[Future[Job]]) -> None:
        try:
            for future in done:
                job = on_device(future.result())
                if job is not None:
                    # The new parameters are read from here on, and gradients overwritten.
                    self.device.join(job)
        except Exception as error:
            raise self._guard.failure(error) from error

    def updates(self, subgroups: Iterable[Subgroup], *, wait: bool) -> list[Job] | None:
        """The jobs on the device after which weights of these are at home as the last step makes them.

        Those that the host updates are at home already. wait: for the host; else None where it has yet to update some.
        Raises RuntimeError if an update failed, with the cause.
        """
        step = self.step
        found = [] if step is None else [step.done[s] for s in subgroups if s in step.done]
        if not wait and not all(future.done() for future in found):
            return None
        try:
            jobs = (on_device(future.result()) for future in found)
            return [job for job in jobs if job is not None]
        except Exception as error:
            raise self._guard.failure(error) from error

    def _join_in_place(self, subgroup: Subgroup) -> None:
        try:
            self._in_place[subgroup].result()  # the caller reads the parameters from here on
        except Exception as error:
            raise self._guard.failure(error) from error

    def order_caller(self) -> None:
        """Order what the caller queues on the device from now on behind the whole step.

        Blocks until the host's part has ended, and slots and the memory of state that moves away are released.
        Raises RuntimeError if the step failed, with the cause.
        """
        step = self.step
        if step is None:
            return
        with step.iteration.held_up():
            # Each of them, for the caller's next kernel may read any parameter. One launch may update several
            # subgroups.
            self._join(dict.fromkeys(step.done.values()))
            if self._lane_done is not None:
                self._lane_done.result()  # slots and rooms are memory that the caller's next forward may need
            step.ordered = self.device.mark()

    def queue(self) -> bool:
        """Let another step begin before this one has ended. Returns False if it may not: `settle` first.

        It may if all of this one is on the device, ahead of what the caller queues there.
        """
        if not self._open:
            return False
        self._read_queued(wait=False)
        step, others = self.step, self._in_place or self._transits or self._lane_done
        # What the host does for a step is in none of the device's queues: another step could overtake it.
        if step is None or others or step.ordered is None or step.through:
            return False
        self._queued.append(step)
        self.step = None
        return True

    def _read_queued(self, *, wait: bool) -> None:
        """Report the queued steps that have ended. wait: all of them, once they have."""
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

        Raises RuntimeError for what went wrong in any lane, with the first cause, once all has come to an end.
        """
        if not self.idle:
            self._settle_step()
        self._settle_in_place()
        if not self._guard.broken:
            self._guard.complete = self._guard.steps

    def _settle_step(self) -> None:
        self._read_queued(wait=True)
        errors: list[Exception] = []
        step = self.step
        with contextlib.nullcontext() if step is None else step.iteration.held_up():
            spans = [] if step is None else step.spans(errors)
            unused = spans_of((transit.job for transit in self._transits), errors)
            if self._lane_done is not None:
                self._lane_done.result()  # slots and the memory of state that moves away are released then
        self.cancel_slots()
        if step is None:
            errors = []  # of gradients that no step has used, or whose use says that they did not arrive
        elif not errors:
            # Only now, and only without errors: where a transfer has failed, the old home has the only state that is
            # whole.
            for subgroup, home in step.homes:
                home.drop(subgroup)
        # Forgotten after all waits: if Ctrl-C ends one of them, the next call waits again.
        self._transits, self.step, self._lane_done = [], None, None
        spans += self.lane.take_spans()
        if errors:
            raise self._guard.failure(errors[0]) from errors[0]
        # A failed one did not come to its end, though its jobs did.
        if step is not None and self._guard.phase is not Phase.BROKEN:
            self.ended(step, step.timeline(spans, unused))

    def _settle_in_place(self) -> None:
        for running in self._in_place.values():
            running.exception()  # all have ended before any failure is raised
        try:
            for subgroup in self._in_place:
                self._join_in_place(subgroup)
        finally:
            self._in_place = {}

    def finish(self) -> None:
        """Settle for an optimizer that is gone, which no error can reach."""
        if on_own_thread():
            return  # it was collected there
        with contextlib.suppress(Exception):
            if self._queued:  # streams are in order: those queued before have ended with the last one
                self._queued[-1].spans([])
                self._queued.clear()
            self.settle()

    def drain(self) -> None:
        """Block until nothing that was issued so far is running, whatever came of it. The next `settle` says that."""
        # A lane's thread that forks would wait for itself.
        if on_own_thread():
            return
        for running in list(self._in_place.values()):
            with contextlib.suppress(Exception):
                running.exception()
        if not self._open:
            return
        disk = self.stores.disk
        threads = [self.lane, *(() if disk is None else (disk.reading, disk.writing))]
        if self._turns is not None and self._lane_done is not None:
            # User code forks while this thread issues a step, as in a signal handler: the lane waits for more turns.
            self._turns.wait()
            threads.remove(self.lane)
        for thread in threads:
            with contextlib.suppress(Exception):
                thread.submit(lambda: None).result()
        for op in LANE_OF:  # in-order streams, so what is issued last ends last
            with contextlib.suppress(Exception):
                last = self.device.launch(0, lambda: None, 0) if op is Op.UPDATE else self.device.copy(op, 0, [])
                last.wait()

    def after_fork(self) -> None:
        """Renew what a forked child does not inherit: threads."""
        self._beside.renew()
        if self._open:
            self.lane.renew()
            if self.stores.disk is not None:
                self.stores.disk.renew()

    def trim(self) -> None:
        """Return the memory of state that has moved off the device to other processes. Blocks, so never in a hook."""
        if self.trims:
            self.trims = False
            self.device.trim()
