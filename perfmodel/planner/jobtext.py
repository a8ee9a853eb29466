"""The answer for a job of several GPUs, or with parameters on the host, as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from perfmodel.planner.advise import Advice
from perfmodel.planner.fabric import EFFICIENCY
from perfmodel.planner.tables import new_table
from perfmodel.planner.units import format_bytes, format_rate, format_seconds

NEARLY = 0.9
"""A resource that works for this share of the iteration or more leaves little to gain elsewhere."""


def job_headline(advice: Advice) -> Iterator[str]:
    """What the job does in a second, and what limits it."""
    situation, best = advice.situation, advice.best
    question = situation.question
    if not situation.job.talks or advice.tokens_per_s is None or best.iteration_s is None:
        return
    tokens = f"{advice.tokens_per_s:,.0f} tokens/s"
    if question.ranks > 1:
        tokens += f" of the job, {advice.tokens_per_s / question.ranks:,.0f} per GPU"
    share = advice.busy_s[advice.limit] / best.iteration_s
    text = f"{tokens}. What limits the job is {advice.limit}, at work for {share:.0%} of the iteration"
    if share < NEARLY:
        text += "; the rest is waiting for one another"
    yield text + "."


def job_table(advice: Advice) -> Table:
    """What collectives and copies move in an iteration, and how long each takes on its own."""
    situation = advice.situation
    job = situation.job
    title = "What each GPU sends, and receives, in an iteration"
    exposed = situation.exposed_communication_s
    if exposed is not None:
        title += f"; not hidden behind compute: {format_seconds(exposed)}"
    table = new_table(title, "", "ranks", "bytes", "alone")
    for each in job.collectives:
        table.add_row(
            f"{each.kind.value}, {each.part.value}, {each.over}",
            str(each.group.size),
            format_bytes(each.moved),
            format_seconds(each.seconds(job.routes)),
        )
    if job.copied:
        profile = situation.profile
        up, down = job.copied / profile.h2d_bandwidth, job.copied / profile.d2h_bandwidth
        for name, seconds in (
            ("parameters from the host, forward", up),
            ("parameters from the host, backward", up),
            ("gradients to the host, backward", down),
        ):
            table.add_row(name, "", format_bytes(job.copied), format_seconds(seconds))
    if advice.busy_s:
        table.add_section()
        for resource, seconds in sorted(advice.busy_s.items(), key=lambda item: -item[1]):
            table.add_row(f"{resource} at work", "", "", format_seconds(seconds))
    return table


def job_assumptions(advice: Advice) -> Iterator[str]:
    """What the figures of several ranks rest on."""
    situation = advice.situation
    question, routes = situation.question, situation.job.routes
    layout = question.layout
    if situation.job.collectives:
        parts = []
        if layout.per_node > 1:
            name = "GPUs of a node by PCIe" if routes.over_pcie else "GPUs of a node"
            parts.append(f"{name}: {format_rate(routes.interconnect)} each")
        if routes.network is not None and layout.nodes > 1:
            parts.append(f"network: {format_rate(routes.network)} per node")
        yield f"one way, {', '.join(parts)} (--interconnect, --network): {EFFICIENCY:.0%} of {question.fabric.source}"
        yield "collectives run in rings, whose latency is not counted; what leaves a node passes the GPUs' PCIe, too"
    if question.sharded:
        who = f"{layout.shards} GPUs" if layout.shards > 1 else "one GPU"
        copies = f", {layout.replicas} replicas" if layout.replicas > 1 else ""
        yield (
            f"fully_shard on each block and the model, over {who}{copies}, weights gathered again in "
            "backward; gradients leave as each reduce-scatter ends"
        )
    if question.offload_parameters:
        yield "CPUOffloadPolicy(pin_memory=True): parameters, gradients and state of each shard on the host"
