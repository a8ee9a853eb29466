"""The result does not depend, to the bit, on plan, subgroup size, slots, threads or device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from tests.support.random_plans import GROUPS, SHAPES, RandomPlans
from tests.support.training import FAST, bits, plan_anew

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def run(shapes: list[tuple], dtypes: list[torch.dtype], groups: list[dict], skips: set[int], **options: Any) -> list:
    """Five steps on given gradients, the set-up shared by all plans; parameters and state as bits."""
    generator = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(s, generator=generator).to(d)) for s, d in zip(shapes, dtypes, strict=True)]
    buckets = [parameters[i :: len(groups)] for i in range(len(groups))]
    optimizer = DOSAdam(
        [{"params": bucket, **group} for bucket, group in zip(buckets, groups, strict=True)],
        master_weights=options.pop("master_weights", True),
        **options,
    )
    for step in range(5):
        # So that subgroups change places between steps.
        plan_anew(optimizer)
        for i, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if (i * 5 + step) in skips else gradient
        optimizer.step()
    state: list[Tensor] = [t for p in parameters for t in optimizer.state.get(p, {}).values()]
    return bits(parameters) + bits(state)


@pytest.mark.filterwarnings("ignore:DOSAdam.step")  # examples may have no gradient at all
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=8),
    groups=st.lists(GROUPS, min_size=1, max_size=3),
    skips=st.sets(st.integers(0, 39)),
    subgroup_size=st.integers(1, 120),
    slots=st.integers(1, 4),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    master_weights=st.booleans(),
    data=st.data(),
)
def test_any_plan_gives_the_same_bits(
    shapes: list[tuple],
    groups: list[dict],
    skips: set[int],
    subgroup_size: int,
    slots: int,
    threads: int,
    seed: int,
    master_weights: bool,
    data: st.DataObject,
) -> None:
    dtypes = [data.draw(DTYPES) for _ in shapes]
    common = {"shapes": shapes, "dtypes": dtypes, "groups": groups, "skips": skips, "master_weights": master_weights}
    on_host = run(**common)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        accelerated = run(
            **common,
            policy=RandomPlans(seed, slots),
            subgroup_size=subgroup_size,
            device=EmulatedDevice(FAST, capacity=10**8),
        )
    finally:
        torch.set_num_threads(before)
    assert accelerated == on_host


@settings(max_examples=20)
@given(
    subgroup_size=st.integers(1, 200),
    policy=st.sampled_from(["adaptive", "cpu", "stride:1", "stride:2", "stride:3", 0.0, 0.5]),
)
def test_scarce_memory_changes_no_bit(subgroup_size: int, policy: str | float) -> None:
    """Room for some of the slots and residents only: the rest is updated on the host."""
    groups = [{"lr": 0.1}]
    shapes, dtypes = [(10, 10), (50,)], [torch.float32, torch.bfloat16]
    device = EmulatedDevice(FAST, capacity=6000)
    got = run(shapes, dtypes, groups, set(), policy=policy, subgroup_size=subgroup_size, device=device)
    assert device.peak_bytes <= device.capacity
    assert got == run(shapes, dtypes, groups, set())
