#!/usr/bin/env bash
# Makes .venv with the dependencies and the compiled extension. Arguments: further extras of pyproject.toml, such as docs.
# A usable torch (2.6 or later) that PYTHON already has is used, and what else is there; nothing is changed outside .venv.
# Otherwise the version in constraints.txt is installed. TORCH=2.6.0 VENV=.venv-torch-2.6.0 installs that version in any
# case, into an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "Python 3.10 or later is needed, found $("$PYTHON" --version). Choose another: make PYTHON=python3.12 ..." >&2
    exit 2
fi
if ! command -v c++ >/dev/null; then
    echo "A C++ compiler is needed to build the extension. On Debian or Ubuntu: apt-get install g++" >&2
    exit 2
fi

constraints=constraints.txt
options=()
installed=$("$PYTHON" - "${TORCH:-}" <<'PY' || true
import sys
if sys.argv[1]:
    raise SystemExit
try:
    import torch
except ImportError:
    raise SystemExit
version = torch.__version__
if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= (2, 6):
    print(version)
PY
)
if [ -n "$installed" ]; then
    echo "Using the torch $installed that is installed."
    constraints="$VENV/constraints.txt"
    if "$PYTHON" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)'; then
        options=(--system-site-packages)
    fi
fi
[ -x "$VENV"/bin/python ] || "$PYTHON" -m venv "${options[@]}" "$VENV"
build=()
if [ -n "${TORCH:-}" ]; then
    constraints="$VENV/constraints.txt"
    echo "torch==$TORCH" > "$constraints"
    # Not in the folder of .venv: it keeps the paths of the environment that has configured it.
    build=(--config-settings "build-dir=build/torch-$TORCH-{wheel_tag}")
fi
if [ -n "$installed" ]; then
    echo "torch==$installed" > "$constraints"
    # Where PYTHON lives in a virtual environment, --system-site-packages would mean its base interpreter's.
    "$PYTHON" - "$VENV" "$("$VENV"/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PY'
import os, sys
venv, site_packages = sys.argv[1:]
if sys.prefix != sys.base_prefix and os.path.realpath(sys.prefix) != os.path.realpath(venv):
    inherited = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    # The first file by name, so that an installation of this project there gives way to the one in $VENV.
    with open(os.path.join(site_packages, "00-inherited.pth"), "w") as file:
        file.writelines(f"import site; site.addsitedir({path!r})\n" for path in inherited)
PY
fi

pip() { "$VENV"/bin/python -m pip --disable-pip-version-check "$@"; }
# Byte code comes with the first import: pip would compile all of torch's modules.
pip install --quiet --no-compile --constraint "$constraints" "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.18" ninja
# Without what torch asks for where that is installed: it came with it or is not needed, and pip would download gigabytes.
mapfile -t packages < <("$VENV"/bin/python - "${installed:+torch}" dev "$@" <<'PY'
import sys
from pathlib import Path
from pip._vendor.packaging.requirements import Requirement

try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib

without, *extras = sys.argv[1:]
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
asked = [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]
print(*(r for r in asked if Requirement(r).name != without), sep="\n")
PY
)
echo "Installing into $VENV and compiling the extension: some minutes without output."
pip install --quiet --no-compile --constraint "$constraints" "${packages[@]}" &
trap 'kill $! 2>/dev/null || true' EXIT
# Without isolation, so that a rebuild after a change of csrc is incremental.
pip install --quiet --no-deps --no-build-isolation "${build[@]}" --editable .
wait $!
