"""Backwards that update parameters: where each begins and ends, and what its gradients do."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from dos.backward import Backward
from dos.guard import ANY, Phase, entry, main_thread
from dos.in_backward import InBackward, Run
from dos.owners.assembly import Assembly
from dos.owners.taking import Taking
from dos.owners.waiting import Waiting
from dos.sharding.fingerprint import look_at_bits
from dos.sharding.local import local
from dos.signals import thread
from dos.state.record import ParameterRecord
from dos.step.parts import Parts


class Runs:
    """The backwards of user code, for a model that was attached with `updates="backward"`."""

    def __init__(self, assembly: Assembly, waiting: Waiting, taking: Taking) -> None:
        self.guard, self._lock = assembly.guard, assembly.guard.lock
        self._assembly, self._registry, self._ledger = assembly, assembly.registry, assembly.ledger
        self._waiting, self._taking = waiting, taking

    @entry(*ANY, hook=True)
    def run_begins(self, run: Run) -> None:
        """Note that user code begins a backward."""
        if self._assembly.in_backward is not None:
            self._assembly.in_backward.begin(run)

    @torch.no_grad()
    @entry(*ANY, hook=True)
    def run_ends(self, run: Run) -> None:
        """Note that a backward has ended, and issue what is left of its updates."""
        mode = self._assembly.in_backward
        if mode is None:
            return
        try:
            if not self.guard.broken:  # else the step raises the error
                mode.issue_rest()
        except BaseException as error:
            mode.fail(run, error)
            raise
        mode.end(run, self._assembly.parameters)
        self._watch_reads(run)

    @entry(*ANY, hook=True)
    def run_failed(self, run: Run, error: BaseException) -> None:
        """Note that a backward has raised `error`. If it has updated anything, the optimizer is broken."""
        if self._assembly.in_backward is not None:
            self._assembly.in_backward.fail(run, error)
            self._watch_reads(run)

    def _watch_reads(self, run: Run) -> None:
        """Wait before user code reads parameters of which this backward's updates run; else look at no more reads."""
        if not run.updates:
            return
        if self._ledger.unfinished:
            self._waiting.wait_before_reads()
        elif self._assembly.attachment is not None:
            self._assembly.attachment.end_waiting()

    def gather(self, parameter: Tensor, leaf: Tensor) -> bool:
        """Count a gradient that its subgroup's update needs beside others to come; return False for any other.

        Most gradients are of this kind. Called without the optimizer's lock.
        """
        mode, on_device, guard = self._assembly.in_backward, self._assembly.on_device, self.guard
        run = None if mode is None else mode.run
        if mode is None or run is None or not run.gathers or leaf is not parameter or on_device is None:
            return False
        usual = guard.phase is Phase.BACKWARD and not (guard.lost or main_thread.ended)
        if not usual or thread.within or thread.ours:
            return False
        finals, key, lock = mode.finals, id(parameter), self._lock
        each = finals.expected.get(key)
        if each is None or each.alone is None:
            return False
        awaiting, gradient, device = each.alone, parameter.grad, on_device.device
        # Ctrl-C is not held back, which would take microseconds for each gradient: a backward that it ends counts for
        # nothing.
        with lock:
            last = awaiting.left == 1 or run.times.get(key, 0) + 1 != each.times or not (run.alone and run.updates)
            if lock.entered or last or gradient is None or gradient.layout is not torch.strided:
                return False
            run.times[key] = each.times
            # As `Finals` does for others, in one function: this one runs hundreds of times.
            finals.given[each.record.number] = gradient
            awaiting.left -= 1
            if awaiting.queue != device.caller_number():
                awaiting.written_in(device)
            now, before = on_device.now, on_device.gradients_before  # as in `Backward.only_counts`
            if (
                now.backward is None
                or now.gradients + 1 >= before
                or time.perf_counter() >= on_device.decisions.memory.due
            ):
                on_device.count()
            else:
                now.gradients += 1
            return True

    @entry(*ANY, hook=True)
    def gradient_in_backward(self, parameter: Tensor, leaf: Tensor) -> None:
        """Use a gradient that backward has just written, if its parameter is the attached model's."""
        mode, guard = self._assembly.in_backward, self.guard
        usual = guard.phase is Phase.BACKWARD and not guard.lost
        if mode is None or main_thread.ended or (not usual and guard.broken):
            return  # the step raises the error
        if self._assembly.on_device is None and self._registry.devices.holds(parameter):
            self._assembly.set_up_device()
        on_device, run, gradient = self._assembly.on_device, mode.run, leaf.grad
        member = id(parameter) in mode.members
        if member and (run is None or not run.checked):
            mode.check(parameter, leaf, on_device, self._assembly.parameters)
        if member and gradient is not None and gradient.layout is not torch.strided:
            mode.refuse_sparse(leaf)
        guard.phase = Phase.BACKWARD
        takes = on_device is not None and self._taking.takes(parameter, leaf)
        begins = member and run is not None and not run.began
        if (begins or takes) and self._ledger.running and not mode.issued:
            # The host may still update from the memory to which this backward sends its gradients. Before the gradient
            # counts: this wait is no part of backward.
            self._waiting.settle()
        if on_device is not None:
            if on_device.activations.in_use and gradient is not None:
                on_device.device.count(local(gradient))
            on_device.count()
        if takes:
            self._taking.know(parameter)
        if begins and run is not None:
            run.began = True
            self._begin_in_backward(mode, run)
        if takes and on_device is not None and gradient is not None:
            self._take_beside_updates(on_device, self._registry.record(parameter), leaf)
        if member and run is not None:
            mode.ready(run, parameter, leaf)

    def _take_beside_updates(self, on_device: Backward, record: ParameterRecord | None, leaf: Tensor) -> None:
        """Offload a gradient that backward has just written, while updates of others may run."""
        if record is None:
            return
        if not on_device.is_final(record):
            self._registry.offloaded.left.add(record)
            return
        try:
            self._taking.take_written(record, leaf)
        except BaseException:
            on_device.cancel_all()  # as in `Gradients`
            raise

    @torch.no_grad()
    def _begin_in_backward(self, mode: InBackward, run: Run) -> None:
        """Let a backward update, at its first gradient. Raises with nothing changed if a setting cannot be used."""
        if not run.updates:
            return
        if self._assembly.attachment is not None:  # what recomputes in this backward may read past a module's forward
            self._assembly.attachment.wait_before_reads()
        mode.remember_settings(self._assembly.groups)
        on_device = self._assembly.on_device
        if on_device is not None and on_device.decisions.pace.holds:
            return
        if not mode.knows or any(other.ledger.unfinished for other in self._registry.watching.others()):
            return
        if self._registry.homes.disk is not None:
            self._registry.homes.check_unwritten()  # raises, with nothing changed
        look_at_bits(self._registry.marked())
        attachment, weights = self._assembly.attachment, self._assembly.weights
        order = None if attachment is None else attachment.take_new_order()
        if order is not None:
            self._registry.order_by_use(order if weights is None else weights.together(order))
        facts = None if on_device is None else on_device.facts()
        parts = None
        if on_device is not None and facts is not None:
            plan, stores = on_device.decide(facts), self._ledger.stores
            if weights is not None:
                mode.planned = plan, facts
                facts = dataclasses.replace(facts, blocks=weights.staying())  # none moves before step()
                plan = on_device.decide(facts)
            left = facts.left(plan, stores.device.resident_bytes)
            ended = on_device.decisions.ended
            measured = None if ended is None else ended.measured
            of = self._registry.accelerated
            parts = Parts(self._ledger, plan, of, facts.workload, on_device.now, left, measured)
        mode.open(self._assembly.groups, parts)
        run.gathers = on_device is not None and not on_device.activations.in_use

    @contextlib.contextmanager
    def no_update(self) -> Iterator[None]:
        """Let backwards within only add up gradients."""
        mode = self._assembly.in_backward
        if mode is None:
            yield
            return
        mode.held += 1
        try:
            yield
        finally:
            mode.held -= 1
