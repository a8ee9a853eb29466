"""Jobs of several GPUs: collectives, memory, times and limits, on paper."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.demand import demand
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import Stream
from perfmodel.plan import Placement
from perfmodel.planner.answer import Answer
from perfmodel.planner.beside import SLOWER
from perfmodel.planner.job import EFFICIENCY
from perfmodel.planner.machine import GPUS, Fabric
from perfmodel.planner.outcome import adaptive_outcome, outcomes
from perfmodel.planner.question import Question
from perfmodel.planner.situation import DEVICE, HOST, Situation
from perfmodel.planner.whatif import remedies
from perfmodel.simulate import Phase, Scope, makespan
from tests.support.fake_ranks import fake_ranks
from tests.support.planner import question
from tests.support.ranks import needs_fsdp2

H100 = HardwareProfile.builtin("h100")
GB = 1e9

JOBS = st.fixed_dictionaries(
    {
        "machine": st.sampled_from(sorted(GPUS)),
        "numel": st.sampled_from([3e8, 3e9, 3e10]),
        "fsdp": st.booleans(),
        "offload_parameters": st.booleans(),
        "attach": st.booleans(),
        "batch": st.sampled_from([1, 8]),
        "ranks": st.sampled_from([1, 2, 4, 8]),
    }
)


def drawn_question(changes: dict[str, Any]) -> Question:
    """The question, unless it is one that cannot be."""
    try:
        return question(**changes)
    except ValueError:
        assume(False)
        raise


def test_volumes_are_those_of_the_zero_paper() -> None:
    """Rajbhandari et al. 2020, section 7: 2, and 3 with FSDP2's stage 3, for many ranks."""
    jobs = [Situation(question(ranks=1024, fsdp=fsdp)).job for fsdp in (False, True)]
    volumes = [sum(each.moved for each in job.collectives) / 14e9 for job in jobs]
    assert volumes == pytest.approx([2, 3], rel=2e-3)


class _Watch(TorchDispatchMode):
    """Elements of whole tensors by collective, of all process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            self.elements[func.__name__.split(".")[0]] += max(t.numel() for t in tensors)
        return func(*args, **(kwargs or {}))


@needs_fsdp2
def test_volumes_are_fsdp2_s_own() -> None:
    """Blocks exactly. Weights that the root keeps gathered are gathered once and counted twice, to be cautious."""
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        model = nn.Sequential(nn.Embedding(32, 8), *(nn.Linear(8, 8, bias=False) for _ in range(3)), nn.Linear(8, 32))
        numel = sum(p.numel() for p in model.parameters())
        root = numel - 3 * 64
        for block in model[1:4]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with _Watch() as watch:
            model(torch.arange(4)).sum().backward()

    ours: Counter[str] = Counter()
    for each in Situation(question(numel, ranks=4, fsdp=True)).job.collectives:
        ours[each.what] += round(each.moved * 4 / 3 / 2)
    theirs = watch.elements
    assert theirs["_allgather_base_"] == ours["all-gather of weights"] - root
    assert theirs["_reduce_scatter_base_"] == ours["reduce-scatter of gradients"] == numel
    assert theirs["allreduce_"] == 0


@given(JOBS)
def test_more_ranks_never_need_more_memory(drawn: dict[str, Any]) -> None:
    fewer = drawn_question(drawn)
    more = fewer.replace(ranks=2 * fewer.ranks)
    assert Situation(more).device.peak_bytes() <= Situation(fewer).device.peak_bytes()
    assert Situation(more).host_per_rank <= Situation(fewer).host_per_rank


def test_collectives_keep_the_link_between_gpus_busy() -> None:
    """Or PCIe, where there is no other."""
    nvlink, pcie = (question(ranks=8, fsdp=True, fabric=Fabric(rate)) for rate in (400 * GB, None))
    whole, *_ = Situation(nvlink).job.collectives
    assert whole.moved == 7 / 8 * 14e9
    assert whole.seconds == pytest.approx(whole.moved / (EFFICIENCY * 400 * GB))
    fast, slow = (Situation(asked) for asked in (nvlink, pcie))
    assert slow.job.collectives[0].seconds == pytest.approx(whole.moved / H100.h2d_bandwidth_duplex)
    plan = adaptive_outcome(fast).plan
    assert plan is not None
    assert fast.busy_s(plan)["interconnect"] == pytest.approx(3 * whole.seconds)
    assert "interconnect" not in slow.busy_s(plan)
    exchanged_s = sum(each.seconds for each in slow.job.collectives)
    more_s = slow.busy_s(plan)["PCIe to the GPU"] - fast.busy_s(plan).get("PCIe to the GPU", 0.0)
    assert more_s == pytest.approx(exchanged_s)


@given(JOBS, st.booleans(), st.sampled_from([0.0, 0.5]))
@settings(max_examples=5)
def test_no_resource_works_longer_than_the_iteration_lasts(
    drawn: dict[str, Any], gradients: bool, share: float
) -> None:
    leaving = {"offload_gradients": gradients, "offload_activations": share}
    found = Answer(drawn_question({**drawn, **leaving, "chosen_size": int(drawn["numel"] / 16)}))
    assert all(lever.outcome.fits for lever in found.levers)
    assert not (found.remedies and found.situation.fits)
    job, iteration_s = found.situation.job, found.best.iteration_s
    if iteration_s is None:
        assert found.limit in (DEVICE, HOST)
        return
    assert max(found.busy_s.values()) == found.busy_s[found.limit] <= iteration_s * (1 + 1e-9)
    trained_s = job.forward_s() + job.backward_s
    assert found.situation.compute_s <= trained_s * (1 + 1e-9) <= iteration_s * (1 + 1e-6)


def test_memory_is_divided_over_the_shards() -> None:
    one, fsdp = (Situation(question(ranks=8, fsdp=fsdp)) for fsdp in (False, True))
    assert [s.device.weights for s in (one, fsdp)] == [14e9, 14e9 / 8]
    assert [s.host_needed for s in (one, fsdp)] == [8 * 14 * 7e9, 14 * 7e9]
    block, root = -(-7 * 10**9 // 33) * 2, 2 * 32_000 * one.question.model.width * 2
    assert one.question.model.layers == 33
    assert fsdp.device.gathered == 2 * block + root
    assert fsdp.device.peak_bytes() - fsdp.device.gathered >= one.device.peak_bytes() - 2 * 14e9
    assert fsdp.profile.ranks_per_host == 8
    assert fsdp.scope == Scope(Phase.OVERLAPPED, Phase.OVERLAPPED)
    assert one.scope.backward is Phase.SERIAL, "between ranks gradients do not leave during backward"


def test_slow_links_between_gpus_limit_the_job() -> None:
    asked = question(numel=13e9, ranks=8, fsdp=True, fabric=Fabric(5 * GB))
    found = Answer(asked)
    best, job = found.best, found.situation.job
    exchanged_s = 3 * 7 / 8 * 26e9 / (EFFICIENCY * 5e9)
    assert found.limit == "interconnect"
    assert job.forward_s() + job.backward_s == pytest.approx(exchanged_s, rel=0.05), "nothing else takes as long"
    assert best.seconds >= exchanged_s
    assert found.tokens_per_s == pytest.approx(8 * 2048 / best.seconds), "of all GPUs together"


@pytest.mark.parametrize("attach", [False, True])
def test_parameters_on_the_host(attach: bool) -> None:
    asked = question(ranks=4, fsdp=True, offload_parameters=True, attach=attach)
    situation, shard = Situation(asked), 7 * 10**9 // 4
    assert (situation.device.weights, situation.device.gradients) == (0, 0)
    host = situation.host
    assert (host.master, host.moments) == (2 * shard, 8 * shard)
    assert host.gradient_staging == host.parameter_staging == 0, "nothing has to be staged"
    assert situation.host_model == 4 * shard
    assert situation.host_needed == 4 * 14 * shard

    (outcome,) = outcomes(situation)
    loads = situation.update_workload.subgroups
    assert outcome.plan is not None
    assert outcome.update_s is not None
    assert outcome.update_s >= sum(demand(Placement.CPU, load, situation.profile)[Stream.CPU].seconds for load in loads)
    busy = situation.busy_s(outcome.plan)
    assert busy["PCIe to the GPU"] == pytest.approx(2 * 2 * shard / H100.h2d_bandwidth)
    assert busy["PCIe to the host"] == pytest.approx(2 * shard / H100.d2h_bandwidth)
    assert busy["host DRAM"] == pytest.approx((26 * shard + 3 * 2 * shard) / (H100.host_bandwidth / 4))
    after_backward = outcome.update_s + (0 if attach else situation.job.forward_s())
    assert outcome.seconds >= situation.job.backward_s + after_backward
    if not attach:
        assert outcome.seconds == pytest.approx(situation.training_s + outcome.update_s)
        attached = adaptive_outcome(Situation(asked.replace(attach=True)))
        assert attached.seconds < outcome.seconds, "copies and compute run beside updates of later layers"


def test_one_gpu_does_not_hide_copies_of_its_parameters() -> None:
    """There FSDP2 copies on the stream on which it computes."""
    job = Situation(question(fsdp=True, offload_parameters=True, batch=8)).job
    assert job.forward_s() == pytest.approx(job.compute_s[0] + 14e9 / H100.h2d_bandwidth)
    assert job.backward_s > job.compute_s[1] + 14e9 / H100.h2d_bandwidth_duplex
    several = Situation(question(ranks=2, fsdp=True, offload_parameters=True, batch=8)).job
    assert several.forward_s() < 1.1 * job.compute_s[0]


def test_float32_parameters_on_the_host_are_their_own_master() -> None:
    situation = Situation(question(numel=1e9, dtype="fp32", fsdp=True, offload_parameters=True))
    assert (situation.host.master, situation.host.moments, situation.host_model) == (0, 8e9, 8e9)
    load = situation.update_workload.subgroups[0]
    assert load.cpu_traffic == 28 * load.numel, "12 read and written, and the gradient"


@pytest.mark.parametrize(
    ("settings", "proposed"),
    [
        ({"numel": 70e9, "fsdp": True}, "with --offload-parameters"),
        ({"numel": 60e9, "ranks": 8}, "with --fsdp"),
    ],
)
def test_a_model_fits_where_more_is_divided_or_on_the_host(settings: dict[str, Any], proposed: str) -> None:
    situation = Situation(question(**settings))
    assert not situation.fits
    assert proposed in {remedy.change for remedy in remedies(situation)}


@given(JOBS)
@settings(max_examples=8)
@example({"machine": "rtx_3090_desktop", "numel": 3e9, "attach": True, "batch": 1})  # longer compute, shorter in all
def test_one_rank_is_the_performance_model_alone(drawn: dict[str, Any]) -> None:
    """As if there were no FSDP2: compute by the rate, slower beside copies, the rest by `makespan`."""
    alone = {"ranks": 1, "fsdp": False, "offload_parameters": False}
    asked = drawn_question({**drawn, **alone})
    situation = Situation(asked)
    best, work = adaptive_outcome(situation), situation.update_workload
    counted = asked.model.flops(asked.tokens, asked.sequence, checkpointing=True)
    forward, backward = (flops / asked.flops_rate for flops in counted)
    assert (situation.iteration_workload.forward_s, situation.iteration_workload.backward_s) == (forward, backward)
    if best.plan is not None:
        beside = situation.iteration_workload
        least = makespan(best.plan, beside, situation.profile, situation.scope)
        assert 1 - 1e-9 <= (best.iteration_s or 0.0) / least <= 1 + SLOWER
        assert best.update_s == makespan(best.plan, work, situation.profile)
    for lonely in (asked, asked.replace(fsdp=True)):
        assert not Situation(lonely).job.has_communication
        assert Situation(lonely).training_s == Situation(lonely).compute_s
    assert situation.device.gathered == situation.host_model == 0
    assert (situation.host_needed, situation.profile.ranks_per_host) == (14 * asked.model.numel, 1)
