"""The documentation: it builds, its code runs, its tables are what the programs say, and no message is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import messages, plain
from ranks import Ranks
from torch import Tensor, nn

from dos import DOSAdam
from experiments import decisions

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"(?:<!-- (?P<note>[^\n]*) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)


def _run_blocks(text: str, page: str, namespace: dict[str, Any]) -> int:
    """Run the Python blocks of a page one after the other; how many ran."""
    ran = 0
    for block in _BLOCK.finditer(text):
        note = block["note"] or ""
        needs = re.match(r"needs (\w+)$", note)
        if note.startswith("not run") or (needs and importlib.util.find_spec(needs[1]) is None):
            continue
        line = text.count("\n", 0, block.start("code"))
        exec(compile("\n" * line + block["code"], page, "exec"), namespace)
        ran += 1
    return ran


@pytest.mark.parametrize("page", ["getting-started", "migrating"])
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # which would last beyond the test
    assert _run_blocks((DOCS / f"{page}.md").read_text(), page, {}) > 1


def run_on_rank(page: str, folder: str) -> int:
    """What `ranks` calls: the blocks of a page, in this rank's folder, where a checkpoint is everybody's."""
    os.chdir(folder)
    return _run_blocks((DOCS / f"{page}.md").read_text(), page, {})


def test_code_for_many_gpus_runs(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ran > 4 for ran in ranks.run(run_on_rank, "many-gpus", str(tmp_path)))


def test_the_policy_shown_in_how_it_decides_runs() -> None:
    namespace = {"DOSAdam": DOSAdam, "model": nn.Linear(3, 3)}
    assert _run_blocks((DOCS / "how-it-decides.md").read_text(), "how-it-decides", namespace) == 1
    assert isinstance(namespace["optimizer"], DOSAdam)


class _Answering(nn.Module):
    """A model as the README's loops assume it: what it returns has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layer(batch).square().mean())


def test_code_of_the_readme_runs() -> None:
    """Its loops are fragments, with blank lines between them, so each is given a model, data and what else it needs."""
    text = (ROOT / "README.md").read_text()
    use = text[text.index("\n## Use\n") : text.index("\n## ", text.index("\n## Use\n") + 1)]
    fragments = [f for block in _BLOCK.finditer(use) for f in re.split(r"\n\n(?=\S)", block["code"])]
    assert len(fragments) > 3
    for fragment in fragments:
        torch.manual_seed(0)
        model = _Answering()
        namespace = {
            "DOSAdam": DOSAdam,
            "model": model,
            "optimizer": DOSAdam(model.parameters()),
            "data": [torch.randn(2, 4) for _ in range(8)],
            "batch": torch.randn(2, 4),
            "scaler": torch.amp.GradScaler("cpu"),
        }
        exec(fragment, namespace)


def test_a_state_dict_of_torchao_is_taken_over() -> None:
    """By the code in docs/migrating.md; the state dict is built as in torchao/optim/cpu_offload.py."""
    namespace: dict[str, Any] = {}
    _run_blocks((DOCS / "migrating.md").read_text(), "migrating", namespace)
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


def test_decisions_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decisions.main(["--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"decide_policies.png", "decide_memory.png"}
    with pytest.raises(SystemExit) as stopped:
        decisions.main(["--output", str(tmp_path / "nowhere")])
    assert stopped.value.code == 2
    assert "is not a folder that exists" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["index", "getting-started", "many-gpus"])
def test_newcomers_read_early_that_no_gpu_has_run_this(page: str) -> None:
    """Until one has: then the pages, the README's limits and this test change together."""
    assert "No GPU has run this" in "".join((DOCS / f"{page}.md").read_text().splitlines()[:15])
    assert "No GPU has run" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("package", ["dos", "perfmodel"])
def test_every_message_is_in_troubleshooting(package: str) -> None:
    page = plain((DOCS / "troubleshooting.md").read_text())
    found = list(messages(ROOT / package))
    assert len(found) > 40
    missing = [f"{m.where}: {m.essence}" for m in found if m.essence not in page]
    assert not missing, "messages that docs/troubleshooting.md does not have:\n" + "\n".join(missing)


def test_messages_are_found(tmp_path: Path) -> None:
    source = tmp_path / "program" / "module.py"
    source.parent.mkdir()
    source.write_text(
        'KNOWN = "this or that, and nothing else"\n'
        "def f(x):\n"
        '    logger.info("took %d s of `time`", x)\n'
        "    warnings.warn(f'{x} was a very bad idea', stacklevel=2)\n"
        "    assert x, 'not for users'\n"
        "    raise ValueError(f'expected {KNOWN}, found {x}') from OSError(x)\n"
    )
    found = {m.where: m.essence for m in messages(source.parent)}
    assert found == {
        "program/module.py:3": "s of time",
        "program/module.py:4": "was a very bad idea",
        "program/module.py:6": "this or that, and nothing else",
    }


def test_pages_build_without_warnings(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    api = (tmp_path / "api" / "index.html").read_text()
    assert "clip_grad_norm_" in api
    assert "<li><code>subgroups</code>: at least one.</li>" in api  # fields of docstrings are lists
