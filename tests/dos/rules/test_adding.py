"""A rule that nothing knows: momentum on whole tensors, on the device alone. It needs this file and nothing else.

One that stays has these lines in dos/rules, its arithmetic in dos/kernels, and an optimizer that chooses it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dos import DOSAdam, EmulatedDevice
from dos.rules.base import Rule, Run, check_number
from dos.torch_internals.operators import tensor_at
from perfmodel import Placement, Plan, SubgroupLoad, Workload
from perfmodel.adaptive import adaptive
from perfmodel.format import MASTER, MASTER_KEY, Field, Format
from perfmodel.policies import off_cpu
from tests.support.devices import Unreliable
from tests.support.fake_ranks import fake_ranks
from tests.support.inside import plan_anew
from tests.support.random_plans import RandomPlans
from tests.support.training import FAST, bits, loss_of, mlp, profile, train

pytestmark = pytest.mark.usefixtures("one_core")

KEY = "momentum_buffer"


class Settings(NamedTuple):
    lr: float
    momentum: float
    decay: float
    scale: float


def move(values: Tensor, buffer: Tensor, gradient: Tensor, settings: Settings) -> None:
    """The update, float32. The norm is why a parameter cannot be updated in parts."""
    buffer.mul_(settings.momentum).add_(gradient.float() * settings.scale).add_(values, alpha=settings.decay)
    values.sub_(buffer / (buffer.norm() + 1e-8), alpha=settings.lr)


class WholeTensors:
    """A batch of whole parameters."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.follow(())
        self.gradients: list[tuple[int, torch.dtype]] = []
        self.which: Sequence[int] = ()

    def follow(self, moves: Iterable[tuple[int, int, int]]) -> None:
        moved = list(moves)

        def at(tensor: Tensor) -> Tensor:
            address = tensor.data_ptr()
            address += sum(to - start for start, to, nbytes in moved if start <= address < start + nbytes)
            return tensor_at(address, len(tensor), tensor.dtype, tensor.device)

        for number, (updated, fields, out, shaped) in enumerate(self.runs):
            here = {name: at(tensor) for name, tensor in fields.items()}
            self.runs[number] = Run(at(updated), here, None if out is None else at(out), shaped)

    def point(self, addresses: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        self.gradients = list(zip(addresses, dtypes, strict=True))

    def choose(self, settings: Sequence[Settings], which: Sequence[int] | None = None) -> None:
        self.which = which or [0] * len(self.runs)

    def updates(self, settings: Sequence[Settings]) -> list[tuple[Run, int, torch.dtype, Settings]]:
        each = zip(self.runs, self.gradients, self.which, strict=True)
        return [(run, address, dtype, settings[i]) for run, (address, dtype), i in each if address]


@dataclass(frozen=True)
class Momentum:
    """Settings are those of DOSAdam's groups; the first of `betas` is the momentum."""

    keys: ClassVar[tuple[str, ...]] = (KEY, MASTER_KEY)
    whole: ClassVar[bool] = True
    on_cpu: ClassVar[bool] = False

    def agreed(self) -> dict[str, str]:
        return {"the optimizer": "momentum"}

    def check(self, group: Mapping[str, Any], where: str) -> None:
        check_number(group["lr"], f"{where}: lr")
        if not group["lr"] >= 0:
            raise ValueError(f"{where}: lr must be 0 or more, found {group['lr']}")

    def adopt(self, saved: MutableMapping[str, Any], own: Mapping[str, Any], where: str) -> None:
        self.check(saved, where)

    def extra(self, group: Mapping[str, Any]) -> Mapping[str, str]:
        return {}

    def format(self, parameter: Tensor, *, extra: Collection[str]) -> Format:
        values = str(parameter.dtype).removeprefix("torch.")
        master = () if values == "float32" else (Field(MASTER, "float32", MASTER_KEY),)
        return Format("momentum", values, (Field("momentum", "float32", KEY), *master))

    def problem(
        self, entry: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any] | None = None
    ) -> str | None:
        return None if not entry or KEY in entry else f"its state has no {KEY!r}"

    def empty_entry(self, parameter: Tensor) -> dict[str, Tensor]:
        return {key: torch.empty(parameter.shape, device="cpu") for key in self.keys}

    def write_entry(self, entry: Mapping[str, Any], parameter: Tensor, views: Mapping[str, Tensor]) -> None:
        for key, view in views.items():
            view.copy_(entry[key]) if key in entry else view.zero_()

    def settings(self, group: Mapping[str, Any], count: float, scale: float) -> Settings:
        return Settings(group["lr"], group["betas"][0], group["weight_decay"], scale)

    def batch(self, runs: Sequence[Run]) -> WholeTensors:
        return WholeTensors(runs)

    def prepare(self, batches: Sequence[WholeTensors], settings: Sequence[Settings]) -> Callable[[], None]:
        updates = [update for batch in batches for update in batch.updates(settings)]

        @torch.no_grad()
        def update() -> None:
            for run, address, dtype, chosen in updates:
                gradient = tensor_at(address, len(run.updated), dtype, run.updated.device)
                values, buffer, flat = (run.shaped(t) for t in (run.updated, run.fields["momentum"], gradient))
                move(values, buffer, flat, chosen)
                if run.out is not None:
                    run.out.copy_(run.updated)

        return update


class DOSMomentum(DOSAdam):
    @staticmethod
    def _rule(master_weights: bool, state_format: str | None) -> Rule:
        return Momentum()


class Plain(torch.optim.Optimizer):
    """The same update, a parameter after the other."""

    def __init__(self, params: Any, settings: Settings) -> None:
        super().__init__(params, {})
        self.settings = settings
        self.masters = {p: p.detach().clone().float() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p, master in ((p, master) for p, master in self.masters.items() if p.grad is not None):
            move(master, self.state[p].setdefault(KEY, torch.zeros_like(master)), p.grad, self.settings)
            p.copy_(master)


PLAIN = Settings(lr=0.02, momentum=0.9, decay=0.1, scale=1.0)
SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.0), "weight_decay": 0.1}


class DeviceAlone(EmulatedDevice):
    """Has no CPU beside it that could update."""

    def host_update(self, *asked: Any) -> AbstractContextManager[float]:
        raise AssertionError("the rule has no arithmetic for the CPU")


def assert_as_plain(
    optimizer: DOSAdam, model: nn.Module, steps: int, make: Callable[[torch.dtype], nn.Module] = mlp
) -> None:
    """Parameters and state, after so many steps. make: the model as it was."""
    twin = make(next(model.parameters()).dtype)
    reference = Plain(twin.parameters(), PLAIN)
    train(twin, reference, steps)
    assert bits(model.parameters()) == bits(twin.parameters())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert bits([optimizer.state[p][KEY]]) == bits([reference.state[q][KEY]])
        if p.dtype != torch.float32:
            assert bits([optimizer.state[p][MASTER_KEY]]) == bits([reference.masters[q]])


def _name(policy: Any) -> str:
    return "random" if isinstance(policy, RandomPlans) else str(policy)


@pytest.mark.parametrize("more", [{}, {"attach": True}, {"offload_gradients": True}], ids=str)
@pytest.mark.parametrize("policy", [RandomPlans(0, slots=2), "stride:2", "resident", "cpu", 0.5], ids=_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_momentum_on_whole_tensors(dtype: torch.dtype, policy: Any, more: dict[str, bool]) -> None:
    model, settings = mlp(dtype), dict(more)
    attach = settings.pop("attach", False)
    optimizer = DOSMomentum(
        model.parameters(),
        policy=copy.deepcopy(policy),
        device=DeviceAlone(FAST, 10**9),
        subgroup_size=100,
        **SETTINGS,
        **settings,
    )
    if attach:
        optimizer.attach(model)
    placements = set[Placement]()
    for step in range(10):
        train(model, optimizer, 1, first_step=step)
        plan = optimizer.plan()
        placements |= set(plan.placements)
        if attach:
            optimizer.synchronize()
        plan_anew(optimizer)
    streamed, resident = {Placement.GPU_STREAMED}, {Placement.GPU_RESIDENT}
    expected = {"resident": resident, "cpu": streamed, "stride:2": streamed}
    assert placements == expected.get(policy if isinstance(policy, str) else "", streamed | resident)
    assert len(plan) > 1
    assert_as_plain(optimizer, model, 10)


def deep(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)), nn.Linear(24, 7)).to(dtype)


@pytest.mark.parametrize("budget", [0, 10_000, 10**6])
def test_adaptive_plans_without_the_cpu(budget: int) -> None:
    """By which the link is slow and the CPU fast, so that with any other rule the CPU would update."""
    slow_link = profile(h2d_bandwidth=1e8, d2h_bandwidth=1e8, h2d_bandwidth_duplex=1e8, d2h_bandwidth_duplex=1e8)
    settings: dict[str, Any] = {"memory_budget": budget, "subgroup_size": 600, **SETTINGS}
    model, other = deep(), deep()
    adamw = DOSAdam(other.parameters(), device=EmulatedDevice(slow_link, 10**9), **settings)
    train(other, adamw, 2)
    assert (Placement.CPU in getattr(adamw.plan(), "placements", ())) == (budget < 10**6)
    optimizer = DOSMomentum(model.parameters(), device=DeviceAlone(slow_link, 10**9), **settings)
    train(model, optimizer, 6)
    plan = optimizer.plan()
    assert (Placement.GPU_RESIDENT in plan.placements) == (budget > 0)
    assert (Placement.GPU_STREAMED in plan.placements) == (budget < 10**6)
    assert_as_plain(optimizer, model, 6, deep)


@pytest.mark.parametrize(("free", "residents"), [(0, 0), (4000, 0), (20_000, 4), (10**6, 8)])
def test_the_planner_gives_the_cpu_nothing(free: int, residents: int) -> None:
    state = Momentum().format(torch.empty(0), extra=())
    loads = tuple(SubgroupLoad.of(1000, state, on_cpu=False) for _ in range(8))
    work = Workload(loads, 0.01, 0.01, peak_free_bytes=free, shared_free_bytes=free, update_free_bytes=free)
    plan = off_cpu(adaptive(work, FAST), work)
    assert Placement.CPU not in plan.placements
    assert plan.placements.count(Placement.GPU_RESIDENT) == residents
    some = tuple(SubgroupLoad.of(1000, state, on_cpu=i % 2 == 0) for i in range(8))
    mixed = off_cpu(Plan((Placement.CPU,) * 8, tuple(range(8)), slots=0), Workload(some))
    assert mixed.placements == (Placement.CPU, Placement.GPU_STREAMED) * 4
    assert mixed.slots == 1


def test_without_memory_a_step_is_refused_and_nothing_has_changed() -> None:
    model, device = mlp(), Unreliable(failing=0.5)
    optimizer = DOSMomentum(
        model.parameters(), policy=RandomPlans(1, slots=2), device=device, subgroup_size=100, **SETTINGS
    )
    refusals, unchanged = list[str](), list[bool]()

    def step_once_there_is_memory() -> None:
        before = bits(model.parameters())
        for _ in range(100):
            try:
                optimizer.step()
            except torch.OutOfMemoryError as error:
                refusals.append(str(error))
                plan_anew(optimizer)
                unchanged.append(bits(model.parameters()) == before)
            else:
                return plan_anew(optimizer)
        raise AssertionError("it is never there")

    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        step_once_there_is_memory()
    assert device.failures > len(refusals) > 0
    assert all("for the CPU cannot update it" in refusal for refusal in refusals)
    assert all(unchanged)
    assert_as_plain(optimizer, model, 12)


def test_state_dicts() -> None:
    model, resumed = mlp(torch.bfloat16), mlp(torch.bfloat16)

    def made(trained: nn.Module) -> DOSMomentum:
        return DOSMomentum(
            trained.parameters(), policy="stride:2", device=DeviceAlone(FAST, 10**9), subgroup_size=100, **SETTINGS
        )

    optimizer, another = made(model), made(resumed)
    train(model, optimizer, 5)
    state = copy.deepcopy(optimizer.state_dict())
    assert {key for entry in state["state"].values() for key in entry} == {"step", KEY, MASTER_KEY}
    resumed.load_state_dict(model.state_dict())
    another.load_state_dict(state)
    train(resumed, another, 5, first_step=5)
    assert_as_plain(another, resumed, 10)
    del state["state"][0][KEY]
    with pytest.raises(ValueError, match="its state has no 'momentum_buffer'"):
        another.load_state_dict(state)


def test_parameters_and_settings_outside_the_rule_are_refused() -> None:
    with pytest.raises(ValueError, match="is on cpu, where this optimizer cannot update"):
        DOSMomentum(mlp().parameters())
    with pytest.raises(ValueError, match="updates them as a whole; leave disk= out"):
        DOSMomentum(mlp().parameters(), device=DeviceAlone(FAST, 10**9), disk="/tmp")
    with fake_ranks(2):
        divided = nn.Parameter(distribute_tensor(torch.zeros(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
        with pytest.raises(ValueError, match=r"parameter 0 .* is a DTensor, divided over ranks"):
            DOSMomentum([divided], device=DeviceAlone(FAST, 10**9))
    with pytest.raises(ValueError, match="param group 0: lr must be 0 or more"):
        DOSMomentum([{"params": mlp().parameters(), "lr": -1.0}], device=DeviceAlone(FAST, 10**9))
