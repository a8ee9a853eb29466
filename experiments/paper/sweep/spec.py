"""Specification of a sweep: a TOML file as a list of configurations, every mistake in it said in one line."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from experiments.paper.runs import DATA_SHEETS
from experiments.paper.zero3 import Mode
from perfmodel.hardware import LINK_RATES, HardwareProfile, builtin_profiles

PUBLISHED_LOOPS = tuple(mode.value for mode in Mode)
"""Policies that are DeepSpeed's loops, as in the published runs."""
OUR_POLICIES = ("cpu", "ratio", "stride", "adaptive")
"""Policies that are plans for our engine."""
DEVICES = ("simulated", "emulated", "cuda")


@dataclass(frozen=True)
class Configuration:
    """One run. Fields that the policy does not use are None, so that equal runs are equal.

    machine: a built-in profile, or the file of one.
    model: its size as people call it, `7B`. policy: of PUBLISHED_LOOPS or OUR_POLICIES.
    ranks: data-parallel; ranks_per_node of them share a host.
    micro_batch: sequences of a forward. accumulation: forwards of an iteration.
    subgroup_size: parameters. stride: every stride-th subgroup on the GPU. ratio: share of the state on the host.
    memory: of the GPU, free for optimizer state: `ratio` for the share 1 - ratio and one staging slot (what the
        published schedule takes), `trace` for the memory that the published traces show free, or GiB.
    contention: share of the links and of the host's memory bandwidth that others take.
    device: where it runs. parameters: of the small model that stands for a rank's part on a device.
    """

    machine: str
    model: str
    policy: str
    ranks: int
    ranks_per_node: int
    micro_batch: int
    accumulation: int
    subgroup_size: int
    stride: int | None
    ratio: float | None
    memory: str | float | None
    contention: float
    device: str
    parameters: int | None

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Configuration:
        """A configuration of values as TOML gives them. Raises ValueError naming the key that is wrong."""
        unknown = sorted(values.keys() - KEYS.keys())
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r} in a run; there are {', '.join(KEYS)}")
        missing = [key for key in ("machine", "model", "policy") if key not in values]
        if missing:
            raise ValueError(f"a run needs {missing[0]!r}")
        read = {key: _read_value(key, value) for key, value in values.items()}
        given: dict[str, Any] = DEFAULTS | {"ranks_per_node": min(read.get("ranks", DEFAULTS["ranks"]), 4)} | read
        if given["ranks"] % given["ranks_per_node"]:
            raise ValueError(
                f"ranks must be a multiple of ranks_per_node, found {given['ranks']} and {given['ranks_per_node']}"
            )
        _check_together(given)
        used: dict[str, Any] = {key: value if _counts(key, given) else None for key, value in given.items()}
        return cls(**used)

    def profile(self) -> HardwareProfile:
        """The machine's rates."""
        builtin = builtin_profiles()
        return self.left_of(builtin[self.machine] if self.machine in builtin else HardwareProfile.load(self.machine))

    def left_of(self, profile: HardwareProfile) -> HardwareProfile:
        """The rates of a machine less the share that contention takes."""
        return profile.replace(**{rate: getattr(profile, rate) * (1 - self.contention) for rate in CONTENDED})


CONTENDED = ("host_bandwidth", *LINK_RATES)
"""Rates that others take a share of."""

DEFAULTS: dict[str, Any] = {
    "ranks": 4,
    "micro_batch": 1,
    "accumulation": 1,
    "subgroup_size": 100_000_000,
    "stride": 2,
    "ratio": 1.0,
    "memory": "ratio",
    "contention": 0.0,
    "device": "simulated",
    "parameters": 2_000_000,
}


def _counts(key: str, given: Mapping[str, Any]) -> bool:
    """Whether a run of this policy depends on the key."""
    policy = given["policy"]
    if key == "stride":
        return policy in ("dos", "stride")
    if key == "ratio":
        return policy in (*PUBLISHED_LOOPS, "ratio", "stride") or (policy == "adaptive" and given["memory"] == "ratio")
    if key == "memory":
        return policy == "adaptive"
    return key != "parameters" or given["device"] != "simulated"


def _check_together(given: Mapping[str, Any]) -> None:
    policy, machine, device = given["policy"], given["machine"], given["device"]
    if policy in PUBLISHED_LOOPS and device != "simulated":
        raise ValueError(
            f"policy {policy!r} is DeepSpeed's loop and cannot run on device {device!r}; use {', '.join(OUR_POLICIES)}"
        )
    if device == "cuda" and not import_module("torch").cuda.is_available():  # simulations need no torch
        raise ValueError("device 'cuda' was asked for and there is no CUDA device here; use 'emulated' or 'simulated'")
    if machine not in DATA_SHEETS:
        published = ", ".join(DATA_SHEETS)
        if policy in PUBLISHED_LOOPS:
            raise ValueError(f"policy {policy!r} needs a published machine ({published}), found machine {machine!r}")
        if policy == "adaptive" and given["memory"] == "trace":
            raise ValueError(f"memory 'trace' needs a published machine ({published}), found machine {machine!r}")


def _is_number(value: object, least: float, below: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < below


def _is_size(value: object) -> bool:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)B", value) if isinstance(value, str) else None
    return found is not None and float(found[1]) > 0


class Key(NamedTuple):
    """Values that a run may have for a key. wanted: in words. accepts: whether a value is one. read: converts it."""

    wanted: str
    accepts: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value

    @classmethod
    def one_of(cls, *names: str) -> Key:
        return cls(f"must be one of {', '.join(names)}", lambda value: value in names)


_WHOLE = Key(  # 1e8 is one
    "must be a whole number of 1 or more", lambda n: _is_number(n, 1, math.inf) and n == n // 1, int
)
KEYS = {
    "machine": Key("must be the name of a profile or a file", lambda value: isinstance(value, str)),
    "model": Key(
        "must be a size in billions of parameters such as '7B'", _is_size, lambda value: f"{float(value[:-1]):g}B"
    ),
    "policy": Key.one_of(*PUBLISHED_LOOPS, *OUR_POLICIES),
    **dict.fromkeys(("ranks", "ranks_per_node", "micro_batch", "accumulation", "subgroup_size", "stride"), _WHOLE),
    "ratio": Key(
        "is the share on the host and must lie in [0, 1]", lambda n: _is_number(n, 0, math.nextafter(1, 2)), float
    ),
    "memory": Key(
        "must be 'ratio', 'trace' or 0 GiB or more",
        lambda n: n in ("ratio", "trace") or _is_number(n, 0, math.inf),
        lambda n: n if isinstance(n, str) else float(n),
    ),
    "contention": Key("is the share that others take and must lie in [0, 1)", lambda n: _is_number(n, 0, 1), float),
    "device": Key.one_of(*DEVICES),
    "parameters": _WHOLE,
}


def _read_value(key: str, value: object) -> Any:
    """The value as a configuration has it. Raises ValueError for one that the key does not take."""
    wanted, accepts, read = KEYS[key]
    if not accepts(value):
        raise ValueError(f"{key} {wanted}, found {value!r}")
    if key == "machine" and value not in builtin_profiles():
        try:
            HardwareProfile.load(str(value))
        except OSError:
            names = ", ".join(builtin_profiles())
            raise ValueError(f"{key} {value!r} is neither a built-in profile ({names}) nor a file") from None
    return read(value)


@dataclass(frozen=True)
class Sweep:
    """The runs that one file asks for.

    axis: the key along which results are compared, or None. facets: other keys with several values, but for those that
    change together with the axis, and those that tell the compared from each other.
    """

    name: str
    title: str
    about: str
    axis: str | None
    facets: tuple[str, ...]
    configurations: tuple[Configuration, ...]


COMPARED = ("policy", "memory")
"""Keys that tell what is compared; the others say on what."""


def read_sweep(path: Path) -> Sweep:
    """The sweep of a TOML file.

    Its table `run` gives each key a value or a list of values; all combinations are run. Each `[[together]]` table has
    lists of one length that are gone through together. Raises OSError when the file cannot be read, ValueError naming
    the file and the key for whatever is wrong with it.
    """
    try:
        toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        return _read(path.stem, toml.loads(path.read_text()))
    except ModuleNotFoundError as error:
        raise ValueError(f"sweeps are TOML files, which need {error.name} to be read: pip install tomli") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(name: str, document: dict[str, Any]) -> Sweep:
    unknown = sorted(document.keys() - {"title", "about", "axis", "run", "together"})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; there are title, about, axis, run, together")
    run, together = document.get("run"), document.get("together", [])
    if not isinstance(run, dict):
        raise ValueError("a sweep needs a table [run]")
    columns: list[Mapping[str, Sequence[object]]] = [{key: _list(key, value)} for key, value in run.items()]
    columns += [_same_length(table) for table in together]
    keys = [key for table in columns for key in table]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice!r} is given twice; say it once, in [run] or in one [[together]]")
    axis = document.get("axis")
    if axis is not None and axis not in keys:
        raise ValueError(f"axis must be a key of the runs ({', '.join(keys)}), found {axis!r}")
    choices = [[dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)] for table in columns]
    found = [
        Configuration.of({key: value for part in parts for key, value in part.items()})
        for parts in itertools.product(*choices)
    ]
    beside_axis = [key for table in columns if axis in table for key in table]
    facets = [k for table in columns if len(next(iter(table.values()))) > 1 for k in table if k not in beside_axis]
    return Sweep(
        name,
        document.get("title", name),
        document.get("about", "").strip(),
        axis,
        tuple(key for key in facets if key not in COMPARED),
        tuple(dict.fromkeys(found)),
    )


def _list(key: str, value: object) -> list[object]:
    if not isinstance(value, list):
        return [value]
    if not value:
        raise ValueError(f"{key} is an empty list; give a value, or leave the key out")
    return value


def _same_length(table: Mapping[str, object]) -> dict[str, Sequence[object]]:
    columns: dict[str, Sequence[object]] = {key: _list(key, value) for key, value in table.items()}
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"lists in one [[together]] must have one length, found {lengths}")
    return columns
