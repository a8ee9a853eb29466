"""Weights of blocks that stream: their fetches, their updates, their memory, and the bound."""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import Op, Placement, Plan, SubgroupLoad, Workload
from perfmodel.adaptive import adaptive
from perfmodel.bounds import lower_bound
from perfmodel.compute import memory_freed
from perfmodel.division import PASSING_TRIED, Division, divisions, fits
from perfmodel.floor import Floor
from perfmodel.format import SPLIT
from perfmodel.hardware import HardwareProfile, builtin_profiles
from perfmodel.plan import Tier
from perfmodel.policies import cpu_only, resident, spilled, static_ratio, stride
from perfmodel.schedule import schedule, schedule_micro_batch, schedule_step
from perfmodel.scope import UPDATE_ALONE, Phase, Scope
from perfmodel.simulate import Simulator, exposed, makespan, simulate
from perfmodel.workload import SIZES, WEIGHT_WINDOW, BlockLoad, SavedTensors, peak_room
from tests.support.machines import machine, with_disk, work
from tests.support.random_plans import saved_tensors
from tests.support.schedules import found, lines

C, S, R = Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT
HOST, DEVICE = Tier.HOST, Tier.DEVICE
WHOLE = Scope(Phase.OVERLAPPED, Phase.OVERLAPPED)


def offloaded(load: Workload, **fields: object) -> Workload:
    """The same with offloaded gradients."""
    loads = tuple(dataclasses.replace(each, returned_bytes=each.gradient_bytes) for each in load.subgroups)
    return dataclasses.replace(load, subgroups=loads, **fields)  # type: ignore[arg-type]


def layers(count: int, outside: int = 0, each: int = 1, **fields: object) -> Workload:
    """Blocks of `each` equal subgroups, with some subgroups of no block before and behind them."""
    load = offloaded(work(count * each + 2 * outside), **fields)
    nbytes = each * load.subgroups[0].parameter_bytes
    first = [outside + b * each for b in range(count)]
    return dataclasses.replace(load, blocks=tuple(BlockLoad(nbytes, start, start + each) for start in first))


def test_blocks_are_fetched_while_the_one_before_computes() -> None:
    """Of three blocks behind a subgroup of none, through a window of two; each awaits its update.

    The last two are there since forward.
    """
    load = layers(3, outside=1, forward_s=5.0, backward_s=10.0)
    load = dataclasses.replace(load, subgroups=load.subgroups[:4])
    assert lines(schedule(Plan((C, C, S, R), tuple(range(4)), 1), load, WHOLE)) == [
        "0 backward COMPUTE 24",
        "1 weights WEIGHTS 24 after 0",
        "2 backward COMPUTE 24",
        "3 backward COMPUTE 24 after 1",
        "4 backward COMPUTE 24",
        "5 gradient 3 GRADIENT 24 after 0",
        "6 gradient 2 GRADIENT 24 after 2",
        "7 gradient 1 GRADIENT 24 after 3",
        "8 gradient 0 GRADIENT 24 after 4",
        "9 update 0 CPU 12 after 8 4",
        "10 parameter 0 PARAMETER 24 after 9 4",
        "11 update 1 CPU 12 after 7 4",
        "12 prefetch 2 PREFETCH 192 slot 0 after 4 6",
        "13 update 2 GPU 12 slot 0 after 12 4",
        "14 flush 2 FLUSH 168 slot 0 after 13",
        "15 prefetch 3 PREFETCH 48 slot 0 after 14 5",
        "16 update 3 GPU 12 slot 0 after 15 4",
        "17 flush 3 FLUSH 24 slot 0 after 16",
        "18 weights WEIGHTS 24 after 2 11",
        "19 weights WEIGHTS 24 after 3 14",
        "20 forward COMPUTE 24 after 10",
        "21 forward COMPUTE 24 after 18",
        "22 weights WEIGHTS 24 after 21 17",
        "23 forward COMPUTE 24 after 19",
        "24 forward COMPUTE 24 after 22",
    ]


def test_an_update_finds_weights_at_home_or_moves_them_there() -> None:
    """On the CPU nothing is copied, not even parameters that it lacks; state that leaves takes weights with it."""
    finds = [
        found(state, HOST, 12, 24, stale_bytes=24)._replace(streams=True) for state in (HOST, HOST, DEVICE, DEVICE)
    ]
    assert lines(schedule_step(Plan((C, S, R, C), (0, 1, 2, 3), 1), work(4), finds, ())) == [
        "0 backward COMPUTE 0",
        "1 update 0 CPU 12 after 0",
        "2 prefetch 1 PREFETCH 192 slot 0 after 0",
        "3 update 1 GPU 12 slot 0 after 2 0",
        "4 flush 1 FLUSH 168 slot 0 after 3",
        "5 prefetch 2 PREFETCH 48 slot 0 after 4",
        "6 update 2 GPU 12 slot 0 after 5 0",
        "7 flush 2 FLUSH 24 slot 0 after 6",
        "8 prefetch 3 PREFETCH 48 slot 0 after 7",
        "9 update 3 GPU 12 slot 0 after 8 0",
        "10 flush 3 FLUSH 168 slot 0 after 9",
    ]


@st.composite
def models(draw: st.DrawFn) -> tuple[Plan, Workload]:
    """Blocks of any sizes, some of them frozen or in part, with subgroups of none between, and a plan of any kind."""
    loads, blocks = list(work(draw(st.integers(1, 2)), 10).subgroups), []
    for _ in range(draw(st.integers(1, 7))):
        own = work(1, draw(st.integers(1, 30))).subgroups * draw(st.integers(0, 3))
        nbytes = sum(each.parameter_bytes for each in own) + draw(st.sampled_from([0, 0, 50]))
        blocks.append(BlockLoad(nbytes, len(loads), len(loads) + len(own)))
        loads += own + work(1, 5).subgroups * draw(st.sampled_from([0, 0, 1]))
    if draw(st.booleans()):
        blocks = [BlockLoad(nbytes, start - 1, stop - 1) for nbytes, start, stop in blocks]
        loads = loads[1:] or loads
    n = len(loads)
    load = offloaded(
        Workload(tuple(loads)),
        blocks=tuple(blocks),
        forward_s=draw(st.sampled_from([0.5, 10.0])),
        backward_s=draw(st.sampled_from([1.0, 20.0])),
        micro_batches=draw(st.integers(1, 4)),
        activations=draw(saved_tensors(200)),
    )
    placements = tuple(draw(st.lists(st.sampled_from(Placement), min_size=n, max_size=n)))
    on_device = frozenset(draw(st.sets(st.integers(0, len(load.blocks) - 1))))
    leaving = sum(each.nbytes for each in load.activations) // 2
    return Plan(
        placements, draw(st.permutations(range(n))), draw(st.integers(1, 3)), leaving, frozenset(), on_device
    ), load


def test_a_frozen_block_that_backward_does_not_reach_is_fetched_for_the_next_forward() -> None:
    load = offloaded(work(1, 10), blocks=(BlockLoad(50, 0, 0),), forward_s=0.5, backward_s=1.0)
    made = schedule(Plan((C,), (0,), slots=0), load, Scope(Phase.OVERLAPPED, Phase.OVERLAPPED))
    assert [task.size for task in made.tasks if task.op is Op.WEIGHTS] == [50]


def test_backward_frees_no_more_memory_for_slots_than_state_shares_while_updating() -> None:
    load = dataclasses.replace(work(4), backward_s=4.0, peak_free_bytes=0.0)
    plan = Plan((S,) * 4, (0, 1, 2, 3), 2)
    assert memory_freed(plan, load, 2) == (1, 1), "of four pieces; more is free than slots need"
    scarce = dataclasses.replace(load, shared_free_bytes=2.0 * load.slot_bytes)
    assert memory_freed(plan, scarce, 2) == (2, 4)


def test_slots_are_filled_from_half_of_backward_on_where_all_fit_into_what_its_second_half_leaves() -> None:
    """Of five pieces the third is past the half, and the last one the end of backward."""
    load = dataclasses.replace(work(5), backward_s=5.0, peak_free_bytes=0.0, half_freed_bytes=2 * work(5).slot_bytes)
    plan = Plan((S,) * 5, (0, 1, 2, 3, 4), 2)
    assert memory_freed(plan, load, 2) == (3, 3)
    assert memory_freed(plan, load, 3) == (5, 5, 5), "all or none"
    beside = dataclasses.replace(load, peak_free_bytes=3 * load.slot_bytes, half_freed_bytes=0)
    assert memory_freed(plan, beside, 2) == (3, 3), "not before half of backward, although they fit at the peak"
    assert memory_freed(Plan((R, R, S, S, S), (0, 1, 2, 3, 4), 2), beside, 2) == (5, 5), "residents take the room"
    with pytest.raises(ValueError, match="half_freed_bytes must be 0 or more, found -1"):
        dataclasses.replace(load, half_freed_bytes=-1)


def test_backward_frees_memory_for_slots_where_blocks_are_frozen() -> None:
    """For the first of two as the first piece of backward ends, which is a frozen block's; the second half way.

    Where gradients are offloaded, only the step fills slots: gradients that come up pass through them, too.
    """
    blocks = BlockLoad(24, 0, 1), BlockLoad(24, 1, 2), BlockLoad(24, 2, 2), BlockLoad(24, 2, 2)
    load = offloaded(work(2), blocks=blocks, backward_s=4.0, peak_free_bytes=48.0, update_free_bytes=4 * 144.0)
    plan = Plan((S, S), (0, 1), 2)
    assert memory_freed(plan, load, 2) == (1, 2), "pieces of backward"
    tasks = schedule(plan, load, Scope(Phase.OVERLAPPED)).tasks
    backward = max(number for number, task in enumerate(tasks) if task.op is Op.BACKWARD)
    assert all(backward in task.after for task in tasks if task.op is Op.PREFETCH)


@given(models(), st.sampled_from(["updated", "serial", "a micro-batch"]))
def test_weights_are_there_when_a_block_computes_and_never_more_than_the_window_holds(
    case: tuple[Plan, Workload], kind: str
) -> None:
    plan, load = case
    if kind == "a micro-batch":
        made = schedule_micro_batch(plan, load)
    else:
        made = schedule(plan, load, Scope(Phase.OVERLAPPED, Phase.SERIAL if kind == "serial" else Phase.OVERLAPPED))
    starts, ends = Simulator(load, machine()).serve(made)
    assert not any(map(math.isnan, ends)), "all is served"
    fetches = [number for number, task in enumerate(made.tasks) if task.op is Op.WEIGHTS]
    uses, frozen = [], any(block.stop == 0 for b, block in enumerate(load.blocks) if b not in plan.blocks_on_device)
    for op, runs in ((Op.BACKWARD, load.backward_runs), (Op.FORWARD, load.runs)):
        sizes, stops = dict(runs), list(itertools.accumulate(size for _, size in runs))
        reached = dict(zip(sizes, stops, strict=True))
        pieces = [number for number, task in enumerate(made.tasks) if task.op is op]
        at = dict(zip(pieces, itertools.accumulate(made.tasks[number].size for number in pieces), strict=True))
        assert max(at.values()) == stops[-1]
        again = op is Op.FORWARD and (kind != "a micro-batch" or frozen)
        there = 0 if again else WEIGHT_WINDOW
        for b in sorted(range(len(load.blocks)), reverse=op is Op.BACKWARD):
            parts = range(load.blocks[b].start, load.blocks[b].stop) or (~b,)
            if b not in plan.blocks_on_device and parts[0] in sizes:
                first, last = min(reached[i] - sizes[i] for i in parts), max(reached[i] for i in parts)
                pieces_inside = [n for n in pieces if made.tasks[n].size and first < at[n] <= last]
                uses.append((b, pieces_inside, there > 0))
                there -= 1
    fetched = [place for place, (_, _, known) in enumerate(uses) if not known]
    assert [made.tasks[n].size for n in fetches] == [load.blocks[uses[place][0]].nbytes for place in fetched]
    for place, fetch in zip(fetched, fetches, strict=True):
        assert all(starts[n] >= ends[fetch] - 1e-9 for n in uses[place][1])
        for _, before, _ in uses[: max(0, place - WEIGHT_WINDOW + 1)]:
            assert all(starts[fetch] >= ends[n] - 1e-9 for n in before)


@given(models())
def test_blocks_that_stay_take_no_time(case: tuple[Plan, Workload]) -> None:
    plan, load = case
    blocks = tuple(block for block in load.blocks if block.start < block.stop)
    nbytes = [sum(each.parameter_bytes for each in load.subgroups[b.start : b.stop]) for b in blocks]
    blocks = tuple(block._replace(nbytes=n) for block, n in zip(blocks, nbytes, strict=True))
    load = dataclasses.replace(load, blocks=blocks, micro_batches=1, activations=())
    plan = dataclasses.replace(plan, blocks_on_device=frozenset(range(len(load.blocks))))
    without = dataclasses.replace(plan, blocks_on_device=frozenset()), dataclasses.replace(load, blocks=())
    assert makespan(plan, load, machine(), WHOLE) == pytest.approx(makespan(*without, machine(), WHOLE))


def test_other_micro_batches_wait_for_weights_alone() -> None:
    """Each fetch takes 2 s and each block's part of forward 1 s, of backward 2 s."""
    load = layers(4, forward_s=4.0, backward_s=8.0)
    plan = Plan((C,) * 4, tuple(range(4)), 0)
    one = makespan(plan, load, machine(), WHOLE)
    several = dataclasses.replace(load, micro_batches=5)
    # Two are there when each pass begins, and backward computes as long as a fetch takes. In forward the third waits
    # for 1 s, and so does the fourth.
    assert makespan(plan, several, machine(), WHOLE) - one == pytest.approx(4 * (1 + 1))
    assert makespan(plan, several, machine()) == makespan(plan, load, machine()), "of an update alone there are none"
    stay = dataclasses.replace(plan, blocks_on_device=frozenset(range(4)))
    assert makespan(stay, several, machine(), WHOLE) == makespan(stay, load, machine(), WHOLE)


def test_weights_on_the_device_take_memory() -> None:
    load = layers(4, peak_free_bytes=100.0)
    plan = Plan((C,) * 4, tuple(range(4)), 0)
    for stay, nbytes in (((), 48), ((0,), 72), ((0, 3), 96), ((1, 2, 3), 96), ((0, 1, 2, 3), 96)):
        assert load.weight_bytes(stay) == nbytes
        assert load.has_room(dataclasses.replace(plan, blocks_on_device=frozenset(stay)))
    some = dataclasses.replace(plan, blocks_on_device=frozenset({1, 2}))
    assert not dataclasses.replace(load, peak_free_bytes=95).has_room(some)
    assert not dataclasses.replace(load, shared_free_bytes=95).has_room(some)
    assert not dataclasses.replace(load, blocks_least=3).has_room(some)
    assert not dataclasses.replace(load, blocks_most=1).has_room(some)
    assert str(some).endswith("; weights of 2 blocks stay on the device")


def test_blocks_that_stay_are_spread_evenly() -> None:
    load = layers(8)
    assert [sorted(load.staying(count)) for count in (0, 1, 2, 4, 8)] == [
        [],
        [4],
        [2, 6],
        [1, 3, 5, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert all(len(layers(n).staying(count)) == count for n in range(1, 20) for count in range(n + 1))


def test_bad_blocks() -> None:
    load = layers(2)
    with pytest.raises(ValueError, match="in the order of these; found BlockLoad"):
        dataclasses.replace(load, blocks=load.blocks[::-1])
    with pytest.raises(ValueError, match="need offloaded gradients, found returned_bytes=0"):
        dataclasses.replace(work(2), blocks=load.blocks)
    with pytest.raises(ValueError, match="micro_batches must be 1 or more, found 0"):
        dataclasses.replace(load, micro_batches=0)
    for b in (-1, 2):
        with pytest.raises(ValueError, match=r"the plan keeps blocks .* on the device, the workload has 2"):
            simulate(Plan((C, C), (0, 1), 0, blocks_on_device=frozenset({b})), load, machine())


@st.composite
def with_memory(draw: st.DrawFn) -> tuple[Plan, Workload, HardwareProfile]:
    """Just enough memory for the plan, and a model of a realistic size."""
    plan, load = draw(models())
    many, second = draw(st.sampled_from([10**5, 10**7])), draw(st.sampled_from([0.01, 0.1]))
    plan = dataclasses.replace(plan, activation_bytes=plan.activation_bytes * many)
    load = dataclasses.replace(
        load,
        subgroups=tuple(
            dataclasses.replace(each, **{size: getattr(each, size) * many for size in SIZES}) for each in load.subgroups
        ),
        blocks=tuple(block._replace(nbytes=block.nbytes * many) for block in load.blocks),
        activations=tuple(each._replace(nbytes=each.nbytes * many) for each in load.activations),
        forward_s=load.forward_s * second,
        backward_s=load.backward_s * second,
    )
    staged, count = plan.slots * load.slot_bytes, len(plan.blocks_on_device)
    shares = draw(st.booleans())  # as where an update runs on to the next peak
    held = load.state_bytes_of(plan.served(R)) + load.weight_bytes(plan.blocks_on_device) + staged * shares
    peak = draw(st.sampled_from([max(0, held - peak_room(load.activations, plan.activation_bytes)), math.inf]))
    load = dataclasses.replace(
        load,
        peak_free_bytes=peak,
        shared_free_bytes=peak if shares else math.inf,
        update_free_bytes=staged,
        blocks_least=draw(st.sampled_from([0, count])),
        blocks_most=draw(st.sampled_from([count, math.inf])),
    )
    if draw(st.booleans()):
        free = draw(st.sampled_from([0.0, 0.5])) * load.state_bytes
        load = with_disk(load, free, draw(st.integers(1, 4)))
    return spilled(plan, load), load, draw(st.sampled_from(list(builtin_profiles().values())))


SCOPES = [UPDATE_ALONE, WHOLE, Scope(Phase.UPDATED, Phase.OVERLAPPED), Scope(Phase.SERIAL, Phase.OVERLAPPED)]


@given(with_memory(), st.sampled_from(SCOPES))
def test_no_plan_is_faster_than_the_bound(case: tuple[Plan, Workload, HardwareProfile], scope: Scope) -> None:
    plan, load, profile = case
    if scope.backward is Phase.UPDATED:  # not from disk
        load = dataclasses.replace(load, in_backward=True, host_free_bytes=math.inf, windows=0)
        plan = dataclasses.replace(plan, on_disk=frozenset())
    assert load.has_room(plan)
    seconds = exposed(plan, load, profile, scope)
    assert seconds >= lower_bound(load, profile, scope).seconds * (1 - 1e-6) - 1e-9
    if scope != UPDATE_ALONE:
        beside = Scope.beside(load)
        least = Floor(load, profile, beside).seconds(plan)
        assert exposed(plan, load, profile, beside) >= least - 1e-9 * (1 + abs(least)), "nor than by its own sums"


def test_the_bound_of_state_that_stays_in_its_window() -> None:
    """One subgroup on disk, and one window, which is read into beside a backward beside which nothing else runs."""
    each = SubgroupLoad(10**6, 2 * 10**6, 2 * 10**6, 12 * 10**6, returned_bytes=2 * 10**6, host_bytes=12 * 10**6)
    load = Workload((each,), 0.005, 0.01, peak_free_bytes=0.0, update_free_bytes=12e6, host_free_bytes=0.0, windows=1)
    profile, scope = HardwareProfile.builtin("a100_bound"), Scope(Phase.SERIAL, Phase.OVERLAPPED)
    plan = Plan((C,), (0,), 1, on_disk=frozenset({0}))
    assert load.has_room(plan)
    assert exposed(plan, load, profile, scope) >= lower_bound(load, profile, scope).seconds * (1 - 1e-6)


def test_the_bound_of_an_update_alone_has_no_offloaded_gradients() -> None:
    """They have left before: the host's memory and the link have nothing of them."""
    each = SubgroupLoad(10**6, 2 * 10**6, 2 * 10**6, 12 * 10**6, returned_bytes=2 * 10**6, host_bytes=16 * 10**6)
    load = Workload((each, each), peak_free_bytes=0.0, update_free_bytes=12e6)
    profile = HardwareProfile.builtin("a100_bound")
    plan = Plan((C, S), (0, 1), 1)
    assert exposed(plan, load, profile, UPDATE_ALONE) >= lower_bound(load, profile, UPDATE_ALONE).seconds


def test_the_bound_knows_weights() -> None:
    """Each pass moves 4 x 24 bytes at 12 bytes/s; the CPU's parameters need no copy, or 1/3 s each."""
    load = layers(4, forward_s=1.0, backward_s=2.0, peak_free_bytes=4 * 24.0, update_free_bytes=0.0)
    profile = machine(cpu_update_rate=1e6, gpu_update_rate=1e-6)
    streams = dataclasses.replace(load, blocks_most=0, micro_batches=3)
    # Two of them are there when backward begins, and when forward does that no update precedes.
    assert lower_bound(streams, profile, WHOLE).seconds == pytest.approx((4 - 2) + (8 - 1) + 2 * (8 - 3), rel=1e-3)
    assert lower_bound(load, profile, WHOLE).seconds == pytest.approx(8 - 1, rel=1e-3)


def test_fixed_policies_keep_as_many_blocks_as_have_room_beside_the_rest() -> None:
    load = layers(4, peak_free_bytes=2 * 144 + 80.0)
    plans = cpu_only(load), static_ratio(load, 0.5), stride(load, 2, slots=1)
    assert [len(plan.blocks_on_device) for plan in plans] == [4, 1, 4]
    shared = dataclasses.replace(load, shared_free_bytes=144 + 72.0)
    assert [len(stride(shared, 2, slots=count).blocks_on_device) for count in (1, 2)] == [1, 0]
    assert all(load.has_room(plan) for plan in plans)
    fixed = dataclasses.replace(load, blocks_least=2, blocks_most=2)
    assert [len(plan.blocks_on_device) for plan in (cpu_only(fixed), resident(fixed))] == [2, 2]


@pytest.mark.parametrize(
    ("on_cpu", "placements", "slots"),
    [(0, (R, S, S, S, S, S), 4), (1, (R, S, S, S, C, S), 4), (2, (R, S, S, C, C, S), 4), (5, (R, C, C, C, C, C), 1)],
)
def test_state_whose_weights_are_on_the_host_streams_last(
    on_cpu: int, placements: tuple[Placement, ...], slots: int
) -> None:
    """Offloaded gradients of residents pass through slots, too."""
    division = Division(4, 0, (0,), frozenset({0, 1}))
    plan = division.plan(layers(4, outside=1), on_cpu)
    assert (plan.placements, plan.slots) == (placements, slots)
    assert dataclasses.replace(division, streams=False).plan(layers(4, outside=1), 5).placements[1:] == (C,) * 5


def test_all_fits_to_the_byte() -> None:
    load, blocks = work(4), layers(2)
    sizes = load.state_bytes, blocks.state_bytes + 2 * 24
    assert [fits(dataclasses.replace(load, peak_free_bytes=sizes[0] - less)) for less in (0, 1)] == [True, False]
    assert [fits(dataclasses.replace(blocks, shared_free_bytes=sizes[1] - less)) for less in (0, 1)] == [True, False]
    assert [fits(dataclasses.replace(blocks, blocks_most=most)) for most in (2, 1)] == [True, False]


def test_divisions_have_no_slots_that_nothing_passes_through() -> None:
    division = Division(4, 0, (0,))
    assert [division.plan(work(4), on_cpu).slots for on_cpu in (0, 2, 3)] == [3, 1, 0]
    assert [division.plan(offloaded(work(4)), on_cpu).slots for on_cpu in (0, 2, 3, 4)] == [4, 2, 1, 0]
    for other in (division, dataclasses.replace(division, streams=False)):
        for on_cpu in range(5):
            assert other.counts(4, on_cpu) == Counter(other.plan(work(4), on_cpu).placements)
    everything = tuple(range(4))
    assert divisions(work(4)) == [Division(0, 0, everything, streams=False)]
    assert divisions(offloaded(work(4))) == [Division(slots, 0, everything, streams=False) for slots in PASSING_TRIED]


@pytest.mark.parametrize(
    ("plan", "memory", "blocks"),
    [
        # All four, of 24 bytes, beside a slot of 144; one and a window of two; a window alone.
        ("stride", {"shared_free_bytes": 144.0 + 96}, 4),
        ("stride", {"shared_free_bytes": 144.0 + 95}, 1),
        ("stride", {"shared_free_bytes": 144.0 + 71}, 0),
        # Beside state that is resident at the peak.
        ("ratio", {"peak_free_bytes": 144.0 + 96}, 4),
        ("ratio", {"peak_free_bytes": 144.0 + 95}, 1),
        # Saved tensors that have to move have left at the peak.
        ("ratio", {"peak_free_bytes": 144.0 + 95, "activation_least_bytes": 400}, 1),
    ],
)
def test_fixed_policies_keep_the_weights_that_have_room(plan: str, memory: dict[str, float], blocks: int) -> None:
    load = layers(4, activations=tuple(SavedTensors(100, 0.1 * i, 1 - 0.1 * i) for i in range(6)), **memory)
    made = static_ratio(load, 0.75) if plan == "ratio" else stride(load, 2, slots=1)
    assert len(made.blocks_on_device) == blocks


def test_all_stays_where_it_fits_and_no_weights_stream_before_compute_is_known() -> None:
    load = layers(6, outside=1, each=2)
    plan = adaptive(load, machine())
    assert (set(plan.placements), len(plan.blocks_on_device)) == ({R}, 6)
    fixed = dataclasses.replace(load, blocks_least=2, blocks_most=2, forward_s=10.0, backward_s=20.0)
    assert len(adaptive(fixed, machine()).blocks_on_device) == 2
    tight = dataclasses.replace(load, peak_free_bytes=6 * 48.0 + 144)
    plan = adaptive(tight, machine())
    assert (plan.placements.count(R), len(plan.blocks_on_device)) == (1, 6), "state makes room, as fetches cost time"
    assert adaptive(dataclasses.replace(load, peak_free_bytes=10.0), machine()).blocks_on_device == frozenset()


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Workload, HardwareProfile]:
    """A model on a machine of any kind, with room for a part of its weights and state."""
    profile = builtin_profiles()[draw(st.sampled_from(sorted(builtin_profiles())))]
    count, each = draw(st.sampled_from([4, 9, 16])), draw(st.integers(1, 2))
    one = SubgroupLoad.of(draw(st.sampled_from([10, 200])) * 10**6, SPLIT)
    one = dataclasses.replace(one, returned_bytes=one.gradient_bytes)
    nbytes = each * one.parameter_bytes
    forward_s = draw(st.floats(0.1, 5.0)) * count * nbytes / profile.h2d_bandwidth
    n = count * each + 2
    load = Workload(
        (one,) * n,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        blocks=tuple(BlockLoad(nbytes, 1 + b * each, 1 + (b + 1) * each) for b in range(count)),
        micro_batches=draw(st.sampled_from([1, 1, 4])),
        peak_free_bytes=2 * nbytes + draw(st.floats(0.0, 0.9)) * (count * nbytes + n * one.state_bytes),
    )
    if draw(st.booleans()):
        load = dataclasses.replace(load, shared_free_bytes=load.peak_free_bytes)
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    saved = (SavedTensors(int(share * nbytes), (b + 1) / count, 1 - b / count) for b in range(count))
    return dataclasses.replace(load, activations=tuple(saved) if share else ()), profile


@given(trainings())
@settings(max_examples=15, derandomize=True)
def test_the_number_of_blocks_that_stay_is_as_good_as_any_fixed_one(case: tuple[Workload, HardwareProfile]) -> None:
    load, profile = case
    best = adaptive(load, profile)
    assert load.has_room(best)
    found, scope = makespan(best, load, profile, WHOLE), Scope.beside(load)
    assert found >= scope.compute_s(load) + lower_bound(load, profile, scope).seconds * (1 - 1e-6)
    for count in range(0, len(load.blocks) + 1, len(load.blocks) // 4):
        fixed = dataclasses.replace(load, blocks_least=count, blocks_most=count)
        plan = adaptive(fixed, profile)
        assert len(plan.blocks_on_device) == count
        assert not fixed.has_room(plan) or found <= 1.03 * makespan(plan, load, profile, WHOLE)


def test_a_plan_for_a_model_that_had_more_blocks_has_no_room() -> None:
    """The planner remembers plans, and blocks were removed."""
    plan = dataclasses.replace(cpu_only(layers(3)), blocks_on_device=frozenset([0, 2]))
    assert layers(3).has_room(plan)
    fewer = layers(3)
    assert not dataclasses.replace(fewer, blocks=fewer.blocks[:2]).has_room(plan)
