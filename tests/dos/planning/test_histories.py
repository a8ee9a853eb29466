"""Random histories of device memory: capacity is never exceeded, no bit changes, everything is given back."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from tests.support.training import FAST, bits, bits_on_host, loss_of, mlp

pytestmark = pytest.mark.usefixtures("one_core")

BY_HAND = os.environ.get("DOS_MEMORY_HISTORIES")
"""How many histories; without it always the same 90."""
STATE_BYTES = 12 * sum(p.numel() for p in mlp().parameters())
"""Optimizer state of the network; the unit in which the histories measure memory."""
MOST_STEPS = 8


@dataclass(frozen=True)
class Load:
    """What the training process takes of the device in one kind of iteration, in shares of STATE_BYTES.

    forward: at its end. backward: as each of the gradients is there. update: from the end of backward on.
    """

    forward: float
    backward: tuple[float, ...]
    update: float

    @property
    def peak(self) -> float:
        return max(self.forward, self.update, *self.backward)


@dataclass(frozen=True)
class History:
    """A training run and everything that happens to the device's memory in it.

    spare: memory beyond the process's own peak; loads: iterations take turns; loads_later: from the middle on.
    neighbour: what another process wants, by iteration. known_peak: whether the process reserves its peak at the start,
    so that the neighbour may want any amount and still not starve the process itself.
    attach_at: the iteration before which the model is attached. budgets: by iteration, for a function; else budget.
    release_before_step, release_before_forward: iterations. wasted: those whose first backward is thrown away.
    collected: whether the optimizer is simply forgotten at the end.
    """

    spare: float
    loads: tuple[Load, ...]
    loads_later: tuple[Load, ...]
    neighbour: tuple[float, ...]
    known_peak: bool
    policy: str | float
    subgroup_size: int
    dtype: torch.dtype
    attach_at: int | None
    offload_gradients: bool
    budget: int | float | None
    budgets: tuple[int, ...] | None
    release_before_step: frozenset[int]
    release_before_forward: frozenset[int]
    wasted: frozenset[int]
    collected: bool

    @property
    def steps(self) -> int:
        return len(self.neighbour)

    def load(self, step: int) -> Load:
        loads = self.loads if 2 * step < self.steps else self.loads_later
        return loads[step % len(loads)]

    @property
    def peak(self) -> float:
        return max(load.peak for load in (*self.loads, *self.loads_later))


shares = st.one_of(st.floats(0, 3), st.sampled_from([0.0, 1.0]))
loads = st.builds(Load, shares, st.tuples(*[shares] * 5), shares)
steps_of = st.integers(2, MOST_STEPS)


@st.composite
def histories(draw: st.DrawFn) -> History:
    steps = draw(steps_of)
    spare = draw(st.one_of(st.floats(0, 2), st.floats(0, 0.2), st.floats(2, 20)))
    known_peak = draw(st.booleans())
    wants = st.floats(0, 2 * spare if known_peak else spare) | st.just(0.0)
    return History(
        spare=spare,
        loads=tuple(draw(st.lists(loads, min_size=1, max_size=3))),
        loads_later=tuple(draw(st.lists(loads, min_size=1, max_size=3))),
        neighbour=tuple(draw(st.lists(wants, min_size=steps, max_size=steps))),
        known_peak=known_peak,
        policy=draw(st.sampled_from(["adaptive"] * 6 + ["stride:1", "stride:2", 0.0, 0.5])),
        subgroup_size=draw(st.sampled_from([100, 150, 300, 700, 1500])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        attach_at=draw(st.none() | st.integers(0, steps - 1)),
        offload_gradients=draw(st.booleans()),
        budget=draw(st.none() | st.none() | st.integers(0, 2 * STATE_BYTES) | st.floats(0, 1)),
        budgets=draw(
            st.none() | st.none() | st.lists(st.integers(0, 2 * STATE_BYTES), min_size=steps, max_size=steps).map(tuple)
        ),
        release_before_step=draw(st.frozensets(st.integers(0, steps - 1), max_size=2)),
        release_before_forward=draw(st.frozensets(st.integers(0, steps - 1), max_size=2)),
        wasted=draw(st.frozensets(st.integers(0, steps - 1), max_size=2)),
        collected=draw(st.sampled_from([False] * 15 + [True])),
    )


@dataclass
class Process:
    """The training process's own memory on the device, and its neighbour's."""

    history: History
    step: int = 0
    nbytes: int = 0
    device: EmulatedDevice = field(init=False)

    def __post_init__(self) -> None:
        if self.history.known_peak:
            self.nbytes = self._bytes(self.history.peak)
        # A device that could never hold a slot of a fixed plan is refused.
        least = self._bytes(1.05) if str(self.history.policy).startswith("stride") else 1
        self.device = EmulatedDevice(
            FAST,
            capacity=max(least, self._bytes(self.history.peak) + self._bytes(self.history.spare)),
            occupied=lambda: self.nbytes,
            neighbour=lambda: self._bytes(self.history.neighbour[self.step]),
        )

    def take(self, share: float) -> None:
        """Take so much instead of what was taken before. Raises torch.OutOfMemoryError, as any allocation would."""
        wanted, free = self._bytes(share), self.device.memory().free
        if wanted - self.nbytes > free:
            raise torch.OutOfMemoryError(f"the training process wants {wanted} bytes, has {self.nbytes}, free: {free}")
        self.nbytes = wanted

    @staticmethod
    def _bytes(share: float) -> int:
        return int(share * STATE_BYTES)


def forward_and_backward(model: nn.Module, process: Process, step: int) -> None:
    load = process.history.load(step)
    process.take(load.forward / 2)
    loss = loss_of(model, step)
    process.take(load.forward)
    loss.backward()
    process.take(load.update)


def watch_backward(model: nn.Module, on_gradient: Callable[[int], None]) -> None:
    """Call back as each gradient is there, with its number in this order."""
    parameters = list(model.parameters())
    for position, parameter in enumerate(parameters):
        number = len(parameters) - 1 - position

        def accumulated(_: Tensor, number: int = number) -> None:
            on_gradient(number)

        parameter.register_post_accumulate_grad_hook(accumulated)


def run(history: History) -> None:
    """Train through the history and check what must hold in every one.

    Growth of the process that does not fit is the process's own error, which it handles as `release_memory` says.
    """
    process, model = Process(history), mlp(history.dtype)
    device = process.device
    watch_backward(model, lambda number: process.take(history.load(process.step).backward[number]))
    budgets = history.budgets
    optimizer = DOSAdam(
        model.parameters(),
        policy=history.policy,
        subgroup_size=history.subgroup_size,
        offload_gradients=history.offload_gradients,
        memory_budget=history.budget if budgets is None else lambda: budgets[process.step],
        device=device,
    )
    for step in range(history.steps):
        process.step = step
        if step == history.attach_at:
            optimizer.attach(model)
        if step in history.release_before_forward:
            optimizer.release_memory()
        optimizer.zero_grad()
        try:
            if step in history.wasted:
                forward_and_backward(model, process, step)
                optimizer.zero_grad()
            forward_and_backward(model, process, step)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            optimizer.release_memory()
            forward_and_backward(model, process, step)
        if step in history.release_before_step:
            optimizer.release_memory()
        optimizer.step()
        assert device.peak_bytes <= device.capacity
    optimizer.synchronize()
    assert bits(model.parameters()) == bits_on_host(history.dtype, history.steps)
    if history.collected:
        del optimizer
        gc.collect()
    else:
        optimizer.release_memory()
    assert device.usage().held == 0
    assert device.peak_bytes <= device.capacity


@pytest.mark.timeout(3600)
@settings(
    max_examples=int(BY_HAND or 90),
    derandomize=BY_HAND is None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a history as found says more than one shrunk for minutes
    suppress_health_check=list(HealthCheck),
)
@given(histories())
def test_no_history_of_memory_changes_a_bit_or_exceeds_the_capacity(history: History) -> None:
    run(history)
