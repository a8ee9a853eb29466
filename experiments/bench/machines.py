"""Machines that the demo trains on: this machine's GPU, or an emulated accelerator like an H100 node."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence

import torch
from torch.optim import AdamW, Optimizer

from dos import EmulatedDevice
from dos.devices import Script
from experiments.gpt import GPT
from experiments.miniature import equal_subgroups, fastest_s
from experiments.paper.ranks import PublishedRank
from experiments.plots import MemorySample
from experiments.training import UPDATE, Position
from perfmodel.format import float32

ROOM = 0.8
"""Share of AdamW's state for which there is room on the emulated machine beside the training."""
NEIGHBOUR = 0.65
"""Share of that room, wanted by another process while memory changes."""
HEADROOM = 1.4
"""Forward and backward on the emulated machine over the fastest that were seen here. Hooks wait for what is missing,
so that both last as long in every run, whatever else the processor has to do."""


MOST_COMPUTE_S = 0.125
"""Of forward and backward, by which an emulated machine is slowed: other programs must not make a demo take an hour."""


def choose_machine(model: GPT, subgroup_size: int, steps: int, compute: Callable[[], None]) -> Machine:
    """The GPU if there is one, else an `EmulatedMachine`. compute: one forward and backward, to be timed for it."""
    if torch.cuda.is_available():
        return Machine()
    compute_s = min(fastest_s(compute, 20), MOST_COMPUTE_S)
    return EmulatedMachine(model, subgroup_size, compute_s=compute_s, steps=steps)


class Machine:
    """Trains one model after the other, each with one optimizer: here on the current CUDA device, in real time.

    torch_device: where model and batches are. device: what `DOSAdam(device=...)` is given.
    has_neighbour: whether another process can be made to take memory.
    samples: of device memory since `begin`, the fullest of each iteration at the time when that began; if it has
        a neighbour.
    compute_s: seconds that forward and backward are made to last, if they do not by themselves.
    """

    name: str
    torch_device: torch.device
    device: EmulatedDevice | None = None
    has_neighbour = False
    samples: Sequence[MemorySample] = ()
    compute_s = 0.0

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.torch_device)

    def begin(self, beside_neighbour: bool = False) -> None:
        """Forget the memory of the run before. beside_neighbour: another process takes memory in its middle third."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def step(self, optimizer: Optimizer) -> None:
        """`optimizer.step()`, taking as long as it does on this machine."""
        optimizer.step()

    def peak_bytes(self, optimizer: Optimizer) -> int:
        """The most device memory held since `begin`."""
        return torch.cuda.max_memory_allocated(self.torch_device)

    @property
    def capacity(self) -> int:
        """Bytes of device memory."""
        return torch.cuda.mem_get_info(self.torch_device)[1]


class EmulatedMachine(Machine):
    """One of four ranks of the published run of a 20B model on H100s, as small and slow as the model here needs.

    Time: the node's rates (the built-in profile `h100`) are slowed down together until the update of the whole model
    on the CPU lasts as many times forward plus backward as it did there.
    Memory: every byte there is `parameters / (that rank's parameters)` bytes here. What model, gradients and
    activations take follows the run's recorded trace, by phase of the iteration. Beside them there is room for ROOM of
    AdamW's state, less than on the node, so that AdamW does not fit. In a run beside a neighbour another process wants
    NEIGHBOUR of that in the middle third of the steps.

    subgroup_size: in parameters. compute_s: seconds of one forward and backward here. steps: of each run.
    """

    torch_device = torch.device("cpu")
    device: EmulatedDevice
    has_neighbour = True

    def __init__(self, model: GPT, subgroup_size: int, compute_s: float, steps: int) -> None:
        published, values = PublishedRank.read(), str(model.tokens.weight.dtype).removeprefix("torch.")
        loads = equal_subgroups(model.numel, subgroup_size, state=float32(values))
        rank = published.miniature(loads, published.update_over_compute * HEADROOM * compute_s)
        room = int(ROOM * sum(2 * p.nbytes for p in model.parameters()))  # two moments, in the parameters' type
        self._rank = dataclasses.replace(rank, memory_bytes=rank.recording.peak + room)
        slower = published.profile.host_bandwidth / rank.profile.host_bandwidth
        self.name = f"emulated H100 node (rates 1/{slower:.0f}, memory 1/{published.loads.numel / loads.numel:.0f})"
        self.compute_s = HEADROOM * compute_s
        self._progress = Position(model, self._rank.forward_s, self._rank.backward_s, moved=self._look)
        self._visit = [(0.0, 0), (steps / 3, int(NEIGHBOUR * room)), (2 * steps / 3, 0)]
        self.begin()

    def begin(self, beside_neighbour: bool = False) -> None:
        self._progress.iteration = -1
        neighbour = Script(self._visit, lambda: self._progress.iteration) if beside_neighbour else 0
        self.device = self._rank.device(lambda: self._progress.position, neighbour)
        self.samples: list[MemorySample] = []
        self._began = time.perf_counter()

    def step(self, optimizer: Optimizer) -> None:
        self._progress.move_to(UPDATE)
        if isinstance(optimizer, AdamW):
            numel = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            self.device.launch(0, optimizer.step, numel).wait()
        else:
            optimizer.step()

    def peak_bytes(self, optimizer: Optimizer) -> int:
        if isinstance(optimizer, AdamW):
            return self._rank.recording.peak + sum(
                t.nbytes for entry in optimizer.state.values() for t in entry.values() if t.ndim
            )
        return self.device.own_peak_bytes

    def _look(self) -> None:
        """Memory rises and falls in every iteration; what decides where state can be is the fullest moment."""
        sample = MemorySample(time.perf_counter() - self._began, *self.device.usage())
        if self._progress.position == 0.0:
            self.samples.append(sample)
        elif sum(sample[1:]) > sum(self.samples[-1][1:]):
            self.samples[-1] = sample._replace(time_s=self.samples[-1].time_s)

    @property
    def capacity(self) -> int:
        return self.device.capacity
