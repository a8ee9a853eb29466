"""The simulator against timelines worked out by hand, and properties of any of them."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import Lane, Op, Placement, Plan, Timeline
from perfmodel.adaptive import adaptive
from perfmodel.demand import speed_beside_updates
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import CPU, D2H, H2D, PIECE_BYTES, Stream, lane_speeds, run_tasks, shared_speeds
from perfmodel.policies import cpu_only, stride
from perfmodel.simulate import UPDATE_ALONE, Phase, Scope, exposed, makespan, serve, simulate
from perfmodel.tasks import Schedule
from perfmodel.workload import HostTimes, SubgroupLoad, Workload
from tests.support.machines import machine, work

C, S, R = Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT
RESULTS = Path(__file__).parents[2] / "experiments" / "results"
WHOLE = Scope(Phase.OVERLAPPED, Phase.OVERLAPPED)


def spans(timeline: Timeline) -> list[tuple[str, str, float, float]]:
    return [(s.lane.value, s.name, round(s.start, 9), round(s.end, 9)) for s in timeline.spans]


def test_slots_are_reused_when_their_flush_has_ended() -> None:
    plan = Plan((S, S, S), (0, 1, 2), 2)
    assert spans(simulate(plan, work(3), machine())) == [
        ("H2D", "prefetch 0", 0, 12),
        ("GPU", "update 0", 12, 15),
        ("H2D", "prefetch 1", 12, 24),
        ("D2H", "flush 0", 15, 27),
        ("GPU", "update 1", 24, 27),
        ("D2H", "flush 1", 27, 39),
        ("H2D", "prefetch 2", 27, 39),
        ("GPU", "update 2", 39, 42),
        ("D2H", "flush 2", 42, 54),
    ]


def test_streams_take_turns_on_a_link() -> None:
    """Gradients are all there from the start, yet a flush that is ready goes before the second next of them."""
    profile = machine(d2h_bandwidth=1.0, h2d_bandwidth=1e6, gpu_update_rate=1e6, h2d_bandwidth_duplex=1e6,
                      d2h_bandwidth_duplex=1.0)  # fmt: skip
    timeline = simulate(Plan((C, C, C, S), (0, 1, 2, 3), 1), work(4), profile)
    assert [s.name for s in timeline.on(Lane.D2H)] == ["gradient 0", "flush 3", "gradient 1", "gradient 2"]


def test_saved_tensors_interrupt_copies_of_state() -> None:
    copies = (Stream.PREFETCH, 3.0, 1.0, ()), (Stream.PARAMETER, 1.0, 1.0, ()), (Stream.RESTORE, 2.0, 1.0, (0,))
    start, end = run_tasks([(Stream.COMPUTE, 1.0, 0.0, ()), *copies], machine())
    assert start == pytest.approx([0, 0, 5, 1])
    assert end == pytest.approx([1, 5, 6, 3])


@pytest.mark.parametrize(
    ("pieces", "comes_s", "takes_s", "ends"),
    [
        (4.0, 1.0, 2.0, [6, 3]),
        (4.0, 1.0, 3.0, [4, 7]),  # the other one has no more left than this
        (4.0, 3.5, 0.2, [4, 4.2]),  # nor a whole piece
        (1.0, 1.0, 2.0, [4, 6]),  # or is one piece
    ],
)
def test_of_two_copies_in_pieces_the_shorter_one_ends_first(
    pieces: float, comes_s: float, takes_s: float, ends: list[float]
) -> None:
    """One of 4 s, and one that comes later."""
    rate = pieces * PIECE_BYTES / 4.0
    copies = (Stream.PREFETCH, 4.0, rate, ()), (Stream.PARAMETER, takes_s, rate, (0,))
    _, end = run_tasks([(Stream.GPU, comes_s, 0.0, ()), *copies], machine(host_bandwidth=math.inf))
    assert end[1:] == pytest.approx(ends)


@pytest.mark.parametrize(
    ("copies_s", "ends"),
    [
        # The gradient that comes last delays no update, wherever it is in the plan; parameters go up as updates end.
        ([50.0, 2.0, 1.0], [54, 9, 5]),
        ([2.0, 50.0, 1.0], [9, 54, 5]),
        # While the third is updated the two others arrive: the plan's first is next.
        ([3.0, 2.0, 1.0], [9, 13, 5]),
    ],
)
def test_the_cpu_takes_the_first_of_the_plan_whose_gradient_has_arrived(copies_s: list[float], ends: list[int]) -> None:
    """For each of three what it waits for, on a lane of its own, an update of 4 s, and a copy back of 1 s."""
    streams = (Stream.READ, Stream.GRADIENT, Stream.GPU)
    found: list[tuple[int, float, float, tuple[int, ...]]] = []
    found += [(stream, seconds, 0.0, ()) for stream, seconds in zip(streams, copies_s, strict=True)]
    found += [(Stream.CPU, 4.0, 0.0, (copy,)) for copy in range(3)]
    found += [(Stream.PARAMETER, 1.0, 0.0, (3 + turn,)) for turn in range(3)]
    _, end = run_tasks(found, machine())
    assert end[3:6] == pytest.approx(ends)
    assert end[6:] == pytest.approx([each + 1 for each in ends])


@pytest.mark.parametrize(("ahead_s", "starts"), [(0.0, [52, 40, 64]), (15.0, [42, 54, 30]), (99.0, [46, 34, 22])])
def test_the_cpu_begins_once_step_is_called_with_what_has_arrived(ahead_s: float, starts: list[int]) -> None:
    """Backward ends one subgroup every 10 s, the last one's first; copies take 2 s, an update 12 s."""
    load = work(4, backward_s=40.0, forward_s=20.0, ahead_s=ahead_s)
    timeline = simulate(Plan((C, C, C, R), (0, 1, 2, 3), 0), load, machine(d2h_bandwidth=12.0), WHOLE)
    spans_of = {span.subgroup: span.start for span in timeline.on(Lane.CPU)}
    assert [spans_of[i] for i in range(3)] == pytest.approx(starts)


def test_no_tasks_take_no_time() -> None:
    assert serve(Schedule([]), work(1), machine()) == Timeline(())


def test_fixed_costs() -> None:
    profile = machine(copy_latency_s=0.5, launch_latency_s=0.25)
    assert [s.duration for s in simulate(Plan((C,), (0,), 0), work(1), profile).spans] == [2.5, 12.25, 2.5]
    assert [s.duration for s in simulate(Plan((S,), (0,), 1), work(1), profile).spans] == [12.5, 3.25, 12.5]


def test_both_directions_at_once_are_slower() -> None:
    profile = machine(h2d_bandwidth_duplex=6.0, d2h_bandwidth_duplex=4.0, gpu_update_rate=1e9)
    timeline = simulate(Plan((S, S), (0, 1), 2), work(2), profile)
    # From 12 both copy: 12 s of prefetch at half speed; flush has done a third of its own 12 s per 12 s.
    assert timeline.on(Lane.H2D)[1].end == pytest.approx(36)
    assert timeline.on(Lane.D2H)[0].end == pytest.approx(40)


@pytest.mark.parametrize(
    ("demands", "weights", "capacity", "speeds"),
    [
        ([30.0, 10.0], [1.0, 3.0], 50.0, [1.0, 1.0]),
        ([30.0, 10.0], [1.0, 1.0], 20.0, [0.5, 0.5]),
        ([30.0, 10.0], [1.0, 2.0], 20.0, [0.4, 0.8]),
        ([30.0, 10.0], [1.0, 9.0], 25.0, [0.5, 1.0]),  # what the second does not need goes to the first
        ([9.0, 30.0, 0.0, 30.0], [9.0, 1.0, 1.0, 2.0], 29.0, [1.0, 2 / 9, 1.0, 4 / 9]),
        ([], [], 1.0, []),
    ],
)
def test_shared_speeds(demands: list[float], weights: list[float], capacity: float, speeds: list[float]) -> None:
    assert shared_speeds(demands, weights, capacity) == pytest.approx(speeds)


users = st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 10), st.floats(0, 1)), max_size=5)


@given(users, st.floats(1e-3, 300))
def test_all_of_a_capacity_is_shared_and_no_share_falls_when_others_demand_less(
    each: list[tuple[float, float, float]], capacity: float
) -> None:
    demands, weights, less = map(list, zip(*each, strict=True)) if each else ([], [], [])
    speeds = shared_speeds(demands, weights, capacity)
    served = sum(demand * speed for demand, speed in zip(demands, speeds, strict=True))
    assert served == pytest.approx(min(sum(demands), capacity))
    fewer = shared_speeds([d * factor for d, factor in zip(demands, less, strict=True)], weights, capacity)
    assert all(0 < before <= after * (1 + 1e-9) <= 1 + 1e-8 for before, after in zip(speeds, fewer, strict=True))


@pytest.mark.parametrize(
    ("name", "measured"), [("h200", (79.4e9, 27.8e9, 40.3e9)), ("h100", (110.6e9, 23.0e9, 35.7e9))]
)
def test_a_profile_without_weights_shares_as_an_h200_and_an_h100_did(
    name: str, measured: tuple[float, float, float]
) -> None:
    """Host DRAM traffic of CPU updates and copies both ways at once, of bytes/s."""
    profile = HardwareProfile.load(RESULTS / f"nvidia-{name}-2026-11-26" / "profile.json")
    demands = profile.cpu_update_rate * 28, profile.h2d_bandwidth, profile.d2h_bandwidth
    speeds = lane_speeds(dict(zip((CPU, H2D, D2H), demands, strict=True)), profile)
    found = [demand * speeds[lane] for lane, demand in zip((CPU, H2D, D2H), demands, strict=True)]
    assert found == pytest.approx(measured, rel=0.12)


def test_host_bandwidth_is_shared() -> None:
    """The CPU alone would cause 24 bytes/s, a copy 12: of 18 in all, each gets half of its rate."""
    load = Workload((SubgroupLoad(12, 0, 0, 144),) * 2)
    even = machine(host_bandwidth=18.0, gpu_update_rate=1e9, h2d_weight=1.0, d2h_weight=1.0)
    timeline = simulate(Plan((S, C), (0, 1), 1), load, even)
    assert timeline.on(Lane.H2D)[0].end == pytest.approx(24)
    assert timeline.on(Lane.CPU)[0].end == pytest.approx(24, rel=1e-6), "288 bytes, of 12 a second"
    assert timeline.on(Lane.D2H)[-1].end == pytest.approx(24 + 12, rel=1e-6), "alone"


def test_ranks_and_traffic_factor_reduce_the_cpus_bandwidth() -> None:
    alone = makespan(cpu_only(work(1)), work(1), machine(host_bandwidth=56.0))
    shared = makespan(cpu_only(work(1)), work(1), machine(host_bandwidth=56.0, ranks_per_host=4))
    remote = makespan(cpu_only(work(1)), work(1), machine(host_bandwidth=56.0, cpu_traffic_factor=4.0))
    assert alone == pytest.approx(2 + 12 + 2)
    assert shared == pytest.approx(2 + 24 + 2)
    assert remote == pytest.approx(2 + 24 + 2)


def test_whole_iteration_overlaps_both_ends() -> None:
    load = work(2, forward_s=20.0, backward_s=10.0)
    timeline = simulate(Plan((R, C), (0, 1), 0), load, machine(), WHOLE)
    assert spans(timeline) == [
        ("GPU", "backward", 0, 10),
        ("D2H", "gradient 1", 5, 7),
        ("GPU", "update 0", 10, 13),
        ("CPU", "update 1", 10, 22),
        ("GPU", "forward", 13, 23),
        ("H2D", "parameter 1", 22, 24),
        ("GPU", "forward", 24, 34),
    ]
    plan, serial = Plan((R, C), (0, 1), 0), Scope(Phase.SERIAL, Phase.SERIAL)
    assert exposed(plan, load, machine(), WHOLE) == pytest.approx(4)
    assert exposed(plan, load, machine(), serial) == makespan(plan, load, machine()) == pytest.approx(16)
    assert makespan(plan, load, machine(), serial) == pytest.approx(30 + 16)


ISSUING = HostTimes(turn=1.0, job=3.0, rest=4.0)


def test_the_next_forward_waits_for_the_host_that_issues_the_step() -> None:
    """It begins in the middle of backward: a turn takes it 1 s, the update of the resident 3 s, its return 4 s."""
    load, plan = work(2, forward_s=20.0, backward_s=10.0, ahead_s=5.0), Plan((R, C), (0, 1), 0)
    for host, begins in ((HostTimes(), [0, 10, 13]), (ISSUING, [0, 10, 13]), (HostTimes(2.0, 8.0, 4.0), [0, 15, 19])):
        timeline = simulate(plan, dataclasses.replace(load, host=host), machine(), WHOLE)
        assert [span.start for span in timeline.on(Lane.GPU)][:3] == begins


def test_a_streamed_subgroup_comes_once_the_host_has_queued_its_jobs() -> None:
    """But for the one whose slot backward has filled, of which the host queues the update and the way home."""
    load = work(3, forward_s=20.0, backward_s=40.0, host=ISSUING)
    plan = Plan((S, S, S), (0, 1, 2), 2)
    begins = [span.start for span in simulate(plan, load, machine(), WHOLE).on(Lane.H2D)]
    assert begins == [0, 12, 40 + 2 * 3 + 2 * 3 + 3 * 3]


def test_an_update_on_the_cpu_slows_the_host_that_issues() -> None:
    profile = machine(cpu_update_rate=12.0).replace(cpu_threads=10)
    tasks = [(Stream.CPU, 1.0, 0.0, ()), (Stream.HOST, 2.0, 0.0, ())]
    assert run_tasks(tasks, profile)[1] == pytest.approx([1.0, 3 - 1 / profile.slowdown])


def test_what_the_host_issues_in_backward_is_none_of_the_step_s() -> None:
    load = work(3, forward_s=20.0, backward_s=40.0, in_backward=True)
    late = dataclasses.replace(load, host=ISSUING)
    plan, scope = Plan((S, C, R), (0, 1, 2), 1), Scope.beside(load)
    assert simulate(plan, late, machine(), scope) == simulate(plan, load, machine(), scope)


def test_plans_stream_less_where_that_takes_the_host_long() -> None:
    profile = HardwareProfile.builtin("h100")
    load = Workload.of_sizes([36_000_000] * 24, forward_s=0.05, backward_s=0.14, ahead_s=0.04)
    load = dataclasses.replace(load, peak_free_bytes=load.state_bytes / 3, shared_free_bytes=load.state_bytes / 3)
    late = dataclasses.replace(load, host=HostTimes(turn=4e-4, job=10e-3, rest=8e-3))
    quick, slow = (adaptive(each, profile).placements.count(S) for each in (load, late))
    assert slow < quick


def test_prefetch_waits_for_the_memory_that_backward_frees() -> None:
    """Half of the slot's bytes are free at the peak, all of them when backward is half done."""
    slot = work().slot_bytes
    load = work(4, backward_s=40.0, peak_free_bytes=slot / 2, update_free_bytes=1.5 * slot)
    timeline = simulate(stride(load, 4, slots=1), load, machine(), Scope(Phase.OVERLAPPED))
    assert timeline.on(Lane.H2D)[0].start == pytest.approx(20)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    placements = tuple(draw(st.lists(st.sampled_from(Placement), min_size=1, max_size=12)))
    order = tuple(draw(st.permutations(range(len(placements)))))
    return Plan(placements, order, draw(st.integers(1, 4)))


@given(plans(), st.floats(10.0, 100.0), st.sampled_from([UPDATE_ALONE, WHOLE, Scope(Phase.SERIAL, Phase.OVERLAPPED)]))
def test_every_plan_keeps_the_engines_rules(plan: Plan, host: float, scope: Scope) -> None:
    load = work(len(plan), forward_s=7.0, backward_s=5.0)
    profile = machine(host_bandwidth=host, h2d_bandwidth_duplex=8.0)
    timeline = simulate(plan, load, profile, scope)
    assert timeline == simulate(plan, load, profile, scope)
    ends = {(s.op, s.subgroup): s for s in timeline.spans}
    for lane in Lane:
        for before, after in itertools.pairwise(timeline.on(lane)):
            assert after.start >= before.end - 1e-9
    for i in {*plan.served(C), *plan.served(S), *plan.served(R)[:1]}:  # residents are updated together
        operations = {C: [Op.GRADIENT, Op.UPDATE, Op.PARAMETER], S: [Op.PREFETCH, Op.UPDATE, Op.FLUSH], R: [Op.UPDATE]}
        chain = [ends[op, i] for op in operations[plan.placements[i]]]
        assert all(b.start >= a.end - 1e-9 for a, b in itertools.pairwise(chain))
    streamed = plan.served(S)
    for i, later in zip(streamed, streamed[plan.slots :], strict=False):
        assert ends[Op.PREFETCH, later].start >= ends[Op.FLUSH, i].end - 1e-9
    moved = sum(s.duration for s in timeline.spans if s.lane in (Lane.H2D, Lane.D2H))
    assert moved >= (4 * plan.placements.count(C) + 24 * len(streamed)) * 12 / 12 - 1e-6


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="plan is for 2 subgroups, the workload has 4"):
        simulate(Plan((C, C), (0, 1), 0), work(4), machine())


def test_operations_without_size_take_no_time() -> None:
    load = Workload.of_sizes([0, 12, 0])
    assert math.isfinite(makespan(cpu_only(load), load, machine()))
    assert makespan(stride(load, 1), load, HardwareProfile.builtin("h100")) > 0


def test_compute_beside_an_update_keeps_what_the_host_leaves_it() -> None:
    """The host needs 0.8 s for a second of compute, and 1.9 times that beside an update by ten threads."""
    work = Workload.of_sizes([8] * 2, forward_s=1.0, host_share=0.8)
    profile = machine(cpu_update_rate=8.0, host_bandwidth=math.inf).replace(cpu_threads=10)
    scope = Scope(forward=Phase.SERIAL)
    kept = 1 / (0.8 * 1.9)
    tasks = [(Stream.CPU, 1.0, 0.0, ()), (Stream.COMPUTE, 1.0, speed_beside_updates(work, profile), ())]
    assert run_tasks(tasks, profile)[1] == pytest.approx([1.0, 2 - kept])
    alone = makespan(cpu_only(work), work, profile, scope)
    assert alone == makespan(cpu_only(work), dataclasses.replace(work, host_share=0.0), profile, scope), "not beside"
    never_late = dataclasses.replace(work, host_share=0.5)
    assert speed_beside_updates(never_late, profile) == 0.0
