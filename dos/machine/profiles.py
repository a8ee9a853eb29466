"""Stores measured profiles in files, and finds them again."""

from __future__ import annotations

import functools
import os
import platform
import re
import tempfile
from pathlib import Path

from dos.guard import warn
from dos.machine.process import local_ranks, usable_cores
from perfmodel.hardware import RATES, HardwareProfile, builtin_profiles

COMMAND = "python -m dos.calibrate"
BUSY = "measured while other programs had the CPU"
"""The note in a profile whose rates are too low for this reason."""
ROUGH = "roughly, at the first step"
"""The note in a profile that was measured in a moment."""
NOT_MEASURED = "not measured, taken from the profile"
"""The note in a profile before the rates that are another profile's."""


def find_profile(device_name: str) -> HardwareProfile | None:
    """Return the profile that was measured on this machine with this accelerator, cores and ranks; None without one.

    A file that cannot be used is ignored; a warning names it, once.
    """
    try:
        return _load(profile_path(device_name), device_name, COMMAND)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _warn(f"the measured profile is not used: {error}")
        return None


def save_profile(profile: HardwareProfile, device_name: str) -> Path:
    """Save a profile of this machine for `find_profile`; return its path. Raises OSError if it cannot be written."""
    path = profile_path(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written apart and renamed, so that no process reads half a file.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        profile.save(Path(folder) / path.name)
        (Path(folder) / path.name).replace(path)
    return path


def resolve_profile(profile: HardwareProfile | str | Path | None, device_name: str) -> HardwareProfile | None:
    """Return the profile that a user asked for.

    profile: a profile, the name of a built-in one, a file, or None for `find_profile`.
    Raises ValueError that names the file if it is missing, broken, of another version or measured on another machine.
    """
    if profile is None:
        return find_profile(device_name)
    if isinstance(profile, HardwareProfile):
        return profile
    builtin = builtin_profiles()
    if isinstance(profile, str) and profile in builtin:
        return builtin[profile]
    check_named(profile)
    mend = f"{COMMAND} --output {profile}"
    try:
        return _load(Path(profile), device_name, mend)
    except OSError as error:
        raise ValueError(f"{profile}: {error.strerror}; measure this machine with `{mend}`") from error


def check_named(profile: str | Path) -> None:
    """Raise ValueError unless `profile` is a file or the name of a built-in profile."""
    builtin = builtin_profiles()
    if str(profile) not in builtin and not Path(profile).is_file():
        raise ValueError(
            f"profile {str(profile)!r} is neither a file nor a built-in profile ({', '.join(builtin)}); measure this "
            f"machine with `{COMMAND} --output {profile}`"
        )


def calibrated_rates(profile: HardwareProfile) -> frozenset[str]:
    """Return the names of the rates that `COMMAND` measured on a quiet machine."""
    source, note = profile.provenance.source, profile.provenance.note
    if source != "measured" or BUSY in note or ROUGH in note:
        return frozenset()
    of_others = note.partition(NOT_MEASURED)[2]
    return frozenset(RATES) - {"cpu_traffic_factor", *re.findall(r"\w+", of_others)}


def profile_path(device_name: str) -> Path:
    """Return this machine's file: one per accelerator, CPU, number of cores of this process, and of local ranks.

    Raises OSError if there is no home directory.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the XDG specification requires that relative paths are ignored
        try:
            cache = Path.home() / ".cache"
        except RuntimeError as error:
            raise OSError(f"{error} Set XDG_CACHE_HOME to a directory for caches.") from error
    key = f"{device_name} {cpu_model()} {len(usable_cores())} cores {local_ranks()} ranks"
    return cache / "deep-optimizer-states" / f"{re.sub('[^a-z0-9]+', '-', key.lower()).strip('-')}.json"


def machine_name(device_name: str) -> str:
    """Return the name of this machine in `Provenance.machine`."""
    return f"{device_name}, {cpu_model()}"


@functools.cache
def cpu_model() -> str:
    """Return the system's name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _load(path: Path, device_name: str, mend: str) -> HardwareProfile:
    """Load a profile. Raises OSError or ValueError naming the file and the command that mends it."""
    try:
        profile = HardwareProfile.load(path)
    except (ValueError, TypeError) as error:
        hint = "" if COMMAND in str(error) else f"; measure again with `{mend}`"
        raise ValueError(f"{error}{hint}") from error
    measured_on, here = profile.provenance.machine, machine_name(device_name)
    if profile.provenance.source == "measured" and measured_on != here:
        raise ValueError(f"{path} was measured on {measured_on!r}, this is {here!r}; measure again with `{mend}`")
    if BUSY in profile.provenance.note:
        _warn(
            f"{path} was {BUSY} ({profile.provenance.note}), so plans begin with rates that are too low; measure again "
            f"on a quiet machine with `{mend}`"
        )
    return profile


_warn = functools.cache(warn)
