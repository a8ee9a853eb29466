"""Jobs of several GPUs and nodes: collectives, memory, times and limits, on paper."""

from __future__ import annotations

import csv
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

from experiments.paper.runs import RUNS
from perfmodel.demand import demand
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import Stream
from perfmodel.plan import Placement
from perfmodel.planner.answer import Answer
from perfmodel.planner.job import EFFICIENCY, Job
from perfmodel.planner.machine import FABRICS, Fabric
from perfmodel.planner.outcome import adaptive_outcome, outcomes
from perfmodel.planner.question import Group, Question
from perfmodel.planner.situation import DEVICE, HOST, Situation
from perfmodel.planner.whatif import remedies
from perfmodel.simulate import makespan
from tests.support.fake_ranks import fake_ranks
from tests.support.planner import question
from tests.support.ranks import needs_fsdp2

H100 = HardwareProfile.builtin("h100")
GB = 1e9

JOBS = st.fixed_dictionaries(
    {
        "machine": st.sampled_from(sorted(FABRICS)),
        "numel": st.sampled_from([3e8, 3e9, 3e10]),
        "nodes": st.sampled_from([1, 2, 4]),
        "replicas": st.sampled_from([1, 2, 4]),
        "fsdp": st.booleans(),
        "offload_parameters": st.booleans(),
        "attach": st.booleans(),
        "batch": st.sampled_from([1, 8]),
        "ranks": st.sampled_from([1, 2, 4, 8, 16]),
        "zero": st.sampled_from([0, 2]),
    }
)


def drawn_question(changes: dict[str, Any]) -> Question:
    """The question, unless it is one that cannot be."""
    try:
        return question(**{**changes, **({"zero": 0} if changes["fsdp"] else {})})
    except ValueError:
        assume(False)
        raise


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 48))
def test_groups_are_those_of_a_mesh(nodes: int, per_node: int, replicas: int) -> None:
    """Against ranks written out: a mesh (replicas, shards) of neighbours, as init_device_mesh lays it out."""
    try:
        asked = question(ranks=nodes * per_node, nodes=nodes, replicas=replicas, fsdp=True)
    except ValueError:
        shards = nodes * per_node / replicas
        assert shards % 1 or (shards % per_node and per_node % shards)
        return
    mesh = [[replica * asked.shards + i for i in range(asked.shards)] for replica in range(replicas)]
    groups = [(replica, asked.sharding) for replica in mesh]
    groups += [(list(shard), asked.replication) for shard in zip(*mesh, strict=True)]
    for ranks, group in groups:
        members = Counter(rank // per_node for rank in ranks)
        assert group == Group(len(ranks), *set(members.values())), "equally many in each node"
        assert group.nodes == len(members)


def test_volumes_are_those_of_the_zero_paper() -> None:
    """Rajbhandari et al. 2020, section 7: 2, and 3 with stage 3, for many ranks."""
    jobs = [Situation(question(ranks=1024, nodes=128, zero=stage)).job for stage in range(4)]
    volumes = [sum(each.moved for each in job.collectives) / 14e9 for job in jobs]
    assert volumes == pytest.approx([2, 2, 2, 3], rel=2e-3)


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
@pytest.mark.parametrize("replicas", [1, 2])
def test_volumes_are_fsdp2_s_own(replicas: int) -> None:
    """Blocks exactly. Weights that the root keeps gathered are gathered once and counted twice, to be cautious."""
    shape, names = ((4,), None) if replicas == 1 else ((2, 2), ("replicate", "shard"))
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = nn.Sequential(nn.Embedding(32, 8), *(nn.Linear(8, 8, bias=False) for _ in range(3)), nn.Linear(8, 32))
        numel = sum(p.numel() for p in model.parameters())
        root = numel - 3 * 64
        for block in model[1:4]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with _Watch() as watch:
            model(torch.arange(4)).sum().backward()

    ours: Counter[str] = Counter()
    for each in Situation(question(numel, ranks=4, replicas=replicas, fsdp=True)).job.collectives:
        rounds = 2 if each.what.startswith("all-reduce") else 1
        ours[each.what] += round(each.moved / rounds * each.group.size / (each.group.size - 1) / 2)
    theirs = watch.elements
    assert theirs["_allgather_base_"] == ours["all-gather of weights"] - root
    assert theirs["_reduce_scatter_base_"] == ours["reduce-scatter of gradients"] == numel
    assert theirs["allreduce_"] == ours["all-reduce between replicas"] == (numel // 2 if replicas > 1 else 0)


def exchanging(fabric: Fabric, **settings: Any) -> Job:
    """FSDP2 on two nodes of four GPUs, with so fast links."""
    return Situation(question(ranks=8, nodes=2, fsdp=True, fabric=fabric, **settings)).job


def test_the_slowest_link_of_a_ring_counts_and_each_link_is_busy_for_its_part() -> None:
    pcie = H100.h2d_bandwidth_duplex
    nvlink, network = EFFICIENCY * 400 * GB, EFFICIENCY * 100 * GB
    whole, *_ = exchanging(Fabric(400 * GB, 100 * GB)).collectives
    assert whole.moved == 7 / 8 * 14e9
    assert whole.seconds == whole.network_s == pytest.approx(whole.moved / network), "one ring has all adapters"
    assert whole.interconnect_s == pytest.approx(whole.moved / nvlink)
    assert whole.pcie_s == pytest.approx(whole.moved / 4 / pcie), "its part of what leaves"
    node, *_, pairs = exchanging(Fabric(400 * GB, 100 * GB), replicas=2).collectives
    assert node.seconds == pytest.approx(node.moved / nvlink)
    assert node.network_s == node.pcie_s == pairs.interconnect_s == 0
    assert pairs.seconds == pytest.approx(pairs.moved / (network / 4)), "four rings share the adapters"
    *_, pairs = exchanging(Fabric(400 * GB, 10_000 * GB), replicas=2).collectives
    assert pairs.seconds == pairs.moved / pcie, "a GPU reaches the network through its PCIe link"
    whole, *_ = exchanging(Fabric(None, 100 * GB)).collectives
    assert whole.pcie_s == whole.interconnect_s == pytest.approx(whole.moved / pcie)


@given(JOBS)
def test_more_ranks_never_need_more_memory(drawn: dict[str, Any]) -> None:
    fewer = drawn_question(drawn)
    more = fewer.replace(ranks=2 * fewer.ranks)
    assert Situation(more).device.peak_bytes() <= Situation(fewer).device.peak_bytes()
    assert Situation(more).host_per_rank <= Situation(fewer).host_per_rank


COLLECTIVES_HOLD_UP = {
    "machine": "a100_pcie_server",
    "numel": 3e9,
    "nodes": 2,
    "replicas": 4,
    "fsdp": True,
    "offload_parameters": False,
    "attach": True,
    "batch": 1,
    "ranks": 8,
    "zero": 0,
}
"""Beside its collectives the CPU has no time for a share that pays beside compute alone."""


@given(JOBS, st.floats(1.01, 100))
@example(COLLECTIVES_HOLD_UP, 2.0)
@settings(max_examples=40)
def test_a_faster_network_never_costs_time(drawn: dict[str, Any], factor: float) -> None:
    """Collectives exactly; the iteration to 1%, for its plan is the best of some that are simulated."""
    asked = drawn_question(drawn)
    assert asked.fabric.network is not None
    faster = Fabric(asked.fabric.interconnect, factor * asked.fabric.network)
    before, after = Situation(asked), Situation(asked.replace(fabric=faster))
    assert after.training_s <= before.training_s * (1 + 1e-9)
    assert adaptive_outcome(after).seconds <= adaptive_outcome(before).seconds * 1.01


@given(JOBS, st.booleans(), st.sampled_from([0.0, 0.5]))
@settings(max_examples=8)
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
    one, fsdp = (Situation(question(ranks=8, nodes=2, fsdp=fsdp)) for fsdp in (False, True))
    hsdp = Situation(question(ranks=8, nodes=2, fsdp=True, replicas=2))
    assert [s.device.weights for s in (one, hsdp, fsdp)] == [14e9, 14e9 / 4, 14e9 / 8]
    assert [s.host_needed for s in (one, hsdp, fsdp)] == [4 * 14 * 7e9, 14 * 7e9, 14 * 7e9 / 2], "per node"
    block, root = -(-7 * 10**9 // 33) * 2, 2 * 32_000 * one.question.model.width * 2
    assert one.question.model.layers == 33
    assert fsdp.device.gathered == hsdp.device.gathered == 2 * block + root
    assert fsdp.device.peak_bytes() - fsdp.device.gathered >= one.device.peak_bytes() - 2 * 14e9
    assert fsdp.profile.ranks_per_host == 4


def test_zero_gathers_new_parameters_after_the_update() -> None:
    whole, divided = (Situation(question(numel=1e9, ranks=4, zero=zero)) for zero in (0, 1))
    gathered_s = 3 / 4 * 2e9 / (EFFICIENCY * 450e9)
    assert (whole.job.after_update_s, divided.job.after_update_s) == (0, pytest.approx(gathered_s))
    plan = adaptive_outcome(divided).plan
    assert plan is not None
    scheduled_s = makespan(plan, divided.iteration_workload, divided.profile, divided.scope)
    assert divided.iteration_s(plan) == pytest.approx(scheduled_s + gathered_s, rel=1e-12)
    exposed_s = divided.job.backward_s - divided.job.compute_s[1] + gathered_s
    assert divided.exposed_communication_s == pytest.approx(exposed_s)


def test_a_slow_network_limits_the_job_and_hsdp_helps() -> None:
    asked = question(numel=13e9, ranks=8, nodes=2, fsdp=True, fabric=Fabric(450 * GB, 5 * GB))
    found = Answer(asked)
    best, job = found.best, found.situation.job
    exchanged_s = 3 * 7 / 8 * 26e9 / (EFFICIENCY * 5e9)
    assert found.limit == "network"
    assert job.forward_s() + job.backward_s == pytest.approx(exchanged_s, rel=0.05), "nothing else takes as long"
    assert best.seconds >= exchanged_s
    assert found.tokens_per_s == pytest.approx(8 * 2048 / best.seconds), "of all GPUs together"
    hsdp = Situation(asked.replace(replicas=2))
    assert hsdp.training_s == pytest.approx(26e9 / 4 / (EFFICIENCY * 5e9 / 4), rel=0.05)
    helps = {lever.change: lever.outcome.seconds for lever in found.levers}
    assert helps["--replicas 2"] == adaptive_outcome(hsdp).seconds
    assert helps["network twice as fast"] < 0.6 * best.seconds


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
        ({"numel": 60e9, "ranks": 8, "nodes": 2, "fsdp": True, "replicas": 4}, "with one replica over all ranks"),
        ({"numel": 60e9, "ranks": 8, "nodes": 2}, "with --fsdp"),
    ],
)
def test_a_model_fits_where_more_is_divided_or_on_the_host(settings: dict[str, Any], proposed: str) -> None:
    situation = Situation(question(**settings))
    assert not situation.fits
    assert proposed in {remedy.change for remedy in remedies(situation)}


@given(JOBS)
@settings(max_examples=20)
def test_one_rank_is_the_performance_model_alone(drawn: dict[str, Any]) -> None:
    """As if there were no nodes and no FSDP2: compute by the rate, the rest by `makespan`."""
    alone = {"ranks": 1, "nodes": 1, "replicas": 1, "fsdp": False, "offload_parameters": False}
    asked = drawn_question({**drawn, **alone})
    situation = Situation(asked)
    best, work = adaptive_outcome(situation), situation.update_workload
    counted = asked.model.flops(asked.tokens, asked.sequence, checkpointing=True)
    forward, backward = (flops / asked.flops_rate for flops in counted)
    assert (situation.iteration_workload.forward_s, situation.iteration_workload.backward_s) == (forward, backward)
    if best.plan is not None:
        beside = situation.iteration_workload
        assert best.iteration_s == makespan(best.plan, beside, situation.profile, situation.scope)
        assert best.update_s == makespan(best.plan, work, situation.profile)
    for lonely in (asked, asked.replace(zero=3), asked.replace(zero=0, fsdp=True)):
        assert not Situation(lonely).job.has_communication
        assert Situation(lonely).training_s == Situation(lonely).compute_s
    assert situation.device.gathered == situation.host_model == 0
    assert (situation.host_needed, situation.profile.ranks_per_host) == (14 * asked.model.numel, 1)


@pytest.mark.parametrize("nodes", [2, 4])
def test_published_runs_over_a_network(nodes: int) -> None:
    """7B on 8 and 16 A100s: one bandwidth explains forward and backward, of both, to 15%.

    It is 6.4 GB/s per node: these runs, by DeepSpeed, got a sixth of the adapters' bandwidth.
    """
    with RUNS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["nodes"] == str(nodes)]
    (run,) = (r for r in rows if r["mode"] == "async_grad_only" and r["grad_accum"] == "1" and r["cpu_ratio"] == "1.0")
    job = Situation(
        question(
            float(run["params_total"]),
            "a100_unbound",
            ranks=nodes * int(run["ranks_per_node"]),
            nodes=nodes,
            fsdp=True,
            batch=int(run["mbs"]),
            flops_rate=150e12,
            fabric=Fabric(300 * GB, 6.4 * GB / EFFICIENCY),
        )
    ).job
    assert job.forward_s() == pytest.approx(float(run["fwd_ms"]) / 1e3, rel=0.15)
    assert job.backward_s == pytest.approx(float(run["bwd_ms"]) / 1e3, rel=0.15)
