"""The step as data, against schedules written out by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import Op, Placement, Plan
from perfmodel.lanes import Stream
from perfmodel.plan import Tier
from perfmodel.schedule import schedule, schedule_step, turns
from perfmodel.scope import UPDATE_ALONE, Phase, Scope
from perfmodel.simulate import Simulator, serve
from perfmodel.tasks import SubgroupState, Task, arriving, leaving, staged
from perfmodel.workload import SavedTensors
from tests.support.machines import machine, work
from tests.support.schedules import found, lines

C, S, R = Placement.CPU, Placement.GPU_STREAMED, Placement.GPU_RESIDENT
DEVICE, HOST = Tier.DEVICE, Tier.HOST


def step(
    placements: tuple[Placement, ...], finds: list[SubgroupState], slots: int = 1, begun: tuple[Task, ...] = ()
) -> list:
    plan = Plan(placements, tuple(range(len(placements))), slots)
    return lines(schedule_step(plan, work(len(placements)), finds, begun))


def test_a_plan_that_finds_all_as_it_wants() -> None:
    plan = Plan((C, S, R, S), (1, 0, 2, 3), 1)
    expected = [
        "0 update 2 GPU 12",
        "1 prefetch 1 PREFETCH 144 slot 0",
        "2 update 1 GPU 12 slot 0 after 1",
        "3 flush 1 FLUSH 144 slot 0 after 2",
        "4 gradient 0 GRADIENT 24",
        "5 update 0 CPU 12 after 4",
        "6 parameter 0 PARAMETER 24 after 5",
        "7 prefetch 3 PREFETCH 144 slot 0 after 3",
        "8 update 3 GPU 12 slot 0 after 7",
        "9 flush 3 FLUSH 144 slot 0 after 8",
    ]
    assert lines(schedule(plan, work(4))) == expected


def test_residents_of_one_format_are_one_task_which_holds_no_transfer_home_up() -> None:
    """It comes behind state that leaves and state that has come to a slot, and before all that has yet to come."""
    begun = (Task(Op.PREFETCH, Stream.PREFETCH, 1, 144, (), 0),)
    finds = [found(DEVICE), found(HOST), found(HOST), *[found(DEVICE, numel=n) for n in (12, 5, 12, 12)]]
    sizes = work(7)
    loads = (*sizes.subgroups[:6], dataclasses.replace(sizes.subgroups[6], format="split"))
    plan = Plan((R, S, S, R, R, C, R), tuple(range(7)), 2)
    made = schedule_step(plan, dataclasses.replace(sizes, subgroups=loads), finds, begun)
    assert [task for task in lines(made) if " update " in task] == [
        "9 update 5 GPU 12 after 8",
        "11 update 1 GPU 12 slot 0 after 7 8",
        "13 update 0+3+4 GPU 29 after 8",
        "14 update 6 GPU 12 after 8",
        "16 update 2 GPU 12 slot 1 after 15 8",
    ]


def test_beside_compute() -> None:
    scope = Scope(Phase.OVERLAPPED, Phase.OVERLAPPED)
    assert lines(schedule(Plan((C, S), (0, 1), 1), work(2, forward_s=1.0, backward_s=1.0), scope)) == [
        "0 backward COMPUTE 24",
        "1 gradient 0 GRADIENT 24 after 0",
        "2 update 0 CPU 12 after 1 0",
        "3 parameter 0 PARAMETER 24 after 2 0",
        "4 prefetch 1 PREFETCH 144 slot 0",
        "5 update 1 GPU 12 slot 0 after 4 0",
        "6 flush 1 FLUSH 144 slot 0 after 5",
        "7 forward COMPUTE 12 after 3",
        "8 forward COMPUTE 12 after 5",
    ]


def test_state_comes_to_stay_and_leaves() -> None:
    """The third leaves without an update, the fourth has no gradient and stays where it is."""
    finds = [found(HOST), found(DEVICE), found(DEVICE, None), found(HOST, None)]
    assert step((R, C, S, R), finds) == [
        "0 backward COMPUTE 0",
        "1 update 1 GPU 12 after 0",
        "2 flush 1 FLUSH 144 after 1",
        "3 flush 2 FLUSH 144 after 0",
        "4 prefetch 0 PREFETCH 144 after 0",
        "5 update 0 GPU 12 after 4 0",
    ]
    plan = Plan((R, C, S, R), (3, 2, 1, 0), 1)
    assert (arriving(plan, finds), leaving(plan, finds), staged(plan, finds)) == ([0], [2, 1], [])


def test_offloaded_gradients_come_up_through_slots_or_are_used_where_they_are() -> None:
    """One of each placement, one that arrives and one that leaves, through one slot."""
    finds = [found(state, HOST, 12, 48) for state in (HOST, HOST, DEVICE, HOST, DEVICE)]
    assert step((C, S, R, R, C), finds) == [
        "0 backward COMPUTE 0",
        "1 update 0 CPU 12 after 0",
        "2 parameter 0 PARAMETER 24 after 1 0",
        "3 prefetch 1 PREFETCH 192 slot 0 after 0",
        "4 update 1 GPU 12 slot 0 after 3 0",
        "5 flush 1 FLUSH 144 slot 0 after 4",
        "6 prefetch 2 PREFETCH 48 slot 0 after 5",
        "7 update 2 GPU 12 slot 0 after 6 0",
        "8 prefetch 3 PREFETCH 192 slot 0 after 7",
        "9 update 3 GPU 12 slot 0 after 8 0",
        "10 prefetch 4 PREFETCH 48 slot 0 after 9",
        "11 update 4 GPU 12 slot 0 after 10 0",
        "12 flush 4 FLUSH 144 after 11",
    ]
    assert staged(Plan((C, S, R, R, C), (0, 1, 2, 3, 4), 1), finds) == [1, 2, 3, 4]


def test_without_a_slot_state_goes_home_to_be_updated_with_offloaded_gradients() -> None:
    """The other has a gradient for 5 of its 12 parameters, which alone are updated."""
    assert step((R, C), [found(DEVICE, HOST, 12, 48), found(HOST, numel=5, gradient_bytes=10)], slots=0) == [
        "0 backward COMPUTE 0",
        "1 flush 0 FLUSH 144 after 0",
        "2 update 0 CPU 12 after 1 0",
        "3 parameter 0 PARAMETER 24 after 2 0",
        "4 gradient 1 GRADIENT 10 after 0",
        "5 update 1 CPU 5 after 4 0",
        "6 parameter 1 PARAMETER 10 after 5 0",
    ]


def test_transfers_under_way_are_not_issued_again() -> None:
    """All gradients of the first have left, half of the second; state of the third is in a slot."""
    begun = (
        Task(Op.PREFETCH, Stream.PREFETCH, 2, 144, (), 0),
        Task(Op.GRADIENT, Stream.GRADIENT, 1, 12),
        Task(Op.GRADIENT, Stream.GRADIENT, 0, 24),
    )
    finds = [
        found(HOST, gradient_bytes=None),
        found(HOST, gradient_bytes=12),
        found(HOST),
    ]
    assert step((C, C, S), finds, begun=begun) == [
        "0 backward COMPUTE 12",
        "1 backward COMPUTE 12",
        "2 backward COMPUTE 12",
        "3 prefetch 2 PREFETCH 144 slot 0 after 1",
        "4 gradient 1 GRADIENT 12 after 1",
        "5 gradient 0 GRADIENT 24 after 2",
        "6 backward COMPUTE 0",
        "7 update 2 GPU 12 slot 0 after 3 6",
        "8 flush 2 FLUSH 144 slot 0 after 7",
        "9 update 0 CPU 12 after 5 2",
        "10 parameter 0 PARAMETER 24 after 9 6",
        "11 gradient 1 GRADIENT 12 after 6",
        "12 update 1 CPU 12 after 11 4 2",
        "13 parameter 1 PARAMETER 24 after 12 6",
    ]


def test_the_host_fetches_parameters_that_it_lacks() -> None:
    """With the gradient, after one that has left, beside an offloaded one; an update on the device has them."""
    begun = (Task(Op.GRADIENT, Stream.GRADIENT, 1, 24),)
    finds = [
        found(HOST, stale_bytes=24),
        found(HOST, gradient_bytes=None, stale_bytes=6),
        found(HOST, HOST, stale_bytes=24),
        found(HOST, stale_bytes=24),
        found(DEVICE, stale_bytes=24),
    ]
    assert step((C, C, C, S, R), finds, begun=begun)[7:] == [
        "7 update 4 GPU 12 after 6",
        "8 gradient 0 GRADIENT 48 after 6",
        "9 update 0 CPU 12 after 8 4",
        "10 parameter 0 PARAMETER 24 after 9 6",
        "11 gradient 1 GRADIENT 6 after 6",
        "12 update 1 CPU 12 after 11 5 4",
        "13 parameter 1 PARAMETER 24 after 12 6",
        "14 gradient 2 GRADIENT 24 after 6",
        "15 update 2 CPU 12 after 14 4",
        "16 parameter 2 PARAMETER 24 after 15 6",
        "17 prefetch 3 PREFETCH 144 slot 0 after 6",
        "18 update 3 GPU 12 slot 0 after 17 6",
        "19 flush 3 FLUSH 144 slot 0 after 18",
    ]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Plan, list[SubgroupState]]:
    placements = tuple(draw(st.lists(st.sampled_from(Placement), min_size=1, max_size=10)))
    plan = Plan(placements, draw(st.permutations(range(len(placements)))), draw(st.integers(1, 4)))
    one = st.builds(
        found,
        st.sampled_from((Tier.DEVICE, Tier.HOST)),
        st.sampled_from([DEVICE, HOST, None]),
        stale_bytes=st.sampled_from([0, 24]),
    )
    return plan, draw(st.lists(one, min_size=len(placements), max_size=len(placements)))


@given(steps())
def test_any_step_can_be_served_and_leaves_state_where_the_plan_wants_it(
    made: tuple[Plan, list[SubgroupState]],
) -> None:
    plan, finds = made
    load = work(len(plan))
    issued = schedule_step(plan, load, finds, ())
    assert all(other < number for number, task in enumerate(issued.tasks) for other in task.after)
    timeline = serve(issued, load, machine())
    assert len([s for s in timeline.spans if s.subgroup is not None]) == len(issued.tasks) - 1
    for i, each in enumerate(finds):
        ops = [task.op for task in issued.tasks if i in (task.subgroup, *task.others)]
        assert (Op.UPDATE in ops) == (each.gradient is not None)
        if Op.UPDATE in ops or each.state is DEVICE:
            ups = Op.PREFETCH in ops and each.state is HOST
            assert (each.state is DEVICE or ups) - (Op.FLUSH in ops) == (plan.placements[i] is R)
    for slot in range(plan.slots):
        used = [s for s in issued.tasks if s.slot == slot]
        # Whoever fills a slot waits for the one who emptied it.
        for one, other in itertools.pairwise(used):
            if one.subgroup != other.subgroup:
                assert issued.tasks.index(one) in other.after


@pytest.mark.parametrize("scope", [UPDATE_ALONE, Scope(Phase.SERIAL)])
def test_a_step_that_finds_all_as_planned_is_the_plan(scope: Scope) -> None:
    """But for its first task, where `step()` is called."""
    plan = Plan((C, S, R, S, C), (1, 0, 4, 2, 3), 2)
    finds = [found(DEVICE if p is R else HOST) for p in plan.placements]
    issued = schedule_step(plan, work(5), finds, ()).tasks[1:]
    planned = schedule(plan, work(5), scope).tasks
    assert [task[:4] for task in issued] == [task[:4] for task in planned if task.op is not Op.BACKWARD]


def test_updates_that_begin_in_backward() -> None:
    """Each waits for its own piece of backward; of what has come the CPU takes first what forward needs first."""
    load = work(4, backward_s=4.0, forward_s=4.0, in_backward=True)
    plan, scope = Plan((R, C, C, S), (0, 1, 2, 3), 1), Scope.beside(load)
    assert lines(schedule(plan, load, scope)) == [
        *(f"{n} backward COMPUTE 12" for n in range(4)),
        "4 gradient 2 GRADIENT 24 after 1",
        "5 gradient 1 GRADIENT 24 after 2",
        "6 prefetch 3 PREFETCH 144 slot 0 after 0",
        "7 update 3 GPU 12 slot 0 after 6 0",
        "8 flush 3 FLUSH 144 slot 0 after 7",
        "9 update 2 CPU 12 after 4 1",
        "10 parameter 2 PARAMETER 24 after 9 1",
        "11 update 1 CPU 12 after 5 2",
        "12 parameter 1 PARAMETER 24 after 11 2",
        "13 update 0 GPU 12 after 3",
        *(f"{n} forward COMPUTE 12 after {after}" for n, after in ((14, 13), (15, 12), (16, 10), (17, 7))),
    ]
    last_first = Plan((C,) * 4, (0, 1, 2, 3), 0)
    for turn_s, order in ((0.5, [3, 2, 1, 0]), (2.5, [3, 1, 0, 2]), (10.0, [3, 0, 1, 2])):
        assert turns(last_first, load, {C: [turn_s] * 4}) == order


def test_state_on_disk_is_updated_behind_a_backward_that_updates() -> None:
    """`step()` has the windows."""
    load = dataclasses.replace(work(4, backward_s=4.0, in_backward=True), windows=2)
    load = dataclasses.replace(load, forward_s=4.0)
    plan = Plan((C, C, S, C), (0, 1, 2, 3), 1, on_disk=frozenset({1, 2}))
    made = schedule(plan, load, Scope.beside(load))
    start, end = Simulator(load, machine()).serve(made)
    ends = max(seconds for task, seconds in zip(made.tasks, end, strict=True) if task.op is Op.BACKWARD)
    begins = {
        (task.subgroup, task.op): seconds
        for task, seconds in zip(made.tasks, start, strict=True)
        if task.move or task.op is Op.UPDATE
    }
    assert begins[3, Op.UPDATE] < ends
    assert {i for i, op in begins if op is Op.READ} == {1, 2}
    assert min(seconds for (i, _), seconds in begins.items() if i in (1, 2)) >= ends


def test_saved_tensors_leave_in_forward_and_come_back_in_backward() -> None:
    """Three of five, in reverse, while backward uses tensors saved two places later; its next piece waits for them."""
    saved = tuple(SavedTensors(12, share, 1 - share) for share in (0.2, 0.4, 0.6, 0.8, 1.0))
    load = dataclasses.replace(work(2, 15, forward_s=1.0, backward_s=1.0), activations=saved)
    whole = Scope(Phase.OVERLAPPED, Phase.OVERLAPPED)
    assert lines(schedule(Plan((R, R), (0, 1), 0, activation_bytes=47), load, whole)) == [
        "0 backward COMPUTE 0",
        "1 restore RESTORE 12 after 0",
        "2 backward COMPUTE 6",
        "3 restore RESTORE 12 after 2",
        "4 backward COMPUTE 6",
        "5 restore RESTORE 12 after 4",
        "6 backward COMPUTE 6 after 1",
        "7 backward COMPUTE 6 after 3",
        "8 backward COMPUTE 6 after 5",
        "9 update 0+1 GPU 30 after 8",
        "10 forward COMPUTE 6 after 9",
        "11 save SAVE 12 after 10",
        "12 forward COMPUTE 6",
        "13 save SAVE 12 after 12",
        "14 forward COMPUTE 3",
        "15 forward COMPUTE 3 after 9",
        "16 save SAVE 12 after 15",
        "17 forward COMPUTE 12",
    ]


def test_offloaded_gradients_leave_in_backward_wherever_state_rests() -> None:
    loads = tuple(dataclasses.replace(each, returned_bytes=24) for each in work(4).subgroups)
    load = dataclasses.replace(work(4, backward_s=1.0), subgroups=loads, windows=2, host_free_bytes=0)
    plan = Plan((C, S, C, S), tuple(range(4)), 1, on_disk=frozenset({0, 1}))
    made = schedule(plan, load, Scope(backward=Phase.OVERLAPPED))
    assert [task.subgroup for task in made.tasks if task.op is Op.GRADIENT] == [3, 2, 1, 0]


def test_windows_take_turns_whenever_the_turn_of_their_state_comes() -> None:
    """No window waits while another is used again."""
    plan = Plan((R,) * 6 + (C,) * 9, tuple(range(15)), 0, on_disk=frozenset(range(6, 15)))
    finds = [*[found(DEVICE)] * 6, *[found(Tier.DISK)] * 9]
    load = dataclasses.replace(work(15), windows=3, host_free_bytes=0)
    issued = schedule_step(plan, load, finds, ())
    assert [task.window for task in issued.tasks if task.op is Op.READ] == [0, 1, 2] * 3
