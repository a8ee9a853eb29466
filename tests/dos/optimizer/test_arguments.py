"""Arguments that are plausible and wrong: they work where their meaning is clear, else an error names them at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from perfmodel.hardware import HardwareProfile
from tests.support.training import FAST

INF, NAN = float("inf"), float("nan")
H100 = HardwareProfile.builtin("h100")


def gpu() -> EmulatedDevice:
    return EmulatedDevice(FAST, capacity=10**7)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def optimizer(**settings: Any) -> DOSAdam:
    return DOSAdam(model().parameters(), **{"device": gpu(), **settings})


def attached(**settings: Any) -> None:
    net = model()
    DOSAdam(net.parameters(), device=gpu(), offload_gradients=True).attach(net, **settings)


def setting(name: str, value: object) -> Callable[[], DOSAdam]:
    return lambda: optimizer(**{name: value})


CLEAR = [
    ("subgroup_size", [1e2, np.int64(100), np.float32(100)]),
    ("host_memory", [4e9, np.int64(4 * 10**9), np.float64(4e9)]),
    ("memory_budget", [4e6, np.int64(10**6), np.float32(0.5), 1.0, lambda: 1e6, lambda: np.int64(10**6)]),
    ("max_grad_norm", [1, np.float32(1), Fraction(1, 2), 10**30, torch.tensor(1.0)]),
    ("policy", [0, np.float32(0.5)]),
    ("offload_gradients", [1, np.True_]),
    ("master_weights", [0, np.False_]),
    ("amsgrad", [None, 1, np.True_]),
    ("maximize", [None, 1]),
    ("betas", [[0.9, 0.99], np.array([0.9, 0.99])]),
    ("process_groups", [None, []]),
    ("device", ["cpu", torch.device("cpu"), EmulatedDevice("h100", 1e7), EmulatedDevice(H100, np.int64(10**7), 1e3)]),
    ("device", [EmulatedDevice("h100", 10**7, neighbour=lambda: 1e3)]),
    ("profile", [FAST.replace(cpu_update_rate=np.float32(1e9), cpu_threads=np.int64(2)).scaled(np.float64(2))]),
]


@pytest.mark.parametrize(("name", "values"), CLEAR, ids=[name for name, _ in CLEAR])
def test_a_clear_meaning_is_taken(name: str, values: list[Any]) -> None:
    for value in values:
        net = model()
        each = DOSAdam(net.parameters(), **{"device": gpu(), name: value})
        net(torch.ones(2, 8)).sum().backward()
        each.step()
        each.metrics()


def test_numbers_mean_what_they_say() -> None:
    whole = optimizer(subgroup_size=1e2, host_memory=np.float64(4e9), memory_budget=4e6)._options
    assert (whole.subgroup_size, whole.host_memory, whole.memory_budget) == (100, 4 * 10**9, 4 * 10**6)
    assert all(type(each) is int for each in (whole.subgroup_size, whole.host_memory, whole.memory_budget))
    assert optimizer(memory_budget=1)._options.memory_budget == 1, "a byte"
    assert type(optimizer(memory_budget=1.0)._options.memory_budget) is float, "all"
    assert EmulatedDevice(FAST, 24e6).memory().total == 24_000_000


REFUSED: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    *(
        (f"{name}={value!r}", setting(name, value), error, f"{name} must be a whole number")
        for name in ("subgroup_size", "host_memory")
        for error, values in ((TypeError, ["4GB", True, [1], torch.tensor(8)]), (ValueError, [-1, 0, 1.5, INF, NAN]))
        for value in values
    ),
    *(
        (f"{name}={value!r}", setting(name, value), TypeError, f"{name} must be True or False")
        for name in ("master_weights", "amsgrad", "maximize", "decoupled_weight_decay", "offload_gradients",
                     "skip_nonfinite")
        for value in ("native", [True], 2, np.ones(2), torch.ones(2))
    ),
    *(
        (f"device={value!r}", setting("device", value), error, message)
        for value, error, message in (
            (0, ValueError, r"device is 0, and torch.cuda.device_count\(\) is 0 here; leave device= out"),
            ("cuda", ValueError, "device is 'cuda', and torch.cuda.device_count"),
            (torch.device("cuda", 1), ValueError, "and torch.cuda.device_count"),
            ("gpu", ValueError, "device must be the torch device of the parameters.*found 'gpu'"),
            ("mps", ValueError, "device must be the torch device of the parameters.*found 'mps'"),
            (True, TypeError, "device must be the torch device"),
            (1.5, TypeError, "device must be the torch device"),
            (["cuda"], TypeError, "device must be the torch device"),
            (EmulatedDevice, TypeError, "device must be the torch device"),
            (FAST, TypeError, r"device: found the profile 'fast', .*pass dos.EmulatedDevice\(profile, capacity\)"),
        )
    ),
    *(
        (f"EmulatedDevice{arguments!r}", lambda arguments=arguments: EmulatedDevice(*arguments), error, message)
        for arguments, error, message in (
            (("h101", 10**7), ValueError, "no built-in hardware profile 'h101'; there are"),
            ((None, 10**7), TypeError, "profile must be a perfmodel.hardware.HardwareProfile, .* found None"),
            ((10**7, FAST), TypeError, "profile must be a perfmodel"),
            ((Path("h100.json"), 10**7), TypeError, "profile must be a perfmodel"),
            *(((FAST, value), TypeError, "capacity must be a whole number of bytes") for value in ("24GB", None, True)),
            *(((FAST, value), ValueError, "capacity must be a whole number of bytes") for value in (-1, 1.5, INF, NAN)),
            ((FAST, 10, "x"), TypeError, "occupied must be a whole number of bytes"),
            ((FAST, 10, -1), ValueError, "occupied must be a whole number of bytes"),
            ((FAST, 10, lambda: None), TypeError, "occupied: the function must give bytes"),
            ((FAST, 10, lambda: -1), ValueError, "occupied: the function must give 0 or more bytes"),
            ((FAST, 10, 20.0), ValueError, r"occupied must lie in \[0, capacity=10\] bytes, found 20"),
        )
    ),
    ("neighbour", lambda: EmulatedDevice(FAST, 10, neighbour="x"), TypeError, "neighbour must be a whole"),
    *((f"budget={each}", setting("memory_budget", each), ValueError, "memory_budget must be 0 or more")
      for each in (90.0, 1.5, -1, NAN)),
    *((f"weights={each}", lambda each=each: attached(weights=each), ValueError, "weights must be 0 or more blocks")
      for each in (4.0, 4e9, -1)),
    ("activations", lambda: attached(activations=50.0), ValueError, "activations must be a share"),
    ("blocks", lambda: attached(weights=1, blocks=5), TypeError, "blocks must be modules, found int"),
    *((f"params={each!r}", lambda each=each: DOSAdam(each), TypeError, "params: expected parameters, found")
      for each in (None, 5, nn.Linear(1, 1), nn.Linear(1, 1).parameters)),
    *((f"groups={each!r}", setting("process_groups", each), TypeError, "process_groups must be")
      for each in (5, "world", [None])),
    *((f"max_norm={each!r}", lambda each=each: optimizer().clip_grad_norm_(each), TypeError, "max_norm must be a num")
      for each in (None, "1", True, torch.ones(2))),
    *((f"eps={each!r}", setting("eps", each), TypeError, "eps must be a number") for each in ("1", torch.ones(2))),
    *((f"betas={each!r}", setting("betas", each), ValueError, "betas must be two numbers")
      for each in (np.array(0.9), torch.tensor(0.9))),
    *((f"load {each!r}", lambda each=each: optimizer().load_state_dict(each), ValueError,
       f"has 'state' and 'param_groups', found {found}")
      for each, found in (
          ({"state": []}, r"\['state'\]"), ({1: 0, "x": 0}, r"\['1', 'x'\]"),
          ({"state": None, "param_groups": []}, "them as NoneType and list"),
          ({"state": {}, "param_groups": {}}, "them as dict and dict"),
          ({"state": {0: None}, "param_groups": [{"params": [0]}]}, "NoneType in them"),
          ({"state": {}, "param_groups": [0]}, "int in them"),
          ({"state": {}, "param_groups": [{"params": 0}]}, "int in them"),
          ({"state": {}, "param_groups": [{}]}, "NoneType in them"))),
    *((f"load {each!r}", lambda each=each: optimizer().load_state_dict(each), TypeError, "expected a state dict, found")
      for each in (None, "out/optimizer.pt", nn.Linear(1, 1))),
    ("adamw_state", lambda: optimizer().adamw_state("0.weight"), TypeError, "expected a parameter, found '0.weight'"),
    ("scaled", lambda: FAST.scaled("2"), TypeError, "factor must be a number, found '2'"),
    ("builtin", lambda: HardwareProfile.builtin(["h100"]), ValueError, "no built-in hardware profile"),
]  # fmt: skip


# Without addresses, which differ between the workers that collect these tests.
NAMES = [re.sub(r" at 0x[0-9a-f]+", "", name)[:100] for name, *_ in REFUSED]


@pytest.mark.parametrize(("build", "error", "message"), [row[1:] for row in REFUSED], ids=NAMES)
def test_anything_else_is_refused_at_once(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_an_index_is_a_cuda_device_as_torch_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert optimizer(device=1)._device == torch.device("cuda", 1)
    assert optimizer(device=np.int64(0))._device == torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"device is 2, and torch.cuda.device_count\(\) is 2"):
        optimizer(device=2)


def test_memory_that_runs_out_on_an_emulated_device_names_what_helps() -> None:
    device = EmulatedDevice(FAST, capacity=100)
    with pytest.raises(torch.OutOfMemoryError, match="200 bytes asked for, 100 of 100 free; offload gradients or"):
        device.allocate(200)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"a tensor of 200 bytes was made.*EmulatedDevice a larger capacity"
    ):
        device.count(torch.zeros(50))
