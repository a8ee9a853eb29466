"""The code of README and docs, run as a reader would: block after block, in the folder where Python was started.

`test_package.py` calls `main` with an installed package, outside the checkout.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dos
from dos import DOSAdam, EmulatedDevice
from perfmodel.hardware import HardwareProfile

ROOT = Path(__file__).parents[2]
WHOLE = ("getting-started", "hugging-face", "migrating", "formats", "updates-during-backward", "weights")
"""Pages whose blocks are one program."""
FRAGMENTS = ("README", "index", "activations", "disk", "memory", "how-it-decides", "calibrating")
"""Pages whose blocks are parts of the reader's own program: each gets a model and the rest of it."""
ON_RANKS = "on ranks"
"""The note above a block that needs a process group."""
CONTINUES = "# Continues "
"""How a block begins that needs names of the reader's program, or of blocks above. Others run as they are."""

_BLOCK = re.compile(r"(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)```", re.DOTALL)


class Block(NamedTuple):
    """One block of code. line: of the page, before the code. note: the comment above it."""

    language: str
    code: str
    line: int
    note: str

    @property
    def runs(self) -> bool:
        """Whether what it needs is there: a module, and no ranks."""
        needs = re.match(r"needs (\w+)$", self.note)
        return self.note != ON_RANKS and (needs is None or importlib.util.find_spec(needs[1]) is not None)

    @property
    def continues(self) -> bool:
        """Whether it says that it needs names from elsewhere."""
        return self.code.startswith(CONTINUES)


def page(name: str) -> Path:
    """The file of a page."""
    return ROOT / "README.md" if name == "README" else ROOT / "docs" / f"{name}.md"


def blocks(name: str) -> Iterator[Block]:
    """All blocks of a page."""
    text = page(name).read_text()
    for found in _BLOCK.finditer(text):
        yield Block(found["language"], found["code"], text.count("\n", 0, found.start("code")), found["note"] or "")


def commands(name: str) -> list[str]:
    """The command lines of a page's blocks, and those within its text."""
    shells = [block.code for block in blocks(name) if block.language in ("", "sh")]
    lines = [line for code in shells for line in re.sub(r"\\\n *", "", code).splitlines()]
    text = page(name).read_text().replace("\n> ", " ")
    lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    return [
        found[1] for line in lines if (found := re.match(r"(?:\$ )?((?:python|make|torchrun|pip) .*?)(?:\s+#|$)", line))
    ]


def run(name: str, namespace: dict[str, Any]) -> int:
    """Run the Python blocks of a page one after the other, each with the names that it may need; how many ran."""
    namespace.setdefault("CPUOffloadOptimizer", torchao_stand_in)
    chosen = [block for block in blocks(name) if block.language == "python" and block.runs]
    for block in chosen:
        names = namespace if block.continues else {}
        exec(compile("\n" * block.line + block.code, str(page(name)), "exec"), names)
        namespace |= names
    return len(chosen)


def torchao_stand_in(parameters: Any, kind: Any, *, offload_gradients: bool, **settings: Any) -> Any:
    """For torchao's CPUOffloadOptimizer, as docs/migrating.md calls it."""
    return kind(parameters, **settings)


class Answering(nn.Module):
    """A model as the pages assume it: it returns a loss, and it has layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


def surroundings(*, accelerated: bool) -> dict[str, Any]:
    """What a fragment finds: a model, data, and an optimizer that has made a step."""
    torch.manual_seed(0)
    model, batch = Answering(), torch.randn(2, 4)
    gpu = EmulatedDevice(HardwareProfile.builtin("h100"), capacity=10**8)

    def build(*args: Any, device: Any = None, **settings: Any) -> DOSAdam:
        return DOSAdam(*args, device=gpu if device == "cuda" else device, **settings)

    optimizer = DOSAdam(model.parameters(), device=gpu if accelerated else None)
    model(batch).backward()
    optimizer.step()
    return {"DOSAdam": build, "torch": torch, "model": model, "optimizer": optimizer, "batch": batch}


def run_fragments(name: str, *, accelerated: bool) -> int:
    """Run each fragment of a page by itself; README's blocks are made of several, with blank lines between."""
    ran = 0
    for block in blocks(name):
        if block.language == "python" and block.runs:
            for code in re.split(r"\n\n(?=\S)", block.code) if name == "README" else [block.code]:
                names = surroundings(accelerated=accelerated) if block.continues else {}
                exec(compile(code, str(page(name)), "exec"), names)
                ran += 1
    return ran


def main() -> None:
    """Run a page and all fragments where Python was started; print how many blocks ran, and with which package."""
    warnings.simplefilter("ignore")  # traces that show nothing
    ran = run("getting-started", {}) + sum(run_fragments(name, accelerated=True) for name in FRAGMENTS)
    print(f"{ran} blocks ran with {dos.__version__} in {dos.__file__}")
