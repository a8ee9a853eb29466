"""Questions to the planner, and its answers, each made once."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from perfmodel.hardware import HardwareProfile
from perfmodel.planner.answer import Answer, to_json
from perfmodel.planner.machine import FABRICS, GPUS, PCIE
from perfmodel.planner.main import command_line, question_of
from perfmodel.planner.question import Question
from perfmodel.planner.text import show
from perfmodel.planner.transformer import Transformer

LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def question(numel: float = 7e9, machine: str = "h100", **settings: Any) -> Question:
    """7B, checkpointed, on one GPU of the machine, unless something else is said."""
    gpu = GPUS[machine]
    defaults: dict[str, Any] = {
        "profile": HardwareProfile.builtin(machine),
        "device_bytes": gpu.memory_bytes,
        "checkpointing": True,
        "flops_rate": gpu.utilisation * gpu.peak("bf16"),
        "fabric": FABRICS.get(machine, PCIE),
    }
    return Question(Transformer.of_size(int(numel)), **{**defaults, **settings})


def asked(*arguments: str) -> tuple[Question, list[str]]:
    """The question of a command line, and how it was understood; nothing is planned."""
    return question_of(command_line().parse_args(arguments))


@functools.cache
def typed(line: str) -> Answer:
    """The answer to a command line that names no file of a test's own."""
    return Answer(*asked(*line.split()))


def answer(line: str) -> dict[str, Any]:
    """The same as `--json` prints it."""
    return parsed(json.dumps(typed(line), default=to_json, allow_nan=False))


def text(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The same as the command prints it without `--json`."""
    show(typed(line))
    return capsys.readouterr().out


def parsed(printed: str) -> dict[str, Any]:
    """The output as a program reads it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return dict(json.loads(printed, parse_constant=refuse))
