"""How long forward and backward are said to last."""

from __future__ import annotations

import math
import random

import pytest

from dos.step.iteration import Iteration, Wait
from dos.step.pace import Pace, Typical
from tests.support.devices import Copying


class At:
    """A mark that the device has come to at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def at(self) -> float:
        return self.seconds


def waits(*times: tuple[float, float]) -> list[Wait]:
    return [Wait(At(before), At(after)) for before, after in times]


def iterate(pace: Pace, forward_s: float, backward_s: float = 2.0, issued: float | None = None) -> None:
    """One iteration, in which compute and the device's waits for the host last so long together."""
    iteration = Iteration(Copying())
    iteration.forward, iteration.backward, iteration.step = At(10), At(10 + forward_s), At(10 + forward_s + backward_s)
    pace.backward_begins(iteration, Iteration(Copying()))
    pace.step(iteration, early=None, issued=issued)


def test_waits_do_not_count() -> None:
    """Neither those for parameters nor those for saved tensors, as far as they lie within."""
    before, iteration, pace = Iteration(Copying()), Iteration(Copying()), Pace(queues=False)
    iteration.forward, iteration.backward, iteration.first_departure, iteration.step = At(10), At(20), At(22), At(40)
    before.waits = waits((0, 9), (10, 11))
    pace.backward_begins(iteration, before, waits((12, 14), (19, 21), (21, 22)))
    assert pace.forward.seconds == 10 - 1 - 2 - 1
    pace.step(iteration, early=True, stalls=waits((20, 21), (21, 25), (30, 31)))
    assert pace.backward.seconds == 18 - 3 - 1
    assert pace.rest.seconds == 20 - 5 - 1


def test_a_forward_that_a_late_host_stretches_is_no_longer_than_one_with_nothing_beside_it() -> None:
    """Else the plan would leave more beside the forward, which stretches it: a belief that confirms itself."""
    pace = Pace()
    for _ in range(2):
        iterate(pace, 3.0)
    assert pace.wants_clean()
    iterate(pace, 1.0)
    assert (pace.forward.seconds, pace.late_s) == (1.0, 0.0)
    for _ in range(40):
        iterate(pace, 1.0 + pace.forward.seconds)
        assert pace.forward.seconds == 1.0
        assert pace.late_s == 1.0, "reported apart"


def test_before_that_a_forward_is_no_longer_than_the_backward_behind_it() -> None:
    pace = Pace()
    iterate(pace, 9.0, backward_s=2.0)
    assert pace.forward.seconds == 2.0
    assert pace.late_s == 7.0


def test_a_shorter_forward_counts_and_one_in_five_that_is_stretched_does_not() -> None:
    pace = Pace(queues=False)
    for seconds in (1.0, 1.0, 5.0, 1.0, 1.0, 5.0, 5.0, 1.0, 0.5, 0.5):
        iterate(pace, seconds)
    assert pace.forward.seconds == 0.5


def test_the_first_forwards_that_differ_by_noise_change_no_plan() -> None:
    """A plan is made at the first gradient, where the device waits for it."""
    pace = Pace(queues=False)
    for seconds, known in ((4.0, 4.0), (3.99, 4.0), (1.0, 1.0), (0.995, 1.0)):
        iterate(pace, seconds)
        assert pace.forward.seconds == known


def test_forwards_with_nothing_beside_them_are_rare_and_follow_a_batch_that_grows() -> None:
    pace, asked = Pace(), list[int]()

    def train(seconds: float, steps: int) -> None:
        for _ in range(steps):
            wants = pace.wants_clean()
            asked.extend([pace._steps] * wants)
            iterate(pace, seconds if wants else 1.5 * seconds)

    train(1.0, 5000)
    assert asked[:4] == [2, 18, 50, 114]
    assert len(asked) < 12
    assert pace.forward.seconds == 1.0
    before = len(asked)
    train(4.0, 1025)
    assert len(asked) > before
    assert pace.forward.seconds == 4.0


def test_forwards_with_nothing_beside_them_that_differ_by_noise_change_no_plan() -> None:
    pace, known, noise = Pace(), list[float](), iter([1.0, 0.97, 1.03, 0.96, 1.01])
    for _ in range(120):
        clean = pace.wants_clean()
        iterate(pace, next(noise) if clean else 1.4)
        known.append(pace.forward.seconds)
    assert len({*known[Typical.REVIEWS[-1] + 3 :]}) == 1


def test_a_forward_in_which_user_code_evaluates_is_not_believed_for_good() -> None:
    """Whichever of those with nothing beside them it is; all others are stretched."""
    for which in range(4):
        pace, number = Pace(), 0
        for _ in range(600):
            wants = pace.wants_clean()
            iterate(pace, (30.0 if number == which else 1.0) if wants else 1.4)
            number += wants
        assert pace.forward.seconds == 1.0, which


def test_no_forward_is_asked_for_where_the_device_queues_nothing() -> None:
    emulated = Pace(queues=False)
    for _ in range(100):
        assert not emulated.wants_clean()
        iterate(emulated, 1.0)


def test_the_host_is_ahead_from_the_step_s_issue_to_the_end_of_backward() -> None:
    def ahead(queues: bool, *issued: float) -> float:
        pace = Pace(queues=queues)
        for seconds in issued:
            iteration = Iteration(Copying())
            iteration.backward, iteration.step = At(1.0), At(9.0)
            pace.step(iteration, early=None, issued=seconds)
        return pace.ahead.seconds

    assert ahead(True, *[6.0] * 5) == 3.0
    assert ahead(True, *[6.0] * 5, *[5.5] * 5) == 3.0, "differences count against backward, and change no plan"
    assert ahead(True, *[6.0] * 5, *[3.0] * 5) == 6.0
    assert ahead(True, *[10.0] * 5) == 0.0, "the device waited for the host"
    assert ahead(False, *[6.0] * 5) == 0.0, "a device that queues nothing ends with the host"


def test_a_backward_that_updates_stretch_is_no_longer_than_one_with_nothing_beside_it() -> None:
    """Else all updates would seem to end within it, and state would stay on the host though there is room."""
    pace = Pace()
    for issued in (0.0, None):
        iterate(pace, 3.0, 9.0, issued)
    assert pace.wants_clean()
    iterate(pace, 1.0, 2.5, issued=0.0)
    assert pace.holds
    for _ in range(40):
        iterate(pace, 1.0 + pace.forward.seconds, 4.0)
        assert not pace.holds
        assert pace.rest.seconds == 2.5


def test_a_backward_grows_with_its_forward() -> None:
    pace = Pace()
    for issued in (0.0, None):
        iterate(pace, 1.0, issued=issued)
    for step in range(200):
        wants, size = pace.wants_clean(), 1.0 + (step > 20)
        backward_s, issued = (4.0 * size, None) if step else (2.5, 0.0)
        iterate(pace, size if wants else 1.5 * size, backward_s, issued)
    assert (pace.forward.seconds, pace.rest.seconds) == (2.0, 5.0)


def test_a_late_host_counts_where_a_backward_s_updates_are_predicted() -> None:
    """With what step() takes, for which the device waits, too; no plan is made for it."""
    pace, before = Pace(), None
    for step in range(12):
        wants = pace.wants_clean()
        iteration, end_s = Iteration(Copying()), 12.0 if step == 4 else 11.0
        forward_s, backward_s = (1.0, 2.5) if wants else (1.5, 4.0)
        iteration.forward, iteration.backward = At(end_s), At(end_s + forward_s)
        iteration.step = At(end_s + forward_s + backward_s)
        previous = Iteration(Copying())
        previous.step = At(end_s - 0.25)
        pace.backward_begins(iteration, previous if before else None)
        pace.step(iteration, early=None, issued=0.0 if step == 0 or pace.holds else None)
        before = iteration
    assert pace.rest.seconds == 2.5
    assert pace.updated.seconds == 4.25
    assert pace.late_in_backward_s == 1.75


def test_a_stretched_forward_makes_no_backward_shorter_than_one_with_nothing_beside_it() -> None:
    """The host may be late in the one forward by which backwards are judged."""
    pace = Pace()
    for issued in (0.0, None):
        iterate(pace, 3.0, 9.0, issued)
    assert pace.wants_clean()
    iterate(pace, 2.0, 2.5, issued=0.0)
    for _ in range(200):
        iterate(pace, 1.0 if pace.wants_clean() else 2.0, 4.0)
    assert (pace.forward.seconds, pace.rest.seconds) == (1.0, 2.5)


def test_no_backward_holds_its_updates_once_state_may_have_the_memory_of_gradients() -> None:
    """As where all state was on the device, which needs no such forward, and has to leave."""
    pace = Pace()
    for _ in range(9):
        iterate(pace, 1.0)
    assert pace.wants_clean()
    iterate(pace, 1.0)
    assert not pace.holds


NOISE = [math.exp(0.05 * number) for number in range(-2, 3)] * (Typical.REVIEWS[-1] // 5)


@pytest.mark.parametrize("place", [2, 4])
def test_a_figure_settles_whatever_the_noise_s_order(place: int) -> None:
    found = set()
    for seed in range(20):
        rng, figure, known = random.Random(seed), Typical(place=place), list[float]()
        for noise in [*rng.sample(NOISE, len(NOISE)), *rng.choices(NOISE, k=200)]:
            figure.add(noise)
            known.append(figure.seconds)
        found.add(known[-1])
        assert len({*known[Typical.REVIEWS[0] - 1 :]}) <= len(Typical.REVIEWS)
        assert len({*known[Typical.REVIEWS[-1] - 1 :]}) == 1
    assert found == {sorted(NOISE)[len(NOISE) // place]}


def test_a_lasting_change_is_followed_within_a_few_and_reviewed_again() -> None:
    figure = Typical()
    for _ in range(100):
        figure.add(1.0)
    for seconds in [1.5] * 4:
        figure.add(seconds)
    assert figure.seconds == 1.5
    for _ in range(Typical.REVIEWS[-1]):
        figure.add(1.4)
    assert figure.seconds == 1.4
