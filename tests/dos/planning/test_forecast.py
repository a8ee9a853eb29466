"""Low-water marks to room: scripted histories with literal answers, and what holds for any history."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dos.planning.forecast import MARGIN, REMEMBERED, REMEMBERED_AFTER_FAILURE, Forecast, Room
from perfmodel import Op

TOTAL = 1000
SPARED = int(MARGIN * TOTAL)


class Iteration(NamedTuple):
    """What others take of the device at the peak of an iteration and while updating."""

    peak: int
    update: int


def play(forecast: Forecast, iterations: Sequence[Iteration], held: int = 0) -> list[int]:
    """The room for residents after each iteration, all of which is taken; what others want beyond the device waits."""
    rooms = []
    for others in iterations:
        for phase, taken in ((Op.FORWARD, others.update), (Op.BACKWARD, others.peak), (Op.UPDATE, others.update)):
            forecast.sample(phase, max(0, TOTAL - taken - held), held, TOTAL)
        held = forecast.room().resident
        rooms.append(held)
        forecast.end_iteration()
    return rooms


def steady(taken: int, count: int, swing: int = 0) -> list[Iteration]:
    return [Iteration(taken, taken - swing)] * count


def test_nothing_is_known_before_the_first_sample() -> None:
    assert Forecast().room()[:2] == (0, 0)
    assert Forecast().late_room() == 0
    assert Forecast().margin == 0


def test_the_first_peak_counts_at_once() -> None:
    forecast = Forecast()
    forecast.sample(Op.FORWARD, 900, 0, TOTAL)
    assert forecast.room()[:2] == (880, 880)
    forecast.sample(Op.BACKWARD, 400, 0, TOTAL)
    assert forecast.room()[:2] == (380, 380)


def test_state_gives_way_before_the_next_peak_to_a_neighbour_that_takes_memory() -> None:
    forecast = Forecast()
    play(forecast, steady(600, 4, swing=300))
    held = 380
    forecast.sample(Op.FORWARD, TOTAL - 300 - held, held, TOTAL)
    forecast.sample(Op.BACKWARD, TOTAL - 600 - held, held, TOTAL)
    assert forecast.room().resident == 380
    forecast.sample(Op.UPDATE, TOTAL - 300 - 200 - held, held, TOTAL)
    assert forecast.room().resident == 180


def test_a_spike_of_one_iteration_counts_for_some_iterations() -> None:
    fits, waits = Iteration(610, 310), Iteration(700, 300)
    before, after = steady(600, 3, swing=300), steady(600, REMEMBERED + 3, swing=300)
    assert play(Forecast(), [*before, fits, *after]) == [380] * 3 + [370] * (1 + REMEMBERED) + [380] * 3
    # What has to wait is not seen in full: more is given back at once, until nothing waits.
    assert play(Forecast(), [*before, waits, *after]) == [380] * 3 + [340] + [360] * REMEMBERED + [380] * 3


def test_marks_that_fall_steadily_are_expected_to_fall_on() -> None:
    """By the least of the last falls: by the next peak that much will have been taken."""
    forecast = Forecast()
    rooms = []
    for free in (900, 800, 740, 640, 520, 530):
        forecast.sample(Op.BACKWARD, free, 0, TOTAL)
        rooms.append(forecast.room().resident)
        forecast.end_iteration()
    assert rooms == [880, 780, 720, 640 - 60 - 20, 520 - 60 - 20, 500]


def margins(forecast: Forecast, free: Sequence[int], held: int = 100) -> list[int]:
    found = []
    for nbytes in free:
        forecast.sample(Op.BACKWARD, nbytes, held, TOTAL)
        forecast.end_iteration()
        found.append(forecast.margin)
    return found


def test_a_starving_neighbour_widens_the_margin_faster_and_faster_and_a_content_one_takes_it_back() -> None:
    """It stops at the whole device."""
    forecast = Forecast()
    assert margins(forecast, [0, 5, 9, 0]) == [40, 50, 65, 87]
    assert margins(forecast, [10, 19]) == [87, 87], "neither short nor content"
    assert margins(forecast, [20, 500, 0]) == [20, 20, 40]
    assert margins(forecast, [0] * 20)[-1] == TOTAL + SPARED
    assert forecast.room()[:2] == (0, 0)


def levels(forecast: Forecast, others: Sequence[int], own: int = 300) -> list[int]:
    """The room for residents in iterations in which others hold so much at the peak."""
    found = []
    for nbytes in others:
        forecast.sample(Op.BACKWARD, TOTAL - own - nbytes, 0, TOTAL, others=nbytes)
        found.append(forecast.room().resident)
        forecast.end_iteration()
    return found


def test_memory_that_others_give_back_is_used_at_once_if_they_never_took() -> None:
    """Else a third of the most that they took at a time is left to them, until four iterations have seen it free."""
    assert levels(Forecast(), [400, 400, 100, 100]) == [280, 280, 580, 580]
    assert levels(Forecast(), [100, 400, 100, 100, 100, 100, 100]) == [580, 280, 480, 480, 480, 580, 580]
    assert levels(Forecast(), [400, 100, 220, 100])[-1] == 580 - 40


def test_memory_that_this_process_gives_back_is_used_after_some_iterations() -> None:
    """Its next batch may be as large again, and it would be its own code that ran out of memory."""
    forecast = Forecast()
    levels(forecast, [200], own=500)
    assert levels(forecast, [200] * 6, own=100) == [280] * REMEMBERED + [680] * 2


def iterate(forecast: Forecast, count: int, fits: int = TOTAL) -> list[int]:
    """The room for residents in each of some iterations with 300 bytes free beside 100; so many can be allocated."""
    found = []
    for _ in range(count):
        forecast.sample(Op.UPDATE, 300, 100, TOTAL)
        found.append(forecast.room().resident)
        if found[-1] > fits:
            forecast.allocation_failed(fits)
        forecast.end_iteration()
    return found


def test_after_a_failed_allocation_no_more_is_planned_for_some_iterations() -> None:
    forecast = Forecast()
    assert iterate(forecast, 1, fits=200) == [380]
    assert iterate(forecast, REMEMBERED + 2) == [200] * REMEMBERED + [380] * 2
    assert forecast.margin == SPARED


def test_a_failed_allocation_counts_at_once() -> None:
    """State that gave way in backward must not come back in the step of the same iteration."""
    forecast = Forecast()
    forecast.sample(Op.UPDATE, 300, 100, TOTAL)
    forecast.allocation_failed(200)
    forecast.allocation_failed(250)
    assert forecast.room().resident == 200


def test_leaving_makes_no_more_room_than_there_is_while_updating() -> None:
    """Then no saved tensor is there, but all gradients are."""
    forecast = Forecast()
    for phase, free in ((Op.BACKWARD, 100), (Op.UPDATE, 600)):
        forecast.sample(phase, free, 0, TOTAL)
    room = forecast.room()
    assert (room.resident, room.update, room.more) == (100 - SPARED, 600 - SPARED, 500)
    forecast.allocation_failed(300)
    assert forecast.room().more == 300 - room.resident


def test_repeated_failures_are_tried_less_and_less_often() -> None:
    forecast = Forecast()
    rooms = iterate(forecast, 330, fits=200)
    assert [len(list(run)) for room, run in itertools.groupby(rooms) if room == 200] == [4, 8, 16, 32, 64, 100, 99]
    assert iterate(forecast, 200)[1:] == [380] * 199
    assert iterate(forecast, 6, fits=200) == [380] + [200] * REMEMBERED + [380]


def run_out(forecast: Forecast, held: int, retried_peak: int) -> None:
    """The user's code runs out of memory beside what is held, which is released; the retry takes this much."""
    forecast.ran_out(held)
    forecast.sample(Op.BACKWARD, TOTAL - retried_peak, 0, TOTAL)
    forecast.end_iteration()


def test_the_peak_at_which_user_code_ran_out_is_remembered_for_long() -> None:
    forecast = Forecast()
    play(forecast, steady(300, 5))
    run_out(forecast, 680, retried_peak=500)
    rooms = play(forecast, steady(300, REMEMBERED_AFTER_FAILURE + 5))
    assert rooms[: REMEMBERED_AFTER_FAILURE - 1] == [480] * (REMEMBERED_AFTER_FAILURE - 1)
    assert rooms[-1] == 680


def test_running_out_again_at_once_halves_what_may_be_held() -> None:
    """A peak that no sample sees: what they show does not help."""
    forecast = Forecast()
    held = play(forecast, steady(300, 5))[-1]
    seen = []
    for _ in range(7):
        run_out(forecast, held, retried_peak=300)
        held = play(forecast, steady(300, 1))[-1]
        seen.append(held)
    assert seen == [680, 340, 170, 85, 42, 21, 10]


def test_running_out_later_is_judged_by_what_is_seen_then() -> None:
    forecast = Forecast()
    play(forecast, steady(300, 5))
    run_out(forecast, 680, retried_peak=500)
    play(forecast, steady(300, 50))
    run_out(forecast, 480, retried_peak=600)
    assert play(forecast, steady(300, 10))[-1] == 380


def backward(forecast: Forecast, marks: Sequence[int], late: Sequence[int]) -> None:
    for nbytes in marks:
        forecast.sample(Op.BACKWARD, nbytes, 0, TOTAL)
    for nbytes in late:
        forecast.sample(Op.BACKWARD, nbytes, 0, TOTAL, late=True)


def test_in_the_second_half_of_backward_there_is_room_for_what_that_half_has_left_before() -> None:
    forecast = Forecast()
    backward(forecast, [100, 200], [500, 450, 700])
    assert forecast.late_room() == 0, "nothing is known of how a backward goes on"
    forecast.end_iteration()
    backward(forecast, [100, 200], [])
    assert forecast.late_room() == 0, "not in its second half yet"
    backward(forecast, [], [520])
    assert forecast.late_room() == 520 - 50 - SPARED
    backward(forecast, [], [400])
    assert forecast.late_room() == 400 - SPARED


def test_the_second_half_of_backward_frees_what_it_left_at_least_in_recent_iterations() -> None:
    forecast = Forecast()
    backward(forecast, [100, 200], [])
    forecast.end_iteration()
    assert forecast.half_freed is None, "nothing was sampled in its second half"
    backward(forecast, [100, 200], [500, 450, 700])
    forecast.end_iteration()
    assert forecast.half_freed == 450 - 100
    backward(forecast, [300], [250, 120])
    forecast.end_iteration()
    assert forecast.half_freed == 0, "memory peaked at its end"
    for _ in range(REMEMBERED):
        backward(forecast, [100], [])
        forecast.end_iteration()
    assert forecast.half_freed == 0, "as long as no other one was seen"
    for _ in range(REMEMBERED):
        forecast.sample(Op.BACKWARD, 100, 0, TOTAL, others=200)
        forecast.sample(Op.BACKWARD, 150, 0, TOTAL, others=200, late=True)
        forecast.end_iteration()
    assert forecast.half_freed == 50, "what others have is no difference"


def test_nothing_is_prefetched_early_while_it_is_remembered_that_the_user_ran_out() -> None:
    forecast = Forecast()
    for _ in range(2):
        backward(forecast, [100], [500])
        forecast.end_iteration()
    forecast.ran_out(0)
    backward(forecast, [100], [500])
    assert forecast.late_room() == 0
    for _ in range(REMEMBERED_AFTER_FAILURE):
        forecast.end_iteration()
        backward(forecast, [100], [500])
    assert forecast.late_room() == 500 - SPARED


# What holds for any history.

Event = tuple[str, int, int]
"""A phase with free and held bytes, or something that happens."""

PHASES = {"forward": Op.FORWARD, "backward": Op.BACKWARD, "update": Op.UPDATE}
nbytes = st.integers(0, TOTAL)
samples = st.tuples(st.sampled_from(sorted(PHASES)), nbytes, nbytes)
events = st.one_of(samples, samples, samples, st.tuples(st.sampled_from(["end", "end", "failed"]), st.just(0), nbytes))


def follow(forecast: Forecast, history: Sequence[Event], more: int = 0) -> list[Room]:
    """The room after each event. more: bytes added to all that is free."""
    rooms = []
    for what, free, held in history:
        if what in PHASES:
            forecast.sample(PHASES[what], free + more, held, TOTAL)
        elif what == "end":
            forecast.end_iteration()
        else:
            forecast.allocation_failed(held)
        rooms.append(forecast.room())
    return rooms


@given(st.lists(events, max_size=60))
def test_never_more_than_the_lowest_recent_mark_less_the_margin(history: list[Event]) -> None:
    forecast = Forecast()
    lowest: list[int | None] = [None]
    for event in history:
        room = follow(forecast, [event])[0]
        what, free, held = event
        if what in ("forward", "backward"):
            lowest[-1] = free + held if lowest[-1] is None else min(lowest[-1], free + held)
        elif what == "end":
            lowest.append(None)
        assert 0 <= room.resident <= room.update
        recent = [mark for mark in lowest[-REMEMBERED:] if mark is not None]
        if recent:
            assert room.resident <= max(0, min(recent) - forecast.margin)
        assert room.update <= max(0, 2 * TOTAL - forecast.margin)


@given(st.lists(events, max_size=60), st.integers(0, TOTAL))
def test_more_free_memory_never_means_less_room(history: list[Event], more: int) -> None:
    poor, rich = follow(Forecast(), history), follow(Forecast(), history, more)
    for less, room in zip(poor, rich, strict=True):
        assert room.resident >= less.resident
        assert room.update >= less.update


@given(st.lists(events, max_size=60), st.integers(0, TOTAL), st.integers(0, 300), st.booleans())
def test_every_history_is_forgotten(history: list[Event], taken: int, swing: int, ran_out: bool) -> None:
    forecast = Forecast()
    follow(forecast, history)
    if ran_out:
        forecast.ran_out(500)
    forecast.end_iteration()
    play(forecast, steady(taken, REMEMBERED_AFTER_FAILURE + 20, swing=min(swing, taken)))
    assert forecast.room().resident == max(0, TOTAL - taken - SPARED)


@pytest.mark.parametrize("happens", [Forecast.end_iteration, lambda f: f.allocation_failed(5), lambda f: f.ran_out(5)])
def test_events_before_the_first_sample_do_no_harm(happens: Callable[[Forecast], None]) -> None:
    forecast = Forecast()
    happens(forecast)
    forecast.end_iteration()
    assert forecast.room()[:2] == (0, 0)
    assert play(forecast, steady(600, 120))[-1] == 380
