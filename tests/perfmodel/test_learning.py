"""Plans while the simulator still looks at them."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from perfmodel import SubgroupLoad, Workload
from perfmodel.adaptive import AdaptivePlanner
from perfmodel.format import format_of
from perfmodel.hardware import HardwareProfile
from perfmodel.simulate import Scope, makespan
from perfmodel.workload import SavedTensors


def test_no_iteration_runs_a_plan_that_is_worse_than_one_that_was_simulated() -> None:
    """Half of the state fits, and saved tensors may make room for more."""
    load = SubgroupLoad.of(67_638, format_of("bfloat16"))
    groups = tuple(SavedTensors(598_277, (i + 1) / 25, 1 - i / 25) for i in range(24))
    workload = Workload(
        (load,) * 24,
        forward_s=0.15,
        backward_s=0.3,
        peak_free_bytes=12 * load.state_bytes,
        shared_free_bytes=12 * load.state_bytes,
        activations=groups,
        activation_host_bytes=15 * 598_277,
    )
    node = HardwareProfile.builtin("h100").replace(copy_latency_s=0.0, launch_latency_s=0.0)
    node = dataclasses.replace(node, host_bandwidth=node.host_bandwidth / 2)
    profile = node.scaled(24 * load.state_bytes / 0.3 / node.h2d_bandwidth)
    planner, seconds = AdaptivePlanner(), list[float]()
    while not planner.settled:
        plan = planner(workload, profile)
        seconds.append(makespan(plan, workload, profile, Scope.beside(workload)))
        planner.learn()
    assert len(seconds) > 3, "the search takes several iterations"
    assert all(after <= before for before, after in pairwise(seconds)), seconds
