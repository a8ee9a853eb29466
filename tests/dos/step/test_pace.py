"""How long forward and backward are said to last."""

from __future__ import annotations

from dos.step.iteration import Iteration, Wait
from dos.step.pace import Pace
from tests.support.devices import Copying


class At:
    """A mark that the device has come to at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def at(self) -> float:
        return self.seconds


def waits(*times: tuple[float, float]) -> list[Wait]:
    return [Wait(At(before), At(after)) for before, after in times]


def test_waits_do_not_count() -> None:
    """Neither those for parameters nor those for saved tensors, as far as they lie within."""
    before, iteration, pace = Iteration(Copying()), Iteration(Copying()), Pace()
    iteration.forward, iteration.backward, iteration.first_departure, iteration.step = At(10), At(20), At(22), At(40)
    before.waits = waits((0, 9), (10, 11))
    pace.backward_begins(iteration, before, waits((12, 14), (19, 21), (21, 22)))
    assert pace.forward.seconds == 10 - 1 - 2 - 1
    pace.step(iteration, early=True, stalls=waits((20, 21), (21, 25), (30, 31)))
    assert pace.backward.seconds == 18 - 3 - 1
