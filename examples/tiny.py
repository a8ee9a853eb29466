"""What the examples share, so that each shows its own point alone: a small model, data it can learn, a device."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dos import EmulatedDevice
from perfmodel.hardware import HardwareProfile

VOCABULARY = 64
LENGTH = 16


def options(arguments: Sequence[str] | None, *, steps: int) -> argparse.Namespace:
    """--device: where the model is, and for "emulated" where it counts as being. --steps: of training.

    Without a GPU torch computes in one thread from then on.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda", "emulated"), default="emulated")
    parser.add_argument("--steps", type=int, default=steps)
    found = parser.parse_args(arguments)
    if found.device != "cuda":
        compute_in_one_thread()
    return found


def compute_in_one_thread() -> None:
    """For small models: torch's other threads would spin between operations, on cores that the optimizer needs."""
    torch.set_num_threads(1)


def place(name: str) -> torch.device:
    """Where torch has the model. An emulated accelerator's memory is the host's."""
    return torch.device("cuda" if name == "cuda" else "cpu")


def check_launched() -> None:
    """Exit with the command to run, unless torchrun (or accelerate launch) has started this process."""
    if "RANK" not in os.environ and not dist.is_initialized():
        raise SystemExit(f"this example runs on several ranks; start it so: torchrun --nproc-per-node 2 {sys.argv[0]}")


def start_rank(name: str) -> tuple[torch.device, int, int]:
    """Join the process group of torchrun: where this rank's model is, its number, and how many there are."""
    check_launched()
    where = place(name)
    if where.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    return where, dist.get_rank(), dist.get_world_size()


def accelerator(name: str, parameters: int) -> EmulatedDevice | None:
    """What `DOSAdam(device=...)` is given: nothing for real devices, which it finds by itself.

    The emulated one has two thousandths of the speed of a desktop with an RTX 4090, so that this small model keeps it
    busy, and memory for half of the optimizer's state, which takes 8 bytes per parameter.
    """
    if name != "emulated":
        return None
    return EmulatedDevice(HardwareProfile.builtin("rtx_4090_desktop").scaled(2e-3), capacity=4 * parameters)


def progressions(count: int, seed: int = 0) -> Tensor:
    """Arithmetic progressions modulo VOCABULARY, to be continued: int64 of shape (count, LENGTH)."""
    generator = torch.Generator().manual_seed(seed)
    start, difference = torch.randint(VOCABULARY, (2, count, 1), generator=generator)
    return (start + difference % 4 * torch.arange(LENGTH)) % VOCABULARY


def windows(count: int, seed: int = 0) -> Tensor:
    """Two neighbouring numbers of a progression and the one that follows: int64 of shape (14 * count, 3)."""
    return progressions(count, seed).unfold(1, 3, 1).reshape(-1, 3)


def batches(steps: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of numbers and the number that follows them: shapes (batch, 2) and (batch,)."""
    for step in range(steps):
        rows = windows(8, seed=step).to(device)
        yield rows[:, :2], rows[:, 2]


def model() -> nn.Module:
    """Predicts a number from the two before it. 0.2 million parameters."""
    torch.manual_seed(0)
    hidden = 256
    return nn.Sequential(
        nn.Embedding(VOCABULARY, hidden),
        nn.Flatten(),
        nn.Linear(2 * hidden, hidden),
        nn.GELU(),
        nn.Linear(hidden, hidden),
        nn.GELU(),
        nn.Linear(hidden, VOCABULARY),
    )
