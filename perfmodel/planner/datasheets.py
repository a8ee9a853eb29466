"""The GPUs of the built-in machines: memory, and the data sheets' peak arithmetic without sparsity."""

from __future__ import annotations

from dataclasses import dataclass

UTILISATION = 0.4
"""Share of the peak that training reaches. Llama 3 reached 38% to 43% on H100s (Grattafiori et al. 2024, "The Llama 3
Herd of Models", table 4), Megatron 42% to 57% on A100s (Korthikanti et al. 2022, table 5)."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    memory_gib: as PyTorch reports it, which is less than the name says.
    tflops_16bit, tflops_fp32: peak of dense matrix products, of bfloat16 or float16 accumulated in float32, and of
        float32 without TF32, in 1e12 FLOP/s.
    """

    name: str
    memory_gib: float
    tflops_16bit: float
    tflops_fp32: float

    @property
    def memory_bytes(self) -> int:
        """The same in bytes."""
        return int(self.memory_gib * 2**30)

    def peak(self, dtype: str) -> float:
        """FLOP/s for `bf16`, `fp16` or `fp32`."""
        return 1e12 * (self.tflops_fp32 if dtype == "fp32" else self.tflops_16bit)


_A100_40 = Gpu("A100 40 GB", 39.4, 312, 19.5)

GPUS = {
    "a100_bound": _A100_40,
    "a100_unbound": _A100_40,
    "a100_pcie_server": Gpu("A100 80 GB", 79.1, 312, 19.5),
    "gh200": Gpu("GH200 96 GB", 94.8, 989, 67),
    "h100": Gpu("H100 80 GB", 79.6, 989, 67),
    "h200_node": Gpu("H200 141 GB", 139.0, 989, 67),
    "l40s_server": Gpu("L40S 48 GB", 44.4, 362, 91.6),
    "rtx_3090_desktop": Gpu("RTX 3090", 23.7, 71, 35.6),
    "rtx_4090_desktop": Gpu("RTX 4090", 23.6, 165, 82.6),
}
"""By the name of the built-in hardware profile."""
