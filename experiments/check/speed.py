"""How fast is it, against everything else, against its bound and against its prediction?"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

from dos.deciding.policies import AdaptivePolicy, resolve_policy
from dos.machine.threads import kernel_threads
from experiments.check.base import Bench, Settings, Size, Skipped, Target
from experiments.check.calibration import measured_profile
from experiments.check.contenders import PEERS, OnDevice, Ours, Peer, Rig, installed
from experiments.check.contest import Clock, Contender, Effort, Score, ratio, run_rounds
from experiments.check.models import (
    HOST_BYTES,
    LARGEST,
    MEDIUM,
    Job,
    emulated_device,
    fitted,
    prepare,
    vitals,
)
from perfmodel import Lane, Op, Span, Timeline

SUBGROUPS = {Size.TINY: 8, Size.SMALL: 16, Size.FULL: 50}
"""Of the model; the bound is meant for 50 and more."""
EFFORTS = {
    Size.TINY: Effort(warm_up=1, timed=1, updates=1, rounds=1),
    Size.SMALL: Effort(warm_up=2, timed=2, updates=2, rounds=2),
    Size.FULL: Effort(warm_up=2, timed=3, updates=1, rounds=5),
}
BRIEF = EFFORTS | {Size.FULL: Effort(warm_up=1, timed=2, updates=1, rounds=5)}
"""For a model so large that every iteration counts."""
SHARES = (0.5, 1.0, 0.1, 0.25, 0.75, 0.0)
"""Of the state, for which adaptive plans have memory."""
SLOTS_SHARE = 0.1
"""Of the state: what strides take for their slots, and more."""
FIXED: dict[str, tuple[str | float, float]] = {
    "CPU only": ("cpu", 0.0),
    "stride 2": ("stride:2", SLOTS_SHARE),
    "ratio 0.5": (0.5, 0.5),
    "stride 3": ("stride:3", SLOTS_SHARE),
    "ratio 0.25": (0.25, 0.75),
    "stride 5": ("stride:5", SLOTS_SHARE),
    "ratio 0.75": (0.75, 0.25),
}
"""Fixed policies, and the share of the state for which each needs memory."""
NOISE = 0.03
"""By so much one policy may seem slower than another without being it."""
NOTHING, MASTERS, PLAIN = "no optimizer", "AdamW, float32 masters", "AdamW, bfloat16 state"
CPU = "CPU only"
PEER_HOST_BYTES = 32
"""For each parameter: a peer's state, and pinned memory that is rounded up to a power of two."""
CERTAIN = 4
"""Contenders that the largest model leaves time for; others take part if there is more of it."""
SET_UP_S, COMPUTE_S = 6e-9, 3e-10
"""For each parameter, roughly: to set up, and to compute an iteration. For choosing a model that there is time for."""


def named(share: float) -> str:
    """DOSAdam's adaptive policy with memory for a share of the state."""
    return f"adaptive, memory for {share:.0%}"


def check_contest(bench: Bench) -> None:
    """AdamW wholly on the GPU, every kind of fixed policy, and adaptive plans with memory for some of the state."""
    stage = Stage(bench, MEDIUM[bench.size])
    # Those that matter most first, in case that there is no time for the others.
    stage.run(
        [
            *(stage.fixed(CPU), stage.adaptive(0.5), stage.adaptive(1.0)),
            *(stage.on_device(MASTERS, masters=True), stage.on_device(NOTHING), stage.on_device(PLAIN, masters=False)),
            *(stage.adaptive(SLOTS_SHARE), stage.fixed("stride 2"), stage.fixed("ratio 0.5")),
            *(stage.adaptive(share) for share in SHARES[3:]),
            *(stage.fixed(name) for name in list(FIXED)[3:]),
        ]
    )


def check_rivals(bench: Bench) -> None:
    """The peers that are installed beside CPU only, and adaptive plans with memory for two slots and for half."""
    peers = installed()
    stage = Stage(bench, MEDIUM[bench.size], each=HOST_BYTES + PEER_HOST_BYTES * len(peers))
    bench.note(peers={peer.name: peer.precision for peer in peers})
    rivals = [Peer(peer, stage.job, stage.device) for peer in peers]
    ours = [stage.adaptive(0.5), stage.fixed(CPU), stage.adaptive(SLOTS_SHARE)]
    scores = stage.run([*rivals, *ours])
    for rival in peers:
        for mine in ours:
            found = ratio(scores[rival.name], scores[mine.name])
            if found is not None:
                note = f"iterations; the peer has {rival.precision}"
                bench.target(Target.at_least(f"{rival.name} over {mine.name}", found, 1.0, note))
    if all(scores[rival.name].dropped for rival in rivals):
        raise Skipped("; ".join(f"{rival.name}: {scores[rival.name].dropped}" for rival in rivals))


def no_rivals(settings: Settings) -> str | None:
    """Why there is nothing to compare with, known beforehand."""
    if not settings.cuda:
        return "no GPU: there is nothing to compare"
    packages = " ".join(peer.package for peer in PEERS)
    return None if installed() else f"no peer is installed (pip install any of {packages})"


def check_largest(bench: Bench) -> None:
    """The largest model that memory and time allow, as if the device had memory for some of the state alone.

    What fits the host may well fit the device entirely, and then there would be nothing to compare.
    """
    most = math.inf
    if bench.cuda:
        rate = measured_profile(bench.out, prepare(bench)).cpu_update_rate
        effort = BRIEF[bench.size]
        iterations = CERTAIN * (effort.warm_up + effort.timed + 1 + effort.updates)
        most = bench.left() / (SET_UP_S + iterations * (COMPUTE_S + 1 / rate))
    stage = Stage(bench, LARGEST[bench.size], most=most)
    certain: list[Contender] = [stage.adaptive(0.25), *map(stage.fixed, (CPU, "ratio 0.75", "stride 3"))]
    assert len(certain) == CERTAIN, "the model was chosen so that there is time for so many"
    others: list[Contender] = [stage.adaptive(0.5), stage.fixed("ratio 0.5"), stage.on_device(PLAIN, masters=False)]
    stage.run([*certain, *others], BRIEF[bench.size])


class Stage:
    """One model, what it runs on, and all that a contest needs."""

    def __init__(self, bench: Bench, job: Job, *, most: float = math.inf, each: int = HOST_BYTES) -> None:
        self.bench, self.device = bench, prepare(bench)
        self.job = fitted(job, bench, each=each, most=most)
        size = -(-self.job.numel // SUBGROUPS[bench.size])
        self.emulated = None if bench.cuda else emulated_device(self.job, size)
        self.profile = measured_profile(bench.out, self.device) if self.emulated is None else self.emulated.profile
        self.batches = self.job.batches(2, self.device)
        start = time.perf_counter()
        self.rig = Rig(self.job, self.device, self.emulated, self.profile, size)
        self.rig.model(*self.batches[0]).backward()
        self.rig.optimizer.step()  # allocates the state
        self.rig.optimizer.synchronize()
        bench.note(
            model=dataclasses.asdict(self.job.config),
            parameters=self.job.numel,
            batch=self.job.batch,
            subgroups=self.rig.subgroups,
            set_up_s=time.perf_counter() - start,
            kernel_threads=kernel_threads(),
            profile=self.profile.to_json(),
            **vitals(self.rig.optimizer, bench.cuda),
        )

    def fixed(self, name: str) -> Ours:
        return Ours(name, self.rig, resolve_policy(FIXED[name][0]), FIXED[name][1])

    def adaptive(self, share: float) -> Ours:
        return Ours(named(share), self.rig, AdaptivePolicy(self.profile), share)

    def on_device(self, name: str, masters: bool | None = None) -> OnDevice:
        return OnDevice(name, self.job, self.device, self.emulated, masters=masters, before=self.rig.leave)

    def run(self, contenders: Sequence[Contender], effort: Effort | None = None) -> dict[str, Score]:
        """The contest, with its targets; the last timeline of each of ours is kept."""
        bench = self.bench
        kept: dict[str, Timeline] = {}
        mine = {c.name: c for c in contenders if isinstance(c, Ours)}

        def on_progress(scores: dict[str, Score]) -> None:
            last = [name for name, score in scores.items() if score.updates and name in mine and name not in kept]
            kept.update({name: mine[name].timeline() for name in last})
            bench.note(contenders={name: score.summary() for name, score in scores.items()})

        effort = effort or EFFORTS[bench.size]
        scores = run_rounds(contenders, self.batches, effort, Clock(bench.cuda), bench.left, on_progress)
        judge(bench, scores, {name: ours.share for name, ours in mine.items()})
        keep_timelines(bench, kept)
        return scores


def judge(bench: Bench, scores: Mapping[str, Score], shares: Mapping[str, float]) -> None:
    """Targets of what ran: AdamW, the bound, the prediction, CPU only, and all fixed policies."""

    def between(some: str, other: str) -> float | None:
        return ratio(scores[some], scores[other]) if {some, other} <= scores.keys() else None

    def worst(title: str, found: Mapping[str, float], limit: float) -> None:
        if found:
            name = max(found, key=lambda n: found[n])
            bench.target(Target.at_most(title, found[name], limit, f"worst: {name}"))

    for reference in (MASTERS, PLAIN):
        found = between(named(1.0), reference)
        if found is not None:
            bench.target(Target.at_most(f"iteration over {reference}", found, 1.02, named(1.0)))
        elif named(1.0) in scores:
            bench.target(Target.unmeasured(f"iteration over {reference}", "at most 1.02", scores[reference].dropped))
    updates = {name: score.typical() for name, score in scores.items() if score.updates}
    ours = {name: update for name, update in updates.items() if name.startswith("adaptive")}
    bounds = {name: u["exposed_s"] / u["bound_s"] for name, u in ours.items() if u.get("bound_s")}
    errors = {name: abs(u["predicted_s"] / u["exposed_s"] - 1) for name, u in updates.items() if u.get("predicted_s")}
    bench.note(over_bound=bounds, prediction_errors=errors)
    worst("update over its bound", bounds, 1.10)
    worst("error of the predicted update", errors, 0.10)
    if (gain := between(CPU, named(0.5))) is not None:
        bench.target(Target.at_least("CPU only over adaptive with memory for half", gain, 1.5, "iterations"))
    compared = {
        f"{name} against {other}": quotient
        for name in ours
        for other, (_, needs) in FIXED.items()
        if needs <= shares[name] and (quotient := between(name, other)) is not None
    }
    bench.note(adaptive_over_fixed=compared)
    worst("adaptive over any fixed policy that needs no more memory", compared, 1 + NOISE)


def keep_timelines(bench: Bench, timelines: Mapping[str, Timeline]) -> None:
    """Write an update of each as a Chrome trace, beginning with the first gradient that leaves."""
    folder = bench.out / "timelines"
    folder.mkdir(exist_ok=True)
    kept = {}
    for name, timeline in timelines.items():
        shown = from_first(timeline)
        file = f"{bench.name} {name}".replace(" ", "-").replace(",", "").replace("%", "") + ".json"
        shown.save(folder / file)
        spans = [[s.lane.value, s.op.value, s.subgroup, s.start, s.end] for s in shown.spans]
        kept[name] = {"trace": f"timelines/{file}", "spans": spans}
    bench.note(timelines=kept)


def from_first(timeline: Timeline) -> Timeline:
    """The same with the first start at 0 and, if that was before step(), the backward that it ran beside."""
    shift = max(0.0, -min((span.start for span in timeline.spans), default=0.0))
    spans = [Span(s.lane, s.op, s.subgroup, s.start + shift, s.end + shift) for s in timeline.spans]
    return Timeline.of([*([Span(Lane.GPU, Op.BACKWARD, None, 0.0, shift)] if shift else []), *spans])
