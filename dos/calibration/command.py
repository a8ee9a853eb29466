"""Measures this machine and saves its profile for DOSAdam: ``python -m dos.calibrate [--quick] [--disk DIR]``."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dos.calibration.measure import FULL, QUICK, Measurement, base_profile, measure, name_of
from dos.calibration.rounds import Exchange
from dos.devices import Device, EmulatedDevice
from dos.devices.cuda import CudaDevice
from dos.machine.process import local_ranks, usable_cores
from dos.machine.profiles import machine_name, save_profile
from dos.machine.threads import most_beside
from dos.state.disk import DiskError
from perfmodel.hardware import HardwareProfile, builtin_profiles

EMULATED_SLOWDOWN = 1000
"""The divisor of emulated machines' rates, so that any host keeps up with them."""

NOISY = 0.10
"""The spread above which a figure is not trusted."""

_ROWS = {
    "cpu_update_rate": ("CPU update", "param/s"),
    "cpu_update_rate_beside": ("  beside copies both ways", "param/s"),
    "cpu_update_rate_beside_h2d": ("  beside copies to the device", "param/s"),
    "cpu_update_rate_beside_d2h": ("  beside copies to the host", "param/s"),
    "cpu_update_rate_beside_disk": ("  beside disk reads and writes", "param/s"),
    "turn_latency_s": ("  fixed cost", "s"),
    "cpu_speed_split": ("  split state", "times"),
    "cpu_speed_int8": ("  int8 state", "times"),
    "host_slowdown": ("  other work of the host beside it takes", "times"),
    "host_bandwidth": ("host memory, per rank", "B/s"),
    "h2d_bandwidth": ("host to device", "B/s"),
    "h2d_bandwidth_beside_update": ("  beside a CPU update", "B/s"),
    "h2d_bandwidth_duplex": ("  while both ways run", "B/s"),
    "h2d_bandwidth_beside": ("  and a CPU update", "B/s"),
    "h2d_weight": ("  part of scarce host memory", "times"),
    "d2h_bandwidth": ("device to host", "B/s"),
    "d2h_bandwidth_beside_update": ("  beside a CPU update", "B/s"),
    "d2h_bandwidth_duplex": ("  while both ways run", "B/s"),
    "d2h_bandwidth_beside": ("  and a CPU update", "B/s"),
    "d2h_weight": ("  part of scarce host memory", "times"),
    "copy_latency_s": ("fixed cost of a copy", "s"),
    "gpu_update_rate": ("device update", "param/s"),
    "gpu_speed_split": ("  split state on the device", "times"),
    "gpu_speed_int8": ("  int8 state on the device", "times"),
    "launch_latency_s": ("fixed cost of a launch", "s"),
    "disk_read_bandwidth": ("disk read", "B/s"),
    "disk_read_bandwidth_duplex": ("  while writing", "B/s"),
    "disk_read_bandwidth_beside": ("  while writing and updating", "B/s"),
    "disk_write_bandwidth": ("disk write", "B/s"),
    "disk_write_bandwidth_duplex": ("  while reading", "B/s"),
    "disk_write_bandwidth_beside": ("  while reading and updating", "B/s"),
    "disk_latency_s": ("fixed cost of a read or write", "s"),
}
"""Figures in the order of the table: their names there, and their units."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status; bad arguments exit with 2."""
    arguments = _parse(argv)
    device: Device | None = arguments.device
    leader = os.environ.get("RANK", "0") == "0"
    # Drawn only between figures, so that drawing disturbs none.
    bar = Progress(console=Console(stderr=True), transient=True, auto_refresh=False, disable=not leader)
    with _ranks() as exchange, bar:
        task = bar.add_task("", total=1.0)
        began = time.perf_counter()

        def tell(label: str, done: float) -> None:
            if not bar.console.is_terminal and leader:  # a log shows no bar
                bar.console.print(f"{time.perf_counter() - began:.0f} s: {label}", highlight=False)
            bar.update(task, description=label, completed=done, refresh=True)

        cores = _cores_per_rank(exchange)
        limit = cores if device is None else most_beside(cores)
        ranks = local_ranks()
        try:
            found = measure(
                device,
                QUICK if arguments.quick else FULL,
                [arguments.threads] if arguments.threads else thread_counts(limit),
                exchange=exchange,
                progress=tell,
                ranks=ranks,
                disk=arguments.disk,
            )
        except torch.OutOfMemoryError as error:
            raise SystemExit(f"dos.calibrate: not enough free device memory to measure with: {error}") from None
        except DiskError as error:
            raise SystemExit(f"dos.calibrate: {error.found}; choose another folder with --disk") from None
        except OSError as error:
            raise SystemExit(f"dos.calibrate: {error.strerror or error}") from None
    name = name_of(device)
    note = f"{ranks} ranks measured together" if ranks > 1 else ""
    profile = found.profile(base_profile(device), machine_name(name), ranks, note)
    console = Console()
    if leader:
        console.print(table(found, profile))
        for remark in remarks(found, os.environ, len(usable_cores()), os.cpu_count() or 1):
            console.print(remark, style="yellow", highlight=False, soft_wrap=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # one rank on each host writes
    return _save(profile, name, arguments.output if leader else None, console)


def thread_counts(limit: int) -> list[int]:
    """Return 1, 2, 4, ... and the limit itself."""
    return [2**i for i in range(limit.bit_length()) if 2**i < limit] + [limit]


def table(found: Measurement, profile: HardwareProfile) -> Table:
    """Return a table of all figures with units; figures with a large spread are marked."""
    result = Table("", "value", "spread", "", title=profile.provenance.machine)
    for column in (1, 2):
        result.columns[column].justify = "right"
    for name, (label, unit) in _ROWS.items():
        figure = found.figures.get(name)
        if figure is not None:
            noisy = figure.spread > NOISY
            result.add_row(
                label,
                quantity(figure.value, unit),
                f"{figure.spread:.0%}",
                "noisy" if noisy else "",
                style="red" if noisy else None,
            )
        elif getattr(profile, name, None) is not None:
            result.add_row(label, quantity(getattr(profile, name), unit), "", "not measured", style="dim")
    return result


def remarks(found: Measurement, environment: Mapping[str, str], cores: int, host_cores: int) -> list[str]:
    """Return notes for the user beside the figures, a line each.

    cores: the number of cores on which this process may run, of `host_cores`.
    """
    tried = ", ".join(f"{n}: {quantity(f.value, 'param/s')}" for n, f in found.trials.items())
    lines = [f"CPU threads: {found.threads} (the fewest within 3% of the best of {tried})."]
    if "h2d_bandwidth" not in found.figures:
        lines.append(
            "No accelerator: only the host was measured, its memory by the CPU update alone; links and device are "
            "conservative guesses."
        )
    lines += [f"{note[0].upper()}{note[1:]}." for note in found.notes]
    omp = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    overruled = omp == "1" and "LOCAL_WORLD_SIZE" in environment  # see dos.machine.threads
    if omp.isdecimal() and int(omp) < found.threads and not overruled:
        lines.append(
            f"OMP_NUM_THREADS={omp} holds training's CPU update to {omp} of "
            f"{found.threads} threads. It was ignored here; unset it, or set it to {found.threads}, to train."
        )
    if cores < host_cores // local_ranks(environment):
        lines.append(
            f"The affinity mask leaves this process {cores} of {host_cores} cores, and only those were tried. If a "
            "launcher or taskset set it by mistake, widen it and calibrate again."
        )
    if found.busy:
        lines.append(
            f"The CPU update got {found.cpu_share:.0%} of the CPU time it wanted: other programs were running, or a "
            "container's quota is smaller than its cores. Repeat on a quiet machine."
        )
    noisy = [_ROWS[name][0].strip() for name, figure in found.figures.items() if figure.spread > NOISY]
    if noisy:
        lines.append(f"Too noisy to trust, spread above {NOISY:.0%}: {', '.join(noisy)}. Repeat on a quiet machine.")
    return lines


def quantity(value: float, unit: str) -> str:
    """Format with three digits and a prefix: `45.6 GB/s`; without a prefix for "times": `1.05 times`."""
    prefixes = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ"}
    if unit == "times":
        return f"{value:.3g} times"
    scale = next((s for s in prefixes if abs(value) >= s), 1e-6 if value else 1.0)
    return f"{value / scale:.3g} {prefixes[scale]}{unit}"


def _save(profile: HardwareProfile, name: str, output: Path | None, console: Console) -> int:
    """Write the profile where DOSAdam finds it, and to `output`; return the exit status."""
    try:
        if output is not None:
            profile.save(output)
            console.print(f"Written to {output}.", soft_wrap=True)
        if name.startswith("emulated "):
            console.print("An emulated device brings its own profile; nothing else is kept.")
        else:
            console.print(f"Kept in {save_profile(profile, name)}, where DOSAdam finds it.", soft_wrap=True)
    except OSError as error:
        console.print(f"dos.calibrate: the profile cannot be written: {error}", style="red", soft_wrap=True)
        return 1
    return 0


@contextmanager
def _ranks() -> Iterator[Exchange]:
    """Yield an exchange among all ranks of a launcher, or of this process alone."""
    if not (os.environ.get("WORLD_SIZE", "1") != "1" and "MASTER_ADDR" in os.environ):
        yield lambda value: [value]
        return

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    dist.init_process_group("gloo")
    try:
        yield exchange
    finally:
        dist.destroy_process_group()


def _cores_per_rank(exchange: Exchange) -> int:
    """Return this rank's share of its cores. Ranks that are bound to cores of their own share none."""
    host, cores = platform.node(), usable_cores()
    sharing = sum(host == other and bool(cores & theirs) for other, theirs in exchange((host, cores)))
    return max(1, len(cores) // sharing)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="dos.calibrate", description="Measure this machine and keep its profile for DOSAdam.")
    parser.add_argument("--quick", action="store_true", help="under 15 s rather than under a minute, less exact")
    parser.add_argument("--device", type=_device, default="auto", help="cuda, cuda:N, cpu or emulated:NAME")
    parser.add_argument("--output", type=_file, metavar="FILE", help="also write the profile here")
    parser.add_argument("--threads", type=_threads, metavar="N", help="of the CPU update, instead of trying")
    parser.add_argument("--disk", type=_folder, nargs="+", default=(), metavar="DIR", help="measure state on disk")
    return parser.parse_args(argv)


def _device(text: str) -> Device | None:
    if text == "cpu" or (text == "auto" and not torch.cuda.is_available()):
        return None
    kind, _, which = text.partition(":")
    if kind == "emulated":
        machines = builtin_profiles()
        if which not in machines:
            raise argparse.ArgumentTypeError(f"no machine {which!r} to emulate; there are {', '.join(machines)}")
        return EmulatedDevice(machines[which].scaled(1 / EMULATED_SLOWDOWN), capacity=10**9)
    if text == "auto":
        kind = "cuda"
    if kind != "cuda" or (which and not which.isdecimal()) or text.endswith(":"):
        raise argparse.ArgumentTypeError(f"expected cuda, cuda:N, cpu or emulated:NAME, found {text!r}")
    count = torch.cuda.device_count()
    # A launcher may show each rank all devices or only its own.
    index = int(which) if which else int(os.environ.get("LOCAL_RANK", "0")) % max(count, 1)
    if index >= count:
        raise argparse.ArgumentTypeError(f"no CUDA device {index}; there are {count} (cpu measures the host alone)")
    return CudaDevice(torch.device("cuda", index))


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    return path


def _folder(text: str) -> Path:
    path = Path(text).absolute()
    with suppress(OSError):  # the name may be too long
        if path.parent.is_dir():
            return path
    raise argparse.ArgumentTypeError(
        f"{text!r} is not in a folder that exists, and would be made on another drive than the one to be measured; "
        "mount that, or make the folder first"
    )


def _threads(text: str) -> int:
    cores = len(usable_cores())
    if not text.isdecimal() or not 1 <= int(text) <= cores:
        raise argparse.ArgumentTypeError(f"expected 1 to {cores}, the cores this process may use, found {text!r}")
    return int(text)
