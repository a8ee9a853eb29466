"""GPUs and machines as data sheets have them: `machines.json`, which says from where."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

UTILISATION = 0.4
"""Share of the peak that training reaches. Llama 3 reached 38% to 43% on H100s (Grattafiori et al. 2024, "The Llama 3
Herd of Models", table 4), Megatron 42% to 57% on A100s (Korthikanti et al. 2022, table 5)."""


@dataclass(frozen=True)
class Gpu:
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


DATA = json.loads((resources.files("perfmodel") / "planner" / "machines.json").read_text())
"""The file. Its fabrics are those of `fabric.py`."""
_GPUS = {name: Gpu(name, **values) for name, values in DATA["gpus"].items()}
GPUS = {name: _GPUS[values["gpu"]] for name, values in DATA["machines"].items()}
"""By the name of the built-in hardware profile."""
ALIASES: dict[str, str] = DATA["aliases"]
"""GPUs for which a built-in profile stands, with the host that it has."""
CARDS = {name: Card(**{**values, "gpu": _GPUS[values["gpu"]]}) for name, values in DATA["cards"].items()}
LINKS = {int(generation): tuple(rates) for generation, rates in DATA["links"].items()}
"""Bytes/s of pinned copies over 16 lanes by PCIe generation: one way, and each of both ways at once."""
