"""Imports the compiled part: from the package of these sources, or from the installed package that they shadow."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_NAME = "dos._adam"
_HERE = Path(__file__).resolve().parents[1]
_CALLERS = (
    *("devices/cuda.py", "devices/runtime.py", "kernels/adam.py", "kernels/native.py", "kernels/update.py"),
    *("state/disk/files.py", "state/disk/space.py"),
)


def load_extension() -> ModuleType:
    """Import the compiled part.

    Python started in a checkout finds the sources there before the package that `pip install .` has installed, and only
    the package has the compiled part. It is imported from there if the modules that use its interface are the same in
    both.

    Raises ImportError with the cause and the remedy.
    """
    try:
        found = importlib.import_module(_NAME)
        if not hasattr(found, "Kernel"):  # an editable installation of sources that have changed since
            raise ImportError("it is of an older version")
        return found
    except ModuleNotFoundError:
        installed = _installed()
    except ImportError as error:
        raise ImportError(
            f"the compiled part of dos cannot be loaded ({error}). "
            "Build it anew with: pip install --force-reinstall --no-deps . (needs a C++ compiler with OpenMP)"
        ) from error
    if installed is None:
        raise ImportError(
            f"the compiled part of dos is not in {_HERE}, and no installed package has it for this Python. "
            "Build it with: pip install . (needs a C++ compiler with OpenMP)"
        )
    if any((installed / name).read_bytes() != (_HERE / name).read_bytes() for name in _CALLERS):
        raise ImportError(
            f"the source folder {_HERE} shadows the installed package {installed}, whose compiled part is of another "
            "version. Install this one with: pip install . (or start Python in another folder)"
        )
    sys.modules["dos"].__path__.append(str(installed))
    return importlib.import_module(_NAME)


def _installed() -> Path | None:
    """Return the folder of another dos on Python's path that has a compiled part for this Python."""
    for entry in sys.path:
        folder = Path(entry).resolve() / "dos"
        known = folder != _HERE and all((folder / name).is_file() for name in _CALLERS)
        if known and PathFinder.find_spec(_NAME, [str(folder)]):
            return folder
    return None
