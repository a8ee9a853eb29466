"""A store and a format that nothing knows: each needs what docs/architecture.md names, and nothing else."""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

import perfmodel.demand
import perfmodel.schedule
from dos import DOSAdam, EmulatedDevice
from dos.devices import Copy, Job
from dos.kernels.update import AdamBatch
from dos.rules.adamw import AdamW
from dos.rules.base import Run
from dos.state.arena import State, state_copies
from dos.state.subgroup import Subgroup
from perfmodel import Op, Placement, Plan, Span, Workload
from perfmodel.format import Field, Format
from perfmodel.plan import Move, Tier
from perfmodel.schedule import FLUSH, PREFETCH
from tests.support.random_plans import RandomPlans
from tests.support.training import FAST, bits, mlp, plan_anew, train

pytestmark = pytest.mark.usefixtures("one_core")

E = TypeVar("E", bound=enum.Enum)


def member(of: type[E], name: str, value: object) -> E:
    """One more member of an enum, which cannot be extended."""
    made = object.__new__(of)
    made._name_, made._value_ = name, value
    return made


SHELF = member(Tier, "SHELF", "shelf")
SHELVED = member(Placement, "SHELVED", ("shelved", SHELF))
SHELVED.label, SHELVED.stays = SHELVED.value


class Shelf:
    """State as bytes in a dictionary."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.kept: dict[Subgroup, bytes] = {}
        self.stored = self.dropped = 0

    def has(self, subgroup: Subgroup) -> bool:
        return subgroup in self.kept

    def reserve(self, subgroups: Iterable[Subgroup]) -> list[Subgroup]:
        self.kept |= dict.fromkeys(subgroups, b"")
        return []

    def drop(self, subgroup: Subgroup) -> None:
        self.dropped += 1
        del self.kept[subgroup]

    def fetch(self, subgroup: Subgroup) -> State:
        return subgroup.state.carve(torch.frombuffer(bytearray(self.kept[subgroup]), dtype=torch.uint8))

    def store(
        self, number: int, subgroup: Subgroup, source: State, after: Sequence[Job], beside: Sequence[Copy] = ()
    ) -> Job:
        buffer = torch.empty(subgroup.state.carved_bytes, dtype=torch.uint8)
        copies = state_copies(subgroup.state.carve(buffer), source)
        return Shelving(self, subgroup, buffer, self.device.copy(Op.FLUSH, number, copies, after))


class Shelving:
    """The job that brings state to the shelf."""

    def __init__(self, shelf: Shelf, subgroup: Subgroup, buffer: torch.Tensor, job: Job) -> None:
        self.shelf, self.subgroup, self.buffer, self.job = shelf, subgroup, buffer, job

    def wait(self) -> Span:
        span = self.job.wait()
        self.shelf.kept[self.subgroup] = self.buffer.numpy().tobytes()
        self.shelf.stored += 1
        return span


class WithShelf:
    """Plans that change at every step, of four placements."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, workload: Workload) -> Plan:
        n = len(workload.subgroups)
        return Plan(tuple(self.random.choices([*Placement, SHELVED, SHELVED], k=n)), tuple(range(n)), slots=2)


@pytest.mark.parametrize(("seed", "offload_gradients"), [(0, False), (1, True), (2, False)])
def test_a_store(seed: int, offload_gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, destination, what in (
        (SHELF, Tier.DEVICE, PREFETCH),
        (Tier.DEVICE, SHELF, FLUSH),
        (SHELF, Tier.HOST, FLUSH),
    ):
        monkeypatch.setitem(perfmodel.schedule.MOVES, Move(source, destination), what)
    model, twin = mlp(), mlp()
    device = EmulatedDevice(FAST, 10**9)
    optimizer = DOSAdam(
        model.parameters(),
        policy=WithShelf(seed),
        subgroup_size=150,
        device=device,
        offload_gradients=offload_gradients,
    )
    reference = DOSAdam(twin.parameters(), policy="cpu", subgroup_size=150, device=EmulatedDevice(FAST, 10**9))
    assert optimizer._session.on_device is not None
    stores, shelf = optimizer._session.ledger.stores, Shelf(device)
    stores.of = {Tier.DEVICE: stores.device, SHELF: shelf, Tier.HOST: stores.host}
    for step in range(8):
        train(model, optimizer, 1, first_step=step)
        optimizer.synchronize()
        plan_anew(optimizer)
    assert shelf.stored > 10
    assert shelf.dropped > 0
    assert shelf.kept
    train(twin, reference, 8)
    assert bits(model.parameters()) == bits(twin.parameters())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert bits([optimizer.state[p]["exp_avg_sq"]]) == bits([reference.state[q]["exp_avg_sq"]])
    assert not shelf.kept, "reading brings it home"


class WithNotes(AdamW):
    """AdamW's state has one more field, of which its kernels know nothing."""

    def format(self, parameter: Tensor, *, accelerated: bool, extra: Collection[str]) -> Format:
        known = super().format(parameter, accelerated=accelerated, extra=extra)
        return Format("with notes", known.values, (*known.fields, Field("notes", "int16", "notes")))

    def batch(self, runs: Sequence[Run]) -> AdamBatch:
        return super().batch([run._replace(fields=known_fields(run)) for run in runs])


def known_fields(run: Run) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in run.fields.items() if name != "notes"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_format(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = mlp(dtype), mlp(dtype)
    reference = DOSAdam(twin.parameters())
    train(twin, reference, 8)
    monkeypatch.setattr(DOSAdam, "_rule", WithNotes)
    device = EmulatedDevice(FAST, 10**9)
    optimizer = DOSAdam(model.parameters(), policy=RandomPlans(0, slots=2), subgroup_size=150, device=device)
    train(model, optimizer, 1)
    for number, p in enumerate(model.parameters()):
        optimizer.state[p]["notes"].fill_(number)
    train(model, optimizer, 7, first_step=1)
    assert bits(model.parameters()) == bits(twin.parameters())
    for number, (p, q) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
        assert bits([optimizer.state[p]["exp_avg"]]) == bits([reference.state[q]["exp_avg"]])
        assert optimizer.state[p]["notes"].unique().tolist() == [number], "it goes wherever state goes"
    assert "notes" in optimizer.state_dict()["state"][0]
