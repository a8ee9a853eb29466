"""Plans and workloads: validation and text."""

from typing import Any

import pytest

from perfmodel import Placement, Plan, SubgroupLoad, Workload
from perfmodel.workload import SavedTensors

C, S, R = Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT


def test_plan_prints_itself_and_serves_in_order() -> None:
    plan = Plan((C, S, R, C), (3, 0, 1, 2), 1)
    assert str(plan) == "4 subgroups: 2 cpu, 1 gpu_streamed, 1 gpu_resident; 1 slot; 2C S R"
    assert plan.served(C) == (3, 0)
    assert str(Plan((R,), (0,), 0, 2**20)).endswith("; 1.0 MiB of saved tensors move to the host")


@pytest.mark.parametrize(
    ("placements", "order", "slots", "message"),
    [
        ((C, C), (0, 0), 0, r"found 2 entries \(1 distinct\)"),
        ((C, C), (0,), 0, "must name each of the 2 subgroups once"),
        ((C,), (0,), -1, "slots must be 0 or more"),
        ((S,), (0,), 0, "at least 1 staging slot"),
    ],
)
def test_bad_plans(placements: tuple[Placement, ...], order: tuple[int, ...], slots: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(placements, order, slots)


def test_workload_sums() -> None:
    load = Workload.of_sizes([10, 30])
    assert (load.numel, load.slot_bytes) == (40, 360)
    assert load.subgroups[0] == SubgroupLoad(10, 20, 20, 120, host_bytes=160)
    assert load.subgroups[0].cpu_traffic == 280


@pytest.mark.parametrize(
    ("sizes", "others", "message"),
    [
        ([], {}, "at least one subgroup, found none"),
        ([-1], {}, "numel must be 0 or more"),
        ([1], {"forward_s": -1}, "forward_s must be 0 or more"),
        ([1], {"peak_free_bytes": float("nan")}, "peak_free_bytes must be 0 or more, found nan"),
        ([1], {"activations": (SavedTensors(8, 0.5, 0.5), SavedTensors(8, 0.6, 0.6))}, "due in the reverse order"),
    ],
)
def test_bad_workloads(sizes: list[int], others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.of_sizes(sizes, **others)
