"""Assumptions on which the planner's figures rest, for people."""

from __future__ import annotations

from collections.abc import Iterator

from perfmodel.format import INT8
from perfmodel.planner.job import EFFICIENCY
from perfmodel.planner.question import MARGIN, Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.units import format_bytes, format_count, format_rate
from perfmodel.workload import WEIGHT_WINDOW


def assumptions(situation: Situation) -> Iterator[str]:
    """Yield the assumptions, a line each."""
    question, model = situation.question, situation.question.model
    if model.assumed:
        yield model.assumed
    yield _operations(question)
    yield from _job_assumptions(situation)
    yield (
        f"{format_bytes(question.reserved)} of GPU memory for CUDA and fragmentation (--reserved); "
        f"{MARGIN:.0%} that DOSAdam keeps free"
    )
    yield "activations of fused kernels, gradients None before forward: zero_grad() as it is by default"
    yield _accumulation(situation)
    if question.streams:
        yield (
            f"weights that stream are on the GPU while their layer computes, {WEIGHT_WINDOW} layers at a time; "
            "embedding and output layer stay"
        )
    if question.in_backward:
        yield 'updates begin in backward, so that nothing clips: optimizer.attach(model, updates="backward")'
    elif question.attach:
        yield "updates continue during the next forward: optimizer.attach(model)"
    if question.state_format == INT8:
        yield "moments in 8 bits: other results than AdamW's (docs/formats.md)"
    if question.trainable < 1:
        yield f"{format_count(question.trained)} parameters are trained, the others frozen (--trainable)"
    if situation.spill.windows:
        read, write = question.profile.disk_read_bandwidth, question.profile.disk_write_bandwidth
        beside = question.profile.disk_read_bandwidth_duplex, question.profile.disk_write_bandwidth_duplex
        yield (
            f"disks of the node read {format_rate(read)} and write {format_rate(write)} (--disk-read, --disk-write), "
            f"at once {' and '.join(map(format_rate, beside))}"
        )
    if question.host_bytes is not None:
        reserved = format_bytes(question.reserved_on_host)
        yield f"{reserved} of the node's memory for the system and the processes (--host-reserved)"


def _operations(question: Question) -> str:
    """Describe the operations that are counted of forward and backward."""
    model, whole = question.model, sum(question.flops) / question.tokens
    forward, backward = model.attention_flops(question.sequence, eager=question.eager_attention)
    attention = forward * (1 + question.checkpointing) + backward
    mask = "" if question.eager_attention else "causal "
    again = ", each block computed twice (--checkpointing)" if question.checkpointing else ""
    weights = "all parameters multiply" if not model.head_weights else "embeddings are looked up"
    return f"{whole / 1e9:,.3g} GFLOP per token, {attention / whole:.0%} of it {mask}attention; {weights}{again}"


def _job_assumptions(situation: Situation) -> Iterator[str]:
    """Yield the assumptions about several ranks, and about parameters on the host."""
    question, job, fabric = situation.question, situation.job, situation.question.fabric
    if job.collectives:
        of = fabric.link if job.over_pcie else f"{EFFICIENCY:.0%} of {fabric.link}"
        yield f"collectives reach {format_rate(job.interconnect)} per GPU: {of} (--interconnect)"
        yield "collectives run in rings, whose latency is not counted"
    if question.fsdp:
        gpus = f"{question.ranks} GPUs" if question.ranks > 1 else "one GPU"
        yield (
            f"fully_shard on each block and the model, over {gpus}, weights gathered again in backward; gradients move "
            "to the host as each reduce-scatter ends"
        )
    if question.offload_parameters:
        if question.ranks == 1:
            yield "FSDP2 on one GPU copies parameters up on the stream on which it computes, so none of that is hidden"
        yield "CPUOffloadPolicy(pin_memory=True); not counted: PyTorch rounds each pinned tensor up to a power of two"


def _accumulation(situation: Situation) -> str:
    """Describe the micro-batches of a step, and the peak without accumulation."""
    question = situation.question
    if not question.accumulation:
        return "one micro-batch in each step (--no-accumulation), so gradients come as activations go"
    on_host = question.offload_gradients or question.offload_parameters
    where = "add up on the host" if on_host else "stay beside the next one's activations"
    peak = situation.device.peak_bytes()
    less = f", and a peak of {format_bytes(peak)}" if peak < situation.peak else ""
    times = "one (--accumulation N)" if question.micro_batches == 1 else f"{question.micro_batches}"
    return (
        f"gradient accumulation: steps of several micro-batches, whose gradients {where} "
        f"(--no-accumulation: one{less}); times are of a step with {times}"
    )
