"""A wheel is built, installed where nothing else of this project is, and does what README and docs show."""

from __future__ import annotations

import email
import fcntl
import importlib.util
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import dos
from tests.support import ROOT
from tests.support.processes import PACKAGES, run


def _can_build() -> bool:
    """Whether what the build asks for is installed, so that it needs no network."""
    needed = ("scikit_build_core", "nanobind", "pip")
    return shutil.which("c++") is not None and all(importlib.util.find_spec(module) for module in needed)


pytestmark = [
    pytest.mark.skipif(not _can_build(), reason="a wheel needs C++, pip, scikit-build-core and nanobind"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by what `make wheel` calls. Half a minute; seconds where the checkout has been built before."""
    folder = tmp_path_factory.mktemp("dist")
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run in several processes, and share the folder of the build
        run("bash", "scripts/wheel.sh", "--no-build-isolation", timeout=800, PYTHON=sys.executable, DIST=str(folder))
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    run(sys.executable, *install)
    return folder


def python(site: Path, folder: Path, *arguments: str) -> str:
    """Return Python's output, run in the folder, with the installed package before all others and no editable one."""
    path = os.pathsep.join([str(site), *PACKAGES])
    return run(sys.executable, "-S", *arguments, cwd=folder, PYTHONPATH=path).stdout


def test_the_wheel_has_what_it_should(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [path] = [name for name in names if name.endswith("METADATA")]
        metadata = email.message_from_bytes(archive.read(path))
    assert metadata["Version"] == dos.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"dos/py.typed", "perfmodel/py.typed", "perfmodel/profiles/h100.json"} <= names
    assert {name.split("/")[0] for name in names} <= {"dos", "perfmodel", path.split("/")[0]} | {
        name.split("/")[0] for name in names if ".libs/" in name
    }
    [compiled] = [name for name in names if name.startswith("dos/_adam")]
    tag = "cp312-abi3" if sys.version_info >= (3, 12) else f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}"
    assert f"-{tag}-" in wheel.name
    assert compiled.endswith(".abi3.so") == (sys.version_info >= (3, 12))


def test_the_version_stands_in_one_place() -> None:
    for name in ("CHANGELOG.md", "CITATION.cff"):
        assert re.search(rf"\b{re.escape(dos.__version__)}\b", (ROOT / name).read_text()), f"{name} has another version"


PROGRAM = """
import contextlib, runpy, sys
sys.path.append(sys.argv[1])
import pages
pages.main()
for module, *words in ("perfmodel", "--params", "1e8", "--machine", "rtx_3090_desktop"), ("dos.calibrate", "--help"):
    sys.argv[1:] = words
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def test_code_of_the_pages_and_the_commands_run_with_the_installed_package(site: Path, tmp_path: Path) -> None:
    """Outside the checkout; tests/project/test_docs.py runs all pages inside."""
    said = python(site, tmp_path, "-c", PROGRAM, str(ROOT / "tests" / "support"))
    count, version, package = re.search(r"^(\d+) blocks ran with (\S+) in (.*)$", said, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert int(count) > 15
    assert version == dos.__version__
    assert Path(package).is_relative_to(site)
    assert "100M parameters in bf16, rtx_3090_desktop: fits" in said
    assert "usage: dos.calibrate" in said
