"""All checks, in the order in which they run: those first whose answers matter most if it ends early."""

from __future__ import annotations

from experiments.checks import (
    beside,
    calibration,
    environment,
    features,
    host,
    kernels,
    plans,
    pressure,
    rivals,
    speed,
    suite,
    synchronisation,
)
from experiments.checks.base import Check
from experiments.checks.peers import BitsAndBytes, DeepSpeed, TorchAo

CHECKS = (
    Check("environment", "what this machine is", environment.run, share=3),
    Check("host", "host memory can be pinned", host.run, share=10),
    Check("kernels", "all kernels give the same bits", kernels.run, share=25),
    Check("calibration", "rates of this machine", calibration.run, share=25, least_s=12),
    Check("bits", "all plans and overlaps give the same bits", plans.check_bits, share=35),
    Check("losses", "losses are AdamW's", plans.check_losses, share=8),
    Check("full-memory", "with memory for everything: against AdamW", speed.check_full_memory, share=55, least_s=25),
    Check("policies", "all policies, memory for some of the state", speed.check_policies, share=110, least_s=40),
    Check("memory", "a budget is kept, a neighbour is made room for", pressure.run, share=30, least_s=12),
    Check("features", "clipping, GradScaler, offloaded gradients", features.run, share=25, least_s=10),
    Check("beside", "forward and backward beside copies", beside.run, share=10),
    Check("synchronisation", "step() does not wait for the GPU", synchronisation.run, share=15, least_s=8),
    Check("tests", "tests/cuda", suite.run, share=60, least_s=15, obstacle=suite.missing),
    Check("compile", "torch.compile", features.run_compiled, share=30, least_s=10),
    Check("torchao", "against torchao's CPUOffloadOptimizer", rivals.check_torchao, 40, 30, rivals.missing(TorchAo)),
    Check("deepspeed", "against DeepSpeed's ZeRO-Offload", rivals.check_deepspeed, 40, 30, rivals.missing(DeepSpeed)),
    Check(
        "bitsandbytes",
        "against bitsandbytes' paged AdamW",
        rivals.check_bitsandbytes,
        share=40,
        least_s=30,
        obstacle=rivals.missing(BitsAndBytes),
    ),
    Check(
        "largest",
        "the largest model that fits, with memory for some of its state",
        speed.check_largest,
        share=50,
        least_s=25,
    ),
)
