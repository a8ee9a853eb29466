"""The compiled part is found where `pip install .` has put it, and if not, the message says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dos.kernels import update
from tests.support import ROOT
from tests.support.processes import PACKAGES, run

COMPILED = Path(str(update._adam.__file__))


def sources(folder: Path) -> Path:
    """A copy of the sources without the compiled part, as in a checkout; the folder that dos is in."""
    shutil.copytree(ROOT / "dos", folder / "dos", ignore=shutil.ignore_patterns("_adam*", "__pycache__"))
    shutil.copytree(ROOT / "perfmodel", folder / "perfmodel", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return sources(tmp_path / "checkout")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where `pip install .` has installed the same sources, with the compiled part."""
    site = sources(tmp_path / "site")
    shutil.copy(COMPILED, site / "dos")
    return site


ALONE = """
import sys, types
package = sys.modules["dos"] = types.ModuleType("dos")
package.__path__ = [sys.argv[1]]
from dos.kernels.extension import load_extension
print(load_extension().__file__)
"""


def load(folder: Path, site: Path | None = None, code: str = ALONE) -> subprocess.CompletedProcess[str]:
    """Load the compiled part in the folder, without torch by default; `site` comes before this Python's packages."""
    path = os.pathsep.join([*([] if site is None else [str(site)]), *PACKAGES])
    # -S: no hooks of an editable installation.
    return run(sys.executable, "-S", "-c", code, str(folder / "dos"), cwd=folder, good=False, PYTHONPATH=path)


def error_of(folder: Path, site: Path | None = None, code: str = ALONE) -> str:
    """What that says in its last line."""
    done = load(folder, site, code)
    assert done.returncode == 1
    assert "circular" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_sources_that_shadow_the_installed_package_work(checkout: Path, site: Path) -> None:
    """As after `pip install .`, from the checkout."""
    done = load(checkout, site)
    assert done.stdout.split() == [str(site / "dos" / COMPILED.name)], done.stderr


def test_another_version_is_not_used(checkout: Path, site: Path) -> None:
    with (site / "dos/kernels/adam.py").open("a") as file:
        file.write("# another\n")
    said = f"the source folder {checkout / 'dos'} shadows the installed package {site / 'dos'}"
    assert said in error_of(checkout, site)


def test_an_editable_installation_of_older_sources_is_to_be_built_anew(checkout: Path) -> None:
    (checkout / "dos/_adam.py").write_text("adam_update = None\n")
    assert "cannot be loaded (it is of an older version). Build it anew with: pip install" in error_of(checkout)


@pytest.mark.skipif(any((p / "dos/kernels/update.py").exists() for p in map(Path, PACKAGES)), reason="dos is installed")
def test_without_any_compiled_part_the_message_says_so(checkout: Path) -> None:
    said = error_of(checkout, code="import dos")
    assert f"the compiled part of dos is not in {checkout / 'dos'}" in said
    assert "pip install ." in said


def test_a_compiled_part_that_does_not_load(checkout: Path) -> None:
    (checkout / "dos" / COMPILED.name).write_bytes(b"not a library")
    assert "the compiled part of dos cannot be loaded" in error_of(checkout)
