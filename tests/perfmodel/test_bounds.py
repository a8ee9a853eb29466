"""The lower bound: by hand where one lane binds, and below every plan."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import Placement, Plan
from perfmodel.bounds import lower_bound
from perfmodel.floor import Floor
from perfmodel.hardware import DISK_RATES, HardwareProfile, builtin_profiles
from perfmodel.policies import cpu_only, spilled, static_ratio, stride
from perfmodel.simulate import UPDATE_ALONE, Phase, Scope, exposed, makespan
from perfmodel.workload import HostTimes, SavedTensors, SubgroupLoad, Workload, peak_room
from tests.support.machines import machine, with_disk, work
from tests.support.random_plans import saved_tensors
from tests.support.training import FAST

H2D_RATES = "h2d_bandwidth", "h2d_bandwidth_duplex"
C, S, R = Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT
FAST_LINKS = dict.fromkeys(("h2d_bandwidth", "d2h_bandwidth", "h2d_bandwidth_duplex", "d2h_bandwidth_duplex"), 1e6)


@pytest.mark.parametrize(
    ("rates", "memory", "seconds", "binding", "share"),
    [
        # No memory on the device: all 48 parameters on the CPU, 1 s each.
        ({}, {"peak_free_bytes": 0.0, "update_free_bytes": 0.0}, 48.0, "CPU", {C: 1.0}),
        # All of it resident but the CPU's part meanwhile: 1 in 5, as the GPU is 4 times as fast.
        (FAST_LINKS, {}, 48 / 5, "GPU", {C: 0.2, R: 0.8}),
        # No residents, a slow H2D link (1 byte/s): the CPU's parameters cost 2 s, more than its update.
        (
            {"h2d_bandwidth": 1.0, "h2d_bandwidth_duplex": 1.0, "cpu_update_rate": 1e6},
            {"peak_free_bytes": 0.0},
            96.0,
            "H2D",
            {C: 1.0},
        ),
        # 32 bytes per parameter through 8 bytes/s of host DRAM, no slot.
        (
            {"host_bandwidth": 8.0, "cpu_update_rate": 1e6, **FAST_LINKS},
            {"peak_free_bytes": 0.0, "update_free_bytes": 0.0},
            48 * 32 / 8,
            "host DRAM",
            {C: 1.0},
        ),
        # Memory of half the state.
        ({}, {"peak_free_bytes": 2 * 144.0, "update_free_bytes": 0.0}, 24.0, "CPU", {C: 0.5, R: 0.5}),
        # Forward hides all that fits beside it.
        ({}, {"forward_s": 100.0, "peak_free_bytes": 0.0, "update_free_bytes": 0.0}, 0.0, "nothing", {C: 1.0}),
    ],
)
def test_one_lane_binds(
    rates: dict[str, float], memory: dict[str, float], seconds: float, binding: str, share: dict[Placement, float]
) -> None:
    load = work(4, **memory)
    bound = lower_bound(load, machine(**rates), Scope.beside(load))
    assert bound.seconds == pytest.approx(seconds, rel=1e-3)
    assert bound.binding == binding
    assert {p: s for p, s in bound.shares.items() if s > 1e-3} == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize(
    ("rates", "seconds", "binding"),
    [
        # 3 of 4 subgroups of 144 bytes are read at 1 byte/s, written at 2, and both at once gain nothing.
        ({}, 3 * 144 * 1.5, "disk read"),
        ({"disk_write_bandwidth": 0.5, "disk_write_bandwidth_duplex": 0.25}, 3 * 144 * 3.0, "disk write"),
        # A drive that reads and writes at once as fast as alone.
        ({"disk_read_bandwidth_duplex": 1.0, "disk_write_bandwidth_duplex": 2.0}, 3 * 144, "disk read"),
        # 16 bytes of state each way, and the others of the CPU's update, through 0.1 byte/s of host DRAM.
        ({"host_bandwidth": 0.1}, (3 * 2 * 144 + 48 * 32) / 0.1, "host DRAM"),
    ],
)
def test_the_disk_binds(rates: dict[str, float], seconds: float, binding: str) -> None:
    disk = {"disk_read_bandwidth": 1.0, "disk_write_bandwidth": 2.0, "disk_latency_s": 0.0}
    duplex = {"disk_read_bandwidth_duplex": 0.5, "disk_write_bandwidth_duplex": 1.0}
    load = with_disk(work(4, peak_free_bytes=0.0, update_free_bytes=0.0), 144)
    bound = lower_bound(load, machine(cpu_update_rate=1e6, **{**FAST_LINKS, **disk, **duplex, **rates}))
    assert bound.seconds == pytest.approx(seconds, rel=1e-2)
    assert bound.binding == binding


def test_subgroups_are_on_disk_as_a_whole() -> None:
    """Of 3 of 12 parameters and one of 2 the host has room for 30: those of 12, 12 and 2."""
    rates = dict.fromkeys(DISK_RATES, 12.0) | {"disk_latency_s": 0.0, "cpu_update_rate": 1e6, **FAST_LINKS}
    load = Workload.of_sizes((12, 2, 12, 12), peak_free_bytes=0.0, update_free_bytes=0.0)
    bound = lower_bound(with_disk(load, 12 * 30.0), machine(**rates))
    assert bound.seconds == pytest.approx(12, rel=1e-3)


def test_windows_are_filled_beside_backward() -> None:
    """4 subgroups take 2 s to be read, 1 s to be written, and 2 windows hold 2 of them."""
    rates = dict.fromkeys(DISK_RATES, 144.0) | {"disk_latency_s": 0.0, "cpu_update_rate": 1e6, **FAST_LINKS}
    rates |= dict.fromkeys(("disk_read_bandwidth", "disk_read_bandwidth_duplex"), 72.0)
    for backward_s, seconds in ((0.0, 8.0), (1.0, 7.0), (2.0, 6.0), (4.0, 4.0), (9.0, 4.0)):
        load = work(4, peak_free_bytes=0.0, update_free_bytes=0.0, backward_s=backward_s)
        found = lower_bound(with_disk(load, 0), machine(**rates), Scope(backward=Phase.OVERLAPPED)).seconds
        assert found == pytest.approx(seconds, rel=1e-3)


def offloading(load: Workload) -> Workload:
    """The workload with offloaded gradients."""
    loads = tuple(dataclasses.replace(each, returned_bytes=each.gradient_bytes) for each in load.subgroups)
    return dataclasses.replace(load, subgroups=loads)


def test_no_slot_is_filled_in_backward_where_offloaded_gradients_pass_through_it() -> None:
    rates = machine(cpu_update_rate=1e-3, gpu_update_rate=1e6, **FAST_LINKS | dict.fromkeys(H2D_RATES, 12.0))
    load = offloading(work(4, peak_free_bytes=0.0, backward_s=100.0))
    scope = Scope.beside(load)
    assert lower_bound(load, rates, scope).seconds == pytest.approx(4 * (144 + 24) / 12, rel=1e-3)
    assert exposed(stride(load, 1, slots=4), load, rates, scope) == pytest.approx(4 * (144 + 24) / 12, rel=1e-3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Workload, HardwareProfile]:
    sizes = draw(st.lists(st.integers(1, 10).map(lambda m: m * 10_000_000), min_size=1, max_size=8))
    placements = tuple(draw(st.lists(st.sampled_from(Placement), min_size=len(sizes), max_size=len(sizes))))
    slots = draw(st.integers(1, 3))
    order = tuple(draw(st.permutations(range(len(sizes)))))
    activations = draw(saved_tensors(sum(sizes)))
    plan = Plan(placements, order, slots, draw(st.integers(0, sum(each.nbytes for each in activations))))
    load = Workload.of_sizes(
        sizes,
        update_free_bytes=slots * 12 * max(sizes),
        backward_s=draw(st.sampled_from([0.0, 0.05, 2.0])),
        forward_s=draw(st.sampled_from([0.0, 0.05, 2.0])),
        ahead_s=draw(st.sampled_from([0.0, 0.02, 1.0])),
        host=draw(st.sampled_from([HostTimes(), HostTimes(turn=0.01, job=0.02, rest=0.05)])),
        host_share=draw(st.sampled_from([0.0, 0.9])),
    )
    load = dataclasses.replace(load, activations=activations)
    if draw(st.booleans()):
        load = offloading(load)
    held = sum(12 * n for n, p in zip(sizes, placements, strict=True) if p is R)
    shares_peak = draw(st.booleans())  # as where an update runs on to the next peak
    peak = held + (load.update_free_bytes if shares_peak else 0)
    peak = draw(st.sampled_from([max(0, peak - peak_room(activations, plan.activation_bytes)), math.inf]))
    load = dataclasses.replace(load, peak_free_bytes=peak, shared_free_bytes=peak if shares_peak else math.inf)
    if draw(st.booleans()):
        free = draw(st.sampled_from([0.0, 0.3, 0.8])) * load.state_bytes
        load = with_disk(load, free, draw(st.integers(1, 4)))
    return spilled(plan, load), load, draw(st.sampled_from(list(builtin_profiles().values())))


@given(cases(), st.booleans(), st.booleans())
def test_no_plan_is_faster(case: tuple[Plan, Workload, HardwareProfile], alone: bool, in_backward: bool) -> None:
    plan, load, profile = case
    load = dataclasses.replace(load, in_backward=in_backward and not load.windows)
    scope = UPDATE_ALONE if alone else Scope.beside(load)
    seconds = exposed(plan, load, profile, scope)
    assert seconds >= lower_bound(load, profile, scope).seconds * (1 - 1e-6) - 1e-9
    least = Floor(load, profile, scope).seconds(plan)
    assert seconds >= least - 1e-9 * (1 + abs(least)), "nor than by its own sums"


def test_the_sums_of_a_plan_come_near_its_time() -> None:
    """So near that they tell which plans need not be simulated."""
    load = work(24, size=50_000_000, backward_s=0.2, forward_s=0.1)
    load = dataclasses.replace(load, peak_free_bytes=load.state_bytes / 3)
    profile, scope = builtin_profiles()["h100"], Scope.beside(load)
    compute_s = scope.compute_s(load)
    for plan in (cpu_only(load), stride(load, 2), stride(load, 1, slots=1), static_ratio(load, 0.7)):
        least = compute_s + Floor(load, profile, scope).seconds(plan)
        assert least >= 0.93 * makespan(plan, load, profile, scope)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_saved_tensors_that_have_to_leave_on_a_machine_far_faster_than_any(share: float) -> None:
    saved = tuple(SavedTensors(65536, 0.1 + 0.04 * i, 0.9 - 0.04 * i) for i in range(17))
    all_of_them = sum(each.nbytes for each in saved)
    busy = Workload(
        (SubgroupLoad(5000, gradient_bytes=20000, parameter_bytes=20000, state_bytes=60000),) * 14,
        forward_s=0.03,
        backward_s=0.036,
        peak_free_bytes=0,
        activations=saved,
        activation_least_bytes=all_of_them,
        activation_host_bytes=int(share * all_of_them),
    )
    assert lower_bound(busy, FAST, Scope.beside(busy)).seconds < 1e-3


def test_a_small_subgroup_makes_no_slot_small() -> None:
    """The bound of more work is no less: slots that backward fills take the state that is in them."""
    rates = machine(**FAST_LINKS | {"h2d_bandwidth": 8.0, "h2d_bandwidth_duplex": 8.0})
    bounds = []
    for sizes in ([100] * 10, [*[100] * 10, 1]):
        load = Workload.of_sizes(sizes, shared_free_bytes=2400.0, peak_free_bytes=2400.0, backward_s=1e4)
        bounds.append(lower_bound(load, rates, Scope.beside(load)).seconds)
    assert bounds[1] >= bounds[0] > 0
