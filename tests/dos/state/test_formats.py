"""Split masters and whole ones: the same bits in any plan, whatever users do to parameters and state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import pytest
import torch
from torch import Tensor

from dos import DOSAdam, EmulatedDevice
from dos.kernels.adam import joined
from dos.kernels.masters import follow
from dos.kernels.update import AdamBatch
from dos.rules.adamw import AdamW
from dos.rules.base import Run
from perfmodel import Op, Placement, Plan, Workload
from perfmodel.format import Field, Format
from tests.support.devices import Copying
from tests.support.inside import plan_anew
from tests.support.random_plans import RandomPlans, all_in
from tests.support.training import FAST, bits, bits_on_host, maker, mlp, train

CPU, STREAMED, RESIDENT = Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT


@pytest.mark.parametrize(
    ("before", "now", "moved"),
    [
        (CPU, CPU, {Op.GRADIENT: 2, Op.PARAMETER: 2}),
        (STREAMED, CPU, {Op.GRADIENT: 2 + 2, Op.PARAMETER: 2}),
        (CPU, STREAMED, {Op.PREFETCH: 10, Op.FLUSH: 10}),
        (STREAMED, STREAMED, {Op.PREFETCH: 10, Op.FLUSH: 10}),
        (CPU, RESIDENT, {Op.PREFETCH: 10}),
        (RESIDENT, RESIDENT, {}),
        (RESIDENT, CPU, {Op.FLUSH: 10}),
    ],
)
@pytest.mark.parametrize("offload_gradients", [False, True])
def test_bytes_that_are_moved(before: Placement, now: Placement, moved: dict[Op, int], offload_gradients: bool) -> None:
    """Per parameter, in the second step; offloaded gradients leave in any case, and come up to be used there."""
    placements = [before, now]

    def policy(workload: Workload) -> Plan:
        return all_in(placements[0], workload, slots=2)

    model, device = mlp(torch.bfloat16), Copying()
    settings_ = {"policy": policy, "device": device, "offload_gradients": offload_gradients}
    optimizer = DOSAdam(model.parameters(), subgroup_size=300, **settings_)
    train(model, optimizer, 2)
    del placements[0]
    plan_anew(optimizer)
    device.asked.clear()
    train(model, optimizer, 1)
    optimizer.synchronize()
    found, expected = Counter[Op](), Counter(moved)
    for asked in device.asked:
        found[asked.op] += asked.nbytes
    if offload_gradients:
        on_host = now is CPU and before is not RESIDENT
        expected[Op.GRADIENT] += 0 if on_host else 2
        expected[Op.PREFETCH] += 0 if on_host else 2
    numel = sum(p.numel() for p in model.parameters())
    assert +found == {op: nbytes * numel for op, nbytes in (+expected).items()}


@pytest.mark.parametrize("between", [STREAMED, RESIDENT])
def test_the_host_reads_again_what_the_device_has_updated(between: Placement) -> None:
    """Its rests are of the device's newest parameters, and what was staged for earlier steps is older."""
    placements = [CPU]
    model = mlp(torch.bfloat16)
    optimizer = maker(lambda workload: all_in(placements[0], workload, slots=2))(model.parameters())
    for step, placements[0] in enumerate([CPU, CPU, between, CPU, CPU]):
        plan_anew(optimizer)
        train(model, optimizer, 1, first_step=step)
    optimizer.synchronize()
    assert bits(model.parameters()) == bits_on_host(torch.bfloat16, 5)


@pytest.mark.parametrize("place", ["host", "cpu", "stride:1", "resident"])
def test_rests_are_live_views(place: str) -> None:
    model = mlp(torch.bfloat16)
    optimizer = maker(place)(model.parameters())
    train(model, optimizer, 3)
    weight = model[0].weight
    for _ in range(2):
        rest = optimizer.state[weight]["master_rest"]
        assert (rest.dtype, rest.shape) == (torch.bfloat16, weight.shape), "whose bits are of int16"
        master = optimizer.adamw_state(weight)["master_param"]
        assert torch.equal(master, joined(weight.detach(), rest.view(torch.int16)))
        assert torch.equal(master.bfloat16(), weight)
        assert not torch.equal(master, weight.float()), "rests say something"
        optimizer.state[weight]["master_rest"].zero_()
        assert torch.equal(optimizer.adamw_state(weight)["master_param"], weight.float())
        train(model, optimizer, 1)


@pytest.mark.parametrize("place", ["host", "adaptive"])
@pytest.mark.parametrize(
    ("dtype", "state_format"), [(torch.bfloat16, None), (torch.bfloat16, "float32"), (torch.float16, None)]
)
def test_masters_follow_what_was_written(dtype: torch.dtype, state_format: str | None, place: str) -> None:
    """On request as in the next step; what was not written to keeps its precision."""
    model = mlp(dtype)
    optimizer = maker(place, state_format=state_format)(model.parameters())
    train(model, optimizer, 2)
    weight = model[0].weight
    kept = optimizer.adamw_state(weight)["master_param"]
    with torch.no_grad():
        weight[1:].mul_(3)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(2):
        master = optimizer.adamw_state(weight)["master_param"]
        assert torch.equal(master.to(dtype), weight)
        assert torch.equal(master[0], kept[0]), "what was not written to"
        assert not torch.equal(master[0], weight[0].float())
        train(model, optimizer, 1)


@pytest.mark.parametrize("place", ["host", "adaptive"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_master_that_user_code_has_put_there_follows_its_parameter(dtype: torch.dtype, place: str) -> None:
    model = mlp(dtype)
    optimizer = maker(place, state_format="float32" if dtype is torch.bfloat16 else None)(model.parameters())
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.0
    before, entry = bits(model.parameters()), optimizer.state[model[0].weight]
    entry["master_param"] = torch.full_like(entry["master_param"], 5.0)
    train(model, optimizer, 1)
    assert bits(model.parameters()) == before


@pytest.mark.parametrize("settings_", [{"master_weights": False}, {}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rests_mean_nothing_to_parameters_of_another_kind(dtype: torch.dtype, settings_: dict[str, bool]) -> None:
    """The parameters are what counts, and moments are loaded."""
    source = mlp(torch.bfloat16)
    saved = DOSAdam(source.parameters(), lr=0.1)
    train(source, saved, 3)
    ends = []
    for without in (False, True):
        model = mlp(dtype, seed=1)
        optimizer = DOSAdam(model.parameters(), **settings_)
        state = saved.state_dict()
        if without or (dtype is torch.bfloat16 and not settings_):
            state["state"] = {i: {k: v for k, v in e.items() if k != "master_rest"} for i, e in state["state"].items()}
        optimizer.load_state_dict(state)
        train(model, optimizer, 1)
        assert {"step", "exp_avg", "exp_avg_sq"} <= optimizer.state[model[0].weight].keys()
        assert len(optimizer.state[model[0].weight]) <= 4
        ends.append(bits(model.parameters()))
    assert ends[0] == ends[1]


def test_a_write_that_nobody_sees_makes_no_nan() -> None:
    """`.data` does not tell; where the parameter is half of its master, 0 with a rest of something else is 0."""
    model = mlp(torch.bfloat16)
    optimizer = DOSAdam(model.parameters())
    train(model, optimizer, 3)
    for parameter in model.parameters():
        parameter.data.mul_(torch.rand(parameter.shape) < 0.5)
    train(model, optimizer, 1)
    assert all(p.isfinite().all() for p in model.parameters())


VALUES = [0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, torch.nan, 2.0**-133]


@pytest.mark.parametrize("value", VALUES)
def test_a_whole_master_follows_by_the_same_rule(value: float) -> None:
    """Any rest beside a value that was written: kept, unless it would make another number of it."""
    rest = torch.arange(-(2**15) + 1, 2**15, dtype=torch.int32).to(torch.int16)
    master: Tensor = joined(torch.full((len(rest),), 0.7, dtype=torch.bfloat16), rest)
    parameter = torch.full((len(rest),), value, dtype=torch.bfloat16)
    follow(master, parameter)
    number = not parameter[0].isnan()
    assert torch.equal(master.bfloat16(), parameter) or not number
    kept = master.view(torch.int32).to(torch.int16) == rest
    if parameter[0].isinf():
        assert torch.equal(kept, rest == 0)
    elif value == 0:
        assert torch.equal(kept, rest >= 0)
        assert torch.equal(master.signbit(), parameter.signbit())
    else:
        assert kept.all()


# One that nothing knows: it needs what docs/architecture.md names, and nothing else.


class WithNotes(AdamW):
    """AdamW's state has one more field, of which its kernels know nothing."""

    def format(self, parameter: Tensor, *, extra: Collection[str]) -> Format:
        known = super().format(parameter, extra=extra)
        return Format("with notes", known.values, (*known.fields, Field("notes", "int16", "notes")))

    def batch(self, runs: Sequence[Run]) -> AdamBatch:
        return super().batch([run._replace(fields=known_fields(run)) for run in runs])


def known_fields(run: Run) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in run.fields.items() if name != "notes"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_format_with_a_field_of_its_own(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
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
