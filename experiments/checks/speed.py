"""How fast is it, against everything else, against its bound and against its prediction?"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dos.deciding.controller import AdaptivePolicy, resolve_policy
from dos.machine.threads import kernel_threads
from experiments.checks.base import Bench, Size, Target
from experiments.checks.calibration import measured_profile
from experiments.checks.contenders import OnDevice, Ours, Rig, first_start, scope_of
from experiments.checks.contest import Clock, Contender, Effort, Probe, Score, hold, ratio
from experiments.checks.machine import machine_for
from experiments.checks.training import HOST_BYTES, LARGEST, MEDIUM, Batch, Job, fitted, prepare
from experiments.checks.vitals import vitals
from perfmodel import Lane, Op, Span, Timeline
from perfmodel.bounds import lower_bound
from perfmodel.hardware import HardwareProfile

SUBGROUPS = {Size.TINY: 8, Size.SMALL: 16, Size.FULL: 50}
"""Of the model; the bound is meant for 50 and more."""
EFFORTS = {
    Size.TINY: Effort(warm_up=1, timed=1, probes=1, rounds=1),
    Size.SMALL: Effort(warm_up=2, timed=2, probes=2, rounds=2),
    Size.FULL: Effort(warm_up=2, timed=3, probes=1, rounds=5),
}
BRIEF = EFFORTS | {Size.FULL: Effort(warm_up=1, timed=2, probes=1, rounds=5)}
"""For a model so large that every iteration counts."""
SHARES = (0.5, 1.0, 0.1, 0.25, 0.75, 0.0)
"""Of the state, for which adaptive plans have memory."""
RATIOS = (0.25, 0.5, 0.75)
STRIDES = (2, 3, 4, 5, 6)
NOISE = 0.03
"""By so much one policy may seem slower than another without being it."""
SLOTS_SHARE = 0.1
"""Of the state: what strides take for their two slots, and more."""

NOTHING, MASTERS, PLAIN = "no optimizer", "AdamW, float32 masters", "AdamW, bfloat16 state"
CPU, FULL = "CPU only", "adaptive"
CERTAIN = 4
"""Contenders that the largest model leaves time for; others take part if there is more of it."""
SET_UP_S, COMPUTE_S = 6e-9, 3e-10
"""For each parameter, roughly: to set up, and to compute an iteration. For choosing a model that there is time for."""


def check_full_memory(bench: Bench) -> None:
    """With memory for all state: as fast as AdamW wholly on the device?"""
    stage = Stage(bench, MEDIUM[bench.size], live=True)
    rig = stage.rig
    adaptive = AdaptivePolicy(stage.profile)
    scores = stage.hold(
        [
            stage.on_device(NOTHING, None),
            stage.on_device(MASTERS, masters=True),
            stage.on_device(PLAIN, masters=False),
            Ours(FULL, rig, adaptive),
            Ours(CPU, rig, resolve_policy("cpu")),
        ]
    )
    for reference in (MASTERS, PLAIN):
        against(bench, scores, FULL, reference, 1.02)
    judge(bench, scores, stage.profile)
    keep_timelines(bench, scores, [FULL])


def check_policies(bench: Bench) -> None:
    """Every policy, and adaptive plans with memory for some of the state; then the same attached."""
    stage = Stage(bench, MEDIUM[bench.size], live=False)
    rig = stage.rig
    # Those that matter most first, in case that there is no time for the others.
    fixed = [Ours(CPU, rig, resolve_policy("cpu"))]
    fixed += [Ours(f"ratio {r:g}", rig, resolve_policy(r)) for r in RATIOS]
    fixed += [Ours(f"stride {k}", rig, resolve_policy(f"stride:{k}")) for k in STRIDES]
    adaptive = [Ours(named(s), rig, AdaptivePolicy(stage.profile), s) for s in SHARES]
    mixed = itertools.chain.from_iterable(itertools.zip_longest(fixed, adaptive))
    scores = stage.hold([contender for contender in mixed if contender is not None], share_of_time=0.75)
    judge(bench, scores, stage.profile)
    keep_timelines(bench, scores, [CPU, "stride 3", *map(named, sorted(SHARES))])
    rig.optimizer.attach(rig.model)
    attached = [Ours(f"{CPU}, attached", rig, resolve_policy("cpu"))]
    attached += [Ours(f"{named(s)}, attached", rig, AdaptivePolicy(stage.profile), s) for s in (0.5, 1.0, SLOTS_SHARE)]
    stage.hold(attached, effort=dataclasses.replace(EFFORTS[bench.size], probes=0))


def check_largest(bench: Bench) -> None:
    """The largest model that memory and time allow, as if the device had memory for some of the state alone.

    What fits the host may well fit the device entirely, and then there would be nothing to compare.
    """
    stage = Stage(bench, LARGEST[bench.size], live=False, most=in_time(bench))
    rig = stage.rig
    quarter, half = [Ours(named(s), rig, AdaptivePolicy(stage.profile), s) for s in (0.25, 0.5)]
    certain: list[Contender] = [
        quarter,
        Ours(CPU, rig, resolve_policy("cpu")),
        Ours("ratio 0.75", rig, resolve_policy(0.75)),
        Ours("stride 3", rig, resolve_policy("stride:3")),
    ]
    assert len(certain) == CERTAIN, "the model was chosen so that there is time for so many"
    perhaps: list[Contender] = [
        half,
        Ours("ratio 0.5", rig, resolve_policy(0.5)),
        stage.on_device(PLAIN, masters=False),
    ]
    scores = stage.hold([*certain, *perhaps], effort=BRIEF[bench.size])
    judge(bench, scores, stage.profile)
    keep_timelines(bench, scores, [CPU, quarter.name, half.name])


def in_time(bench: Bench) -> float:
    """Parameters with which there is time to compare those that matter most."""
    if not bench.cuda:
        return math.inf
    rate = measured_profile(bench.out, prepare(bench)).cpu_update_rate
    effort = BRIEF[bench.size]
    iterations = CERTAIN * (effort.warm_up + effort.timed + 1 + effort.probes)
    return bench.left() / (SET_UP_S + iterations * (COMPUTE_S + 1 / rate))


class Stage:
    """One model, the machine, and all that a contest needs."""

    def __init__(self, bench: Bench, job: Job, *, live: bool, most: float = math.inf, each: int = HOST_BYTES) -> None:
        device = prepare(bench)
        self.bench = bench
        self.job = fitted(job, bench.settings, each=each, most=most)
        subgroup_size = -(-self.job.numel // SUBGROUPS[bench.size])
        self.machine = machine_for(bench, self.job, subgroup_size)
        emulated = self.machine.device
        self.profile = measured_profile(bench.out, device) if emulated is None else emulated.profile
        self.batches: Sequence[Batch] = self.job.batches(2, device)
        start = time.perf_counter()
        self.rig = Rig(self.job, self.machine, self.profile, subgroup_size, live=live)
        self.rig.model(*self.batches[0]).backward()
        self.rig.optimizer.step()  # allocates the state
        self.rig.optimizer.synchronize()
        bench.note(
            machine=self.machine.name,
            model=dataclasses.asdict(self.job.config),
            parameters=self.job.numel,
            batch=self.job.batch,
            subgroups=self.rig.subgroups,
            set_up_s=time.perf_counter() - start,
            kernel_threads=kernel_threads(),
            **vitals(self.rig.optimizer, bench.cuda),
            profile=self.profile.to_json(),
        )
        self._scores: dict[str, Score] = {}
        self._ours: dict[str, Ours] = {}

    def on_device(self, name: str, masters: bool | None) -> OnDevice:
        return OnDevice(name, self.job, self.machine, masters=masters, before=self.rig.leave)

    def hold(
        self, contenders: Sequence[Contender], *, share_of_time: float = 1.0, effort: Effort | None = None
    ) -> dict[str, Score]:
        """A contest in this share of the time that is left. effort: another than usual for this size."""
        effort = effort or EFFORTS[self.bench.size]
        self._ours |= {c.name: c for c in contenders if isinstance(c, Ours)}
        keep = (1 - share_of_time) * self.bench.left()
        return hold(
            contenders, self.batches, effort, Clock(self.bench.cuda), lambda: self.bench.left() - keep, self._told
        )

    def _told(self, scores: dict[str, Score]) -> None:
        self._scores |= scores
        hooks = {name: ours.hooks() for name, ours in self._ours.items()}
        summaries = {name: score.summary() | hooks.get(name, {}) for name, score in self._scores.items()}
        self.bench.note(contenders=summaries)


def named(share: float) -> str:
    return f"{FULL}, memory for {share:.0%}"


def against(bench: Bench, scores: Mapping[str, Score], name: str, reference: str, limit: float) -> None:
    """The target that one contender is at most so many times as slow as another."""
    title, found = f"iteration over {reference}", ratio(scores[name], scores[reference])
    if found is None:
        reason = scores[reference].dropped or scores[name].dropped
        bench.target(Target.unmeasured(title, f"at most {limit:g}", reason))
    else:
        bench.target(Target.at_most(title, found, limit, f"{name}, full memory"))


def judge(bench: Bench, scores: Mapping[str, Score], profile: HardwareProfile) -> None:
    """Targets of what ran: the bound, the prediction, CPU only, and all fixed policies."""
    figures: dict[str, Any] = {}
    errors, over = {}, {}
    for name, score in scores.items():
        probe = score.typical
        if probe is None:
            continue
        figures[name] = overlap(probe)
        errors[name] = abs(probe.prediction_s / probe.update_s - 1) if probe.update_s else math.inf
        if name.startswith(FULL):
            bound = lower_bound(probe.workload, profile, scope_of(probe.workload))
            figures[name] |= {"bound_s": bound.seconds, "binding": bound.binding}
            over[name] = probe.update_s / bound.seconds if bound.seconds > 0 else math.inf
    bench.note(updates=figures, over_bound=over, prediction_errors=errors)
    if over:
        worst = max(over, key=lambda n: over[n])
        bench.target(Target.at_most("update over its bound", over[worst], 1.10, f"worst: {worst}"))
    if errors:
        worst = max(errors, key=lambda n: errors[n])
        bench.target(Target.at_most("error of the predicted update", errors[worst], 0.10, f"worst: {worst}"))
    half = scores.get(named(0.5))
    found = None if half is None else ratio(scores[CPU], half)
    if found is not None:
        bench.target(Target.at_least("CPU only over adaptive with memory for half", found, 1.5, "iterations"))
    compared = {
        f"{name} against {other.name}": quotient
        for name, score in scores.items()
        if name.startswith(FULL)
        for other in scores.values()
        if other.name.startswith((CPU, "ratio", "stride")) and needs(other.name) <= memory_of(name)
        if (quotient := ratio(score, other)) is not None
    }
    bench.note(adaptive_over_fixed=compared)
    if compared:
        worst = max(compared, key=lambda n: compared[n])
        bench.target(
            Target.at_most(
                "adaptive over any fixed policy that needs no more memory",
                compared[worst],
                1 + NOISE,
                f"worst: {worst}",
            )
        )


def memory_of(name: str) -> float:
    """The share of the state for which this contender has memory."""
    return next((share for share in SHARES if named(share) == name), 1.0)


def needs(name: str) -> float:
    """The share of the state for which a fixed policy needs memory."""
    kind, _, number = name.partition(" ")
    if kind == "ratio":
        return 1 - float(number)
    return SLOTS_SHARE if kind == "stride" else 0.0


def overlap(probe: Probe) -> dict[str, Any]:
    """How much of an update ran at once. lanes_at_once: busy seconds of all lanes over those in which any was busy."""
    spans = probe.timeline.spans
    busy = sum(probe.timeline.busy(lane) for lane in Lane)
    any_busy = union(spans)
    return {
        "lanes_at_once": busy / any_busy if any_busy else None,
        "before_step_s": max(0.0, -first_start(probe.timeline)),
        "busy_s": {lane.value: probe.timeline.busy(lane) for lane in Lane},
    }


def union(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of the spans runs."""
    total, reached = 0.0, -math.inf
    for span in sorted(spans, key=lambda s: s.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def keep_timelines(bench: Bench, scores: Mapping[str, Score], names: Sequence[str]) -> None:
    """Write the typical update of these as Chrome traces, beginning with the first gradient that leaves."""
    folder = bench.out / "timelines"
    folder.mkdir(exist_ok=True)
    kept = {}
    for name in names:
        score = scores.get(name)
        if score is None or score.typical is None:
            continue
        timeline = from_first(score.typical.timeline)
        file = f"{bench.name} {name}".replace(" ", "-").replace(",", "").replace("%", "") + ".json"
        timeline.save(folder / file)
        kept[name] = {
            "trace": f"timelines/{file}",
            "spans": [[s.lane.value, s.op.value, s.subgroup, s.start, s.end] for s in timeline.spans],
        }
    bench.note(timelines=kept)


def from_first(timeline: Timeline) -> Timeline:
    """The same with the first start at 0 and, if that was before step(), the backward that it ran beside."""
    shift = max(0.0, -first_start(timeline))
    spans = [Span(s.lane, s.op, s.subgroup, s.start + shift, s.end + shift) for s in timeline.spans]
    return Timeline.of([*([Span(Lane.GPU, Op.BACKWARD, None, 0.0, shift)] if shift else []), *spans])
