"""Waits for updates in flight: before another step begins, before user code reads a parameter, or for all."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor

from dos.devices import Caller, Job
from dos.gradients.late_edits import EDITED, LateEdits
from dos.gradients.zeroing import watched
from dos.guard import ANY, entry, warn
from dos.in_backward import TAKEN
from dos.owners.assembly import Assembly
from dos.parameters.admission import Group
from dos.parameters.group_parameters import GroupParameters
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.unseen import LOST

_CAPTURED = (
    "a CUDA graph is being captured while an update runs on, for which its replays would not wait; call "
    "optimizer.synchronize() before the capture"
)

_REPLACED = (
    "a parameter of shape {} got other memory after step(), as by lstm.flatten_parameters() or p.data = ..., while its "
    "update ran on, which is lost; call optimizer.synchronize() after step(), or do not attach the model"
)


class Waiting:
    """Waits of one optimizer for its updates in flight.

    `settle` waits for all updates, and raises the first failure of any thread; `end_last_step` for those of the last
    step, unless the device queues it; `finish_parameters` orders the caller behind the updates of some parameters.

    edited: whether user code has written to gradients that updates still read, so that each step waits for its updates.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.guard, self._lock = assembly.guard, assembly.guard.lock
        self._assembly, self._registry, self._ledger = assembly, assembly.registry, assembly.ledger
        self._late_edits = LateEdits()
        self.edited = False

    def capturing(self) -> bool:
        """Return whether the present work is being captured in a CUDA graph, whose replays run no hooks. For hooks."""
        return self._assembly.on_device is not None and self._assembly.on_device.device.capturing()

    def waits(self) -> bool:
        """Return whether hooks have anything to do before parameters are used."""
        return bool(self._ledger.pending) or self.capturing()

    def reads_in_backward(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether a backward that may update is about to read these. Raises as `InBackward.check_use`."""
        mode = self._assembly.in_backward
        return mode is not None and mode.reads() and mode.check_use(parameters)

    def finish_others(self) -> None:
        """Wait for other optimizers' updates of these parameters. Takes no lock: their threads may wait for ours.

        It finds gradients in `p.grad` that another one has offloaded, whose parameter user code has moved to this one.
        Raises RuntimeError if another one has used gradients of these in backward, which this step would not find.
        """
        for other in self._registry.watching.others():
            # Only the other session knows its updates: this step would read parameters that they still write.
            if other.ledger.unfinished:
                other.waiting.synchronize()
            mode = other.assembly.in_backward
            taken = [] if mode is None else mode.taken_of(self._assembly.parameters)
            away = self._registry.offloaded.records
            taken = [p for p in taken if self._registry.record(p) not in away]
            if taken:
                raise RuntimeError(TAKEN.format(len(taken), tuple(taken[0].shape)))
        for session in list(watched):
            if session.assembly is not self._assembly and session.registry.offloaded.records:
                away = self._registry.offloaded.records
                found = (p for p in self._assembly.parameters if p.grad is None)
                wanted = {id(p) for p in found if self._registry.record(p) not in away}
                if wanted:
                    session.taking.give_back(wanted)

    def end_last_step(self) -> None:
        """Wait for the last step before another begins, unless the device queues all of it before the next."""
        if self._ledger.running:
            if self._ledger.queue():
                self._warn_of_lost_writes()
            else:
                self.settle()

    def hand_over(self) -> None:
        """Order the work that the caller queues on the device from now on behind the update of all parameters.

        Blocks for updates on the host, and for memory that must be released. The next call raises later failures.
        """
        if self._assembly.on_device is None or not self._assembly.on_device.device.queues or self._ledger.step is None:
            self.settle()
            return
        self._ledger.order_caller()
        self.written(self._ledger.unfinished)
        self._all_updated()

    @entry(*ANY)
    def synchronize(self) -> None:
        """Block until the last step is complete."""
        self.settle()

    def settle(self) -> None:
        if not self._ledger.idle and self.capturing():
            raise RuntimeError(_CAPTURED)  # a wait would end the capture, and look like a step that failed
        try:
            self._ledger.settle()
            if self._assembly.on_device is not None:
                self._assembly.on_device.decisions.pace.read()
            self.written(self._ledger.unfinished)
        except Exception:
            self._all_updated()
            raise
        self._all_updated()  # after the wait: if Ctrl-C ends that, the next call waits again
        if self._ledger.unseen is not None:
            self._warn_of_lost_writes()

    def _warn_of_lost_writes(self) -> None:
        """Warn once of each parameter to which user code wrote too late for its update, if that is known by now."""
        found = () if self._ledger.unseen is None else self._ledger.unseen.lost()
        others = [record for record in found if not record.written_late]
        for record in others:
            record.written_late = True  # its gradients wait for step() from now on, so that such writes count
        if others:
            warn(LOST.format(len(others), tuple(others[0].parameter.shape)))

    def written(self, records: Collection[ParameterRecord]) -> None:
        """Note that user code comes behind the updates of these records from now on."""
        edited = self._late_edits.ended(records) if self._late_edits.read else ()
        if edited and not self.edited:
            self.edited = True
            warn(EDITED.format(len(edited), tuple(edited[0].parameter.shape)))
        self._registry.written(records)

    def _all_updated(self) -> None:
        """Let no hook and no reading wait any more."""
        if self._ledger.pending and self._assembly.attachment is not None:
            self._assembly.attachment.end_waiting()
            for parameters in self._lists():
                parameters.rest()
        self._ledger.pending = {}

    def wait_before_reads(self) -> None:
        """Wait before user code reads parameters of which updates run, if any do."""
        if self._assembly.attachment is not None and self._ledger.unfinished:
            self._assembly.attachment.wait_before_reads()
            for group in self._assembly.groups:
                if type(group["params"]) is list:  # set by user code, as by Accelerate where it divides parameters
                    group["params"] = GroupParameters(group["params"], self.before_reading_lists)
            for parameters in self._lists():
                parameters.wait()

    @contextlib.contextmanager
    def lists_at_rest(self) -> Iterator[None]:
        """Let the lists of the groups not wait meanwhile, for a reader of no values."""
        for parameters in self._lists():
            parameters.rest()
        try:
            yield
        finally:
            if self._assembly.attachment is not None and self._ledger.unfinished:
                for parameters in self._lists():
                    parameters.wait()

    def before_reading_lists(self) -> None:
        """Wait before user code reads a group's list; our own code, which reads them within calls, needs no wait."""
        with self._lock:
            within = self._lock.entered
        if not within:
            self.synchronize()

    def _lists(self) -> list[GroupParameters]:
        """Return the groups' lists of parameters, without those that user code has set."""
        return [group["params"] for group in self._assembly.groups if isinstance(group["params"], GroupParameters)]

    def finish_parameters(self, parameters: Iterable[Tensor], *, captured: bool) -> None:
        """Wait for the updates of these parameters, and no others. A hook calls this before they are used.

        captured: whether this is `capturing`.
        """
        if self._ledger.pending and (captured or not self._have_waited(parameters)):
            self._finish_parameters(parameters)

    def _have_waited(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the caller's queue is behind these updates. Without the lock: readers ask it often."""
        on_device, pending, records = self._assembly.on_device, self._ledger.pending, self._registry.records
        here = None if on_device is None else on_device.device.caller()
        for parameter in parameters:
            record = records.get(id(parameter))
            if record in pending and here not in pending[record]:
                return False
        return True

    @entry(*ANY, hook=True)
    def _finish_parameters(self, parameters: Iterable[Tensor]) -> None:
        self.finish_within(parameters)

    def finish_within(self, parameters: Iterable[Tensor]) -> None:
        """Do the same within a hook that has the lock."""
        if self._ledger.pending:
            if self.capturing():
                raise RuntimeError(_CAPTURED)
            self.join(parameters)

    def join(self, parameters: Iterable[Tensor]) -> None:
        on_device, pending, places = self._assembly.on_device, self._ledger.pending, self._registry.places
        here = None if on_device is None else on_device.device.caller()
        for parameter in parameters:
            record = self._registry.record(parameter)
            # Several modules may read one weight on several streams, each of which must wait.
            behind = None if record is None else pending.get(record)
            if record is None or behind is None or here in behind:
                continue
            subgroups = [subgroup for subgroup, _ in places[record]]
            try:
                # The caller is about to read the parameter, which these updates write.
                for subgroup in subgroups:
                    self._ledger.join(subgroup)
            except Exception:
                with contextlib.suppress(Exception):  # the error that is raised says that the step failed
                    self.settle()
                raise
            if not behind and record.replaced and not record.follow_sharing():
                self.settle()
                raise RuntimeError(_REPLACED.format(tuple(record.parameter.shape)))
            updated = [record, *self._joined_with(record, subgroups, here)]
            self.written([each for each in updated if not pending[each]])
            for each in updated:
                # It stays listed, because another queue that reads the parameter has to wait for itself.
                pending[each] = pending[each] | {here}

    def _joined_with(
        self, record: ParameterRecord, subgroups: Sequence[Subgroup], here: Caller | None
    ) -> list[ParameterRecord]:
        """Return the other records behind whose updates the caller is, too, since it has joined these subgroups.

        Not those whose memory was replaced: the modules that read them raise.
        """
        pending, places = self._ledger.pending, self._registry.places
        if record.arena.streams:
            return []
        found = []
        for other in dict.fromkeys(piece.record for subgroup in subgroups for piece in subgroup.pieces):
            behind = pending.get(other)
            if other is record or behind is None or here in behind or other.replaced:
                continue
            if len(subgroups) >= len(places[other]) and all(subgroup in subgroups for subgroup, _ in places[other]):
                found.append(other)
        return found

    def weights_ready(self, parameters: Iterable[Tensor], *, wait: bool) -> Sequence[Job] | None:
        """Return the jobs for which the device must wait before it fetches these. wait: as in `Ledger.updates`."""
        mode = self._assembly.in_backward
        if mode is not None and mode.reads():
            if not wait and mode.has_updated(parameters):
                return None
            mode.check_use(parameters)
        # Before the first step, and once the last one was settled, homes have their newest values.
        if not self._ledger.pending:
            return ()
        return self._ledger.updates(self._registry.subgroups_of(parameters), wait=wait)

    def finish_homes(self, parameters: Sequence[Tensor]) -> None:
        """Finish the updates of these parameters, which user code is about to read, where weights stream.

        Blocks for the updates of parameters at home.
        """
        if self._ledger.pending and not self.reads_in_backward(parameters):
            self._finish_homes(parameters)

    @entry(*ANY, hook=True)
    def _finish_homes(self, parameters: Sequence[Tensor]) -> None:
        self.finish_homes_within(parameters)

    def finish_homes_within(self, parameters: Sequence[Tensor]) -> None:
        """Do the same within another call of the optimizer."""
        at_home = [s for s in self._registry.subgroups_of(parameters) if s.arena.streams]
        # User code reads the homes on the host, which the flushes of these jobs write.
        for job in self._ledger.updates(at_home, wait=True) or ():
            job.wait()
        self.join(parameters)

    def release_homes(self) -> None:
        """Wait until the device reads no weight at home, so that user code may write to them."""
        weights = self._assembly.weights
        if weights is not None:
            weights.stream.release_homes(weights.stream.blocks)

    def watch_edits(self) -> None:
        """Notice edits of the gradients that the updates in flight read."""
        self._late_edits.watch(self._ledger.pending)

    def watch_list(self, group: Group) -> None:
        """Wait before user code reads the group's parameters while updates run."""
        group["params"] = GroupParameters(group["params"], self.before_reading_lists)
