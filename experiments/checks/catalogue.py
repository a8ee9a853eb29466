"""All checks, in the order in which they run: what is wrong first, how fast it is then."""

from __future__ import annotations

from experiments.checks import (
    calibration,
    environment,
    kernels,
    plans,
    pressure,
    rivals,
    speed,
    synchronisation,
)
from experiments.checks.base import Check
from experiments.peers import BitsAndBytes, DeepSpeed, TorchAo

CHECKS = (
    Check("environment", "what this machine is", environment.run, share=3),
    Check("kernels", "all kernels give the same bits", kernels.run, share=40),
    Check("calibration", "rates of this machine", calibration.run, share=35, least_s=15),
    Check("bits", "all plans and overlaps give the same bits", plans.check_bits, share=50),
    Check("losses", "losses are AdamW's", plans.check_losses, share=10),
    Check("memory", "a budget is kept, a neighbour is made room for", pressure.run, share=40, least_s=15),
    Check("synchronisation", "step() does not wait for the GPU", synchronisation.run, share=20, least_s=10),
    Check("full-memory", "with memory for everything: against AdamW", speed.check_full_memory, share=60, least_s=30),
    Check("policies", "all policies, memory for some of the state", speed.check_policies, share=170, least_s=40),
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
        share=100,
        least_s=40,
    ),
)
