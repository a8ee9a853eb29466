"""The runs of a sweep that are done: a CSV file that grows by whole rows and is picked up where it ends."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.sweep.predict import Outcome
from experiments.sweep.spec import Configuration
from perfmodel.hardware import builtin_profiles

ROOT = Path(__file__).parents[2]
KEY = tuple(f.name for f in dataclasses.fields(Configuration))
RESULT = tuple(f.name for f in dataclasses.fields(Outcome))
SOURCES = ("published", "runs", "sweep/spec", "sweep/published", "sweep/predict")
"""Modules of this package that outcomes follow from."""
COLUMNS = ("version", *KEY, *RESULT)
"""`version` is of everything that the row follows from; a row of another version is run again."""

_COUNTS = {f.name for f in dataclasses.fields(Outcome) if str(f.type).startswith("int")}


class Rows:
    """Outcomes by configuration, in a file.

    Raises ValueError when the file is there and has no such rows, OSError when it cannot be read or written.
    """

    def __init__(self, path: Path, version: str) -> None:
        self._path = path
        self._version = version
        self._done: dict[tuple[str, ...], Outcome] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else ""
        if before and not before.startswith(("version,", "version\n")):
            raise ValueError(f"{path} has no rows of a sweep in it; remove it or choose another folder with --out")
        text = _line(COLUMNS)
        if before.startswith(text):
            whole = before[: before.rfind("\n") + 1]  # a killed run may have left half a row
            for row in csv.reader(io.StringIO(whole[len(text) :])):
                if len(row) == len(COLUMNS) and row[0] == version:
                    self._done[tuple(row[1 : 1 + len(KEY)])] = _parse(row[1 + len(KEY) :])
                    text += _line(row)
        if text != before:
            apart = path.with_suffix(".tmp")
            apart.write_text(text)
            apart.replace(path)

    def get(self, config: Configuration) -> Outcome | None:
        """What is known of a configuration."""
        return self._done.get(config.key())

    def add(self, config: Configuration, outcome: Outcome) -> None:
        """Remember an outcome, in the file too when this returns."""
        values = ["" if value is None else str(value) for value in dataclasses.astuple(outcome)]
        with self._path.open("a") as file:
            file.write(_line([self._version, *config.key(), *values]))
        self._done[config.key()] = outcome


def version(configurations: Iterable[Configuration]) -> str:
    """A digest of what the outcomes follow from: data, profiles, model and, for runs on a device, the engine."""
    configurations = list(configurations)
    files = [*ROOT.glob("perfmodel/**/*.py"), *ROOT.glob("perfmodel/profiles/*.json")]
    files += ROOT.glob("experiments/data/*.csv")
    files += [ROOT / "experiments" / f"{name}.py" for name in SOURCES]
    if any(config.device != "simulated" for config in configurations):
        files += [*ROOT.glob("dos/**/*.py"), *ROOT.glob("csrc/*"), ROOT / "experiments" / "sweep_device.py"]
    files += [Path(machine) for machine in {c.machine for c in configurations} - builtin_profiles().keys()]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _line(values: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _parse(values: list[str]) -> Outcome:
    """The outcome that `add` wrote."""
    given: dict[str, Any] = {}
    for name, value in zip(RESULT, values, strict=True):
        if name == "note":
            given[name] = value
        elif value:
            given[name] = int(value) if name in _COUNTS else float(value)
        else:
            given[name] = None
    return Outcome(**given)
