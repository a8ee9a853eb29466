"""Every command that documentation and docstrings give for an example runs as it stands there, if it needs no GPU."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, pages
from tests.support.processes import python
from tests.support.ranks import needs_fsdp2

EXAMPLES = ROOT / "examples"
ON_RANKS = ("-m", "torch.distributed.run", "--standalone")
STARTERS = {"python": (), "torchrun": ON_RANKS, "accelerate launch": ("-m", "accelerate.commands.launch")}
NEEDS_A_GPU = ("--device cuda", "--model", "...")
MODULES = {
    "accelerate": "accelerate",
    "huggingface": "transformers",
    "full": "transformers",
    "lightning": "pytorch_lightning",
}
"""What examples need, by the first word of their names."""
COMMAND = re.compile(rf"(?:{'|'.join(STARTERS)}) [^`#]*examples/[^`#]*")


def of_table(text: str) -> Iterator[str]:
    """The commands on `examples/NAME.py`, for each name in the table below; one within a row is for that row."""
    command = ""
    for line in text.splitlines():
        row = re.match(r"\| `(\w+)\.py`", line)
        found = [each for each in COMMAND.findall(line) if "NAME" in each]
        if row and command:
            yield from (each.replace("NAME", row[1]) for each in (command, *found))
        elif found:
            command = found[-1]


def documented() -> list[str]:
    """The commands, without repetition."""
    texts = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in sorted(EXAMPLES.glob("*.py"))]
    found = [each for text in texts for line in text.splitlines() for each in COMMAND.findall(line)]
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        found += [" ".join(each.split()) for each in re.findall(rf"`({COMMAND.pattern})`", text)]
        found += [each for block in pages.blocks(path.stem) for each in COMMAND.findall(block.code)]
        found += of_table(text)
    return sorted({each.strip() for each in found if "NAME" not in each})


HERE = [each for each in documented() if not any(word in each for word in NEEDS_A_GPU)]


@needs_fsdp2
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", HERE)
def test_a_documented_command_runs(command: str, tmp_path: Path) -> None:
    starter = next(each for each in STARTERS if command.startswith(each))
    words = command.removeprefix(starter).replace("examples/", f"{EXAMPLES}/").split()
    name = next(Path(word).stem for word in words if word.endswith(".py"))
    needed = MODULES.get(name.split("_")[0], name.split("_")[0] if name.startswith("torchtitan") else "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    if "--accumulation" in words:
        words += ["--steps", "1"]  # of 64 micro-batches, as the page measures many of
    said = python(*STARTERS[starter], *words, cwd=tmp_path, timeout=500)
    assert said.count("Plan: ") <= 1, "one rank speaks"


def test_every_example_has_a_documented_command_that_runs_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")} - {"tiny.py"}
    assert {name for name in names if any(name in command for command in HERE)} == names
    assert any(each.startswith("torchrun") and "larger_than_the_gpu" in each for each in HERE)
