"""The machine that is meant: its rates, its GPU, how much memory that has, and assumptions about it.

The figures of data sheets are in `machines.json`, with their sources.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from perfmodel.format import MIXED
from perfmodel.hardware import HardwareProfile, Provenance, builtin_profiles
from perfmodel.planner.units import Memory, format_bytes

UNKNOWN = "unknown"
"""The built-in profile of cautious guesses."""
USABLE = 0.98
"""Share of the memory that a GPU's name promises, in GiB; the rest is the driver's. The GPUs of
`machines.json` have 97.8% to 99.5% of it; L4, L40S and T4, with error-correcting codes, 91% to 93%."""
OVERSTATED = 1.1
"""GPUs have less memory than their names say, but never by more than this factor."""
SIMILAR = 1.15
"""Ratio of memory within which GPUs count as equally large."""


class Gpu(NamedTuple):
    """One GPU.

    nominal_gib: of memory, as its name says. memory_gib: as PyTorch reports it, which is less.
    tflops_16bit, tflops_fp32: peak of dense matrix products, of bfloat16 or float16 accumulated in float32, and of
        float32 without TF32, in 1e12 FLOP/s.
    utilisation: share of the peak that forward and backward reach, up to 1. basis: its source, for people.
    bf16: whether it computes in bfloat16.
    """

    name: str
    nominal_gib: int
    memory_gib: float
    tflops_16bit: float
    tflops_fp32: float
    utilisation: float
    basis: str
    bf16: bool = True

    @property
    def memory_bytes(self) -> int:
        """Bytes that PyTorch reports."""
        return int(self.memory_gib * 2**30)

    def peak(self, dtype: str) -> float:
        """FLOP/s for `bf16`, `fp16` or `fp32`."""
        return 1e12 * (self.tflops_fp32 if dtype == "fp32" else self.tflops_16bit)


class Card(NamedTuple):
    """A GPU in the host of another machine.

    bandwidth: of its memory, bytes/s. pcie: generation. lanes: up to 16. host: the profile with the host's rates.
    """

    gpu: Gpu
    bandwidth: float
    pcie: int
    lanes: int = 16
    host: str = UNKNOWN


@dataclass(frozen=True)
class Fabric:
    """Nominal bandwidth between GPUs, one way, in bytes/s.

    interconnect: of one GPU to the others of its node; None: its PCIe link, at the profile's rates.
    link: its name, for people.
    """

    interconnect: float | None = None
    link: str = "PCIe, as the profile has it"


_DATA = json.loads((resources.files("perfmodel") / "planner" / "machines.json").read_text())
_GPUS = {name: Gpu(name, **values) for name, values in _DATA["gpus"].items()}
GPUS = {name: _GPUS[values["gpu"]] for name, values in _DATA["machines"].items()}
"""GPUs by the name of the built-in hardware profile."""
ALIASES: dict[str, str] = _DATA["aliases"]
"""GPUs for which a built-in profile stands, with the host that it has."""
CARDS = {name: Card(**{**values, "gpu": _GPUS[values["gpu"]]}) for name, values in _DATA["cards"].items()}
LINKS = {int(generation): tuple(rates) for generation, rates in _DATA["links"].items()}
"""Bytes/s of pinned copies over 16 lanes by PCIe generation: one way, and each of both ways at once."""
PCIE = Fabric()
"""Links of machines of which nothing is known but the profile."""
FABRICS = {name: Fabric(**values["fabric"]) for name, values in _DATA["machines"].items() if "fabric" in values}
"""Links by the name of the built-in profile; PCIE are those of the others."""


class Machine(NamedTuple):
    """A machine as far as it is known. gpu: None if it is not known. notes: how it was understood, for people."""

    profile: HardwareProfile
    gpu: Gpu | None
    device_bytes: int
    notes: list[str]

    def flops_rate(self, dtype: str, tflops: float | None, utilisation: float | None) -> tuple[float, str]:
        """FLOP/s that forward and backward reach, and where that comes from, for people.

        By the data sheet of the GPU; if it is not known, of the slowest one of about as much memory.
        tflops, utilisation: as given on the command line. Raises ValueError for a type in which the
        GPU does not compute.
        """
        if tflops is not None:
            source = "as given" if utilisation is None else f"{utilisation:.0%} of --tflops"
            return tflops * 1e12 * (utilisation or 1.0), source
        gpu = self._alike(dtype)
        if self.gpu is not None and dtype == "bf16" and not gpu.bf16:
            raise ValueError(
                f"the {gpu.name} does not compute in bfloat16; choose --dtype fp16 or fp32, or pass --tflops"
            )
        share = utilisation or gpu.utilisation
        source = f"{share:.0%} of the {gpu.name}'s peak of {gpu.peak(dtype) / 1e12:g}"
        if utilisation is None:
            source += f", by {gpu.basis}"
        if self.gpu is None:
            source += "; no GPU was named, so that is the slowest known one of about its memory"
        return gpu.peak(dtype) * share, source

    def rates(self, dtype: str) -> HardwareProfile:
        """The profile. Where that is of guesses, updates on the GPU are as fast as on the GPU of `flops_rate`."""
        if self.profile.name != UNKNOWN:
            return self.profile
        return self.profile.replace(gpu_update_rate=_update_rate(self._alike(dtype)))

    def _alike(self, dtype: str) -> Gpu:
        """The GPU; if it is not known, the slowest one of about as much memory that computes in this type."""
        able = [gpu for gpu in _GPUS.values() if gpu.bf16 or dtype != "bf16"]
        return self.gpu or min(able, key=self._unlike)

    def _unlike(self, gpu: Gpu) -> tuple[int, float]:
        """Difference of another GPU's memory, in steps of SIMILAR; and of equals, how fast it is."""
        distance = abs(round(math.log(gpu.memory_bytes / self.device_bytes, SIMILAR)))
        return distance, gpu.utilisation * gpu.tflops_16bit


def find_machine(name: str, asked: Memory | None) -> Machine:
    """The machine of that name (a built-in one, a GPU, or the file of a profile), with a GPU as asked.

    asked: its memory; None for all that the GPU has.
    Raises OSError for a file that cannot be read, ValueError for a machine that is not known, or
    memory that it does not have.
    """
    profile, gpu = _profile(name)
    source = profile.provenance
    note = f"rates of {profile.name}: {source.source}"
    if profile.name == UNKNOWN:
        note = "no --machine: rates of links and host are cautious guesses"
    elif source.source != "measured":
        note += f", of {source.machine}"
    notes = [note if source.source == "measured" else f"{note}; measure yours with python -m dos.calibrate"]
    if asked is None and gpu is None:
        if profile.name == UNKNOWN:
            raise ValueError("no GPU is named; pass --machine, such as rtx-4090, or its memory: --gpu 24GB")
        raise ValueError(f"how much memory the GPU of {profile.name} has is not known: pass --gpu, such as 24GB")
    device_bytes = gpu.memory_bytes if gpu is not None else 0
    if asked is not None and asked.nominal and gpu is not None and asked.nbytes == gpu.nominal_gib * 2**30:
        notes.append(f"--gpu {asked.text}: the {format_bytes(device_bytes)} of a {gpu.name}")
    elif asked is not None:
        device_bytes = int(USABLE * asked.nbytes) if asked.nominal else asked.nbytes
        if gpu is not None and device_bytes > OVERSTATED * gpu.memory_bytes:
            raise ValueError(
                f"--gpu {asked.text} is more than the {gpu.name} has, {format_bytes(gpu.memory_bytes)}; for another "
                "GPU leave out --machine, or pass a profile of your own"
            )
        if asked.nominal:
            notes.append(
                f"--gpu {asked.text}, as data sheets write it: {format_bytes(device_bytes)} for programs, {USABLE:.0%} "
                f"of {format_bytes(asked.nbytes)}, less on L4, L40S and T4 (torch.cuda.mem_get_info() tells)"
            )
    return Machine(profile, gpu, device_bytes, notes)


def _profile(name: str) -> tuple[HardwareProfile, Gpu | None]:
    """The rates of the machine of that name, and its GPU, if that is known."""
    known, names = builtin_profiles(), (*ALIASES, *CARDS, *builtin_profiles())
    as_file = name.endswith(".json") or Path(name).exists()
    if not as_file:
        name = _spelled(name, names)
    profile = ALIASES.get(name, name)
    if profile in known:
        return known[profile], GPUS.get(profile)
    if name in CARDS:  # link and bandwidth of its data sheet
        card = CARDS[name]
        alone, duplex = (rate * card.lanes / 16 for rate in LINKS[card.pcie])
        host = "the host's are cautious guesses" if card.host == UNKNOWN else f"the host is that of {card.host}"
        rates = dict.fromkeys(("h2d_bandwidth", "d2h_bandwidth"), alone)
        rates |= dict.fromkeys(("h2d_bandwidth_duplex", "d2h_bandwidth_duplex"), duplex)
        rates["gpu_update_rate"] = _update_rate(card.gpu)
        provenance = Provenance("data sheet", machine=f"the GPU (PCIe {card.pcie}.0, {card.lanes} lanes); {host}")
        return known[card.host].replace(name=card.gpu.name, provenance=provenance, **rates), card.gpu
    if as_file:
        return HardwareProfile.load(name), None
    beginning = [each for each in (*ALIASES, *CARDS) if _letters(each).startswith(_letters(name) or " ")]
    similar = beginning or get_close_matches(name.lower(), names, n=3)
    there = f"did you mean {' or '.join(similar)}?" if similar else f"there are {', '.join((*ALIASES, *CARDS))}."
    raise ValueError(f"no machine {name!r}; {there} For another GPU pass its memory (--gpu 24GB) or a profile's file")


def _update_rate(gpu: Gpu) -> float:
    """Parameters/s of updates on a GPU: by the bandwidth of its memory, or its built-in profile."""
    bandwidth = {card.gpu: card.bandwidth for card in CARDS.values()}.get(gpu)
    if bandwidth is not None:
        return 0.8 * bandwidth / MIXED.update_traffic
    known = builtin_profiles()
    return min(known[name].gpu_update_rate for name, each in GPUS.items() if each == gpu)


def _letters(name: str) -> str:
    """A name as it is compared: `NVIDIA GeForce RTX 4090` and `rtx_4090` are `4090`."""
    return re.sub(r"nvidia|geforce|tesla|rtx|sxm\d?|pcie|hbm\de?|gb|[^a-z0-9]", "", name.lower())


def _spelled(name: str, names: Sequence[str]) -> str:
    """The machine that is meant, by another spelling or as drivers and data sheets name its GPU; else the same text."""
    gpus = {each: GPUS[profile].name for each, profile in ALIASES.items()}
    gpus |= {each: card.gpu.name for each, card in CARDS.items()}
    meant = (each for each in names if _letters(name) in (_letters(each), _letters(gpus.get(each, each))))
    return name if name in names else next(meant, name)
