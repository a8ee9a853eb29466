#!/usr/bin/env bash
# Makes .venv with the dependencies and the compiled extension. Arguments: further extras of pyproject.toml, such as docs.
# A usable torch (2.6 or later) that PYTHON already has is used; otherwise the version in constraints.txt is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"

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
installed=$("$PYTHON" - <<'PY' || true
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
    options=(--system-site-packages)
    constraints=.venv/constraints.txt
fi
[ -x .venv/bin/python ] || "$PYTHON" -m venv "${options[@]}" .venv
[ -z "$installed" ] || echo "torch==$installed" > "$constraints"

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
pip install --quiet --constraint "$constraints" "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.18" ninja
# Without isolation, so that a rebuild after a change of csrc is incremental.
extras=$(IFS=,; echo "dev${*:+,$*}")
pip install --quiet --constraint "$constraints" --no-build-isolation --editable ".[$extras]"
