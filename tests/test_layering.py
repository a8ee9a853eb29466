"""Imports go one way: experiments -> dos -> perfmodel, and inside dos from the shell inwards."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
    "arguments": set(),
    "debug": set(),
    "signals": set(),
    "guard": {"signals"},
    "machine": {"guard"},
    "torch_internals": set(),
    "sharding": {"torch_internals"},
    "rules": {"arguments", "kernels", "sharding"},
    "devices": {"arguments", "guard", "kernels", "machine", "torch_internals"},
    "activations": {"arguments", "devices", "guard", "machine", "planning", "sharding", "state", "torch_internals"},
    "kernels": {"machine", "torch_internals"},
    "state": {"devices", "guard", "kernels", "machine", "rules", "sharding", "torch_internals"},
    "disk": {"state"},
    "gradients": {"devices", "guard", "kernels", "sharding", "state", "step", "torch_internals"},
    "step": {"debug", "devices", "guard", "kernels", "machine", "rules", "sharding", "state", "torch_internals"},
    "planning": {"arguments", "calibration", "devices", "guard", "kernels", "machine", "state", "step"},
    "options": {"arguments", "devices", "machine", "planning", "rules"},
    "parameters": {
        "devices",
        "gradients",
        "guard",
        "kernels",
        "machine",
        "options",
        "rules",
        "sharding",
        "state",
        "step",
        "torch_internals",
    },
    "calibration": {"devices", "kernels", "machine", "state"},
    "weights": {"arguments", "devices", "guard", "machine", "parameters", "sharding", "state", "torch_internals"},
    "calibrate": {"calibration"},
    "report": {"devices", "kernels", "machine", "planning"},
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
        "weights",
    },
    "in_backward": {
        "backward",
        "devices",
        "gradients",
        "guard",
        "options",
        "parameters",
        "planning",
        "rules",
        "sharding",
        "state",
        "step",
        "torch_internals",
        "weights",
    },
    "owners": {
        "activations",
        "backward",
        "devices",
        "gradients",
        "guard",
        "in_backward",
        "options",
        "parameters",
        "planning",
        "sharding",
        "signals",
        "state",
        "step",
        "torch_internals",
        "weights",
    },
}
"""Which parts of dos each part may import; the optimizer may import any. There is no way round."""
INNER["session"] = {*INNER["owners"], "owners"}


def test_inside_dos() -> None:
    for module, allowed in INNER.items():
        place = ROOT / "dos" / module
        for path in place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
            found = {name.split(".")[1] for name in imported(path) if name.startswith("dos.") and name.count(".")}
            assert found - {module, "_adam"} <= allowed, path


INTERNALS = "dos/torch_internals"
OF_PYTHON = ("dos/guard.py", "dos/signals.py")
"""What these reach is Python's: frames, the C half of `signal`, and what threading calls before executors end."""
REACHES = {"__closure__", "__wrapped__", "_getframe", "_register_atexit", "_signal", "cell_contents", "f_back"}
REACHES |= {"f_locals", "get_objects", "get_referrers", "walk_stack"}
"""Names by which frames, closures and collected objects are reached."""
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "operator.attrgetter"}
OF_TORCH = {name for each in (nn.Module, Optimizer, Tensor, torch.UntypedStorage) for name in dir(each)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_dos_")) and name != "_"


@functools.cache
def own_names() -> set[str]:
    """Private names that dos gives to methods, functions, and attributes of its own objects."""
    names = {"_adam", "_asdict", "_fields", "_make", "_replace"}  # the extension, and what each NamedTuple has
    for path in (path for path in SOURCES if within(path, "dos")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
    return names


def is_foreign(name: str) -> bool:
    return is_private(name) and name not in own_names()


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def reached(path: Path) -> set[str]:
    """What a source file has of others' private names, by attribute, import or string, and of REACHES."""
    found = {part for name in imported(path) for part in name.split(".") if is_foreign(part)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            own = node.attr in own_names() and (is_self(node.value) or node.attr not in OF_TORCH)
            if node.attr in REACHES or (is_private(node.attr) and not own):
                found.add(node.attr)
            elif isinstance(node.ctx, ast.Store) and ast.unparse(node).startswith("torch."):
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Name) and node.id in REACHES:
            found.add(node.id)
        elif isinstance(node, ast.Call):
            strings = {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
            asked = strings if ast.unparse(node.func) in BY_NAME else {s for s in strings if s.startswith("torch.")}
            found |= {part for string in asked for part in string.split(".") if is_foreign(part)}
            found |= strings & {"__dict__"}
    return found


def test_torch_is_reached_into_in_one_folder() -> None:
    """Private names, frames, closures and replaced functions of torch: each behind a function that says why."""
    for path in (path for path in SOURCES if within(path, "dos") and not within(path, INTERNALS, *OF_PYTHON)):
        assert not reached(path), f"{path}: what reaches into torch has its place in {INTERNALS}"


def test_each_internal_is_tested_and_listed() -> None:
    """By a test of the same name, and in the table of docs/architecture.md."""
    files = {path.stem for path in (ROOT / INTERNALS).glob("*.py")} - {"__init__"}
    assert files == {path.stem.removeprefix("test_") for path in (ROOT / "tests" / INTERNALS).glob("test_*.py")}
    listed = re.findall(r"^\| `(\w+)\.py` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(files)


def test_only_the_shell_names_a_rule() -> None:
    """All others ask the rule that the options or an arena has."""
    shell = "dos/optimizer.py", "dos/checkpoint.py", "dos/calibration", "dos/rules", "dos/kernels"
    adamw = "dos.rules.adamw", "dos.rules.entries", "dos.kernels.codes"
    for path in SOURCES:
        if within(path, "dos") and not within(path, *shell):
            assert not imports(path, *adamw), path
            names = {name.rpartition(".")[2] for name in imported(path)}
            of_adamw = {"AdamArrays", "AdamBatch", "AdamStep", "STATE_KEYS", "NEEDED_KEYS", "CODED_KEYS", "format_of"}
            assert names.isdisjoint(of_adamw), path
            assert "amsgrad" not in path.read_text(), path


def test_no_two_experiments_import_each_other() -> None:
    """Not in a circle either, nor when a function is called."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES if within(path, "experiments")
    }
    graphlib.TopologicalSorter({name: imported(path) & modules.keys() for name, path in modules.items()}).prepare()


def test_tests_import_helpers_alone() -> None:
    """What several of them need is in tests/support."""
    tests = [
        f"tests.{path.name}"
        for path in (ROOT / "tests").iterdir()
        if path.is_dir() and path.name not in ("simdev", "support")
    ]
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if imports(path, *tests)}
    assert not found
