"""The answer for a job of several GPUs, or with parameters on the host, as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from perfmodel.planner.advise import Advice
from perfmodel.planner.fabric import EFFICIENCY
from perfmodel.planner.layout import Group
from perfmodel.planner.tables import new_table
from perfmodel.planner.units import format_bytes, format_rate, format_seconds

NEARLY = 0.9
"""A resource that works for this share of the iteration or more leaves little to gain elsewhere."""


def job_headline(advice: Advice) -> Iterator[str]:
    """What the job does in a second, and what limits it."""
    situation, best = advice.situation, advice.best
    question = situation.question
    if not situation.job.has_communication or advice.tokens_per_s is None or best.iteration_s is None:
        return
    tokens = f"{advice.tokens_per_s:,.0f} tokens/s"
    if question.ranks > 1:
        tokens += f" of the job, {advice.tokens_per_s / question.ranks:,.0f} per GPU"
    share = advice.busy_s[advice.limit] / best.iteration_s
    text = f"{tokens}. What limits the job is {advice.limit}, at work for {share:.0%} of the iteration"
    if share < NEARLY:
        text += "; for the rest one waits for another"
    yield text + "."


def job_tables(advice: Advice) -> Iterator[Table]:
    """What collectives and copies move in an iteration and how long each takes; what works how long."""
    situation = advice.situation
    job = situation.job
    table = new_table("What each GPU sends and receives in an iteration", "", "between", "bytes", "on its own")
    for each in job.collectives:
        table.add_row(
            f"{each.kind.value}, {each.part.value}",
            _members(each.group),
            format_bytes(each.moved),
            format_seconds(each.seconds(job.routes)),
        )
    if job.copied:
        profile = situation.profile
        up, down = job.copied / profile.h2d_bandwidth, job.copied / profile.d2h_bandwidth
        for name, seconds in (
            ("weights from the host, forward", up),
            ("weights from the host, backward", up),
            ("gradients to the host, backward", down),
        ):
            table.add_row(name, "", format_bytes(job.copied), format_seconds(seconds))
    exposed = situation.exposed_communication_s
    if exposed is not None:
        table.caption = f"Of that {format_seconds(exposed)} are not hidden behind compute."
    yield table
    if advice.best.iteration_s is not None:
        table = new_table("At work in an iteration", "", "time", "share")
        for resource, seconds in sorted(advice.busy_s.items(), key=lambda item: -item[1]):
            table.add_row(resource, format_seconds(seconds), f"{seconds / advice.best.iteration_s:.0%}")
        yield table


def _members(group: Group) -> str:
    """How many GPUs, and where they are."""
    if group.nodes == 1:
        return f"{group.size} GPUs of a node"
    if group.per_node == 1:
        return f"{group.size} nodes"
    return f"{group.size} GPUs, {group.nodes} nodes"


def job_assumptions(advice: Advice) -> Iterator[str]:
    """What the figures of several ranks rest on."""
    situation = advice.situation
    question, routes = situation.question, situation.job.routes
    layout = question.layout
    if situation.job.collectives:
        share = f"{EFFICIENCY:.0%} of "
        if layout.per_node > 1:
            of = question.fabric.within if routes.over_pcie else share + question.fabric.within
            yield f"collectives reach {format_rate(routes.interconnect)} per GPU within a node: {of} (--interconnect)"
        if routes.network is not None and layout.nodes > 1:
            of = share + question.fabric.between
            yield f"collectives reach {format_rate(routes.network)} per node between nodes: {of} (--network)"
        yield "collectives run in rings, whose latency is not counted; what leaves a node passes the GPUs' PCIe, too"
    if question.sharded:
        who = f"{layout.shards} GPUs" if layout.shards > 1 else "one GPU"
        copies = f", {layout.replicas} replicas" if layout.replicas > 1 else ""
        yield (
            f"fully_shard on each block and the model, over {who}{copies}, weights gathered again in "
            "backward; gradients leave as each reduce-scatter ends"
        )
    if question.offload_parameters and layout.shards == 1:
        yield "FSDP2 on one GPU copies parameters up on the stream on which it computes, so none of that is hidden"
    if question.offload_parameters:
        yield ("CPUOffloadPolicy(pin_memory=True); not counted: PyTorch rounds each pinned tensor up to a power of two")
