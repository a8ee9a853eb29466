"""The planner's answer as plain values: what `--json` prints, and all that the text is made of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from perfmodel.bounds import lower_bound
from perfmodel.format import INT8
from perfmodel.plan import Placement
from perfmodel.planner.job import EFFICIENCY
from perfmodel.planner.outcome import Outcome, outcomes
from perfmodel.planner.question import MARGIN, Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.units import format_bytes, format_count, format_rate
from perfmodel.planner.whatif import SMALLEST, fastest_batch, largest, levers, most, remedies
from perfmodel.timeline import Op

DAY_S = 86_400


def answer(question: Question, notes: list[str]) -> dict[str, Any]:
    """Everything the planner has to say; every time in it is simulated, every size counted.

    Sizes are in bytes, times in seconds, None where something does not fit.
    notes: what is assumed of the machine, a line each; the other assumptions follow them.
    """
    situation = Situation(question)
    work, policies = situation.update_workload, outcomes(situation)
    *others, best = policies
    other = min((each for each in others if each.fits), key=lambda each: each.seconds, default=None)
    resident = best.plan.served(Placement.GPU_RESIDENT) if best.plan else ()
    leaving = best.plan.activation_bytes if best.plan else situation.least_leaving
    on_host = situation.host_per_rank + leaving - situation.least_leaving
    # With parameters on the host the update is where it has to be.
    bound = lower_bound(work, situation.profile) if others and situation.fits else None
    settings = {
        f.name: getattr(question, f.name) for f in dataclasses.fields(question) if f.name not in ("model", "profile")
    }
    return {
        "fits": situation.fits,
        "model": dataclasses.asdict(question.model),
        "machine": situation.profile.to_json(),
        "settings": settings | {"fabric": dataclasses.asdict(question.fabric), "subgroup_size": question.subgroup_size},
        "device": {
            **dataclasses.asdict(situation.device),
            "peak": situation.peak,
            "total": question.device_bytes,
            "fits": situation.fits_device,
            "state": situation.state_bytes,
            "room_for_state": situation.room,
            "resident_state": work.state_bytes_of(resident),
            "all_resident_total": math.ceil((situation.peak + work.state_bytes) / (1 - MARGIN)) if others else None,
        },
        "host": {
            **dataclasses.asdict(situation.host),
            "model": situation.host_model,
            "window_bytes": situation.spill.window_bytes,
            "activations": leaving,
            "per_rank": on_host,
            "per_node": on_host * question.per_node,
            "all_ranks": on_host * question.ranks,
            "available": question.host_bytes,
            "reserved": question.reserved_on_host,
            "fits": situation.fits_host,
        },
        "disk": None if question.disk_bytes is None else _disk(situation, best),
        "compute_s": situation.compute_s,
        "best_batch": _best_batch(question),
        "job": _job(situation, best),
        "policies": [_outcome(each) for each in policies],
        # The best of the other policies, and how many times as fast as it adaptive is, if that fits.
        "alternative": other
        and {"policy": other.policy, "speedup": other.seconds / best.seconds if best.fits else None},
        "bound": bound and {"update_s": bound.seconds, "binding": bound.binding, "shares": _by_label(bound.shares)},
        "levers": [
            {"change": lever.change, "largest_batch": lever.largest_batch, **_outcome(lever.outcome)}
            for lever in levers(question, best)
        ],
        "remedies": [
            {
                "change": remedy.change,
                "fits": remedy.situation.fits,
                "effect": remedy.effect.name.lower(),
                "iteration_s": remedy.outcome.iteration_s,
                "device_peak": remedy.situation.peak,
                "host_per_node": remedy.situation.host_needed,
                "disk_per_node": remedy.situation.disk_needed,
                "host_all_ranks": remedy.situation.host_per_rank * question.ranks,
            }
            for remedy in remedies(situation)
        ],
        "largest_parameters": (numel := largest(question)),
        # What even the smallest model of the usual shape does not fit into.
        "smallest_lacks": [] if numel else Situation(question.with_model(SMALLEST)).lacking,
        "largest_batch": most(question, "batch"),
        "largest_sequence": most(question, "sequence", question.model.longest),
        "assumptions": [*notes, *_assumptions(situation)],
    }


def _best_batch(question: Question) -> dict[str, Any] | None:
    """The batch of most tokens per second."""
    if (found := fastest_batch(question)) is None:
        return None
    asked, outcome = found
    tokens = asked.step_tokens / outcome.seconds
    return {
        "batch": asked.batch,
        "iteration_s": outcome.iteration_s,
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": tokens / question.ranks,
    }


def _disk(situation: Situation, best: Outcome) -> dict[str, Any]:
    """State on disk. Bytes of a step and of a day of training are those of a node."""
    question, work, plan = situation.question, situation.update_workload, best.plan
    writes = [task.size for task in situation.operations(plan) if task.op is Op.WRITE] if plan else []
    written = sum(writes) * question.per_node
    per_day = written * DAY_S / best.iteration_s if best.iteration_s else None
    endured = per_day / question.disk_endurance if per_day is not None and question.disk_endurance else None
    return {
        "state": work.state_bytes_of(plan.on_disk) if plan else 0,
        "windows": situation.spill.windows,
        "per_rank": situation.disk_per_rank,
        "per_node": situation.disk_needed,
        "available": question.disk_bytes,
        "fits": situation.fits_disk,
        "written_per_step": written,
        "written_per_day": per_day,
        "endurance": question.disk_endurance,
        "endurance_share_per_day": endured,
        "endurance_days": 1 / endured if endured else None,
    }


def _job(situation: Situation, best: Outcome) -> dict[str, Any]:
    """All ranks together. Bandwidths in bytes/s, one way, as collectives reach them."""
    question, job = situation.question, situation.job
    busy_s = situation.busy_s(best.plan) if best.plan else {}
    tokens = question.step_tokens / best.iteration_s if best.iteration_s else None
    return {
        "ranks": question.ranks,
        "nodes": question.nodes,
        "ranks_per_node": question.per_node,
        "replicas": question.replicas,
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": tokens and tokens / question.ranks,
        # What the job does not fit into, else the resource that works longest.
        "limit": situation.lacking[0] if situation.lacking else max(busy_s, key=busy_s.__getitem__),
        "busy_s": busy_s,
        "forward_s": job.forward_s(),
        "backward_s": job.backward_s,
        "exposed_communication_s": situation.exposed_communication_s,
        "collectives": [
            {
                "what": each.what,
                "part": each.part,
                "over": each.over,
                "ranks": each.group.size,
                "bytes": each.moved,
                "seconds": each.seconds,
            }
            for each in job.collectives
        ],
        "copied_bytes": job.copied,
        "interconnect": job.interconnect,
        "network": job.network,
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    plan = outcome.plan
    rest = {"fits": outcome.fits, "shares": _by_label(outcome.shares), "slots": plan and plan.slots}
    return {key: value for key, value in vars(outcome).items() if key != "plan"} | rest


def _by_label(shares: dict[Placement, float]) -> dict[str, float]:
    return {placement.label: share for placement, share in shares.items()}


def _assumptions(situation: Situation) -> Iterator[str]:
    """What the figures rest on that was not given, a line each."""
    question, model = situation.question, situation.question.model
    if model.assumed:
        yield model.assumed
    yield _operations(question)
    yield from _job_assumptions(situation)
    yield (
        f"{format_bytes(question.reserved)} of GPU memory for CUDA and fragmentation (--reserved); "
        f"{MARGIN:.0%} that DOSAdam leaves alone"
    )
    yield "activations of fused kernels, gradients None before forward: zero_grad() as it is by default"
    yield _accumulation(situation)
    if question.attach:
        yield "updates run on into the next forward: optimizer.attach(model)"
    if question.state_format == INT8:
        yield "moments in 8 bits: other results than AdamW's (docs/formats.md)"
    if question.trainable < 1:
        yield f"{format_count(question.trained)} parameters are trained, the others frozen (--trainable)"
    if situation.spill.windows:
        read, write = question.profile.disk_read_bandwidth, question.profile.disk_write_bandwidth
        beside = question.profile.disk_read_bandwidth_duplex, question.profile.disk_write_bandwidth_duplex
        yield (
            f"disks of a node read {format_rate(read)} and write {format_rate(write)} (--disk-read, --disk-write), "
            f"at once {' and '.join(map(format_rate, beside))}"
        )
    if question.host_bytes is not None:
        reserved = format_bytes(question.reserved_on_host)
        yield f"{reserved} of each node's memory for the system and the processes (--host-reserved)"


def _operations(question: Question) -> str:
    """What is counted of forward's and backward's arithmetic."""
    model, whole = question.model, sum(question.flops) / question.tokens
    forward, backward = model.attention_flops(question.sequence, eager=question.eager_attention)
    attention = forward * (1 + question.checkpointing) + backward
    mask = "" if question.eager_attention else "causal "
    again = ", each block computed twice (--checkpointing)" if question.checkpointing else ""
    weights = "all parameters multiply" if not model.head_weights else "embeddings are looked up"
    return f"{whole / 1e9:,.3g} GFLOP per token, {attention / whole:.0%} of it {mask}attention; {weights}{again}"


def _job_assumptions(situation: Situation) -> Iterator[str]:
    """What the figures of several ranks rest on, and of parameters on the host."""
    question, job, fabric = situation.question, situation.job, situation.question.fabric
    if job.collectives:
        share = f"{EFFICIENCY:.0%} of "
        if question.per_node > 1:
            of = fabric.within if job.over_pcie else share + fabric.within
            yield f"collectives reach {format_rate(job.interconnect)} per GPU within a node: {of} (--interconnect)"
        if job.network is not None and question.nodes > 1:
            of = share + fabric.between
            yield f"collectives reach {format_rate(job.network)} per node between nodes: {of} (--network)"
        yield "collectives run in rings, whose latency is not counted; what leaves a node passes the GPUs' PCIe, too"
    if question.sharded:
        gpus = f"{question.shards} GPUs" if question.shards > 1 else "one GPU"
        copies = f", {question.replicas} replicas" if question.replicas > 1 else ""
        yield (
            f"fully_shard on each block and the model, over {gpus}{copies}, weights gathered again in "
            "backward; gradients leave as each reduce-scatter ends"
        )
    if question.offload_parameters:
        if question.shards == 1:
            yield "FSDP2 on one GPU copies parameters up on the stream on which it computes, so none of that is hidden"
        yield "CPUOffloadPolicy(pin_memory=True); not counted: PyTorch rounds each pinned tensor up to a power of two"


def _accumulation(situation: Situation) -> str:
    """What is assumed about the micro-batches of a step, and what the other assumption would give."""
    question = situation.question
    if not question.accumulation:
        return "one micro-batch in each step (--no-accumulation), so gradients come as activations go"
    where = "stay beside the next one's activations"
    if question.offload_gradients:
        where = f"add up on the host, in {'their own dtype' if question.native_gradients else 'float32'}"
    elif question.offload_parameters:
        where = "add up on the host"
    peak = situation.device.peak()
    less = f", and a peak of {format_bytes(peak)}" if peak < situation.peak else ""
    times = "one (--accumulation N)" if question.micro_batches == 1 else f"{question.micro_batches}"
    return (
        f"gradient accumulation: steps of several micro-batches, whose gradients {where} "
        f"(--no-accumulation: one{less}); times are of a step with {times}"
    )
