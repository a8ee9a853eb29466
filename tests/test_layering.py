"""Imports go one way: experiments -> dos -> perfmodel, and inside dos from the shell inwards."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for package in ("dos", "perfmodel", "experiments") for p in (ROOT / package).rglob("*.py"))


@functools.cache
def imported(path: Path) -> set[str]:
    """Dotted names that a source file imports: modules, and what it takes from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def imports(path: Path, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for name in imported(path) for p in packages)


def within(path: Path, *places: str) -> bool:
    return any(path.is_relative_to(ROOT / place) for place in places)


def test_layers() -> None:
    for path in SOURCES:
        forbidden = set() if within(path, "dos/planning/reading.py") else {"pynvml"}
        if within(path, "perfmodel"):
            forbidden |= {"torch", "dos", "experiments"}
            if not within(path, "perfmodel/planner", "perfmodel/__main__.py"):
                forbidden |= {"perfmodel.planner"}
        if within(path, "dos"):
            forbidden |= {"experiments", "perfmodel.planner"}
        for folder, others in (("paper", ("bench", "check")), ("bench", ("check",)), ("check", ("paper", "bench"))):
            if within(path, f"experiments/{folder}"):
                forbidden |= {f"experiments.{other}" for other in others}
        if not within(path, "dos/kernels/update.py", "experiments/bench/kernel.py"):
            forbidden |= {"dos._adam"}
        assert not imports(path, *forbidden), path
        if within(path, "dos") and not within(path, "dos/devices"):
            assert not any("torch.cuda.Stream" in line or "torch.cuda.Event" in line for line in path.open()), path


INNER: dict[str, set[str]] = {
    "guard": set(),
    "machine": {"guard"},
    "sharding": set(),
    "devices": {"guard", "machine"},
    "activations": {"devices", "guard", "machine", "planning", "sharding", "state"},
    "kernels": {"machine"},
    "state": {"devices", "guard", "kernels", "machine", "sharding"},
    "disk": {"state"},
    "gradients": {"devices", "guard", "kernels", "sharding", "state", "step"},
    "step": {"devices", "guard", "kernels", "machine", "sharding", "state"},
    "planning": {"calibration", "devices", "guard", "kernels", "machine", "state", "step"},
    "options": {"devices", "machine", "planning"},
    "parameters": {
        "devices",
        "gradients",
        "guard",
        "kernels",
        "machine",
        "options",
        "sharding",
        "state",
        "step",
    },
    "calibration": {"devices", "kernels", "machine", "state"},
    "calibrate": {"calibration"},
    "backward": {
        "activations",
        "devices",
        "gradients",
        "guard",
        "options",
        "parameters",
        "planning",
        "sharding",
        "state",
        "step",
    },
    "session": {
        "activations",
        "backward",
        "devices",
        "gradients",
        "guard",
        "options",
        "parameters",
        "planning",
        "sharding",
        "state",
        "step",
    },
}
"""Which parts of dos each part may import; the optimizer may import any. There is no way round."""


def test_inside_dos() -> None:
    for module, allowed in INNER.items():
        place = ROOT / "dos" / module
        for path in place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
            found = {name.split(".")[1] for name in imported(path) if name.startswith("dos.") and name.count(".")}
            assert found - {module, "_adam"} <= allowed, path


def test_tests_import_helpers_alone() -> None:
    """What several of them need is in tests/support."""
    tests = [f"tests.{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "support"]
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if imports(path, *tests)}
    assert not found
