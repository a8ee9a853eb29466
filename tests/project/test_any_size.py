"""docs/any-size.md says what the planner says.

If it does not, each failing test shows what the planner says now.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from experiments.command import markdown
from experiments.paper.arithmetic import MODELS as SHAPES
from perfmodel.planner.fastest import fastest_batch
from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.question import Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.whatif import most
from tests.support import pages
from tests.support.crossings import crossed
from tests.support.planner import asked

LLAMA_31_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_2_7B = {**LLAMA_31_8B, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000}
TRAINED = {"exact": [], "int8": ["--state-format", "int8"]}
"""Rows of docs/any-size.md, by what they ask of the planner."""
SIZES = ("7B", "8B", "14B", "32B", "70B")
SOLD = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""GB of host memory."""


HOSTS = (64, 128, 256, 512, 1024)
"""Of the tables of what trains."""
MODELS = ("Llama 3.1 8B", "Qwen2.5 14B", "Qwen2.5 32B", "Llama 3.1 70B")
SETTINGS = [
    "--checkpointing",
    "--offload-gradients",
    "--fused-loss",
    "--weights",
    "auto",
    "--offload-activations",
    "auto",
]
DRIVE = ["--disk", "4TB", "--disk-read", "7GB", "--disk-write", "5GB"]
"""Where the host's memory is not enough."""
DESKTOPS = ("rtx-3090", "rtx-4090", "rtx-5090")
ON_24_GB = ("--checkpointing", "--offload-gradients")


def tables(name: str) -> Iterator[dict[str, list[str]]]:
    """The tables of a page: rows by their first cell; that of the headings is the empty string."""
    for found in re.findall(r"(?:^\|.*\n)+", pages.page(name).read_text(), re.MULTILINE):
        heading, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in found.splitlines())
        yield {"": heading, **{row[0]: row[1:] for row in rows}}


def table_of(heading: str) -> dict[str, list[str]]:
    """The table of docs/any-size.md that has this heading; of several the first."""
    return next(rows for rows in tables("any-size") if heading in rows[""])


def one_and_eight_s(*line: str) -> list[float]:
    """Seconds of an iteration with one micro-batch, and with eight."""
    return [adaptive_outcome(Situation(asked(*line, "--accumulation", n)[0])).seconds for n in ("1", "8")]


@pytest.fixture(params=[(LLAMA_31_8B, "8B"), (LLAMA_2_7B, "7B")], ids=["8B", "7B"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The file of a configuration, and the model's name in docs/any-size.md."""
    values, name = request.param
    (tmp_path / "config.json").write_text(json.dumps(values))
    return str(tmp_path), name


def cell_of(model: str, gpu: str, host: int, *more: str) -> Question:
    """The question of one cell. more: further options."""
    question, _ = asked("--params", "1e9", "--machine", gpu, "--host", f"{host}GB", *SETTINGS, *more)
    return question.replace(model=Transformer.from_config(SHAPES[model]))


def cell(model: str, gpu: str, host: int) -> str:
    """Tokens per second at the best batch, the batch, the limit; in italics with a drive; a hyphen: not even so."""
    for drive, mark in (((), ""), (DRIVE, "*")):
        if best := fastest_batch(cell_of(model, gpu, host, *drive)):
            question, outcome = best
            assert outcome.plan is not None, "it fits"
            busy = Situation(question).busy_s(outcome.plan)
            limit = max(busy, key=busy.__getitem__)
            return f"{mark}{question.step_tokens / outcome.seconds:,.0f} ({question.batch}), {limit}{mark}"
    return "-"


def of_size(name: str, host: int, *more: str) -> Question:
    """The question of a cell for a model by its name in docs/any-size.md."""
    question = cell_of("Llama 3.1 8B" if name == "7B" else MODELS[SIZES.index(name) - 1], "rtx-4090", host, *more)
    return question.replace(model=Transformer.from_config(LLAMA_2_7B)) if name == "7B" else question


@pytest.mark.parametrize("gpu", ["rtx-4090", "rtx-5090", "h100"])
def test_what_trains_is_what_the_planner_says(gpu: str) -> None:
    rows = [
        ["host memory", *MODELS],
        *([f"{host} GB", *(cell(model, gpu, host) for model in MODELS)] for host in HOSTS),
    ]
    assert markdown(rows) in pages.page("any-size").read_text()


@pytest.mark.parametrize("name", SIZES)
def test_memory_of_any_size_is_the_planners(name: str) -> None:
    """GiB of the GPU, bytes per parameter and GiB of the host, and the least host memory."""
    host, least, column = table_of("bytes per parameter"), table_of("least host memory"), SIZES.index(name)
    for row, options in TRAINED.items():
        question = of_size(name, 2048, *options)
        found = Situation(question)
        each, *sizes = host[row if row == "exact" else f"`--state-format {row}`"]
        assert float(each) == pytest.approx(found.host_needed / question.model.numel, abs=0.01), row
        assert float(sizes[column]) == pytest.approx(found.host_needed / 2**30, abs=0.06), row
    for row, options in {**TRAINED, "`--disk`, weights stream": DRIVE}.items():
        enough = next(gb for gb in SOLD if Situation(of_size(name, gb, *options)).fits)
        assert least[row][column] == f"{enough} GB"
    if name != "7B":
        device, situation = table_of("on the GPU"), Situation(of_size(name, 2048))
        *parts, peak = (float(cells[column - 1]) for row, cells in device.items() if row)
        fields = situation.device
        counted = fields.weights, fields.activations, fields.logits, fields.block, fields.reserved
        assert parts == pytest.approx([nbytes / 2**30 for nbytes in counted], abs=0.06)
        assert peak == pytest.approx(situation.peak / 2**30, abs=0.06)


@pytest.mark.parametrize(("column", "host", "drive"), [(0, 128, ()), (1, 64, DRIVE)])
def test_when_it_pays_to_stream_is_the_planners(column: int, host: int, drive: Sequence[str]) -> None:
    _, *rows = table_of("64 GB and a drive").values()
    ways = [
        {"weights": weights, "offload_activations": saved} for weights in ("stay", "auto") for saved in (0.0, "auto")
    ]
    for cells, way in zip(rows, ways, strict=True):
        best = fastest_batch(cell_of("Llama 3.1 8B", "rtx-4090", host, *drive).replace(**way))
        assert best
        assert cells[column] == f"{best[0].step_tokens / best[1].seconds:,.0f} ({best[0].batch})"


@pytest.mark.parametrize(("machine", "state_format"), crossed(DESKTOPS, ["exact", "int8"]))
def test_speeds_of_8b_on_24_gb_are_the_planners(model: tuple[str, str], machine: str, state_format: str) -> None:
    """Tokens per second at the best batch; seconds of one micro-batch and of eight."""
    config, name = model
    fastest, seconds = (rows for rows in tables("any-size") if "RTX 4090" in rows[""])
    column, row = DESKTOPS.index(machine), f"{name}, {state_format}"
    int8 = ["--state-format", "int8"] if state_format == "int8" else []
    line = [config, "--machine", machine, "--host", "128GB", *ON_24_GB, *int8]
    best = fastest_batch(asked(*line, "--fused-loss")[0])
    assert best
    question, outcome = best
    tokens, batch = fastest[row][column].replace(",", "").strip(")").split(" (")
    assert float(tokens) == pytest.approx(question.step_tokens / outcome.seconds, rel=0.01), question.batch
    assert int(batch) == question.batch
    told = [float(value) for value in seconds[row][column].split(" / ")]
    assert told == pytest.approx(one_and_eight_s(*line), abs=0.1)


def test_what_8b_on_24_gb_says_of_drives_and_of_zero_3_is_the_planners(model: tuple[str, str]) -> None:
    config, name = model
    text = " ".join(pages.page("any-size").read_text().split())
    line = [config, "--machine", "rtx-4090", *ON_24_GB]
    drives = re.findall(rf"\| {name}, (exact|int8) \| (\d+) GB \| (\S+) / (\S+) \| (\S+) / (\S+) \|", text)
    assert len(drives) == {"8B": 3, "7B": 1}[name]
    for state_format, host, *told in drives:
        int8 = ["--state-format", "int8"] if state_format == "int8" else []
        disk = [*line, "--host", f"{host}GB", "--disk", "1TB", *int8]
        faster = [*disk, "--disk-read", "7GB", "--disk-write", "5GB"]
        found = [*one_and_eight_s(*disk), *one_and_eight_s(*faster)]
        assert [float(value) for value in told] == pytest.approx(found, abs=0.1)
    if name == "8B":
        line += ["--host", "128GB"]
        one, eight = one_and_eight_s(*line)
        assert f"on the RTX 4090 {2048 / one:,.0f} tokens per second become {8 * 2048 / eight:,.0f}" in text
        best = fastest_batch(asked(*line, "--fused-loss", "--seq", "1024")[0])
        assert best
        tokens = best[0].step_tokens / best[1].seconds
        assert f"has room for {best[0].batch} and predicts {tokens:,.0f})" in text
        sequence = most(asked(*line, "--fused-loss")[0], "sequence")
        streams = most(asked(*line, "--fused-loss", "--weights", "auto")[0], "sequence")
        assert f"or one of {sequence // 1000},000, and for 31, or one of {streams // 1000},000, with" in text
