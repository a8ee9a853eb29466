"""scripts/setup.sh, without a network: packages are stubs, and so is what builds the extension."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

TORCH = "2.11.0+cu130"

BACKEND = '''
import os, zipfile

def get_requires_for_build_editable(settings=None):
    return []

def build_editable(folder, settings=None, metadata=None):
    """A wheel of nothing but the metadata that the real one has, and a module that says where it was built."""
    name = "deep_optimizer_states-0.1.0"
    lines = ["Metadata-Version: 2.1", "Name: deep-optimizer-states", "Version: 0.1.0", *REQUIRES]
    with zipfile.ZipFile(os.path.join(folder, name + "-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("built_by_setup.py", "")
        wheel.writestr(name + ".dist-info/METADATA", "\\n".join(lines) + "\\n")
        wheel.writestr(name + ".dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(name + ".dist-info/RECORD", "")
    return name + "-py3-none-any.whl"
'''

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="setup.sh asks for a C++ compiler")


def stub(site_packages: Path, name: str, version: str = "99.0", module: str = "") -> None:
    """A distribution that pip believes to be installed."""
    folder = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    (folder / "RECORD").write_text("")
    if name == "torch":
        with (folder / "METADATA").open("a") as metadata:
            metadata.write("Requires-Dist: nvidia-something-of-gigabytes\n")
    if module:
        (site_packages / f"{module}.py").write_text(f"__version__ = {version!r}\n")


@pytest.mark.slow
def test_the_environment_of_python_is_inherited(tmp_path: Path) -> None:
    """A virtual environment with torch, as uv makes one: .venv finds what is there, and asks for the rest."""
    checkout, outer = tmp_path / "checkout", tmp_path / "outer"
    for name in ("scripts/setup.sh", "constraints.txt", "pyproject.toml"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    if subprocess.run([base, "-c", "import ensurepip, venv"], check=False).returncode:
        pytest.skip("this Python makes no virtual environments with pip")
    subprocess.run([base, "-m", "venv", "--without-pip", outer], check=True)
    python = outer / "bin" / "python"
    text = (ROOT / "pyproject.toml").read_text()
    lines = [line for line in text.splitlines() if re.match(r"(dependencies|dev|docs) = ", line)]
    required = {extra.split(" = ")[0]: re.findall(r'"([^"]+)"', extra) for extra in lines}
    said = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site_packages = Path(subprocess.run(said, capture_output=True, text=True, check=True).stdout.strip())
    names = {re.split(r"[\[<>=;]", r)[0] for r in required["dependencies"] + required["dev"]}
    for name in {*names, "scikit-build-core", "nanobind", "cmake", "ninja"} - {"torch", "hypothesis"}:
        stub(site_packages, name)
    stub(site_packages, "torch", TORCH, "torch")
    requires = [f"Requires-Dist: {r}" for r in required["dependencies"]]
    for extra in ("dev", "docs"):
        for requirement in required[extra]:
            name, _, marker = requirement.partition("; ")
            condition = f"({marker}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
            requires.append(f"Requires-Dist: {name}; {condition}")
    (site_packages / "scikit_build_core").mkdir()
    (site_packages / "scikit_build_core" / "__init__.py").touch()
    (site_packages / "scikit_build_core" / "build.py").write_text(f"REQUIRES = {requires!r}\n{BACKEND}")

    # `make test TORCH=2.6.0` hands TORCH on, which asks for an environment that inherits nothing.
    ours = ("PYTHON", "VIRTUAL_ENV", "PIP_", "TORCH", "VENV")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment |= {"PYTHON": str(python), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}

    def set_up(python: Path) -> subprocess.CompletedProcess[str]:
        command = ["bash", "scripts/setup.sh"]
        env = {**environment, "PYTHON": str(python)}
        return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)

    def files() -> list[Path]:
        return sorted(path for path in site_packages.rglob("*") if "__pycache__" not in path.parts)

    before = files()
    incomplete = set_up(python)
    assert incomplete.returncode != 0
    assert "No matching distribution found for hypothesis" in incomplete.stderr, "nothing else is asked for"
    assert files() == before, "the user's environment is left alone"
    stub(site_packages, "hypothesis")
    before = files()
    done = set_up(python)
    assert f"Using the torch {TORCH} that is installed." in done.stdout
    assert done.returncode == 0, done.stderr
    ours = checkout / ".venv" / "bin" / "python"
    look = "import torch, built_by_setup as b; print(torch.__version__, torch.__file__, b.__file__)"
    found = subprocess.run([ours, "-c", look], capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()
    assert found[:2] == [TORCH, str(site_packages / "torch.py")]
    assert Path(found[2]).is_relative_to(checkout / ".venv")
    assert files() == before
    again = set_up(ours)  # as a user who has activated .venv calls make
    assert again.returncode == 0, again.stderr
    assert subprocess.run([ours, "-c", look], check=False, cwd=tmp_path).returncode == 0
