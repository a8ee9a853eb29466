"""The planner's command line, asked in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perfmodel.hardware import HardwareProfile
from perfmodel.planner.machine import FABRICS, GPUS, PCIE
from perfmodel.planner.main import main
from perfmodel.planner.question import Question
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
        "flops_rate": 0.4 * gpu.peak("bf16"),
        "fabric": FABRICS.get(machine, PCIE),
    }
    return Question(Transformer.of_size(int(numel)), **{**defaults, **settings})


def refused(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    """It is said in one line what is wrong with the arguments."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m perfmodel: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(out, parse_constant=refuse)
