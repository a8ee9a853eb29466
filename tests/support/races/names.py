"""Where code is, and what bytes are, for people."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dos.state.device_store import DeviceStore
from dos.state.subgroup import Subgroup
from dos.torch_internals.live_objects import objects_of
from tests.support.races.shadow import Place, Race

DISK = 1 << 60
"""Where bytes of files begin among addresses."""


_MOST_PLACES, _MOST_FRAMES = 4, 40
_RACES = str(Path(__file__).parent)
_UNTOLD = ("/tests/support/devices.py", "/dos/guard.py", "/dos/devices/emulated.py")
"""What is between an access and the code that has it made."""


@functools.cache
def _is_told(file: str) -> bool:
    between = file.startswith(_RACES) or file.endswith(_UNTOLD)
    return ("/dos/" in file or "/tests/" in file) and "/torch/" not in file and not between


def places_now() -> tuple[Place, ...]:
    """Where this thread is in our code and in the test."""
    frame, found, left = sys._getframe(2), [], _MOST_FRAMES
    while frame is not None and left and len(found) < _MOST_PLACES:
        if _is_told(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lineno))
        frame, left = frame.f_back, left - 1  # type: ignore[assignment]
    return tuple(found)


def text_of(race: Race, *, named: bool) -> str:
    """Both accesses, and what the bytes are."""
    names = _names(race.first, race.end) if named else "not looked up"
    return (
        f"nothing orders two accesses of {race.end - race.first} bytes at {race.first:#x} ({names}):\n"
        f"  {race.before}\n  {race.after}"
    )


def _names(first: int, end: int) -> str:
    """What of models and state lies there."""
    if first >= DISK:
        return f"byte {first - DISK & (1 << 48) - 1} of a file"
    found, named = list[str](), dict[int, str]()
    objects = objects_of(nn.Module, Tensor, Subgroup, DeviceStore)
    for each in objects:
        if isinstance(each, nn.Module):  # by dict's own method: that of ours would wait for updates
            own = dict.items(each.__dict__["_parameters"])
            named |= {id(p): f"{type(each).__name__}.{name}" for name, p in own if p is not None}

    def look(tensor: Any, what: str) -> None:
        with contextlib.suppress(Exception):  # some tensors have no memory
            if tensor.numel() and tensor.data_ptr() < end and first < tensor.data_ptr() + tensor.nbytes:
                found.append(what)

    for each in objects:
        if type(each) is nn.Parameter:
            name = named.get(id(each), "parameter") + f" of shape {tuple(each.shape)}"
            look(each, name)
            look(each.grad, f"gradient of {name}")
        elif isinstance(each, Subgroup):
            staged = (
                {"staged gradient": each.gradient, "staged parameter": each.parameter} if each.arena.staging else {}
            )
            for name, tensor in (each.state.fields | staged).items():
                look(tensor, f"{name} of a subgroup of {each.numel} parameters")
        elif isinstance(each, DeviceStore):
            for number, slot in enumerate(each.slots):
                look(slot.memory, f"slot {number}")
            for room in each.resident.values():
                look(room.buffer.memory, f"room of a resident of {room.nbytes} bytes")
    return ", ".join(dict.fromkeys(found)) or "memory of no parameter and no state"
