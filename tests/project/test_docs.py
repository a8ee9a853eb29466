"""The documentation: it builds, its code runs, its tables are what the programs say, and no message is missing."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from dos import DOSAdam
from experiments.bench import decisions
from perfmodel.footprint import HostBytes
from perfmodel.format import format_of
from perfmodel.planner.main import command_line
from tests.support import ROOT, pages
from tests.support.messages import messages, plain
from tests.support.processes import python
from tests.support.ranks import Ranks

DOCS = ROOT / "docs"


@pytest.mark.usefixtures("one_kernel_thread")  # which resets the number, for a page sets it
@pytest.mark.parametrize("name", pages.WHOLE)
def test_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # which would last beyond the test
    if not any(block.runs for block in pages.blocks(name) if block.language == "python"):
        pytest.skip("no library that the page uses is installed")
    assert pages.run(name, {}) > 0


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize("name", pages.FRAGMENTS)
def test_fragments_run(name: str, accelerated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the reader's program, with parameters on an emulated accelerator and on the host."""
    if name == "calibrating" and not accelerated:
        pytest.skip("a profile is of an accelerator")
    monkeypatch.chdir(tmp_path)
    shows_nothing = name == "README" and not accelerated
    with pytest.warns(UserWarning, match="shows nothing") if shows_nothing else contextlib.nullcontext():
        assert pages.run_fragments(name, accelerated=accelerated) > 0


def run_on_rank(folder: str) -> tuple[int, int]:
    """Run the page's blocks in a folder of all ranks, the README's with a step of the optimizer that they build."""
    os.chdir(folder)
    chosen = [block for block in pages.blocks("README") if block.note == pages.ON_RANKS]
    for block in chosen:
        namespace = {"DOSAdam": DOSAdam, "fully_shard": fully_shard, "model": pages.Answering()}
        exec(block.code, namespace)
        namespace["model"](torch.randn(2, 4)).backward()  # type: ignore[operator]
        namespace["optimizer"].step()  # type: ignore[attr-defined]
    return pages.run("many-gpus", {}), len(chosen)


def test_code_for_many_gpus_runs(pair: Ranks, tmp_path: Path) -> None:
    assert all(page > 4 and readme == 1 for page, readme in pair.run(run_on_rank, str(tmp_path)))


NAMES = ["README", *sorted(path.stem for path in DOCS.glob("*.md"))]


def test_every_python_block_is_run() -> None:
    """By the tests above; if not: add the page to tests/support/pages.py."""
    with_code = {name for name in NAMES if any(block.language == "python" for block in pages.blocks(name))}
    assert with_code == {*pages.WHOLE, *pages.FRAGMENTS, "many-gpus"}
    blocks = [block for name in NAMES for block in pages.blocks(name) if block.language == "python"]
    assert all(block.note in ("", pages.ON_RANKS) or re.match(r"needs \w+$", block.note) for block in blocks)
    assert all(block.continues for block in blocks if block.note == pages.ON_RANKS), "each is given names"


@pytest.mark.parametrize("name", ["README", "formats"])
def test_the_bytes_per_parameter_are_the_planners(name: str) -> None:
    table = re.search(r"(?<=\|\n)(\| `split`.*?\n)(?!\|)", pages.page(name).read_text(), re.DOTALL)
    assert table is not None
    for row in table[1].splitlines():
        kind, values, *found = (cell.strip(" `") for cell in row.strip("|").split("|"))
        state_format = re.sub("split.*", "", kind.split("`")[0]) or None
        for dtype in values.split(", "):
            width = 4 if dtype == "float32" else 2
            host = HostBytes.of(10**6, format_of(dtype, state_format=state_format), accelerated=True)
            expected = [2 * width, width, host.state / 10**6, host.total / 10**6]
            assert [float(cell) for cell in found[:4]] == pytest.approx(expected, abs=3e-3), row


@pytest.mark.parametrize("name", [name for name in NAMES if pages.commands(name)])
def test_documented_commands_are_there(name: str) -> None:
    """Their make targets, modules and options; what they do is tested beside each, pip in test_package.py."""
    for command in pages.commands(name):
        program, *words = command.replace("[", "").replace("]", "").split()
        if program == "make":
            targets = [word for word in words if "=" not in word]
            makefile = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), command
        elif "-m" in words:
            module, options = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
            if module.split(".")[0] in ("dos", "perfmodel", "experiments"):
                found = importlib.util.find_spec(module)
                assert found, command
                path = Path(found.origin)
                files = [path] if path.stem != "__init__" else list(path.parent.rglob("*.py"))
                shared = [*(ROOT / "dos/calibration").glob("*.py"), ROOT / "experiments/command.py"]
                known = "".join(file.read_text() for file in (*files, *shared))
                if module == "perfmodel":  # of its options the source has no names but those of fields
                    known = re.sub(r"--([\w-]+)", r'"--\1"', command_line().format_help())
                assert all(f'"{o}"' in known or f'"{o[2:]}"' in known for o in options if o.startswith("--")), command


def test_every_experiment_is_listed() -> None:
    """In experiments/README.md: modules with a main."""
    folder = ROOT / "experiments"
    mains = {p for p in folder.rglob("*.py") if 'if __name__ == "__main__"' in p.read_text()}
    names = {p.parent.name if p.stem == "__main__" else p.stem for p in mains}
    assert names == set(re.findall(r"^\| `(\w+)` \|", (folder / "README.md").read_text(), re.MULTILINE))
    assert all(importlib.util.find_spec(f"experiments.{name}") for name in names)


def test_a_state_dict_of_torchao_is_taken_over() -> None:
    """By the code in docs/migrating.md; the state dict is built as in torchao/optim/cpu_offload.py."""
    namespace: dict[str, Any] = {}
    pages.run("migrating", namespace)
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n)) for n in (5000, 10, 7000, 20)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    large = [torch.optim.AdamW([p], lr=1e-3) for p in parameters if p.numel() >= 4096]
    small = torch.optim.AdamW([p for p in parameters if p.numel() < 4096], lr=1e-3)
    for optimizer in (*large, small):
        optimizer.step()
    ours = DOSAdam(parameters, lr=1e-3)
    namespace["load_from_torchao"](
        ours, {"offloaded": [o.state_dict() for o in large], "on-device": small.state_dict()}
    )
    for parameter in parameters:
        theirs = next(o.state[parameter] for o in (*large, small) if parameter in o.state)
        assert torch.equal(ours.state[parameter]["exp_avg"], theirs["exp_avg"])
        assert ours.state[parameter]["step"] == 1


def test_tables_of_how_it_decides_are_what_the_simulation_says() -> None:
    """If they are not: `python -m experiments.decisions` draws the pictures anew and prints the tables."""
    page = (DOCS / "how-it-decides.md").read_text()
    assert decisions.policy_table() in page
    assert decisions.room_table() in page


def test_decisions_command(tmp_path: Path) -> None:
    assert decisions.main(["--out", str(tmp_path / "new")]) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"decide_policies.png", "decide_memory.png"}


EARLY = ("README", "index", "getting-started", "many-gpus", "benchmarks", "choosing", "formats", "exactness")


@pytest.mark.parametrize("name", EARLY)
def test_newcomers_read_early_what_no_gpu_has_run(name: str) -> None:
    """In a note, until one has: then the pages and this test change together."""
    note = re.search(r"^> .*GPU", pages.page(name).read_text(), re.MULTILINE)
    assert note
    assert len(note.string[: note.start()].split()) < 160


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 950
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith(("|", "!")))


@pytest.mark.parametrize("package", ["dos", "perfmodel"])
def test_every_message_is_in_troubleshooting(package: str) -> None:
    page = plain((DOCS / "troubleshooting.md").read_text())
    found = list(messages(ROOT / package))
    assert len(found) > 40
    missing = [f"{m.where}: {m.essence}" for m in found if m.essence not in page]
    assert not missing, "messages that docs/troubleshooting.md does not have:\n" + "\n".join(missing)


def test_messages_are_in_alphabetical_order() -> None:
    """By the first fixed words, so that a reader finds the text of an error where the page says."""
    entries = (DOCS / "troubleshooting.md").read_text().partition("\n## Messages\n")[2]
    found = [
        (letter, re.sub("[^a-z0-9]+", " ", text.lower()).strip(" 0123456789"))
        for letter, rows in re.findall(r"^### (.)\n(.*?)(?=^### |\Z)", entries, re.MULTILINE | re.DOTALL)
        for _, text in re.findall(r"^- (`+)(.+?)\1(?!`)", rows, re.MULTILINE)
    ]
    assert len(found) > 300
    assert [after for before, after in itertools.pairwise(found) if after < before] == []
    assert all(text.startswith(letter.lower()) for letter, text in found)


@pytest.mark.slow
def test_pages_build_without_warnings(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
    python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path, NO_MKDOCS_2_WARNING="1")
    api = (tmp_path / "api" / "index.html").read_text()
    assert "clip_grad_norm_" in api
    assert "<li><code>subgroups</code>: at least one.</li>" in api  # fields of docstrings are lists
