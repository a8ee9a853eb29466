"""State as user code reads, replaces and moves it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from dos.guard import ANY, UNBROKEN, entry
from dos.in_backward import STATE_READ
from dos.owners.assembly import Assembly
from dos.owners.waiting import Waiting
from dos.parameters.live_state import LiveState


class State:
    """The state of one optimizer as `optimizer.state` shows it."""

    def __init__(self, assembly: Assembly, waiting: Waiting) -> None:
        self.guard, self._lock = assembly.guard, assembly.guard.lock
        self._assembly, self._registry, self._ledger = assembly, assembly.registry, assembly.ledger
        self._waiting = waiting

    @entry(*ANY)
    def bring_home(self) -> None:
        """Move all resident state home, once the last step is complete."""
        self.bring_home_within()

    def bring_home_within(self) -> None:
        self._waiting.settle()
        if self._assembly.on_device is not None:
            self._ledger.stores.bring_home(self._registry.accelerated)

    @entry(*ANY)
    def release_memory(self) -> int:
        """Release all device memory of state that can move to the host; return its bytes."""
        # Read before the wait, so that slots count, which the step releases when it ends.
        held = 0 if self._assembly.on_device is None else self._ledger.stores.device.nbytes
        self.bring_home_within()
        if self._assembly.on_device is not None:
            self._assembly.on_device.decisions.memory.ran_out(held)
            self._assembly.on_device.activations.ran_out()
            self._assembly.on_device.now.backward = None  # if the iteration is tried again, its peak is sampled, too
            self._assembly.on_device.device.trim()
        return held

    @entry(*UNBROKEN)
    def settle_state(self, read: Collection[Tensor]) -> None:
        """Expose the state before user code changes entries, or reads those of the parameters `read`."""
        self.check_whole()
        self.settle_within(read)

    def settle_within(self, read: Collection[Tensor]) -> None:
        self.bring_home_within()
        homes, records = self._registry.homes, self._registry.records
        homes.expose(self._registry.subgroups_of(read))
        for record in filter(None, map(self._registry.record, read)) if homes.disk is not None else ():
            homes.show(record.views.values(), [subgroup for subgroup, _ in self._registry.places[record]])
        for record in records.values():
            record.write_step()

    def check_whole(self) -> None:
        """Raise RuntimeError if state is in part of the next step."""
        if self._assembly.in_backward is not None and self._assembly.in_backward.issued:
            raise RuntimeError(STATE_READ)

    def install(self, state: Mapping[Tensor, Any]) -> None:
        """Install this state as the optimizer's; user code may keep references to it."""
        self._assembly.reconciler.state = LiveState(state, self.settle_state, self._assembly.options.rule.keys)
