"""The harness of experiments: whose turn it is, which results count, medians and ratios, limits, how a command ends."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from experiments.command import Parser, cell, heading, table_of
from experiments.harness import (
    Dropped,
    Limit,
    all_equal,
    bits_of,
    finish,
    measuring,
    medians,
    missed,
    ratio,
    take_turns,
    timed,
)


class Log:
    """Contestants that write down their turns; the result of a turn is what the round gives."""

    def __init__(self) -> None:
        self.turns: list[str] = []

    def contestant(self, name: str, drops_at: float = math.inf) -> Callable[[int], int]:
        def turn(number: int) -> int:
            self.turns.append(f"{name}{number}")
            if number >= drops_at:
                raise Dropped
            return number

        return turn


def test_contestants_take_turns_and_rounds_that_warm_up_do_not_count() -> None:
    log = Log()
    found = take_turns({name: log.contestant(name) for name in "ab"}, [7, 8, 9], warm_up=1, on_turn=log.turns.append)
    assert log.turns == ["a", "a7", "b", "b7", "a", "a8", "b", "b8", "a", "a9", "b", "b9"]
    assert found == {"a": [8, 9], "b": [8, 9]}
    log.turns.clear()
    found = take_turns({name: log.contestant(name) for name in "ab"}, range(2), warm_up=1, mirrored=True)
    assert log.turns == ["a0", "b0", "b0", "a0", "a1", "b1", "b1", "a1"]
    assert found == {"a": [1, 1], "b": [1, 1]}


def test_a_contestant_that_drops_out_keeps_its_results_and_the_others_go_on() -> None:
    log = Log()
    found = take_turns({"a": log.contestant("a", drops_at=1), "b": log.contestant("b")}, range(3))
    assert log.turns == ["a0", "b0", "a1", "b1", "b2"]
    assert found == {"a": [0], "b": [0, 1, 2]}


def test_no_turn_is_taken_when_the_time_is_over() -> None:
    log = Log()
    seconds_left = iter([1.0, -1.0, -1.0])
    found = take_turns({name: log.contestant(name) for name in "ab"}, range(2), left=lambda: next(seconds_left))
    assert found == {"a": [0], "b": []}
    assert log.turns == ["a0"]


def test_figures_are_medians_and_ratios_are_of_one_round() -> None:
    assert medians({"a": [1.0, 9.0, 2.0], "b": []}) == {"a": 2.0}
    # The machine became three times slower between the rounds.
    assert ratio([2.0, 6.0], [1.0, 3.0]) == 2.0
    assert ratio([2.0, 6.0, 5.0], [1.0]) == 2.0
    assert ratio([], [1.0]) is None
    assert timed(lambda: None) >= 0


def test_limits_are_values() -> None:
    least, most = Limit.at_least("gain", 1.4, 1.5), Limit.at_most("time", 1.0, 1.0, "of a step")
    assert (least.measured, least.allowed, least.missed) == (1.4, "at least 1.5", True)
    assert (most.allowed, most.met, most.missed, most.note) == ("at most 1", True, False, "of a step")
    unknown = Limit.at_most("unknown", None, 1.0)
    assert (unknown.met, unknown.missed) == (None, False)
    assert missed([least, most, unknown]) == ["gain"]


def test_bits_of_parameters_and_state() -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    assert all_equal(bits_of(*trained(1)), bits_of(*trained(1)))
    assert not all_equal(bits_of(*trained(1)), bits_of(*trained(2)))
    model, optimizer = trained(1)
    before = bits_of(model, optimizer)
    next(iter(optimizer.state.values()))["exp_avg"][0, 0] = -0.0
    assert not all_equal(before, bits_of(model, optimizer)), "copies, and the state counts"
    assert all_equal(bits_of(model), before[:2])


def test_a_command_ends_with_json_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        with measuring(as_json=True) as (console, progress):
            progress("something")
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    limits = [Limit.at_most("too slow", 2.0, 1.0), Limit.at_most("too large", 1.0, 1.0)]
    assert finish({"rows": [1]}, console, True, limits) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"rows": [1], "missed": ["too slow"]}
    assert "missed: too slow" in captured.err
    assert finish({"rows": [1]}, Console(), False, limits[1:]) == 0
    assert capsys.readouterr().out == "missed: nothing\n"
    assert finish([1], Console(), True) == 0
    assert capsys.readouterr().out == "[1]\n"


@pytest.mark.parametrize("rounds", ["x", "0", "-3"])
def test_a_bad_argument_gets_one_line_and_status_2(rounds: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("overlap", "What it measures.")
    parser.add_count("rounds", 2, "of all in turn")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([f"--rounds={rounds}"])
    said = capsys.readouterr().err
    assert f"--rounds: expected a whole number of 1 or more, found {rounds!r}" in said
    assert said.count("\n") == 1


def test_rows_are_shown_by_their_keys() -> None:
    assert heading("best_fixed_s") == "best fixed"
    assert heading("gparams_per_s") == "gparams per s"
    assert [heading(key) for key in ("peak_bytes", "bits_equal", "fits_share")] == ["peak", "bits", "fits share"]
    shown = {"a_s": 0.25, "a_bytes": 3 << 20, "a_share": 0.5, "a_equal": False, "a": 7, "b": None, "c": "text"}
    assert [cell(*pair) for pair in shown.items()] == ["0.250", "3.00 MiB", "50.0%", "DIFFERENT", "7", "", "text"]
    table = table_of("title", [shown, shown], "c", "a_s")
    assert [column.header for column in table.columns] == ["c", "a"]
    assert table.row_count == 2
    differing = table_of("title", [{"a": 1, "b": 2}, {"c": 3}])
    assert [list(column.cells) for column in differing.columns] == [["1", ""], ["2", ""], ["", "3"]]
