"""On a GPU: training with streams that really run at once, and with everything that users do meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from dos.devices.cuda import CudaDevice
from dos.planning.forecast import MARGIN
from dos.planning.reading import Nvml
from tests.support.gpu import DEVICE, NEEDS_GPU, free_memory, not_simulated
from tests.support.inside import plan_anew
from tests.support.neighbour import Neighbour
from tests.support.random_plans import RandomPlans
from tests.support.scales import LARGE, ROOM, OnTwoStreams, Scales, Sines, SinesOnTwoStreams, run, with_policy
from tests.support.training import bits, no_synchronisation

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    return run(with_policy("cpu"))


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("subgroup_size", [100_000, 500_000, 10**9])
@pytest.mark.parametrize("policy", ["cpu", 0.0, 0.5, "stride:1", "stride:2", "stride:3", "adaptive"])
def test_streams_do_not_race(policy: str | float, subgroup_size: int, attached: bool, expected: list[bytes]) -> None:
    assert run(with_policy(policy, subgroup_size), attached=attached) == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [1, 3])
def test_plans_that_change_every_step(seed: int, slots: int, expected: list[bytes]) -> None:
    policy = RandomPlans(seed, slots)
    assert run(with_policy(policy), attached=True, between=lambda o, _: plan_anew(o)) == expected


def test_offloaded_gradients(expected: list[bytes]) -> None:
    assert run(with_policy("stride:2", offload_gradients=True)) == expected


@pytest.mark.parametrize("policy", [0.0, 0.5, "stride:2", "adaptive"])
def test_moments_in_codes(policy: str | float) -> None:
    coded = {"state_format": "int8"}
    assert run(with_policy(policy, **coded), attached=True) == run(with_policy("cpu", **coded))


def test_a_caller_on_another_stream(expected: list[bytes]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        assert run(with_policy("stride:2"), attached=True) == expected


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("policy", ["cpu", 0.5, "stride:2"])
def test_a_forward_on_two_streams(policy: str | float, attached: bool, expected: list[bytes]) -> None:
    assert run(with_policy(policy), attached=attached, model_class=OnTwoStreams) == expected


# Everything that travels beside state


@pytest.fixture(scope="module")
def expected_of_sines() -> list[bytes]:
    return run(with_policy("cpu"), model_class=Sines, numel=LARGE)


@pytest.mark.parametrize(
    ("policy", "activations"),
    [("cpu", ROOM), (0.0, ROOM), (0.5, ROOM // 4), ("stride:2", ROOM), ("adaptive", ROOM // 2), ("adaptive", "auto")],
)
def test_saved_tensors_that_leave(
    policy: str | float, activations: Literal["auto"] | int, expected_of_sines: list[bytes]
) -> None:

    def ended(optimizer: DOSAdam) -> None:
        assert activations == "auto" or optimizer.metrics()["activation_bytes"] > 0

    saved = {"activations": activations, "model_class": Sines, "numel": LARGE}
    assert run(with_policy(policy), **saved, ended=ended) == expected_of_sines


@pytest.mark.parametrize("policy", ["cpu", "stride:2"])
def test_saved_tensors_that_leave_on_two_streams(policy: str, expected_of_sines: list[bytes]) -> None:
    saved = {"activations": ROOM, "model_class": SinesOnTwoStreams, "numel": LARGE}
    assert run(with_policy(policy), **saved) == expected_of_sines


def test_saved_tensors_that_leave_beside_plans_that_change(expected_of_sines: list[bytes]) -> None:
    saved = {"activations": ROOM, "model_class": Sines, "numel": LARGE}
    policy = with_policy(RandomPlans(seed=0, slots=2), offload_gradients=True)
    assert run(policy, **saved, between=lambda o, _: plan_anew(o)) == expected_of_sines


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("policy", ["cpu", 0.5, "stride:2", "adaptive"])
def test_state_on_disk(policy: str | float, attached: bool, tmp_path: Path, expected: list[bytes]) -> None:
    """A part of it, so that some rests on the host and some passes through windows."""
    make = with_policy(policy, 100_000, disk=tmp_path, host_memory=20_000_000, memory_budget=0)
    assert run(make, attached=attached, ended=rests_on_disk) == expected


def rests_on_disk(optimizer: DOSAdam) -> None:
    assert optimizer.metrics()["disk_held_bytes"] > 0


@pytest.mark.parametrize("seed", range(2))
def test_state_on_disk_under_plans_that_change_every_step(seed: int, tmp_path: Path, expected: list[bytes]) -> None:
    make = with_policy(RandomPlans(seed, slots=2), 100_000, disk=tmp_path, host_memory=20_000_000)
    assert run(make, attached=True, between=lambda o, _: plan_anew(o)) == expected


def test_everything_at_once(tmp_path: Path, expected_of_sines: list[bytes]) -> None:
    saved = {"activations": ROOM, "model_class": Sines, "numel": LARGE}
    more = {"disk": tmp_path, "host_memory": 80_000_000, "offload_gradients": True}
    assert run(with_policy("stride:2", 100_000, **more), **saved) == expected_of_sines


@pytest.mark.parametrize("policy", [0.0, 0.5, "stride:2", "adaptive"])
def test_offloaded_gradients_add_up_as_in_grad(policy: str | float) -> None:
    several: dict[str, Any] = {"micro_batches": 3, "attached": True}
    ours = run(with_policy(policy, offload_gradients=True), **several)
    assert ours == run(with_policy("cpu"), **several)


@not_simulated("graphs")
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("policy", ["cpu", 0.0, 0.5, "stride:2", "adaptive"])
def test_a_captured_forward_and_backward(policy: str | float, attached: bool, expected: list[bytes]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        assert run(with_policy(policy), attached=attached, captured=True) == expected


# What callers do between


def test_emptying_the_cache_in_the_middle(expected: list[bytes]) -> None:
    policy = with_policy("stride:2")
    assert run(policy, attached=True, between=lambda o, _: torch.cuda.empty_cache()) == expected


def test_memory_that_is_freed_and_taken_at_once(expected: list[bytes]) -> None:
    """What the step still reads is not given to others: gradients are freed and their memory overwritten."""

    def overwrite(optimizer: DOSAdam, step: int) -> None:
        optimizer.zero_grad()
        for size in (300_000, 1000, 300_000):
            torch.full((size,), float("nan"), dtype=torch.bfloat16, device=DEVICE)

    assert run(with_policy("stride:2"), attached=True, between=overwrite) == expected


def test_device_memory_is_given_back() -> None:
    run(with_policy("stride:1"), steps=2)
    free_memory()
    before = torch.cuda.memory_allocated()
    run(with_policy("stride:1"), steps=2)
    free_memory()
    assert torch.cuda.memory_allocated() == before


# No synchronisation


@pytest.mark.parametrize("policy", [0.0, "stride:1", "cpu"])
def test_issuing_a_step_waits_for_nothing(policy: str | float) -> None:
    model = Scales(6, 300_000)
    optimizer = with_policy(policy)(model)
    optimizer.attach(model)
    x = torch.ones((), dtype=torch.bfloat16, device=DEVICE)
    for step in range(4):
        optimizer.synchronize()
        optimizer.zero_grad()
        model(x).backward()
        if step < 2:  # state is made, kernels are compiled
            optimizer.step()
            continue
        torch.cuda._sleep(500_000_000)  # the update must come after this, and its issue must not
        with no_synchronisation():
            optimizer.step()
        assert not torch.cuda.current_stream().query(), "step() waited for the device"
    optimizer.synchronize()


# Memory pressure


def test_a_neighbour_takes_memory_and_frees_it() -> None:
    size, layers = 20_000_000, 8  # 1.2 GB of state
    free_memory()  # what other tests have left in the allocator's cache counts as free
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of free device memory")
    make = with_policy("adaptive", size, profile="h100")
    resident: list[float] = []
    neighbour = Neighbour()
    try:

        def between(optimizer: DOSAdam, step: int) -> None:
            optimizer.synchronize()
            resident.append(optimizer.metrics()["share_gpu_resident"])
            if step == 3:
                # What the model needs itself is in the allocator's cache, where no other process can take it.
                free, total = torch.cuda.mem_get_info()
                neighbour.want(free - int(MARGIN / 4 * total))
                assert neighbour.held() > 0
                assert torch.cuda.mem_get_info()[0] < MARGIN / 2 * total, "less than what is left alone"
            elif step == 9:
                neighbour.want(0)
                assert neighbour.held() == 0

        ours = run(make, steps=30, layers=layers, numel=size, between=between)
    finally:
        neighbour.close()
    assert resident[3] == 1.0, "all state fits while no other process is there"
    assert min(resident[4:10]) < 1.0, "state makes room"
    assert resident[-1] == 1.0, "and returns"
    assert ours == run(with_policy(0.0, size), steps=30, layers=layers, numel=size)


def test_a_budget_is_kept_and_memory_is_given_back(expected: list[bytes]) -> None:
    """Also after `release_memory()`, which users call when their own forward or backward has run out."""
    budget, held = 20_000_000, []

    def between(optimizer: DOSAdam, step: int) -> None:
        optimizer.synchronize()  # before the first step has ended there are no figures
        held.append(optimizer.metrics()["memory_held_bytes"])
        if step == 5:
            optimizer.release_memory()

    assert run(with_policy("adaptive", profile="h100", memory_budget=budget), between=between) == expected
    assert 0 < max(held) <= budget


# What users do meanwhile


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 32)).to(DEVICE, dtype)


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 64, generator=generator).to(DEVICE) for _ in range(steps)]


@pytest.mark.parametrize("policy", ["cpu", "stride:2", 0.0])
def test_several_groups_against_adamw(policy: str | float) -> None:
    ours, theirs = network(), network()

    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": model[0].parameters(), "lr": 1e-2, "weight_decay": 0.5},
            {"params": model[2].parameters(), "betas": (0.5, 0.9), "amsgrad": True},
            {"params": model[3].parameters(), "maximize": True},
        ]

    optimizer: torch.optim.Optimizer
    for model, optimizer in (
        (ours, DOSAdam(groups(ours), policy=policy, subgroup_size=5000)),
        (theirs, torch.optim.AdamW(groups(theirs), fused=True)),
    ):
        for batch in batches(6):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@not_simulated("autocast")
@pytest.mark.parametrize("policy", ["cpu", "stride:2", 0.0])
def test_grad_scaler_with_float16(policy: str | float) -> None:
    def trained(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, list[bool]]:
        model = network()
        optimizer, scaler, changed = make(model), torch.amp.GradScaler(init_scale=2.0**10), []
        for step, batch in enumerate(batches(8)):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                loss = model(batch).float().square().mean()
            scaler.scale(loss).backward()
            if step == 4:
                model[0].weight.grad[0, 0] = float("inf")
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            torch.cuda.synchronize()
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        return model, changed

    ours, changed = trained(lambda m: DOSAdam(m.parameters(), lr=1e-3, policy=policy, subgroup_size=5000))
    theirs, _ = trained(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    assert changed == [step != 4 for step in range(8)]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@not_simulated("compiler")
@pytest.mark.parametrize("attached", [False, True])
def test_a_compiled_model(attached: bool) -> None:
    def trained(compiled: bool, policy: str | float) -> list[Tensor]:
        model = network()
        run_model = torch.compile(model) if compiled else model
        optimizer = DOSAdam(model.parameters(), lr=1e-3, policy=policy, subgroup_size=5000)
        if attached:
            optimizer.attach(run_model)
        for batch in batches(5):
            optimizer.zero_grad()
            run_model(batch).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        return [p.detach().cpu() for p in model.parameters()]

    streamed, resident = trained(True, "stride:2"), trained(True, 0.0)
    assert bits(streamed) == bits(resident)
    for a, b in zip(streamed, trained(False, "cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# Which device

CHILD = """
import torch
from dos import DOSAdam
from dos.devices.cuda import CudaDevice
from dos.planning.reading import Nvml
weight = torch.nn.Parameter(torch.ones(1000, device="cuda"))
optimizer = DOSAdam([weight], policy="stride:1")
weight.sum().backward()
optimizer.step()
device = CudaDevice(torch.device("cuda"))
print(device.uuid, Nvml(device.uuid).read().total)
"""


@not_simulated("NVML")
@pytest.mark.parametrize("by", ["index", "uuid"])
def test_visible_devices(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    last = torch.cuda.device_count() - 1
    uuid = CudaDevice(torch.device("cuda", last)).uuid
    if uuid is None:
        pytest.skip("NVML does not know this GPU's memory")
    nvml = Nvml(uuid).read()
    if not isinstance(nvml, tuple):
        pytest.skip(f"NVML does not help here: {nvml}")
    if by == "index" and "CUDA_VISIBLE_DEVICES" in os.environ:
        pytest.skip("CUDA_VISIBLE_DEVICES is set already, so indices mean something else")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(last) if by == "index" else uuid)
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [uuid, str(nvml.total)]
