"""The planner's answer as plain values, for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from perfmodel.plan import Placement
from perfmodel.planner.advise import Advice
from perfmodel.planner.outcome import Outcome


def as_json(advice: Advice, assumptions: list[str]) -> dict[str, Any]:
    """The answer as plain values; sizes in bytes, times in seconds, None where something does not fit."""
    situation, question = advice.situation, advice.situation.question
    settings = {
        f.name: getattr(question, f.name) for f in dataclasses.fields(question) if f.name not in ("model", "profile")
    }
    settings["fabric"] = dataclasses.asdict(question.fabric)
    settings["subgroup_size"] = question.subgroup_size
    device, host = situation.device, situation.host
    return {
        "fits": situation.fits,
        "model": dataclasses.asdict(question.model),
        "machine": situation.profile.to_json(),
        "settings": settings,
        "device": {
            **dataclasses.asdict(device),
            "peak": situation.peak,
            "total": question.device_bytes,
            "fits": situation.fits_device,
            "state": situation.host.state,
            "room_for_state": situation.room,
            "resident_state": advice.resident_bytes,
            "all_resident_total": advice.all_resident_bytes,
        },
        "host": {
            **dataclasses.asdict(host),
            "model": situation.host_model,
            "per_rank": situation.host_per_rank,
            "per_node": situation.host_needed,
            "all_ranks": situation.host_per_rank * question.ranks,
            "available": question.host_bytes,
            "reserved": situation.host_reserved,
            "fits": situation.fits_host,
        },
        "compute_s": situation.compute_s,
        "job": _job_json(advice),
        "policies": [_outcome_json(outcome) for outcome in advice.outcomes],
        "alternative": _alternative_json(advice),
        "bound": None
        if advice.bound is None
        else {
            "update_s": advice.bound.seconds,
            "binding": advice.bound.binding,
            "shares": _shares(advice.bound.shares),
        },
        "levers": [
            {"change": lever.change, "largest_batch": lever.largest_batch, **_outcome_json(lever.outcome)}
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
                "host_all_ranks": remedy.situation.host_per_rank * remedy.situation.question.ranks,
            }
            for remedy in advice.remedies
        ],
        "largest_parameters": advice.largest,
        "largest_batch": advice.largest_batch,
        "largest_sequence": advice.largest_sequence,
        "assumptions": assumptions,
    }


def _alternative_json(advice: Advice) -> dict[str, Any] | None:
    """The best of the other policies, and how many times as fast as it adaptive is, if that fits."""
    other, best = advice.alternative, advice.best
    if other is None:
        return None
    return {"policy": other.policy, "speedup": other.seconds / best.seconds if best.fits else None}


def _job_json(advice: Advice) -> dict[str, Any]:
    """All ranks together. Bandwidths in bytes/s, one way, as collectives reach them."""
    situation, layout = advice.situation, advice.situation.question.layout
    job, tokens = situation.job, advice.tokens_per_s
    known = situation.training_s is not None
    return {
        "ranks": layout.ranks,
        "nodes": layout.nodes,
        "ranks_per_node": layout.per_node,
        "replicas": layout.replicas,
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": None if tokens is None else tokens / layout.ranks,
        "limit": advice.limit or None,
        "busy_s": advice.busy_s,
        "forward_s": situation.iteration_workload.forward_s if known else None,
        "backward_s": situation.iteration_workload.backward_s if known else None,
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


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "fits": outcome.fits,
        "update_s": outcome.update_s,
        "iteration_s": outcome.iteration_s,
        "exposed_s": outcome.exposed_s,
        "shares": _shares(outcome.shares),
        "slots": None if outcome.plan is None else outcome.plan.slots,
    }


def _shares(shares: dict[Placement, float]) -> dict[str, float]:
    return {placement.label: share for placement, share in shares.items()}
