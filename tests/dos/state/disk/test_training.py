"""State that exceeds the host's budget rests on disk: the same bits as from memory, whatever is done meanwhile."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from dos.gradients import offload as offload_module
from perfmodel import Op
from tests.support.devices import LateDevice, Unreliable, jittery_device
from tests.support.disk import SMALL, STATE_BYTES, TWO_WINDOWS, bytes_on_disk, dos_adam, wide
from tests.support.random_plans import RandomPlans
from tests.support.training import (
    FAST,
    assert_close_ulp,
    backward,
    bits,
    ended_steps,
    everything,
    mlp,
    plan_anew,
    train,
)

pytestmark = pytest.mark.usefixtures("one_core")

EXAMPLES = int(os.environ.get("DOS_DISK", "40"))
Pair = tuple[nn.Module, DOSAdam]
ACTIONS: dict[str, Callable[[Pair, random.Random], Pair]] = {}
"""What users do between steps: is given a model and its optimizer, and gives those with which they go on."""


def action(function: Callable[[Pair, random.Random], Pair]) -> Callable[[Pair, random.Random], Pair]:
    ACTIONS[function.__name__] = function
    return function


@action
def nothing(pair: Pair, drawn: random.Random) -> Pair:
    return pair


@action
def write_to_a_parameter(pair: Pair, drawn: random.Random) -> Pair:
    pair[1].synchronize()
    with torch.no_grad():
        drawn.choice(list(pair[0].parameters())).mul_(0.75)
    return pair


@action
def write_to_state(pair: Pair, drawn: random.Random) -> Pair:
    model, optimizer = pair
    name, parameter = drawn.choice(["exp_avg", "exp_avg_sq"]), drawn.choice(list(model.parameters()))
    if parameter in optimizer.state:
        optimizer.state[parameter][name].mul_(0.5)
    return pair


@action
def write_to_views_in_a_step(pair: Pair, drawn: random.Random) -> Pair:
    """Before it, and after it, when an entry was read again. State is read before backward or behind it."""
    model, optimizer = pair
    views = [entry["exp_avg"] for entry in optimizer.state.values()] if drawn.random() < 0.7 else []
    backward(model, 77)
    views = views or [entry["exp_avg"] for entry in optimizer.state.values()]
    if drawn.random() < 0.5:
        for view in views:
            view.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    for entry in optimizer.state.values():
        entry["exp_avg"].sub_(1e-3)
    return pair


@action
def write_to_state_in_backward(pair: Pair, drawn: random.Random) -> Pair:
    """While its gradients are leaving, and after it was begun for the next step."""
    model, optimizer = pair

    def write(parameter: Tensor) -> None:
        if parameter in optimizer.state:
            optimizer.state[parameter]["exp_avg"].mul_(0.5)

    hooks = [p.register_post_accumulate_grad_hook(write) for p in model.parameters() if p.requires_grad]
    backward(model, 78)
    for hook in hooks:
        hook.remove()  # they refer to the optimizer, where the garbage collector does not see it
    optimizer.step()
    optimizer.zero_grad()
    return pair


@action
def replace_state(pair: Pair, drawn: random.Random) -> Pair:
    for entry in pair[1].state.values():
        entry["exp_avg"] = entry["exp_avg"].clone() * 0.5
    return pair


@action
def read_state(pair: Pair, drawn: random.Random) -> Pair:
    assert all(entry["exp_avg"].isfinite().all() for entry in pair[1].state_dict()["state"].values())
    return pair


@action
def release_memory(pair: Pair, drawn: random.Random) -> Pair:
    pair[1].release_memory()
    return pair


@action
def copy_both(pair: Pair, drawn: random.Random) -> Pair:
    return copy.deepcopy(pair)


@action
def pickle_both(pair: Pair, drawn: random.Random) -> Pair:
    return pickle.loads(pickle.dumps(pair))


@action
def save_and_load(pair: Pair, drawn: random.Random) -> Pair:
    file = io.BytesIO()
    torch.save(pair[1].state_dict(), file)
    file.seek(0)
    pair[1].load_state_dict(torch.load(file))
    return pair


@action
def freeze(pair: Pair, drawn: random.Random) -> Pair:
    """Some, or none any more."""
    for parameter in pair[0].parameters():
        parameter.requires_grad_(drawn.random() < 0.7)
    next(pair[0].parameters()).requires_grad_(True)
    return pair


@action
def change_a_group(pair: Pair, drawn: random.Random) -> Pair:
    pair[1].param_groups[0].update(lr=drawn.choice([0.0, 0.05]), weight_decay=0.1)
    return pair


@action
def load_amsgrad(pair: Pair, drawn: random.Random) -> Pair:
    """Its maximum gets room on disk, and views of the state that goes are what is loaded."""
    saved = pair[1].state_dict()
    for entry in saved["state"].values():
        entry.setdefault("max_exp_avg_sq", entry["exp_avg_sq"].clone())
    saved["param_groups"][0]["amsgrad"] = True
    pair[1].load_state_dict(saved)
    return pair


@action
def begin_anew(pair: Pair, drawn: random.Random) -> Pair:
    pair[1].state.clear()
    return pair


def run(
    disk: Path | list[Path] | None, dtype: torch.dtype, actions: Sequence[str], seed: int, **chosen: Any
) -> list[bytes]:
    """Steps with one of the actions between them. Parameters and state."""
    attach, micro_batches = chosen.pop("attach", False), chosen.pop("micro_batches", 1)
    drawn, model = random.Random(seed), wide(dtype)
    pair: Pair = (model, dos_adam(model.parameters(), disk, **chosen))
    if attach:
        pair[1].attach(model)
    for step, name in enumerate(actions):
        model, optimizer = pair
        plan_anew(optimizer)
        optimizer.zero_grad()
        backward(model, 10 * step, micro_batches)
        optimizer.step()
        pair = ACTIONS[name](pair, drawn)
        if attach and pair[0] is not model:
            pair[1].attach(pair[0])
    return everything(*pair)


@settings(
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    actions=st.lists(st.sampled_from(sorted(ACTIONS)), min_size=2, max_size=7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**16),
    slots=st.integers(1, 3),
    share=st.floats(0, 1.2) | st.just(0.0),
    slots_there=st.sampled_from([1, 3, 10**4]),
    folders=st.sampled_from([1, 1, 3]),
    adaptive=st.booleans(),
    failing=st.sampled_from([0.0, 0.0, 0.2]),
    chosen=st.fixed_dictionaries(
        {
            "state_format": st.sampled_from([None, "float32"]),
            "amsgrad": st.booleans(),
            "max_grad_norm": st.sampled_from([None, 0.05]),
            "offload_gradients": st.booleans(),
            "subgroup_size": st.sampled_from([SMALL, 3 * SMALL, 10**5]),
            "attach": st.booleans(),
            "micro_batches": st.integers(1, 2),
        }
    ),
)
@example(  # for the first time there is not enough memory for all, so windows take of it, too
    actions=["write_to_a_parameter"] * 2,
    dtype=torch.float16,
    seed=38707,
    slots=3,
    share=0.983,
    slots_there=3,
    folders=1,
    adaptive=False,
    failing=0.0,
    chosen={
        "state_format": "float32",
        "amsgrad": True,
        "max_grad_norm": None,
        "offload_gradients": True,
        "subgroup_size": SMALL,
        "attach": False,
        "micro_batches": 2,
    },
)
def test_any_plan_in_any_memory_gives_the_same_bits(
    actions: list[str],
    dtype: torch.dtype,
    seed: int,
    slots: int,
    share: float,
    slots_there: int,
    folders: int,
    adaptive: bool,
    failing: float,
    chosen: dict[str, Any],
) -> None:
    """share: of the state, for which the host has memory beyond windows. slots_there: for which the device has.

    adaptive: whether plans are, for budgets of the device that change. failing: how often it has no memory after all.
    """
    whole = run(None, dtype, actions, seed, **{**chosen, "subgroup_size": SMALL})
    largest = min(chosen["subgroup_size"], STATE_BYTES // 12)
    there = {
        **chosen,
        "policy": "adaptive" if adaptive else RandomPlans(seed, slots),
        "memory_budget": functools.partial(random.Random(seed).randint, 0, STATE_BYTES),
        "device": Unreliable(failing, capacity=slots_there * 20 * largest),
        "host_memory": 2 * 24 * largest
        + 8 * STATE_BYTES // 12 * bool(chosen["offload_gradients"])
        + int(share * STATE_BYTES),
    }
    with TemporaryDirectory() as folder, mock.patch.object(offload_module, "PASSAGE_BYTES", 4096):
        assert run([Path(folder) / str(i) for i in range(folders)], dtype, actions, seed, **there) == whole
        assert not bytes_on_disk(Path(folder)), "the optimizer has gone, and its files with it"


def test_most_state_is_on_disk_and_comes_and_goes_with_every_step(tmp_path: Path) -> None:
    model = wide()
    optimizer = dos_adam(model.parameters(), tmp_path)
    for step in range(3):
        train(model, optimizer, 1, first_step=step)
        assert optimizer.plan().on_disk
        assert {Op.READ, Op.WRITE} <= {span.op for span in optimizer.timeline().spans}
        assert bytes_on_disk(tmp_path) > 0


def replace_codes(pair: Pair, drawn: random.Random) -> Pair:
    for entry in pair[1].state.values():
        entry["exp_avg_codes"] = entry["exp_avg_codes"].flip(0)
    return pair


def load_adamw_state(pair: Pair, drawn: random.Random) -> Pair:
    """One parameter after the other."""
    saved = pair[1].state_dict()
    state = {number: pair[1].adamw_state(p) for number, p in enumerate(pair[0].parameters()) if p in pair[1].state}
    pair[1].load_state_dict({**saved, "state": state})
    return pair


@pytest.mark.parametrize(
    ("policy", "dtype", "then"),
    [
        ("cpu", torch.float32, [copy_both, load_adamw_state]),
        ("stride:2", torch.bfloat16, [release_memory, save_and_load]),
        (0.5, torch.bfloat16, [replace_codes, pickle_both]),
    ],
)
def test_codes(
    tmp_path: Path, policy: str | float, dtype: torch.dtype, then: Sequence[Callable[[Pair, random.Random], Pair]]
) -> None:
    """Of subgroups of 131,072 parameters, whose scales fill a page. then: what users do after the first steps."""
    ends = []
    for disk in (None, tmp_path):
        weights = (nn.Parameter(torch.linspace(-1, 1, 131072).view(1024, 128).to(dtype)) for _ in range(7))
        model: nn.Module = nn.ParameterList(weights)
        optimizer = dos_adam(model.parameters(), disk, policy=policy, state_format="int8", host_memory=2 * 131072 * 13)
        generator = torch.Generator().manual_seed(0)
        for step in range(3):
            for number, weight in enumerate(model.parameters()):
                gradient = torch.randn(weight.shape, generator=generator).to(dtype)
                weight.grad = None if (number + step) % 4 == 0 else gradient
            optimizer.step()
            model, optimizer = then[step]((model, optimizer), random.Random(0)) if step < 2 else (model, optimizer)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]
    assert bytes_on_disk(tmp_path) > 0


@pytest.mark.parametrize(
    ("policy", "room", "slow"),
    [
        ("cpu", 0, None),
        ("cpu", 0, Op.WRITE),
        ("stride:1", 90_000, Op.READ),
        ("stride:1", 90_000, Op.FLUSH),
        ("adaptive", 90_000, None),
        ((2, 3), 0, Op.READ),
        ((2, 3), 0, Op.PREFETCH),
        ((1, 2), 90_000, Op.FLUSH),
        ((1, 3), 90_000, None),
        ((1, 3), 0, Op.WRITE),
    ],
)
def test_lanes_that_overtake_each_other(tmp_path: Path, policy: Any, room: int, slow: Op | None) -> None:
    """slow: the one that is. room: for state on the host. policy: a name, or the seed and slots of random plans."""
    late = jittery_device(5) if slow is None else LateDevice(lambda op: 4e-3 if op is slow else 0.0)
    ends = []
    for disk, device in ((None, EmulatedDevice(FAST, 10**9)), (tmp_path, late)):
        model, chosen = wide(torch.bfloat16), RandomPlans(*policy) if isinstance(policy, tuple) else policy
        optimizer = dos_adam(model.parameters(), disk, policy=chosen, device=device, host_memory=TWO_WINDOWS + room)
        optimizer.attach(model)
        for step in range(4):
            plan_anew(optimizer)
            train(model, optimizer, 1, first_step=step)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def test_streams_keep_the_order_of_the_schedule(tmp_path: Path) -> None:
    """What waits for a read is not overtaken by what comes after it."""
    model, late = wide(torch.bfloat16), LateDevice(lambda op: 4e-3 if op is Op.READ else 0.0)
    policy = "stride:1"
    optimizer = dos_adam(model.parameters(), tmp_path, policy=policy, device=late, host_memory=TWO_WINDOWS + 90_000)
    ended = ended_steps(optimizer)
    for step in range(4):
        train(model, optimizer, 1, first_step=step)
        optimizer.synchronize()
        schedule, ran = ended[-1].schedule, ended[-1].ran
        for op in (Op.READ, Op.PREFETCH, Op.FLUSH):
            spans = [span.subgroup for span in ran.spans if span.op is op]
            assert spans == [task.subgroup for task in schedule.tasks if task.op is op]


def test_state_four_times_both_budgets_trains_as_adamw(tmp_path: Path) -> None:
    model, twin = mlp(width=1200), mlp(width=1200)
    device_bytes, host_bytes = 40_000, 80_000
    assert 12 * sum(p.numel() for p in model.parameters()) > 4 * (device_bytes + host_bytes)
    optimizer = dos_adam(
        model.parameters(), tmp_path, policy="adaptive", memory_budget=device_bytes, host_memory=host_bytes
    )
    losses = train(model, optimizer, 6)
    theirs = train(twin, torch.optim.AdamW(twin.parameters(), lr=0.01), 6)
    assert losses == pytest.approx(theirs, rel=1e-5)
    assert_close_ulp(model.parameters(), twin.parameters())
    assert optimizer.metrics()["host_held_bytes"] <= host_bytes


def test_parameters_that_come_and_go(tmp_path: Path) -> None:
    """Experts that are used later, groups that are added, and parameters that leave theirs."""
    ends = []
    for disk in (None, tmp_path):
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(n, generator=generator)) for n in (2500, 1024, 4000, 10, 3000)]
        optimizer = dos_adam(weights[:3], disk)
        for step, used in enumerate([[0], [0, 1], [2], [0, 1, 2], [3, 4], [0, 2, 3, 4], [4]]):
            if step == 4:
                optimizer.add_param_group({"params": weights[3:], "amsgrad": True})
            if step == 5:
                del optimizer.param_groups[0]["params"][1], optimizer.state[weights[1]]
            for number, weight in enumerate(weights):
                weight.grad = torch.randn(weight.shape, generator=generator) if number in used else None
            optimizer.step()
        state = [value for p in weights if p in optimizer.state for value in optimizer.adamw_state(p).values()]
        ends.append(bits([*weights, *state]))
    assert ends[0] == ends[1]
