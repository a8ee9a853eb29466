"""Jobs of several GPUs and nodes: memory, time, and what limits them, on paper."""

from __future__ import annotations

import csv
import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.paper.runs import RUNS
from perfmodel.demand import demand
from perfmodel.hardware import HardwareProfile
from perfmodel.lanes import Stream
from perfmodel.plan import Placement
from perfmodel.planner.advise import advise
from perfmodel.planner.datasheets import GPUS
from perfmodel.planner.fabric import EFFICIENCY, FABRICS, Fabric
from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.question import Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.transformer import Transformer
from perfmodel.simulate import makespan

H100 = HardwareProfile.builtin("h100")
GIB, GB = 2**30, 1e9


def question(numel: float = 7e9, machine: str = "h100", **changes: object) -> Question:
    defaults = {
        "profile": HardwareProfile.builtin(machine),
        "device_bytes": GPUS[machine].memory_bytes,
        "checkpointing": True,
        "flops_rate": 0.4 * GPUS[machine].peak("bf16"),
        "fabric": FABRICS[machine],
    }
    return Question(Transformer.of_size(int(numel)), **{**defaults, **changes})  # type: ignore[arg-type]


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


def job(**changes: object) -> Question:
    """The question, unless it is one that cannot be."""
    if changes["fsdp"]:
        changes["zero"] = 0
    try:
        return question(**changes)  # type: ignore[arg-type]
    except ValueError:
        assume(False)
        raise


@given(JOBS)
@settings(deadline=None, max_examples=200)
def test_more_ranks_never_need_more_device_memory(drawn: dict[str, object]) -> None:
    fewer = job(**drawn)
    more = dataclasses.replace(fewer, ranks=2 * fewer.ranks)
    assert Situation(more).device.peak <= Situation(fewer).device.peak
    assert Situation(more).host_per_rank <= Situation(fewer).host_per_rank


@given(JOBS, st.floats(1.01, 100))
@settings(deadline=None, max_examples=60)
def test_a_faster_network_never_costs_time(drawn: dict[str, object], factor: float) -> None:
    """Collectives exactly; the iteration to 1%, for its plan is the best of some that are simulated."""
    asked = job(**drawn)
    fabric = asked.fabric
    assert fabric.network is not None
    better = dataclasses.replace(asked, fabric=dataclasses.replace(fabric, network=factor * fabric.network))
    before, after = Situation(asked), Situation(better)
    assert (after.training_s or 0) <= (before.training_s or 0) * (1 + 1e-9)
    assert adaptive_outcome(after).seconds <= adaptive_outcome(before).seconds * 1.01


@given(JOBS)
@settings(deadline=None, max_examples=40)
def test_no_resource_works_longer_than_the_iteration_lasts(drawn: dict[str, object]) -> None:
    advice = advise(job(**drawn))
    assert all(lever.outcome.fits for lever in advice.levers)
    assert advice.remedies == () or not advice.situation.fits
    if advice.best.iteration_s is None:
        assert advice.limit in ("memory on the device", "host memory")
        return
    busy = advice.busy_s
    assert max(busy.values()) <= advice.best.iteration_s * (1 + 1e-9)
    assert advice.limit == max(busy, key=lambda resource: busy[resource])
    training_s, compute_s = advice.situation.training_s, advice.situation.compute_s
    assert training_s is not None
    assert compute_s is not None
    assert compute_s <= training_s * (1 + 1e-9) <= advice.best.iteration_s * (1 + 1e-6)


def test_memory_is_divided_over_the_shards() -> None:
    one, fsdp = (Situation(question(ranks=8, nodes=2, fsdp=fsdp)) for fsdp in (False, True))
    hsdp = Situation(question(ranks=8, nodes=2, fsdp=True, replicas=2))
    assert [s.device.weights for s in (one, hsdp, fsdp)] == [14e9, 14e9 / 4, 14e9 / 8]
    assert [s.host_needed for s in (one, hsdp, fsdp)] == [4 * 14 * 7e9, 14 * 7e9, 14 * 7e9 / 2], "per node"
    block, root = -(-7 * 10**9 // 33) * 2, 2 * 32_000 * one.question.model.width * 2
    assert one.question.model.layers == 33
    assert fsdp.device.gathered == hsdp.device.gathered == 2 * block + root
    assert fsdp.device.peak - fsdp.device.gathered >= one.device.peak - 2 * 14e9
    assert fsdp.profile.ranks_per_host == 4


def test_tokens_are_all_gpus_together() -> None:
    advice = advise(question(ranks=8, nodes=2, fsdp=True, batch=3))
    assert advice.best.iteration_s is not None
    assert advice.tokens_per_s == pytest.approx(8 * 3 * 2048 / advice.best.iteration_s)


def test_zero_gathers_new_parameters_after_the_update() -> None:
    whole, divided = (Situation(question(numel=1e9, ranks=4, zero=zero)) for zero in (0, 1))
    gathered_s = 3 / 4 * 2e9 / (EFFICIENCY * 450e9)
    assert (whole.job.after_update_s, divided.job.after_update_s) == (0, pytest.approx(gathered_s))
    plan = adaptive_outcome(divided).plan
    assert plan is not None
    scheduled_s = makespan(plan, divided.iteration_workload, divided.profile, divided.scope)
    assert divided.iteration_s(plan) == pytest.approx(scheduled_s + gathered_s, rel=1e-12)
    assert divided.exposed_communication_s == pytest.approx(
        divided.job.backward_s - (divided.job.compute_s or (0, 0))[1] + gathered_s
    )


def test_a_slow_network_limits_the_job_and_hsdp_helps() -> None:
    slow = Fabric(450 * GB, 5 * GB)
    asked = question(numel=13e9, ranks=8, nodes=2, fsdp=True, fabric=slow)
    advice = advise(asked)
    assert advice.limit == "network"
    exchanged = 3 * 7 / 8 * 26e9 / (EFFICIENCY * 5e9)
    assert advice.situation.training_s == pytest.approx(exchanged, rel=0.05), "nothing else takes as long"
    assert advice.best.iteration_s is not None
    assert advice.best.iteration_s >= exchanged
    hsdp = advise(dataclasses.replace(asked, replicas=2))
    assert hsdp.situation.training_s == pytest.approx(26e9 / 4 / (EFFICIENCY * 5e9 / 4), rel=0.05)
    levers = {lever.change: lever.outcome for lever in advice.levers}
    assert levers["--hsdp"] == hsdp.best
    assert levers["network twice as fast"].seconds < 0.6 * advice.best.seconds
    assert advise(question(ranks=4, fsdp=True)).limit == "compute"


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

    advice = advise(asked)
    (outcome,) = advice.outcomes
    cpu = sum(
        demand(Placement.CPU, load, situation.profile)[Stream.CPU].seconds
        for load in situation.update_workload.subgroups
    )
    assert outcome.update_s is not None
    assert outcome.update_s >= cpu
    busy = advice.busy_s
    assert busy["PCIe to the GPU"] == pytest.approx(2 * 2 * shard / H100.h2d_bandwidth)
    assert busy["PCIe to the host"] == pytest.approx(2 * shard / H100.d2h_bandwidth)
    copies = 2 * 2 * shard + 2 * shard
    assert busy["host DRAM"] == pytest.approx((26 * shard + copies) / (H100.host_bandwidth / 4))
    assert outcome.iteration_s is not None
    assert situation.training_s is not None
    after_backward = outcome.update_s + (0 if attach else situation.job.forward_s())
    assert outcome.iteration_s >= situation.job.backward_s + after_backward
    if not attach:
        assert outcome.iteration_s == pytest.approx(situation.training_s + outcome.update_s)
        attached = advise(dataclasses.replace(asked, attach=True)).best.seconds
        assert attached < outcome.seconds, "copies and compute run beside updates of later layers"


def test_one_gpu_does_not_hide_copies_of_its_parameters() -> None:
    """There FSDP2 copies on the stream on which it computes."""
    job = Situation(question(fsdp=True, offload_parameters=True, batch=8)).job
    assert job.compute_s is not None
    assert job.forward_s() == pytest.approx(job.compute_s[0] + 14e9 / H100.h2d_bandwidth)
    assert job.backward_s > job.compute_s[1] + 14e9 / H100.h2d_bandwidth_duplex
    several = Situation(question(ranks=2, fsdp=True, offload_parameters=True, batch=8)).job
    assert several.forward_s() < 1.1 * job.compute_s[0]


def test_float32_parameters_on_the_host_are_their_own_master() -> None:
    situation = Situation(question(numel=1e9, dtype="fp32", fsdp=True, offload_parameters=True))
    assert (situation.host.master, situation.host.moments, situation.host_model) == (0, 8e9, 8e9)
    load = situation.update_workload.subgroups[0]
    assert load.cpu_traffic == 28 * load.numel, "12 read and written, and the gradient"


def test_a_model_larger_than_the_device_fits_with_parameters_on_the_host() -> None:
    asked = question(numel=70e9, fsdp=True)
    assert not Situation(asked).fits
    remedies = {remedy.change: remedy.situation for remedy in advise(asked).remedies}
    assert remedies["with --offload-parameters"].fits
    assert remedies["with --offload-parameters"].device.peak < 20 * GIB


def test_more_divided_fits_and_is_proposed() -> None:
    asked = question(numel=60e9, ranks=8, nodes=2, fsdp=True, replicas=4)
    assert not Situation(asked).fits
    remedies = {remedy.change: remedy.situation for remedy in advise(asked).remedies}
    assert remedies["with one replica over all ranks"].fits
    undivided = question(numel=60e9, ranks=8, nodes=2)
    assert not Situation(undivided).fits
    proposed = {remedy.change: remedy.situation for remedy in advise(undivided).remedies}
    assert proposed["with --fsdp"].fits


@given(JOBS)
@settings(deadline=None, max_examples=40)
def test_one_rank_is_the_performance_model_alone(drawn: dict[str, object]) -> None:
    """As before there were nodes and FSDP2: compute by the rate, the rest by `makespan`, nothing rounded otherwise."""
    alone = {"ranks": 1, "nodes": 1, "replicas": 1, "fsdp": False, "offload_parameters": False}
    asked = job(**{**drawn, **alone})
    situation, best = Situation(asked), advise(asked).best
    assert asked.flops_rate is not None
    forward, backward = (f / asked.flops_rate for f in asked.model.flops(asked.tokens, checkpointing=True))
    beside = dataclasses.replace(situation.update_workload, forward_s=forward, backward_s=backward)
    if best.plan is not None:
        assert best.iteration_s == makespan(best.plan, beside, situation.profile, situation.scope)
        assert best.update_s == makespan(best.plan, situation.update_workload, situation.profile)
    device, model = situation.device, asked.model
    assert device.gathered == situation.host_model == 0
    assert device.block == model.activation_bytes(asked.tokens, asked.sequence, 2) + (
        -(-model.numel // model.layers) * 2 if asked.zero >= 2 else 0
    )
    assert (situation.host_needed, situation.profile.ranks_per_host) == (14 * model.numel, 1)


def test_without_several_ranks_nothing_is_exchanged() -> None:
    for asked in (question(), question(zero=3), question(fsdp=True)):
        job = Situation(asked).job
        assert not job.has_communication
        assert Situation(asked).training_s == Situation(asked).compute_s


@pytest.mark.parametrize("nodes", [2, 4])
def test_published_runs_over_a_network(nodes: int) -> None:
    """7B on 8 and 16 A100s: one bandwidth explains forward and backward, of both, to 15%.

    It is 6.4 GB/s per node: these runs, by DeepSpeed, got a sixth of what the adapters have.
    """
    with RUNS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["nodes"] == str(nodes)]
    (run,) = (r for r in rows if r["mode"] == "async_grad_only" and r["grad_accum"] == "1" and r["cpu_ratio"] == "1.0")
    ranks = nodes * int(run["ranks_per_node"])
    asked = question(
        float(run["params_total"]),
        "a100_unbound",
        ranks=ranks,
        nodes=nodes,
        fsdp=True,
        batch=int(run["mbs"]),
        flops_rate=150e12,
        fabric=Fabric(300 * GB, 6.4 * GB / EFFICIENCY),
    )
    job = Situation(asked).job
    assert job.forward_s() == pytest.approx(float(run["fwd_ms"]) / 1e3, rel=0.15)
    assert job.backward_s == pytest.approx(float(run["bwd_ms"]) / 1e3, rel=0.15)
