"""The fastest settings: no other choice of them is faster, and none of them is without use."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from perfmodel.hardware import HardwareProfile
from perfmodel.planner.fastest import CHOICES, _with, fastest, fastest_batch
from perfmodel.planner.options import difference
from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.situation import Situation
from perfmodel.planner.text import _code, _fastest
from perfmodel.planner.whatif import WORTHWHILE, _settings
from tests.support.planner import answer, asked, text, typed

OFFLOADS = "--offload-gradients --checkpointing"
SIZE = "--subgroup-size", "100M"
"""Planned five times as fast as the subgroups that the optimizer chooses."""


def test_no_other_choice_is_faster() -> None:
    question = asked(*["--params", "3e9", "--gpu", "8GB", "--host", "64GB", *SIZE])[0]
    found = fastest(question)
    assert found is not None
    rates = []
    for count in range(len(CHOICES) + 1):
        for taken in itertools.combinations(CHOICES, count):
            other = _with(question, taken)
            best = fastest_batch(other) if other else None
            rates += [best[0].step_tokens / best[1].seconds] if best else []
    assert found.tokens_per_s >= (1 - 2 * WORTHWHILE) * max(rates)


def test_the_options_that_are_said_give_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """As they are typed behind those of the question; and with the micro-batches, too."""
    line = " ".join(["--params 1.5e9 --machine rtx-4090 --host 64GB", *SIZE])
    first, second, *_ = text(line, capsys).splitlines()
    assert second == (
        'In code, with the model on the host: optimizer = DOSAdam(..., device="cuda", offload_gradients=True, '
        'subgroup_size=100_000_000); optimizer.attach(model, weights="auto").'
    )
    change, _, rest = first.removeprefix("Fastest with AdamW's results: add ").partition(": ")
    question = asked(*line.split(), *change.split())[0]
    situation = Situation(question)
    seconds = adaptive_outcome(situation).seconds
    assert rest.startswith(f"{question.step_tokens / seconds:,.0f} tokens/s, ")
    assert f"({situation.training_s / seconds:.0%} of what forward and backward reach alone, 98% with --acc" in rest
    count = int(rest.removesuffix(").").split()[-1])
    longer = Situation(question.replace(micro_batches=count))
    assert longer.training_s / adaptive_outcome(longer).seconds >= 0.975


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "--no-attach",
        "--offload-gradients --weights auto --offload-activations auto --state-format int8",
        "--offload-gradients --weights stream --offload-activations 0.5 --host 64GB --disk 1TB",
        "--state-format float32 --offload-gradients",
    ],
)
def test_the_code_that_is_said_runs(settings: str, tmp_path: Path) -> None:
    """With parameters for the dots, a folder, and an emulated device for the GPU."""
    from dos import DOSAdam, EmulatedDevice

    asked_for = asked(*f"--params 1e9 --machine rtx-4090 {settings}".split())[0]
    block = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.ModuleList(block))
    device = EmulatedDevice(HardwareProfile.builtin("unknown"), capacity=2**21)
    code = _code(asked_for).replace("...", "list(model.bfloat16().parameters())").replace("DIRECTORY", str(tmp_path))
    if 'device="cuda"' not in code:  # the model is on the device
        code = code.replace("parameters())", "parameters()), device=device")
    names = {"DOSAdam": DOSAdam, "model": model, "device": device}
    exec(code.replace('"cuda"', "device"), names)
    assert isinstance(names["optimizer"], DOSAdam)
    shown = {"offload_gradients=": "--offload-gradients", "state_format=": "--state-format", "disk=": "--disk"}
    shown |= {"weights=": "--weights", "activations=": "--offload-activations"}
    assert {part for part in shown if part in code} == {part for part, each in shown.items() if each in settings}


def test_eight_bits_are_not_called_adamws_results() -> None:
    line = "--params 7e9 --machine h200 --batch 2 --state-format int8 --subgroup-size 400M"
    found = fastest(asked(*line.split())[0])
    assert found is not None
    assert next(_fastest(found)).startswith("Fastest with moments in 8 bits: ")


def test_several_gpus_share_the_model_where_that_is_faster() -> None:
    question = asked(*["--params", "13e9", "--machine", "a100-80", "--ranks", "2", "--subgroup-size", "400M"])[0]
    found, divided = fastest(question), fastest(question.replace(fsdp=True))
    assert found is not None
    assert divided is not None
    assert "--fsdp" in found.change
    assert found.tokens_per_s == pytest.approx(divided.tokens_per_s, rel=0.02)
    _, code = _fastest(found)
    assert code.startswith("In code: fully_shard(...) of each block and the model; optimizer = ")
    assert {"fsdp": True} in [*_settings(question)]
    assert {"fsdp": True} not in [*_settings(question.replace(ranks=1))]
    # More micro-batches are said only where they gain.
    _, share = divided.accumulating() or (0, 1.0)
    assert share > divided.compute_share + 0.009


def test_a_batch_is_written_to_the_last_sequence() -> None:
    """One of 149K would be larger than the largest that fits."""
    asked_for = asked("--params", "1e9", "--gpu", "80GB")[0]
    assert difference(asked_for, asked_for.replace(batch=149_123)) == "--batch 149123"


def test_nothing_is_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """Where only the batch is changed, its rate stands in the first line alone; and no change both mends and helps."""
    line = "--params 7e9 --machine h200 --subgroup-size 200M"
    shown = text(line, capsys)
    assert shown.count(f"{typed(line).fastest.tokens_per_s:,.0f} tokens/s") == 1
    assert "7B parameters in bf16, h200_node: fits; the first line's batch is the best that fits (" in shown
    shown = text("--params 3e9 --gpu 8 --host 64 --subgroup-size 200M", capsys)
    assert "As asked, 3B parameters in bf16, a GPU of 7.8 GiB: DOES NOT FIT. Without any" in shown
    assert "It fits with" in shown
    assert "What would help" not in shown
    assert "unknown" not in shown


def test_what_was_asked_is_not_faster_than_the_fastest() -> None:
    """Not even by less than another setting would be worth."""
    line = "--params 30e9 --machine h100 --ranks 4 --fsdp --checkpointing --offload-activations auto --host 512GiB"
    found = typed(f"{line} --subgroup-size 400M")
    assert found.fastest is not None
    assert found.best_batch is not None
    question, outcome = found.best_batch
    assert found.fastest.tokens_per_s >= question.step_tokens / outcome.seconds


def test_remedies_say_what_they_train(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--params 3e9 --machine rtx-3060 --host 32GB"
    shown = text(line, capsys)
    assert shown.count("DOES NOT FIT") == 1
    found = typed(line).remedies[0]
    rate = found.situation.question.step_tokens / found.outcome.seconds
    assert f"It fits {found.change}: the GPU then needs 7.2 GiB, the host 39.1 GiB; {rate:,.0f} tokens/s." in shown
    assert re.search(r"--disk 1TB: .*; \d+ tokens/s, \d+ with --batch \d\.\n", shown)


def test_where_nothing_fits_the_first_line_has_the_first_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """And its options, behind those of the question, give what it says."""
    line = "--params 3e9 --gpu 8GB --host 32GB --subgroup-size 400M"
    answer, (first, _, third, *_) = typed(line), text(line, capsys).splitlines()
    best, remedy = answer.fastest, answer.remedies[0]
    assert best is not None
    assert first.startswith("Fastest with AdamW's results on a larger host: ")
    assert f": add {best.change}: {best.tokens_per_s:,.0f} tokens/s, " in first
    assert "DOES NOT FIT" in third
    assert asked(*line.split(), *best.change.split())[0] == best.question
    assert best.tokens_per_s >= remedy.situation.question.step_tokens / remedy.outcome.seconds


def test_nothing_is_said_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer("--params 1000e9 --machine h100 --host 512GB")["fastest"] is None
    shown = text("--params 1000e9 --machine h100 --host 512GB", capsys)
    assert "No setting makes it fit, not even with 4.0 TiB of host memory; several GPUs may hold it" in shown


def test_half_precision_keeps_gradients_where_its_scaler_needs_them(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--params 7e9 --machine v100-32 --dtype fp16 --host 128GB --subgroup-size 400M"
    found = typed(line)
    assert found.fastest is not None
    assert not found.fastest.question.offload_gradients
    assert found.remedies
    assert not any(each.situation.question.offload_gradients for each in found.remedies)
    assert "fp16 needs GradScaler, which does not work with --offload-gradients" in text(f"{line} {OFFLOADS}", capsys)
