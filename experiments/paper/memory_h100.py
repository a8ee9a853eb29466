"""A simulation of the published 20B run on the H100 profile: the paper's stride against adaptive residency."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console

from dos.planning.forecast import MARGIN
from experiments.command import table_of
from experiments.harness import finish
from experiments.paper.ranks import PublishedRank
from experiments.plots import MemorySample, save_memory_and_lanes
from perfmodel import Lane, Op, Placement, Plan, Span, Timeline, Workload
from perfmodel.adaptive import adaptive
from perfmodel.bounds import lower_bound
from perfmodel.demand import demand
from perfmodel.lanes import LANE_OF_STREAM
from perfmodel.policies import cpu_only, stride
from perfmodel.simulate import Phase, Scope, simulate

STRIDE = 2
"""The paper's on the H100."""
PAPER, ADAPTIVE = f"the paper's stride, {STRIDE}", "adaptive residency"
SCOPE = Scope(Phase.OVERLAPPED, Phase.ABSENT)


def plans(rank: PublishedRank) -> dict[str, tuple[Plan, Workload]]:
    """The plans compared, each with the memory it may use: the free memory of the trace, less DOSAdam's margin."""
    work = rank.workload(MARGIN * rank.memory_bytes)

    def room_for(share: float) -> Workload:
        taken = work.peak_free_bytes - share * work.state_bytes
        return dataclasses.replace(
            work, peak_free_bytes=share * work.state_bytes, shared_free_bytes=work.shared_free_bytes - taken
        )

    nothing_stays, third = room_for(0), room_for(1 / 3)
    return {
        "all on the CPU": (cpu_only(work), work),
        PAPER: (stride(work, STRIDE), work),
        "adaptive, nothing resident": (adaptive(nothing_stays, rank.profile), nothing_stays),
        "adaptive, room for a third": (adaptive(third, rank.profile), third),
        ADAPTIVE: (adaptive(work, rank.profile), work),
    }


def simulated(name: str, plan: Plan, work: Workload, rank: PublishedRank) -> dict[str, Any]:
    """One plan, simulated. Seconds and bytes of one iteration of one rank.

    update_s: from the end of backward to the last transfer. iteration_s: with forward and backward.
    h2d_bytes, d2h_bytes: over the links, gradients and parameters included. dram_bytes: that host memory moves.
    held_bytes: of device memory, by resident state and slots together.
    """
    moved: dict[Lane, float] = defaultdict(float)  # each link's bytes move through host DRAM, too
    for placement, load in zip(plan.placements, work.subgroups, strict=True):
        for stream, cost in demand(placement, load, rank.profile).items():
            moved[LANE_OF_STREAM[stream]] += cost.traffic
    held = work.state_bytes_of(plan.served(Placement.GPU_RESIDENT))
    end = max(span.end for span in simulate(plan, work, rank.profile, SCOPE).spans)
    return {
        "plan": name,
        "update_s": end - rank.backward_s,
        "iteration_s": rank.forward_s + end,
        "h2d_bytes": moved[Lane.H2D],
        "d2h_bytes": moved[Lane.D2H],
        "dram_bytes": sum(moved.values()),
        "held_bytes": held + plan.slots * work.slot_bytes,
        "bound_s": lower_bound(work, rank.profile, SCOPE).seconds,
    }


def report(picture: Path | None, *, as_json: bool) -> int:
    """Print the table, and write the picture."""
    rank = PublishedRank.read()
    rows = [simulated(name, plan, work, rank) for name, (plan, work) in plans(rank).items()]
    console = Console(stderr=as_json)
    console.print(
        f"Simulation on the profile {rank.profile.name!r}: one of four ranks of the published 20B run, "
        f"{rank.loads.numel / 1e9:.2f}e9 parameters, whose state is "
        f"{rank.loads.state_bytes / 2**30:.1f} GiB; its recorded memory leaves "
        f"{rank.free_bytes / 2**30:.1f} GiB at the peak, of which {MARGIN:.0%} of the device stay free. "
        "Nothing here was measured but the trace."
    )
    console.print(table_of("One iteration of one rank (simulated)", rows))
    if picture is not None:
        draw(rank, picture)
    return finish({"rows": rows}, console, as_json)


def draw(rank: PublishedRank, path: Path) -> None:
    """The stride and adaptive residency: memory over one iteration, and the lanes."""
    panels = {}
    compared = plans(rank)
    for name in (PAPER, ADAPTIVE):
        plan, work = compared[name]
        later = (s.since(-rank.forward_s) for s in simulate(plan, work, rank.profile, SCOPE).spans)
        timeline = Timeline.of([Span(Lane.GPU, Op.FORWARD, None, 0.0, rank.forward_s), *later])
        end = max(span.end for span in timeline.spans)
        panels[f"{name}: {end:.2f} s"] = memory(plan, work, rank, timeline), timeline
    title = "One iteration of a rank of the published 20B run on an H100 (simulation; memory as recorded)"
    save_memory_and_lanes(panels, rank.memory_bytes, path, title=title)


def memory(plan: Plan, work: Workload, rank: PublishedRank, timeline: Timeline) -> list[MemorySample]:
    """The trace by phase, and what the plan adds: residents always, slots from the first prefetch to the end.

    While updating, the recorded run held the same slots of its own; the trace has them already.
    """
    resident = work.state_bytes_of(plan.served(Placement.GPU_RESIDENT))
    slots = plan.slots * work.slot_bytes
    prefetch_s = min((span.start for span in timeline.spans if span.op is Op.PREFETCH), default=0.0)
    lengths = rank.forward_s, rank.backward_s, 0.0
    begins = 0.0, rank.forward_s, rank.forward_s + rank.backward_s
    samples = []
    for at, used in rank.recording.script():
        phase = int(at)
        time_s = begins[phase] + (at - phase) * lengths[phase]
        held = slots if time_s >= prefetch_s else 0
        samples.append(MemorySample(time_s, used - (held if phase == 2 else 0), resident + held, 0))
    return [*samples, samples[-1]._replace(time_s=max(span.end for span in timeline.spans))]
