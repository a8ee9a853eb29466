"""docs/8b-on-24gb.md, and what README and docs/choosing.md quote of it, says what the planner says.

If it does not, each failing test shows what the planner says now.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.situation import Situation
from perfmodel.planner.whatif import fastest_batch
from tests.support import pages
from tests.support.planner import asked

LLAMA_31_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_2_7B = {**LLAMA_31_8B, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000}
TRAINED = {"exact": [], "`--state-format int8`": ["--state-format", "int8"]}
"""The rows of the host's memory in docs/8b-on-24gb.md, by what they ask of the planner."""


DESKTOPS = ("rtx-3090", "rtx-4090", "rtx-5090")
ON_24_GB = ("--checkpointing", "--offload-gradients")


def tables(name: str) -> Iterator[dict[str, list[str]]]:
    """The tables of a page: rows by their first cell; that of the headings is the empty string."""
    for found in re.findall(r"(?:^\|.*\n)+", pages.page(name).read_text(), re.MULTILINE):
        heading, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in found.splitlines())
        yield {"": heading, **{row[0]: row[1:] for row in rows}}


def table_of(heading: str) -> dict[str, list[str]]:
    """The table of docs/8b-on-24gb.md that has this heading; of several the first."""
    return next(rows for rows in tables("8b-on-24gb") if heading in rows[""])


def one_and_eight_s(*line: str) -> list[float]:
    """Seconds of an iteration with one micro-batch, and with eight."""
    return [adaptive_outcome(Situation(asked(*line, "--accumulation", n)[0])).seconds for n in ("1", "8")]


@pytest.fixture(params=[(LLAMA_31_8B, "8B", 0), (LLAMA_2_7B, "7B", 1)], ids=["8B", "7B"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, int]:
    """The file of a configuration, the model's name in docs/8b-on-24gb.md, and its number among the columns."""
    values, name, column = request.param
    (tmp_path / "config.json").write_text(json.dumps(values))
    return str(tmp_path), name, column


def test_host_memory_of_8b_on_24_gb_is_the_planners(model: tuple[str, str, int]) -> None:
    """Bytes per parameter and GiB of the host, and the least host memory."""
    config, _, column = model
    host = table_of("bytes per parameter")
    for row, options in TRAINED.items():
        each, *sizes = host[row]
        least = sizes[2 + column].replace(" ", "")
        smaller = {"64GB": "48GB", "96GB": "64GB", "128GB": "96GB"}[least]
        line = [config, "--machine", "rtx-4090", *ON_24_GB, *options, "--host"]
        question, _ = asked(*line, least)
        found = Situation(question)
        assert found.fits, row
        assert not Situation(asked(*line, smaller)[0]).fits, row
        assert float(each) == pytest.approx(found.host_needed / question.model.numel, abs=0.01), row
        assert float(sizes[column]) == pytest.approx(found.host_needed / 2**30, abs=0.06), row


@pytest.mark.parametrize("machine", DESKTOPS)
@pytest.mark.parametrize("state_format", ["exact", "int8"])
def test_speeds_of_8b_on_24_gb_are_the_planners(model: tuple[str, str, int], machine: str, state_format: str) -> None:
    """Tokens per second at the best batch; seconds of one micro-batch and of eight."""
    config, name, _ = model
    fastest, seconds = (rows for rows in tables("8b-on-24gb") if "RTX 4090" in rows[""])
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


def test_what_8b_on_24_gb_says_of_drives_and_of_zero_3_is_the_planners(model: tuple[str, str, int]) -> None:
    config, name, _ = model
    text = " ".join(pages.page("8b-on-24gb").read_text().split())
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
        assert f"has room for {best[0].batch} beside the weights and predicts {tokens:,.0f} tokens per second" in text
        readme = " ".join(pages.page("README").read_text().split())
        best = fastest_batch(asked(*line, "--fused-loss")[0])
        assert best
        tokens = best[0].step_tokens / best[1].seconds
        for said in (readme, " ".join(pages.page("choosing").read_text().split())):
            assert f"{tokens:,.0f} tokens/s" in said
            assert "at 90% of its peak" in said
