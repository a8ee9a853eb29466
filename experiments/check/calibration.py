"""Measures the machine's rates, for the checks that compare with them."""

from __future__ import annotations

from pathlib import Path

import torch

from dos import EmulatedDevice
from dos.calibration.command import thread_counts
from dos.calibration.measure import MINIMUM, QUICK, base_profile, measure, name_of
from dos.calibration.rounds import Effort
from dos.devices import Device
from dos.devices.cuda import CudaDevice
from dos.machine.process import usable_cores
from dos.machine.profiles import machine_name
from dos.machine.threads import most_beside
from experiments.check.base import Bench, Size
from experiments.check.models import prepare
from experiments.harness import Limit
from perfmodel.hardware import HardwareProfile

FILE = "profile.json"
EFFORTS = {
    Size.TINY: MINIMUM,
    Size.SMALL: QUICK,
    Size.FULL: Effort(seconds=1.0, repeats=5, host_numel=2**27, device_numel=2**26, copy_bytes=2**28),
}
_SLOWDOWN = 1000
"""Of the emulated machine, so that any host keeps up with it."""


def run(bench: Bench) -> None:
    """Calibrate and keep the profile with the results. An emulated machine's own rates must come out."""
    torch_device = prepare(bench)
    device: Device
    if bench.cuda:
        device = CudaDevice(torch_device)
    else:
        device = EmulatedDevice(HardwareProfile.builtin("h100").scaled(1 / _SLOWDOWN), capacity=10**9)
    found = measure(device, EFFORTS[bench.size], thread_counts(most_beside(len(usable_cores()))))
    profile = found.profile(base_profile(device), machine_name(name_of(device)))
    profile.save(bench.out / FILE)
    bench.note(
        profile=profile.to_json(),
        threads=found.threads,
        cpu_share=found.cpu_share,
        figures={name: {"value": f.value, "spread": f.spread} for name, f in found.figures.items()},
        threads_tried={str(n): f.value for n, f in found.trials.items()},
    )
    if isinstance(device, EmulatedDevice):
        names = ("cpu_update_rate", "h2d_bandwidth", "d2h_bandwidth", "gpu_update_rate")
        off = {name: abs(getattr(profile, name) / getattr(device.profile, name) - 1) for name in names}
        worst = max(off, key=lambda name: off[name])
        bench.target(Limit.at_most("calibration against what is emulated, error", off[worst], 0.1, f"{worst} is worst"))


def measured_profile(out: Path, torch_device: torch.device) -> HardwareProfile:
    """The profile of this run's calibration; a quick one now if that has failed."""
    try:
        return HardwareProfile.load(out / FILE)
    except (OSError, ValueError):
        device = CudaDevice(torch_device)
        measured = measure(device, QUICK, thread_counts(most_beside(len(usable_cores()))))
        return measured.profile(base_profile(device), machine_name(name_of(device)))
