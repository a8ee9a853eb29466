"""The examples run, learn, and come to the same losses wherever state is; frameworks that are missing are skipped."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dos import DOSAdam
from tests.support import ROOT
from tests.support.training import leaving_early

EXAMPLES = ROOT / "examples"
NEEDS = {
    "plain": (),
    "tensorboard_metrics": ("tensorboard",),
    "huggingface_trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("accelerate",),
    "lightning_fit": ("pytorch_lightning",),
}
Main = Callable[..., list[float]]


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> list[DOSAdam]:
    """All that are built during the test."""
    built: list[DOSAdam] = []
    set_up = DOSAdam._set_up

    def remember(self: DOSAdam, *arguments: object) -> None:
        built.append(self)
        set_up(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DOSAdam, "_set_up", remember)
    return built


def _main(name: str, monkeypatch: pytest.MonkeyPatch) -> Main:
    for module in NEEDS[name]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install '.[examples]'")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    main: Main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    return main


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:pytorch_lightning"
)
@pytest.mark.usefixtures("one_kernel_thread")
@pytest.mark.parametrize("name", NEEDS)
def test_example(name: str, optimizers: list[DOSAdam], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main = _main(name, monkeypatch)
    torch.set_num_threads(2)
    with leaving_early() as left_early:
        losses = main(["--device", "emulated", "--steps", "12"])
    assert torch.get_num_threads() == 1, "others would spin between operations, on the cores of the optimizer's threads"
    assert losses[-1] < losses[0]
    on_host = main(["--device", "cpu", "--steps", "12"])
    # Where state is changes no bit. Trainer clips by torch, which rounds gradients that are not offloaded.
    assert losses == (pytest.approx(on_host, rel=1e-5) if name == "huggingface_trainer" else on_host)

    emulated, on_cpu = optimizers
    assert left_early, "gradients leave during backward"
    assert (
        0
        < emulated.metrics()["memory_for_state_bytes"]
        < 8 * sum(p.numel() for group in emulated.param_groups for p in group["params"])
    )
    assert not on_cpu.timeline()
    if name == "tensorboard_metrics":
        assert _scalars(tmp_path / "out" / "tensorboard") > {"loss", "optimizer/update_s", "optimizer/share_cpu"}
        assert (tmp_path / "out" / "tensorboard" / "trace.json").stat().st_size > 1000


def _scalars(folder: Path) -> set[str]:
    """The names of the curves that TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def code(name: str) -> list[dict[str, Any]]:
    """The cells of a notebook that have code."""
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize(
    ("name", "first", "expected"),
    [("demo", 0, ("All have the same bits.", "The same bits again.")), ("t4_16gb", 2, ("step 20: loss", "not a GPU"))],
)
def test_a_notebook_runs_from_top_to_bottom(
    name: str,
    first: int,
    expected: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one namespace, as Jupyter runs it, and ten times as fast. first: before it the planner is asked, for long."""
    monkeypatch.chdir(tmp_path)
    program = "\n\n".join("".join(cell["source"]) for cell in code(name)[first:])
    assert ".scaled(1 / 200)" in program
    threads = torch.get_num_threads()
    exec(program.replace("1 / 200", "1 / 20"), {"__name__": name})
    torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert all(each in said for each in expected)
    if name == "demo":
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_have_the_outputs_of_a_run(path: Path) -> None:
    """All of one run, from top to bottom."""
    cells = code(path.stem)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    printing = [cell for cell in cells if "print(" in "".join(cell["source"])]
    assert all(cell["outputs"] for cell in printing)
    assert "mulated" in path.read_text(), "it says where they were made"


def test_every_example_is_tested() -> None:
    """By its name in a test; `tiny` is what the others share."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*example*.py"))
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"tiny"}
    assert {name for name in names if re.search(rf'"{name}(\.py)?"', tests)} == names
