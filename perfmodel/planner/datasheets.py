"""GPUs: memory, and the data sheets' peak arithmetic without sparsity."""

from __future__ import annotations

from dataclasses import dataclass

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


_A100_40 = Gpu("A100 40 GB", 40, 39.4, 312, 19.5)

GPUS = {
    "a100_bound": _A100_40,
    "a100_unbound": _A100_40,
    "a100_pcie_server": Gpu("A100 80 GB", 80, 79.1, 312, 19.5),
    "gh200": Gpu("GH200 96 GB", 96, 94.8, 989, 67),
    "h100": Gpu("H100 80 GB", 80, 79.6, 989, 67),
    "h200_node": Gpu("H200 141 GB", 141, 139.0, 989, 67),
    "l40s_server": Gpu("L40S 48 GB", 48, 44.4, 362, 91.6),
    "rtx_3090_desktop": Gpu("RTX 3090", 24, 23.7, 71, 35.6),
    "rtx_4090_desktop": Gpu("RTX 4090", 24, 23.6, 165, 82.6),
}
"""By the name of the built-in hardware profile."""

ALIASES = {
    "a100-40": "a100_bound",
    "a100-80": "a100_pcie_server",
    "h100-80": "h100",
    "h200": "h200_node",
    "l40s": "l40s_server",
    "rtx-3090": "rtx_3090_desktop",
    "rtx-4090": "rtx_4090_desktop",
}
"""GPUs for which a built-in profile stands, with the host that it has."""


@dataclass(frozen=True)
class Card:
    """A GPU of which nothing else is known. bandwidth: of its memory, bytes/s. pcie: generation, 16 lanes."""

    gpu: Gpu
    bandwidth: float
    pcie: int


LINKS = {3: (12e9, 10e9), 4: (24e9, 20e9), 5: (50e9, 42e9)}
"""What pinned copies usually reach over 16 lanes, by generation, in bytes/s: one way, and each of both
ways at once. Those of 4 and 5 are what the built-in profiles from data sheets have."""

CARDS = {
    "rtx-5090": Card(Gpu("RTX 5090", 32, 31.3, 209.5, 104.8), 1792e9, 5),
    "a6000": Card(Gpu("RTX A6000", 48, 47.5, 154.8, 38.7), 768e9, 4),
    "l4": Card(Gpu("L4", 24, 22.0, 121, 30.3), 300e9, 4),
    "t4": Card(Gpu("T4", 16, 14.6, 65, 8.1, bf16=False), 320e9, 3),
    "v100-16": Card(Gpu("V100 16 GB", 16, 15.7, 125, 15.7, bf16=False), 900e9, 3),
    "v100-32": Card(Gpu("V100 32 GB", 32, 31.7, 125, 15.7, bf16=False), 900e9, 3),
}
"""Data sheets: NVIDIA RTX Blackwell GPU architecture (RTX 5090), NVIDIA RTX A6000, L4 (half of what it
says with sparsity), T4, V100 (SXM2). Memory of RTX 5090, T4 and V100 32 GB is what PyTorch's errors
report, as users quote them; of the others a guess from cards of the same memory."""
