"""The planner's answer as plain values: what `--json` prints, and all that the text is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from perfmodel.format import INT8
from perfmodel.plan import Placement
from perfmodel.planner.advise import Advice
from perfmodel.planner.disk import DAY_S
from perfmodel.planner.fabric import EFFICIENCY
from perfmodel.planner.outcome import Outcome
from perfmodel.planner.question import MARGIN
from perfmodel.planner.situation import Situation
from perfmodel.planner.units import format_bytes, format_count, format_rate


def to_json(advice: Advice, notes: list[str]) -> dict[str, Any]:
    """The answer; sizes in bytes, times in seconds, None where something does not fit.

    notes: what is assumed of the machine, a line each; the other assumptions follow them.
    """
    situation, question, bound = advice.situation, advice.situation.question, advice.bound
    settings = {
        f.name: getattr(question, f.name) for f in dataclasses.fields(question) if f.name not in ("model", "profile")
    }
    other, best = advice.alternative, advice.best
    leaving = best.plan.activation_bytes if best.plan else situation.least_leaving
    on_host = situation.host_per_rank + leaving - situation.least_leaving
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
            "resident_state": advice.resident_bytes,
            "all_resident_total": advice.all_resident_bytes,
        },
        "host": {
            **dataclasses.asdict(situation.host),
            "model": situation.host_model,
            "window_bytes": situation.spill.window_bytes,
            "activations": leaving,
            "per_rank": on_host,
            "per_node": on_host * question.layout.per_node,
            "all_ranks": on_host * question.ranks,
            "available": question.host_bytes,
            "reserved": question.reserved_on_host,
            "fits": situation.fits_host,
        },
        "disk": None if question.disk_bytes is None else _disk(advice),
        "compute_s": situation.compute_s,
        "job": _job(advice),
        "policies": [_outcome(outcome) for outcome in advice.outcomes],
        # The best of the other policies, and how many times as fast as it adaptive is, if that fits.
        "alternative": other
        and {"policy": other.policy, "speedup": other.seconds / best.seconds if best.fits else None},
        "bound": bound and {"update_s": bound.seconds, "binding": bound.binding, "shares": _by_label(bound.shares)},
        "levers": [
            {"change": lever.change, "largest_batch": lever.largest_batch, **_outcome(lever.outcome)}
            for lever in advice.levers
        ],
        "remedies": [
            {
                "change": remedy.change,
                "fits": remedy.situation.fits,
                "effect": remedy.effect.name.lower(),
                "iteration_s": remedy.outcome.iteration_s,
                "device_peak": remedy.situation.peak,
                "host_per_node": remedy.situation.host_needed,
                "disk_per_node": remedy.situation.disk_per_rank * remedy.situation.question.layout.per_node,
                "host_all_ranks": remedy.situation.host_per_rank * remedy.situation.question.ranks,
            }
            for remedy in advice.remedies
        ],
        "largest_parameters": advice.largest,
        "largest_batch": advice.largest_batch,
        "largest_sequence": advice.largest_sequence,
        "assumptions": [*notes, *_assumptions(situation)],
    }


def _disk(advice: Advice) -> dict[str, Any]:
    """State on disk. Bytes of a step and of a day of training are those of a node."""
    situation, question, best = advice.situation, advice.situation.question, advice.best
    written, per_day, endured = advice.written_bytes, None, None
    if best.iteration_s is not None:
        per_day = written * DAY_S / best.iteration_s
    if per_day is not None and question.disk_endurance is not None:
        endured = per_day / question.disk_endurance
    return {
        "state": advice.on_disk_bytes,
        "windows": situation.spill.windows,
        "per_rank": situation.disk_per_rank,
        "per_node": situation.disk_per_rank * question.layout.per_node,
        "available": question.disk_bytes,
        "fits": situation.fits_disk,
        "written_per_step": written,
        "written_per_day": per_day,
        "endurance": question.disk_endurance,
        "endurance_share_per_day": endured,
        "endurance_days": 1 / endured if endured else None,
    }


def _job(advice: Advice) -> dict[str, Any]:
    """All ranks together. Bandwidths in bytes/s, one way, as collectives reach them."""
    situation, layout = advice.situation, advice.situation.question.layout
    job, tokens = situation.job, advice.tokens_per_s
    known = job.compute_s is not None
    return {
        "ranks": layout.ranks,
        "nodes": layout.nodes,
        "ranks_per_node": layout.per_node,
        "replicas": layout.replicas,
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": None if tokens is None else tokens / layout.ranks,
        "limit": advice.limit or None,
        "busy_s": advice.busy_s,
        "forward_s": job.forward_s() if known else None,
        "backward_s": job.backward_s if known else None,
        "exposed_communication_s": situation.exposed_communication_s,
        "collectives": [
            {
                "what": each.kind.value,
                "part": each.part.value,
                "over": each.over,
                "ranks": each.group.size,
                "bytes": each.moved,
                "seconds": each.seconds(job.routes),
            }
            for each in job.collectives
        ],
        "copied_bytes": job.copied,
        "interconnect": job.routes.interconnect,
        "network": job.routes.network,
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "fits": outcome.fits,
        "update_s": outcome.update_s,
        "iteration_s": outcome.iteration_s,
        "exposed_s": outcome.exposed_s,
        "shares": _by_label(outcome.shares),
        "slots": outcome.plan and outcome.plan.slots,
    }


def _by_label(shares: dict[Placement, float]) -> dict[str, float]:
    return {placement.label: share for placement, share in shares.items()}


def _assumptions(situation: Situation) -> Iterator[str]:
    """What the figures rest on that was not given, a line each."""
    question, model = situation.question, situation.question.model
    if model.assumed:
        yield model.assumed
    flops = sum(model.flops(1, checkpointing=question.checkpointing, trainable=question.trainable))
    yield f"{flops / model.numel:.3g} operations per parameter and token"
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


def _job_assumptions(situation: Situation) -> Iterator[str]:
    """What the figures of several ranks rest on, and of parameters on the host."""
    question, routes = situation.question, situation.job.routes
    layout, fabric = question.layout, question.fabric
    if situation.job.collectives:
        share = f"{EFFICIENCY:.0%} of "
        if layout.per_node > 1:
            of = fabric.within if routes.over_pcie else share + fabric.within
            yield f"collectives reach {format_rate(routes.interconnect)} per GPU within a node: {of} (--interconnect)"
        if routes.network is not None and layout.nodes > 1:
            of = share + fabric.between
            yield f"collectives reach {format_rate(routes.network)} per node between nodes: {of} (--network)"
        yield "collectives run in rings, whose latency is not counted; what leaves a node passes the GPUs' PCIe, too"
    if question.sharded:
        gpus = f"{layout.shards} GPUs" if layout.shards > 1 else "one GPU"
        copies = f", {layout.replicas} replicas" if layout.replicas > 1 else ""
        yield (
            f"fully_shard on each block and the model, over {gpus}{copies}, weights gathered again in "
            "backward; gradients leave as each reduce-scatter ends"
        )
    if question.offload_parameters:
        if layout.shards == 1:
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
    peak = situation.device.peak
    less = f", and a peak of {format_bytes(peak)}" if peak < situation.peak else ""
    times = "one (--accumulation N)" if question.micro_batches == 1 else f"{question.micro_batches}"
    return (
        f"gradient accumulation: steps of several micro-batches, whose gradients {where} "
        f"(--no-accumulation: one{less}); times are of a step with {times}"
    )
