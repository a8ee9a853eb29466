"""Updates during backward under FSDP2: they begin when ranks have reduced a gradient, with the bits of step()."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dos.state.host_store import HostStore
from dos.step.ledger import Ledger
from dos.torch_internals import modes
from perfmodel import Placement, Plan, Workload
from tests.support.inside import in_backward, plan_anew
from tests.support.ranks import Ranks, on_pair
from tests.support.sharded import (
    Block,
    adamw,
    assert_close,
    batch,
    dos_adam,
    mesh_of,
    model,
    shard,
    values,
)
from tests.support.training import Raises, bits

WIDTH = 11
BF16 = torch.bfloat16


class Net(nn.Module):
    """order: of the blocks in forward. recomputes: None, or how checkpointing recomputes them. tied: with the input."""

    def __init__(self, order: Sequence[int] = (0, 1, 2), recomputes: str | None = None, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.recomputes = order, recomputes
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.last, self.raises = nn.Linear(WIDTH, WIDTH, bias=False), False
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in self.order:
            again = {"use_reentrant": self.recomputes == "reentrant"}
            x = self.blocks[i](x) if self.recomputes is None else checkpoint(self.blocks[i], x, **again)
            if self.raises and i == 1:
                x = Raises.apply(x)
        return self.last(x)


def divided(net: Net, replicas: int = 1, dtype: torch.dtype = torch.float32, **how: Any) -> Net:
    mesh = mesh_of(2, replicas) if replicas > 1 else mesh_of()
    net.to(dtype)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(net, mesh=mesh, **how)


def state_of(optimizer: Any) -> list[Tensor]:
    entries = optimizer.state_dict()["state"].values()
    return [value.full_tensor() for entry in entries for key, value in sorted(entry.items()) if key != "step"]


def trained(
    net: Net, updates: str, micro_batches: int = 1, waits: str = "no_update", steps: int = 4, **settings: Any
) -> tuple[list[bytes], int]:
    """Bits of parameters and state, and the number of steps of which backward has issued any.

    waits: what surrounds all micro-batches but the last.
    """
    optimizer, dtype, early = dos_adam(net.parameters(), **settings), next(net.parameters()).dtype, 0
    optimizer.attach(net, updates=updates)
    for step in range(steps):
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            if waits == "sync":
                net.set_requires_gradient_sync(last)
            held = optimizer.no_update() if waits == "no_update" and not last else contextlib.nullcontext()
            with held:
                net(batch(10 * step + micro_batch, WIDTH, dtype)).float().square().mean().backward()
        if updates == "backward":
            early += bool(in_backward(optimizer).issued)
            assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return bits([*values(net), *state_of(optimizer)]), early


def same_bits(makes: dict[str, Any], how: dict[str, Any], settings: dict[str, Any]) -> None:
    expected, none = trained(divided(Net(**makes), **how), "step", **settings)
    found, early = trained(divided(Net(**makes), **how), "backward", **settings)
    assert found == expected
    assert (none, early) == (0, 3), "all but the first step, in which nothing is known"


MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
PROGRAMS: list[Any] = [
    ({}, {}, {"policy": "cpu"}),
    ({"recomputes": "not reentrant"}, {"dtype": BF16}, {"policy": "stride:2", "micro_batches": 2, "waits": "sync"}),
    ({"order": (0, 1, 0, 2, 1)}, {"mp_policy": MIXED}, {"policy": "cpu", "micro_batches": 2}),
]
MORE: list[Any] = [
    ({}, {"reshard_after_forward": False}, {"policy": "resident"}),
    ({"recomputes": "reentrant"}, {}, {"policy": "stride:2"}),
    ({"tied": True}, {"dtype": BF16}, {"policy": "stride:2", "state_format": "int8", "subgroup_size": 1024}),
    ({}, {}, {"device": None}),
    ({}, {"dtype": BF16}, {"policy": "stride:2", "offload_gradients": True, "micro_batches": 2}),
    ({}, {}, {"policy": "cpu", "offload_gradients": True, "micro_batches": 2, "waits": "sync"}),
]


@pytest.mark.parametrize(
    ("makes", "how", "settings"), [*PROGRAMS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_same_bits_as_updates_in_step(
    pair: Ranks, makes: dict[str, Any], how: dict[str, Any], settings: dict[str, Any]
) -> None:
    pair.run(same_bits, makes, how, settings)


@pytest.mark.slow
def test_same_bits_where_shards_have_replicas(ranks: Ranks) -> None:
    ranks.run(same_bits, {}, {"replicas": 2}, {"policy": "stride:2", "micro_batches": 2})


@on_pair
def test_updates_begin_when_gradients_are_reduced() -> None:
    """One block after the other, before backward has reached the first; the result is that of torch's AdamW."""
    net, seen = divided(Net()), list[str]()
    net.blocks[0].register_full_backward_pre_hook(lambda *_: seen.append("first block"))
    optimizer, plain = dos_adam(net.parameters(), policy="cpu"), divided(Net())
    other = adamw(plain.parameters())
    optimizer.attach(net, updates="backward")
    issue = Ledger.issue_part
    with patch.object(Ledger, "issue_part", lambda *given: (seen.append("update"), issue(*given))[1]):
        for step in range(4):
            seen.clear()
            for each, its in ((net, optimizer), (plain, other)):
                each(batch(step, WIDTH)).square().mean().backward()
                its.step()
                its.zero_grad()
            assert (seen.index("first block") > 0) == (step > 0)
    optimizer.synchronize()
    assert_close(values(net), values(plain))


PLACED = [Placement.GPU_RESIDENT, Placement.GPU_RESIDENT, Placement.CPU, Placement.GPU_STREAMED]


def all_at_one_place(places: Iterator[Placement], work: Workload) -> Plan:
    return Plan((next(places),) * len(work.subgroups), tuple(range(len(work.subgroups))), 2)


@on_pair
def test_backward_pins_no_memory() -> None:
    """Pinning waits for the device, whose collectives wait for other ranks: such a subgroup waits for step()."""
    ends, pinned = [], list[bool]()
    make = HostStore.make

    def noted(store: HostStore, wanted: Any) -> None:
        before = store.nbytes
        make(store, wanted)
        pinned.append(modes.in_backward() and store.nbytes > before)

    with patch.object(HostStore, "make", noted):
        for updates in ("step", "backward"):
            net = divided(Net(), dtype=BF16)
            optimizer = dos_adam(net.parameters(), policy=functools.partial(all_at_one_place, itertools.cycle(PLACED)))
            optimizer.attach(net, updates=updates)
            for step in range(8):
                net(batch(step, WIDTH, BF16)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                plan_anew(optimizer)
            optimizer.synchronize()
            ends.append(bits([*values(net), *state_of(optimizer)]))
    assert ends[0] == ends[1]
    assert True not in pinned
    assert pinned


@on_pair
def test_a_gradient_that_is_replaced_while_its_subgroup_waits_for_others_is_trained_on() -> None:
    ends = []
    for updates in ("step", "backward"):
        net = divided(Net())
        optimizer = dos_adam(net.parameters(), subgroup_size=10**6)
        optimizer.attach(net, updates=updates)

        def halve(*_: object, p: Tensor = net.blocks[2].up.weight) -> None:
            p.grad = None if p.grad is None else p.grad * 0.5

        net.blocks[0].register_full_backward_pre_hook(halve)
        train(net, optimizer, 3)
        optimizer.synchronize()
        ends.append(bits(values(net)))
    assert ends[0] == ends[1]


@on_pair
def test_a_use_that_no_backward_before_had_is_refused() -> None:
    """Its shards would be gathered anew, with new values, where each use has a gradient of its own."""
    for reshard in (True, False):
        net = divided(Net((0, 1), "reentrant"), reshard_after_forward=reshard)
        optimizer = dos_adam(net.parameters(), policy="cpu", subgroup_size=20)
        optimizer.attach(net, updates="backward")
        train(net, optimizer, 3)
        net.order = (1, 0, 1)
        with pytest.raises(RuntimeError, match="was read in the backward that has already updated it"):
            net(batch(3, WIDTH)).square().mean().backward()
        with pytest.raises(RuntimeError, match="step 3 was the last complete one"):
            optimizer.step()


def train(net: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        net(batch(step, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_pair
def test_a_backward_that_raises_and_shards_that_are_updated_in_part() -> None:
    net = divided(Net())
    optimizer = dos_adam(net.parameters(), policy="cpu", subgroup_size=20)
    optimizer.attach(net, updates="backward")
    train(net, optimizer, 3)
    optimizer.synchronize()
    with torch.no_grad():
        net.blocks[1].up.weight.mul_(0.5)  # step() has to look at it
    net(batch(3, WIDTH)).square().mean().backward()
    for use in (lambda: net(batch(3, WIDTH)), net.blocks[0].unshard, net.state_dict):
        with pytest.raises(RuntimeError, match="when some of its parameters are updated"):
            use()
    optimizer.step()
    net.raises = True
    with pytest.raises(ArithmeticError, match="in backward"):
        net(batch(4, WIDTH)).square().mean().backward()
    with pytest.raises(RuntimeError, match="step 4 was the last complete one"):
        optimizer.step()


@on_pair
def test_what_is_refused_on_several_ranks() -> None:
    """Before anything has changed: a model divided in part, or on the host, and DistributedDataParallel."""
    in_part = model()
    fully_shard(in_part[0], mesh=mesh_of())
    on_host = shard(model(), mesh_of(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    for each in (in_part, on_host, DistributedDataParallel(model())):
        optimizer = dos_adam(each.parameters())
        with pytest.raises(ValueError, match=r"updates parameters while backward runs: .* in one proc.*upd"):
            optimizer.attach(each, updates="backward")
    alone = shard(model(), mesh_of())[0]
    optimizer = dos_adam(alone.parameters())
    optimizer.attach(alone, updates="backward")
