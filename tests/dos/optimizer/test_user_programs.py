"""Programs of user code and its tools, of each kind, in each mode: AdamW's results, or an error that says so."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from tests.support import user_programs
from tests.support.blocks import WIDE
from tests.support.fake_cuda import FakeCudaDevice, install
from tests.support.training import FAST, SLOW, assert_close_ulp
from tests.support.user_programs import Job, all_programs

pytestmark = pytest.mark.usefixtures("one_core", "_small_weights_are_coded")

BF16: dict[str, Any] = {"dtype": torch.bfloat16}
OFFLOADED: dict[str, Any] = {"offload_gradients": True}
WIDER: dict[str, Any] = {"width": WIDE}
MODES: dict[str, dict[str, Any]] = {
    "host": {},
    "host, attached": {"attach": {}},
    "plain": {"policy": "stride:2"},
    "cpu, attached": {"policy": "cpu", "attach": {}, "machine": SLOW},
    "attached": {"policy": "stride:2", "attach": {}, "machine": SLOW},
    "resident": {"policy": "resident", "attach": {}},
    "offloaded": {"policy": "cpu", "attach": {}, "machine": SLOW, **OFFLOADED},
    "offloaded, as planned": {"policy": "adaptive", "attach": {"activations": 0.5}, **OFFLOADED},
    "none stays": {"policy": "cpu", "attach": {"weights": 0}, "machine": SLOW, **OFFLOADED},
    "some stay": {"policy": "stride:2", "attach": {"weights": 2}, **OFFLOADED},
    "all stay": {"policy": 0.5, "attach": {"weights": 4}, **OFFLOADED},
    "auto": {"policy": "adaptive", "attach": {"weights": "auto"}, "capacity": 40_000, **OFFLOADED},
    "disk": {"policy": "cpu", "attach": {}, "host_memory": 180_000, "memory_budget": 0, **WIDER},
    "disk, weights": {"policy": "cpu", "attach": {"weights": 2}, "host_memory": 400_000, **WIDER, **OFFLOADED},
    "queued": {"policy": "stride:2", "queued": True},
    "queued, attached": {"policy": "cpu", "queued": True, "attach": {}},
    "queued, offloaded": {"policy": "cpu", "queued": True, "attach": {}, **OFFLOADED},
    "in backward": {"policy": "cpu", "attach": {"updates": "backward"}},
    "split": {"policy": "stride:2", "attach": {}, "machine": SLOW, "dtype": torch.bfloat16},
    "split, some stay": {"policy": "cpu", "attach": {"weights": 2}, "dtype": torch.bfloat16, **OFFLOADED},
    "whole masters, queued": {"policy": "stride:2", "queued": True, "attach": {}, **BF16, "state_format": "float32"},
    "whole masters, none stays": {"attach": {"weights": 0}, **BF16, "state_format": "float32", **OFFLOADED},
    "codes": {"policy": "stride:2", "attach": {}, "state_format": "int8"},
    "codes, none stays": {"policy": "cpu", "attach": {"weights": 0}, "state_format": "int8", **OFFLOADED},
    "codes, disk": {"policy": "cpu", "attach": {}, "host_memory": 2_700_000, "state_format": "int8", "width": 224},
    "codes, in backward": {"policy": "cpu", "attach": {"updates": "backward"}, "state_format": "int8"},
}
"""queued: on the runtime that runs work as late as it may."""
ANOTHER = "than when its weights began to stream"
REFUSED = {
    **dict.fromkeys(("loaded_by_assignment", "parametrized", "parametrization_removed", "pruned"), ANOTHER),
    "edited_directly": "'NoneType' object has no attribute 'mul_'",  # as the gradient is on the host
    "replaced_gradients": "'NoneType' and 'int'",
    "hooked_after_accumulation": r"has a hook of register_post_accumulate_grad_hook\(\), which would find no p.grad",
    "clipped_by_value": "cannot clip gradients that DOSAdam",
    "copied_optimizer": "the weights of this model stream for an optimizer that was deleted or replaced",
}
"""What an error says, by the program's name, in modes in which the program may raise it."""
IN_BACKWARD = r"updates='backward'|the optimizer is in an undefined state|'NoneType'"
"""What errors say where backward updates: of state, of clipping, of edits, of a backward that raised."""
USUAL = ("attached", "none stays", "queued, attached")
THIRDS = (0, 1, 2)
"""Of the programs. Each usual mode runs one of them, so that each program runs once; slow tests run the rest."""


@pytest.fixture
def _small_weights_are_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dos.rules.adamw.LEAST_CODED", 128)


def combinations() -> list[Any]:
    """A mode and one third of the programs."""
    quick = set(zip(USUAL, THIRDS, strict=True))
    return [
        pytest.param(mode, third, marks=() if (mode, third) in quick else pytest.mark.slow)
        for mode in MODES
        for third in THIRDS
    ]


def making(mode: dict[str, Any], folder: Path, patch: pytest.MonkeyPatch) -> Callable[[nn.Module], Any]:
    options = {"subgroup_size": 400, **mode}
    for name in ("dtype", "width"):
        options.pop(name, None)
    attach, queued = options.pop("attach", None), options.pop("queued", False)
    machine, capacity = options.pop("machine", FAST), options.pop("capacity", 10**8)
    if queued:
        options["device"] = FakeCudaDevice(install(patch, 0))
    elif len(options) > 1 or attach:
        options["device"] = EmulatedDevice(machine, capacity)
    if "host_memory" in options:
        options["disk"] = folder

    def make(model: nn.Module) -> Any:
        optimizer = DOSAdam(model.parameters(), lr=1e-2, **options)
        if attach is not None:
            optimizer.attach(model, **attach)
        return optimizer

    return make


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


Program = Callable[[Job], Iterable[Tensor]]


def run(program: Program, adapt: Any, make: Callable[[nn.Module], Any], dtype: torch.dtype, width: int) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = Job(make, adapt, dtype, width)
        found = [each.detach().clone() for each in program(job)]
        if isinstance(job.optimizer, DOSAdam):
            job.optimizer.synchronize()
    return found


def on_host(state_format: str | None, **settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: DOSAdam(model.parameters(), lr=1e-2, state_format=state_format, **settings)


@functools.cache
def expected_of(program: Program, adapt: Any, dtype: torch.dtype, state_format: str | None, width: int) -> list[Tensor]:
    """What AdamW leaves, or where other values are stored or more are compared, DOSAdam on the host."""
    as_adamw = dtype is torch.float32 and state_format is None and width == 16
    return run(program, adapt, adamw if as_adamw else on_host(state_format), dtype, width)


def compare(program: Program, adapt: Any, mode: str, folder: Path) -> str:
    """Empty if the program has the expected results; else what is other, or the error."""
    settings = MODES[mode]
    dtype, state_format = settings.get("dtype", torch.float32), settings.get("state_format")
    width = settings.get("width", 16)
    as_adamw = dtype is torch.float32 and state_format is None and width == 16
    if program is user_programs.clipped and not as_adamw and "offload_gradients" in settings:
        # The norm of gradients on the host is a sum in float64, and the factor is not rounded with each of them.
        there = on_host(state_format, device=EmulatedDevice(FAST, 10**8), policy="cpu", offload_gradients=True)
        expected = run(program, adapt, there, dtype, width)
    else:
        expected = expected_of(program, adapt, dtype, state_format, width)
    with pytest.MonkeyPatch.context() as patch:
        try:
            found = run(program, adapt, making(settings, folder, patch), dtype, width)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    try:
        assert_close_ulp(found, expected, 64 if as_adamw else 0)
    except (AssertionError, ValueError) as error:
        return f"OTHER: {str(error).splitlines()[:4]}"
    return ""


@pytest.mark.parametrize("mode", [mode for mode in MODES if "codes" in mode or "disk" in mode])
def test_state_is_where_and_as_the_mode_says(mode: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        job = Job(making(MODES[mode], tmp_path, patch), None, torch.float32, MODES[mode].get("width", 16))
        job.steps(0, 1)
        job.optimizer.synchronize()
        assert ("% int8" in job.optimizer.explain()) == ("codes" in mode)
        assert (job.optimizer.metrics().get("disk_held_bytes", 0) > 0) == ("disk" in mode)


@pytest.mark.parametrize(("mode", "third"), combinations())
def test_programs_have_the_results_of_adamw(mode: str, third: int, tmp_path: Path) -> None:
    """Or raise what says why, and never give other results in silence."""
    wrong = {}
    for number, (name, program, adapt) in list(enumerate(all_programs()))[third::3]:
        found = compare(program, adapt, mode, tmp_path / str(number))
        refused = REFUSED.get(name[2:]) if MODES[mode].get("offload_gradients") else None
        refused = IN_BACKWARD if "in backward" in mode else refused
        if found and not (refused and re.search(refused, found)):
            wrong[name] = found
    assert not wrong
