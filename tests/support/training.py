"""A machine that costs no time, a small network and how it is trained, and comparisons to the bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.step.issue import Step
from dos.step.transit import Transit, Transits
from perfmodel import Timeline
from perfmodel.hardware import HardwareProfile
from tests.support.inside import session_of

FAST = HardwareProfile(
    name="fast",
    host_bandwidth=1e15,
    cpu_update_rate=1e13,
    h2d_bandwidth=1e14,
    d2h_bandwidth=1e14,
    h2d_bandwidth_duplex=1e14,
    d2h_bandwidth_duplex=1e14,
    gpu_update_rate=1e13,
    copy_latency_s=0.0,
    launch_latency_s=0.0,
    disk_read_bandwidth=1e14,
    disk_write_bandwidth=1e14,
    disk_read_bandwidth_duplex=1e14,
    disk_write_bandwidth_duplex=1e14,
    disk_latency_s=0.0,
)
"""So fast that emulating it costs no time."""


def profile(**rates: float) -> HardwareProfile:
    """A fast machine but for these rates."""
    return dataclasses.replace(FAST, **rates)


SLOW = profile(
    h2d_bandwidth=2e6, d2h_bandwidth=2e6, h2d_bandwidth_duplex=2e6, d2h_bandwidth_duplex=2e6, cpu_update_rate=3e5
)
"""An update of the small network takes some milliseconds, much longer than its forward. Streaming does not pay."""


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0, width: int = 40) -> nn.Sequential:
    """A small network of several kinds of parameters; the same for the same seed."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack trace of each call
    return nn.Sequential(nn.Linear(24, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 7, bias=False)).to(
        dtype
    )


class Regression(nn.Module):
    """As Trainer wants a model: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(inputs).square().mean()}


def loss_of(model: nn.Module, step: int) -> Tensor:
    """On a batch that depends on the step number alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(8, 24, generator=generator).to(next(model.parameters()))
    targets = torch.randint(0, 7, (8,), generator=generator).to(inputs.device)
    return nn.functional.cross_entropy(model(inputs).float(), targets)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    first_step: int = 0,
    before_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Train on batches that depend on the step number alone; the losses."""
    losses = []
    for step in range(first_step, first_step + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if before_step is not None:
            before_step(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def batch(seed: int, model: nn.Module | None = None) -> Tensor:
    """Inputs of the small network that depend on the seed alone, in the model's dtype."""
    inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))
    return inputs if model is None else inputs.to(next(model.parameters()).dtype)


def backward(model: nn.Module, seed: int, micro_batches: int = 1) -> None:
    """Add up the gradients of so many batches, which depend on the seed alone."""
    for micro_batch in range(micro_batches):
        model(batch(seed + micro_batch, model)).float().square().mean().backward()


class Raises(torch.autograd.Function):
    """Of which backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


def on(place: Any, capacity: int = 10**9, machine: HardwareProfile = FAST, **more: Any) -> dict[str, Any]:
    """DOSAdam's settings for a place: "host", or else a policy, on an emulated device. more: settings there."""
    return {} if place == "host" else {"policy": place, "device": EmulatedDevice(machine, capacity), **more}


Make = Callable[[Any], Any]
"""Gives an optimizer of these parameters."""


def maker(place: Any = "host", machine: HardwareProfile = FAST, **settings: Any) -> Make:
    """Makes DOSAdam there; subgroups are small where there are any."""
    return lambda parameters: DOSAdam(parameters, **{"subgroup_size": 300, **on(place, machine=machine), **settings})


def assert_as_adamw(run: Callable[[Make], Iterable[Tensor]], place: Any, ulps: int = 64, **settings: Any) -> None:
    """Fail unless `run`, which is given what makes an optimizer, leaves the same with DOSAdam there and with AdamW.

    settings: DOSAdam's own; both have a learning rate of 0.01.
    """
    ours = list(run(maker(place, lr=0.01, **settings)))
    assert_close_ulp(ours, run(lambda parameters: torch.optim.AdamW(parameters, lr=0.01)), ulps)


def assert_as_on_host(run: Callable[[Make], Iterable[Tensor]], place: Any, **settings: Any) -> None:
    """Fail unless `run`, which is given what makes an optimizer, leaves the same bits there and on the host."""
    assert bits(run(maker(place, **settings))) == bits(run(maker("host", **settings)))


def bits(tensors: Iterable[Tensor]) -> list[bytes]:
    """The tensors' contents for comparing bit by bit, NaN and signed zero included."""
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def everything(model: nn.Module, optimizer: DOSAdam) -> list[bytes]:
    """Parameters and state, to the bit."""
    states = optimizer.state_dict()["state"].values()
    return bits([*model.parameters(), *(entry[key] for entry in states for key in sorted(entry))])


def assert_close_ulp(actual: Iterable[Tensor], expected: Iterable[Tensor], ulps: int = 64) -> None:
    """Fail unless all values agree to so many units in the last place of the largest value of each tensor."""
    for a, e in zip(actual, expected, strict=True):
        scale = e.detach().abs().max().item() if e.numel() else 0.0
        torch.testing.assert_close(
            a.detach(), e.detach(), rtol=0, atol=ulps * torch.finfo(e.dtype).eps * max(scale, 1e-6)
        )


@functools.cache
def bits_on_host(dtype: torch.dtype = torch.float32, steps: int = 12) -> list[bytes]:
    """The small network's parameters after so many steps on the host."""
    model = mlp(dtype)
    train(model, DOSAdam(model.parameters()), steps)
    return bits(model.parameters())


def trained_as_on_host(
    device: EmulatedDevice, attach: bool = False, dtype: torch.dtype = torch.float32, steps: int = 12, **settings: Any
) -> tuple[nn.Sequential, DOSAdam]:
    """A network and its optimizer after training on the device, with the bits of the host's and within its memory."""
    model = mlp(dtype)
    optimizer = DOSAdam(model.parameters(), **{"device": device, "subgroup_size": 100, **settings})
    if attach:
        optimizer.attach(model)
    train(model, optimizer, steps)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits_on_host(dtype, steps)
    assert device.peak_bytes <= device.capacity
    return model, optimizer


def attached_after_a_step(**settings: Any) -> tuple[nn.Sequential, DOSAdam, list[bytes]]:
    """A model whose update is still in flight, and what its parameters will be. settings: as for `maker`."""
    model, twin = mlp(), mlp()
    train(twin, DOSAdam(twin.parameters()), 3)
    optimizer = maker("cpu", machine=SLOW, **{"subgroup_size": 150, **settings})(model.parameters())
    optimizer.attach(model)
    train(model, optimizer, 3)
    return model, optimizer, bits(twin.parameters())


@contextmanager
def leaving_early() -> Iterator[list[int]]:
    """The subgroups whose gradients leave during backward meanwhile."""
    found: list[int] = []
    plain = Transits.send

    def send(self: Transits, index: int, *rest: Any, **more: Any) -> Transit:
        found.append(index)
        return plain(self, index, *rest, **more)

    Transits.send = send
    try:
        yield found
    finally:
        Transits.send = plain


def ended_steps(optimizer: DOSAdam) -> list[Step]:
    """A list to which each step is added that ends from now on."""
    found: list[Step] = []
    ledger = session_of(optimizer).ledger
    plain = ledger.ended

    def ended(step: Step, timeline: Timeline) -> None:
        found.append(step)
        plain(step, timeline)

    ledger.ended = ended
    return found


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Operations that wait for the CUDA device raise RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
