"""What is in flight after a step, and who waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from torch import Tensor

from dos.device_side import DeviceSide
from dos.devices import Caller
from dos.guard import Guard, exclusive
from dos.parameters.registry import Registry
from dos.state.record import ParameterRecord
from dos.step.in_place import InPlace

_CAPTURED = (
    "a CUDA graph is being captured while an update runs on, for which its replays would not wait; call "
    "optimizer.synchronize() before the capture"
)


class SessionBase:
    """What a session does about its last step, which may run on when `step()` has returned; `Session` has the rest.

    on_device: what is done on the accelerator; None until a parameter there is met.
    committed: whether there is a step that was issued and has not ended.
    in_flight: the records that are updated in it, with the caller's queues that come behind the update of each.
    """

    def __init__(self, registry: Registry, guard: Guard) -> None:
        self.registry = registry
        self.guard = guard
        self.on_device: DeviceSide | None = None
        self.committed = False
        self.in_flight: dict[ParameterRecord, frozenset[Caller]] = {}
        self._lock = guard.lock
        self._in_place = InPlace(guard)

    @property
    def unfinished(self) -> list[ParameterRecord]:
        """Whose updates the caller has not waited for."""
        return [record for record, behind in self.in_flight.items() if not behind]

    def capturing(self) -> bool:
        """Called by hooks: whether what runs now is being captured in a CUDA graph, whose replays run no hooks."""
        return self.on_device is not None and self.on_device.device.capturing()

    def finish_others(self) -> None:
        """Wait for other optimizers' updates of these parameters. Locks nothing, for those may wait for this one."""
        for other in self.registry.watching.others():
            if other.unfinished:
                other.synchronize()

    def _end_last_step(self) -> None:
        """Wait for the last step before another begins, unless all of it is queued on the device before that."""
        if not self.committed:
            return
        if self.on_device is not None and self.on_device.set_aside():
            self.committed = False
        else:
            self.synchronize()

    def _hand_over(self) -> None:
        """Let the caller have all parameters: what it queues on the device comes after the update there.

        The host waits for its own updates, and where memory must be back. What fails later is raised by the next call.
        """
        if self.on_device is None or not self.on_device.device.queues:
            self.synchronize()
            return
        try:
            self.on_device.order_caller()
        except BaseException:  # interrupted, too: no hook would make up for it
            with contextlib.suppress(Exception):  # what is raised already says that the step failed
                self.synchronize()
            raise
        self.registry.written(self.unfinished)
        self.in_flight = {}

    @exclusive
    def synchronize(self) -> None:
        """Block until the last step is complete. Ctrl-C takes effect then, unless it comes twice."""
        if self.on_device is not None and not self.on_device.idle and self.capturing():
            raise RuntimeError(_CAPTURED)  # to wait would end the capture, and look like a step that failed
        try:
            if self.on_device is not None:
                self.on_device.wait()
            self._in_place.wait()
            self.registry.written(self.unfinished)
        except Exception:
            self.in_flight, self.committed = {}, False
            raise
        self.in_flight, self.committed = {}, False  # not before: an interrupted wait must be made up for

    def finish_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Called by a hook before these parameters are used: wait for their updates, and no others."""
        if self.committed:
            self._finish_parameters(parameters)

    @exclusive
    def _finish_parameters(self, parameters: Iterable[Tensor]) -> None:
        if self.capturing():
            raise RuntimeError(_CAPTURED)
        here = None if self.on_device is None else self.on_device.device.caller()
        for parameter in parameters:
            record = self.registry.record(parameter)
            # A weight that several modules use may be read on several streams, each of which must wait.
            behind = None if record is None else self.in_flight.get(record)
            if record is None or behind is None or here in behind:
                continue
            lane = self.on_device if record.arena.accelerated else self._in_place
            assert lane is not None, "made for the first parameter on it"
            try:
                for subgroup, _ in self.registry.places[record]:
                    lane.wait_for(subgroup)
            except Exception:
                with contextlib.suppress(Exception):  # what is raised already says that the step failed
                    self.synchronize()
                raise
            if not behind:
                self.registry.written([record])
            self.in_flight[record] = behind | {here}

    @exclusive
    def bring_home(self) -> None:
        """Return all resident state to the host, once the last step is complete."""
        self.synchronize()
        if self.on_device is not None:
            self.on_device.bring_home()
