"""DistributedDataParallel: gradients leave when their bucket was reduced, and the bits stay those of step()."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dos.sharding.ddp
from dos import DOSAdam, EmulatedDevice
from perfmodel import Op, Placement
from tests.support.devices import Copying, LateDevice
from tests.support.processes import run_python
from tests.support.random_plans import InTurn
from tests.support.ranks import on_pair
from tests.support.sharded import adamw, assert_close, assert_equal, batch, dos_adam, model, values
from tests.support.training import profile


def halves(state, bucket):  # without annotations, which DDP compares with types
    """A hook of the user's own, which is not DDP's reduction."""
    state.append(bucket.index())
    buffer = bucket.buffer().div_(2 * dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


def run(optimizer_of: Any, hook: bool, view: bool, attach: bool, micro_batches: int) -> list[Tensor]:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.001, gradient_as_bucket_view=view)
    optimizer = optimizer_of(ddp.parameters())
    calls: list[int] = []
    if isinstance(optimizer, DOSAdam):
        optimizer.register_ddp(ddp, *((halves, calls) if hook else ()))
        if attach:
            optimizer.attach(ddp)
    elif hook:
        ddp.register_comm_hook(calls, halves)
    for step in range(4):
        for micro_batch in range(micro_batches):
            ddp.require_backward_grad_sync = micro_batch == micro_batches - 1
            rows = batch(10 * step + micro_batch) + dist.get_rank()
            ddp(rows).pow(2).mean().backward()
        if step == 2:  # after their buckets have left
            torch._foreach_neg_([p.grad for p in ddp.parameters()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=not view)
    if isinstance(optimizer, DOSAdam):
        optimizer.synchronize()
    assert bool(calls) == hook
    return values(ddp.module)


@pytest.mark.parametrize(
    ("policy", "hook", "view", "attach", "micro_batches"),
    [
        ("cpu", False, False, True, 1),
        ("cpu", False, True, False, 2),
        ("stride:2", True, False, True, 2),
        ("resident", True, True, False, 1),
    ],
)
@on_pair
def test_steps_are_those_of_adamw(policy: str, hook: bool, view: bool, attach: bool, micro_batches: int) -> None:
    found = run(lambda p: dos_adam(p, policy=policy), hook, view, attach, micro_batches)
    assert_close(found, run(adamw, hook, view, attach, micro_batches))
    quiet = run(lambda p: dos_adam(p, policy="cpu", max_grad_norm=1e9), hook, view, False, micro_batches)
    assert_equal(found, quiet)


@pytest.mark.parametrize("registered", [True, False])
@on_pair
def test_gradients_leave_during_backward(registered: bool) -> None:
    ddp, device = DistributedDataParallel(model(), bucket_cap_mb=0.001), Copying()
    optimizer = DOSAdam(ddp.parameters(), policy="cpu", subgroup_size=100, device=device)
    if registered:
        optimizer.register_ddp(ddp)
    for step in range(3):
        device.asked.clear()
        ddp(batch(step)).pow(2).mean().backward()
        early = [asked.subgroup for asked in device.asked if asked.op is Op.GRADIENT]
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(early) == list(range(len(optimizer.plan() or ()))) * registered


@on_pair
def test_bad_input() -> None:
    plain = model()
    optimizer = dos_adam(plain.parameters())
    with pytest.raises(TypeError, match="expected a DistributedDataParallel model, found Sequential"):
        optimizer.register_ddp(plain)
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.register_comm_hook([], halves)
    with pytest.raises(RuntimeError, match="one communication hook, and this model has one already"):
        dos_adam(ddp.parameters()).register_ddp(ddp)


@on_pair
def test_switches_are_refused_on_every_rank() -> None:
    """The same gradients are used once it is put back."""
    ends = []
    for switched in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(11, 7), nn.Linear(7, 3)), bucket_cap_mb=0.0001)
        optimizer = dos_adam(ddp.parameters(), policy="cpu")
        optimizer.register_ddp(ddp)
        weight, (group,) = next(ddp.parameters()), optimizer.param_groups
        for step in range(4):
            ddp(batch(step) + dist.get_rank()).pow(2).mean().backward()
            if step in (1, 2) and switched:  # not before, for DDP itself would mix the gradient's elements up
                weight.data = weight.data.t().contiguous().t()
                with pytest.raises(RuntimeError, match="its axes in the order"):
                    optimizer.step()
                weight.data, group["amsgrad"] = weight.data.contiguous(), True
                with pytest.raises(RuntimeError, match="found amsgrad=True"):
                    optimizer.step()
                group["amsgrad"] = False
            optimizer.step()
            optimizer.zero_grad()
        ends.append([*values(ddp.module), *(optimizer.state[weight][key] for key in ("step", "exp_avg"))])
    assert_equal(*ends)


@on_pair
def test_a_model_may_have_several_optimizers() -> None:
    ddp = DistributedDataParallel(model())
    parameters = list(ddp.parameters())
    both = [dos_adam(half, policy="cpu") for half in (parameters[::2], parameters[1::2])]
    for optimizer in both:
        optimizer.register_ddp(ddp)
    alone = model()
    other = dos_adam(alone.parameters(), policy="cpu")
    for step in range(3):
        for each in (ddp, alone):
            each(batch(step)).pow(2).mean().backward()
        for optimizer in (*both, other):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(values(ddp.module), values(alone))


@on_pair
def test_join_broadcasts_what_updates_have_left() -> None:
    """Leaving the block broadcasts the parameters of the rank that went on for longest, to which updates may write."""
    ends = []
    for attached in ("", "model", "DDP"):
        inside = model()
        ddp = DistributedDataParallel(inside)
        numel = sum(p.numel() for p in inside.parameters())
        rates = profile(cpu_update_rate=numel / 0.1) if attached else profile()
        optimizer = dos_adam(inside.parameters(), policy="cpu", device=EmulatedDevice(rates, 1 << 24))
        if attached:
            optimizer.attach(ddp if attached == "DDP" else inside)
        for epoch in range(2):
            with ddp.join():
                for step in range(2 + dist.get_rank()):
                    ddp(batch(10 * epoch + step)).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        inside(batch(0)).pow(2).mean().backward()
        optimizer.step()
        DistributedDataParallel(inside)  # broadcasts, too
        optimizer.synchronize()
        ends.append(values(inside))
    for found in ends[1:]:
        assert_equal(found, ends[0])


class Halves(nn.Module):
    """One of two layers takes part only where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(11, 11), nn.Linear(11, 11)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.last(self.first(x)) if both else self.first(x)


@pytest.mark.parametrize(
    ("registered", "view", "placement", "offload"),
    [
        (True, False, Placement.CPU, False),
        (False, True, Placement.CPU, False),
        (False, True, Placement.GPU_RESIDENT, False),
        (False, True, Placement.CPU, True),
    ],
    ids=["reduced", "views", "views read by the device", "views that leave"],
)
@on_pair
def test_gradients_are_used_before_ddp_writes_those_that_took_no_part(
    registered: bool, view: bool, placement: Placement, offload: bool
) -> None:
    """DDP zeroes their parts of the buckets as backward begins, before any hook, and no module has waited for them."""
    ends = []
    for attach in (False, True):
        ddp = DistributedDataParallel(
            Halves(), bucket_cap_mb=1e-4, find_unused_parameters=True, gradient_as_bucket_view=view
        )
        device = LateDevice(lambda op: 0.03 if op in (Op.GRADIENT, Op.UPDATE) else 0)
        own = ddp.module.last.parameters()
        optimizer = dos_adam(own, policy=InTurn(placement), device=device, offload_gradients=offload)
        if registered:
            optimizer.register_ddp(ddp)
        if attach:
            optimizer.attach(ddp)
        for both in (True, True, False, True):
            ddp(batch(0), both=both).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        ends.append(values(ddp.module))
    assert_equal(*ends)


@on_pair
def test_state_comes_for_a_bucket_that_took_no_part_once_it_is_at_home() -> None:
    """The first gradient is that of another optimizer, so that no hook of ours has ended the last step."""
    ends = []
    for late in (0, 0.03):
        device = LateDevice(lambda op, late=late: late if op is Op.FLUSH else 0)
        ddp = DistributedDataParallel(Halves(), bucket_cap_mb=1e-4, find_unused_parameters=True)
        policy = InTurn(*[Placement.GPU_STREAMED] * 3, Placement.GPU_RESIDENT)
        optimizer = dos_adam(ddp.module.last.parameters(), policy=policy, device=device)
        optimizer.register_ddp(ddp)
        optimizer.attach(ddp)
        for step in range(4):
            ddp(batch(step), both=step != 2).pow(2).mean().backward()
            if step != 2:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.synchronize()
        ends.append(values(ddp.module.last))
    assert_equal(*ends)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_a_single_rank_leave_during_backward_unless_a_model_of_ddp_has_their_parameters() -> None:
    inside, device = model(), Copying()
    optimizer = DOSAdam(inside.parameters(), policy="cpu", subgroup_size=100, device=device)

    def early(module: nn.Module) -> bool:
        left: list[int] = []
        for step in range(2):
            device.asked.clear()
            module(batch(step)).pow(2).mean().backward()
            left = sorted({asked.subgroup for asked in device.asked if asked.op is Op.GRADIENT})
            optimizer.step()
            optimizer.zero_grad()
        assert left in ([], list(range(len(optimizer.plan() or ()))))
        return bool(left)

    assert early(inside), "there is a process group, and no DDP"
    other = DistributedDataParallel(model())
    assert early(inside), "DDP has another model"
    ddp = DistributedDataParallel(inside, init_sync=False)
    assert not early(ddp)
    assert not early(inside)
    again = DistributedDataParallel(inside)
    del ddp
    gc.collect()
    assert not early(again)
    del again, other
    gc.collect()
    assert early(inside), "DDP is gone"


@pytest.mark.usefixtures("one_rank")
def test_copies_of_ddp_are_known() -> None:
    ddp = copy.deepcopy(DistributedDataParallel(nn.Linear(2, 2)))
    gc.collect()
    assert dos.sharding.ddp.reduced >= {*map(id, ddp.parameters())}
    del ddp
    gc.collect()
    assert not dos.sharding.ddp.reduced


@on_pair
def test_gradients_that_user_code_reduces_after_backward_are_used() -> None:
    ends = []
    for optimizer_of in (adamw, lambda p: dos_adam(p, policy="cpu", device=LateDevice(lambda op: 0))):
        inside = model()
        optimizer = optimizer_of(inside.parameters())
        for step in range(3):
            inside(batch(step) + dist.get_rank()).pow(2).mean().backward()
            for parameter in inside.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(optimizer, DOSAdam):
            optimizer.synchronize()
        ends.append(values(inside))
    assert_close(*ends)


ALONE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = DistributedDataParallel(torch.nn.Linear(2, 2))

from dos.sharding import ddp as of_ddp
from perfmodel import Op
from tests.support.devices import LateDevice
from tests.support.sharded import assert_equal, batch, dos_adam, model, values

assert of_ddp.reduced == {*map(id, before.parameters())}, "it is older than the package"
ends = []
for view in (False, True):
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=view)
    device = LateDevice(lambda op: 0.02 if op is Op.GRADIENT else 0)
    optimizer = dos_adam(ddp.parameters(), policy="cpu", device=device, offload_gradients=True)
    for step in range(2):
        for micro_batch in range(2):
            ddp(batch(10 * step + micro_batch)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    ends.append(values(ddp.module))
assert_equal(*ends)
"""


def test_gradients_of_a_single_rank_stay_in_buckets_until_the_step() -> None:
    """DDP zeroes its part of a bucket where a gradient was taken away, while that leaves."""
    run_python("-c", ALONE)
