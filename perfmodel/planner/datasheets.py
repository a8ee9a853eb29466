"""GPUs and machines as data sheets have them: `machines.json`, which says from where."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

UTILISATION = 0.4
"""Share of the peak that training reaches. Llama 3 reached 38% to 43% on H100s (Grattafiori et al. 2024, "The Llama 3
Herd of Models", table 4), Megatron 42% to 57% on A100s (Korthikanti et al. 2022, table 5)."""


class Gpu(NamedTuple):
    """One GPU.

    nominal_gib: of memory, as its name says. memory_gib: as PyTorch reports it, which is less.
    tflops_16bit, tflops_fp32: peak of dense matrix products, of bfloat16 or float16 accumulated in float32, and of
        float32 without TF32, in 1e12 FLOP/s.
    bf16: whether it computes in bfloat16.
    """

    name: str
    nominal_gib: int
    memory_gib: float
    tflops_16bit: float
    tflops_fp32: float
    bf16: bool = True

    @property
    def memory_bytes(self) -> int:
        """The same in bytes."""
        return int(self.memory_gib * 2**30)

    def peak(self, dtype: str) -> float:
        """FLOP/s for `bf16`, `fp16` or `fp32`."""
        return 1e12 * (self.tflops_fp32 if dtype == "fp32" else self.tflops_16bit)


class Card(NamedTuple):
    """A GPU of which nothing else is known. bandwidth: of its memory, bytes/s. pcie: generation, 16 lanes."""

    gpu: Gpu
    bandwidth: float
    pcie: int


@dataclass(frozen=True)
class Fabric:
    """Nominal bandwidth between GPUs, one way, in bytes/s.

    interconnect: of one GPU to the others of its node; None: its PCIe link, at the profile's rates.
    network: of one node to the other nodes, all its adapters together; None: not known.
    within, between: what they are of, for people.
    """

    interconnect: float | None = None
    network: float | None = None
    within: str = "PCIe, as the profile has it"
    between: str = ""


_DATA = json.loads((resources.files("perfmodel") / "planner" / "machines.json").read_text())
_GPUS = {name: Gpu(name, **values) for name, values in _DATA["gpus"].items()}
GPUS = {name: _GPUS[values["gpu"]] for name, values in _DATA["machines"].items()}
"""By the name of the built-in hardware profile."""
ALIASES: dict[str, str] = _DATA["aliases"]
"""GPUs for which a built-in profile stands, with the host that it has."""
CARDS = {name: Card(**{**values, "gpu": _GPUS[values["gpu"]]}) for name, values in _DATA["cards"].items()}
LINKS = {int(generation): tuple(rates) for generation, rates in _DATA["links"].items()}
"""Bytes/s of pinned copies over 16 lanes by PCIe generation: one way, and each of both ways at once."""
PCIE = Fabric()
"""Of machines of which nothing is known but the profile."""
FABRICS = {name: Fabric(**values["fabric"]) for name, values in _DATA["machines"].items() if "fabric" in values}
"""By the name of the built-in profile; the networks of desktops are not known."""
