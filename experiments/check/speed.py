"""How fast is it, against everything else, against its bound and against its prediction?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from dos.deciding.policies import AdaptivePolicy, resolve_policy
from dos.machine.threads import kernel_threads
from experiments.check.base import Bench, Size, Target
from experiments.check.calibration import measured_profile
from experiments.check.contenders import MASTERS, NOTHING, PLAIN, Kind, Ours, Own, Rig, installed, reference
from experiments.check.contest import Clock, Contender, Effort, Score, ratio, run_rounds
from experiments.check.models import HOST_BYTES, MEDIUM, Batch, emulated_device, fitted, prepare, vitals
from perfmodel import Timeline

SUBGROUPS = {Size.TINY: 8, Size.SMALL: 16, Size.FULL: 50}
"""Of the model; the bound is meant for 50 and more."""
EFFORTS = {
    Size.TINY: Effort(warm_up=1, timed=1, updates=1, rounds=1),
    Size.SMALL: Effort(warm_up=2, timed=2, updates=2, rounds=2),
    Size.FULL: Effort(warm_up=2, timed=3, updates=1, rounds=5),
}
SLOTS_SHARE = 0.1
"""Of the state: what strides take for their slots, and more."""
SHARES = (0.5, 1.0, SLOTS_SHARE, 0.25, 0.75, 0.0)
"""Of the state, for which adaptive plans have memory."""
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
CPU = "CPU only"
PEER_HOST_BYTES = 32
"""For each parameter: a peer's state, and pinned memory that is rounded up to a power of two."""


def named(share: float) -> str:
    """DOSAdam's adaptive policy with memory for a share of the state."""
    return f"adaptive, memory for {share:.0%}"


def run(bench: Bench) -> None:
    """AdamW on the GPU, peers that are installed, fixed policies, and adaptive plans with memory for some of the state.

    Peers take part on a GPU alone.
    """
    device, peers = prepare(bench), installed() if bench.cuda else []
    job = fitted(MEDIUM[bench.size], bench, each=HOST_BYTES + PEER_HOST_BYTES * len(peers))
    size = -(-job.numel // SUBGROUPS[bench.size])
    emulated = None if bench.cuda else emulated_device(job, size)
    profile = measured_profile(bench.out, device) if emulated is None else emulated.profile
    batches = job.batches(2, device)
    start = time.perf_counter()
    rig = Rig(job, device, emulated, profile, size)
    rig.model(*batches[0]).backward()
    rig.optimizer.step()  # allocates the state
    rig.optimizer.synchronize()
    bench.note(
        model=dataclasses.asdict(job.config),
        parameters=job.numel,
        batch=job.batch,
        subgroups=rig.subgroups,
        set_up_s=time.perf_counter() - start,
        kernel_threads=kernel_threads(),
        profile=profile.to_json(),
        peers={peer.name: peer.precision for peer in peers},
        **vitals(rig.optimizer, bench.cuda),
    )

    def fixed(*names: str) -> list[Contender]:
        return [Ours(name, rig, resolve_policy(FIXED[name][0]), FIXED[name][1]) for name in names]

    def adaptive(*shares: float) -> list[Contender]:
        return [Ours(named(share), rig, AdaptivePolicy(profile), share) for share in shares]

    def on_device(*names: str) -> list[Contender]:
        return [Own(reference(name, emulated), job, device, before=rig.leave) for name in names]

    # Those that matter most first, in case that there is no time for the others.
    contenders: list[Contender] = [
        *(*fixed(CPU), *adaptive(0.5, 1.0), *on_device(MASTERS, NOTHING)),
        *(Own(peer, job, device) for peer in peers),
        *(*on_device(PLAIN), *adaptive(SLOTS_SHARE), *fixed("stride 2", "ratio 0.5")),
        *(*adaptive(*SHARES[3:]), *fixed(*list(FIXED)[3:])),
    ]
    compete(bench, contenders, batches, EFFORTS[bench.size], peers)


def compete(
    bench: Bench, contenders: Sequence[Contender], batches: Sequence[Batch], effort: Effort, peers: Sequence[Kind] = ()
) -> None:
    """The contest, with its targets; an update of each of ours is kept as a Chrome trace."""
    kept: dict[str, Timeline] = {}
    mine = {c.name: c for c in contenders if isinstance(c, Ours)}

    def on_progress(scores: dict[str, Score]) -> None:
        last = [name for name, score in scores.items() if score.updates and name in mine and name not in kept]
        kept.update({name: mine[name].timeline() for name in last})
        bench.note(contenders={name: score.summary() for name, score in scores.items()})

    scores = run_rounds(contenders, batches, effort, Clock(bench.cuda), bench.left, on_progress)
    judge(bench, scores, peers)
    folder, traces = bench.out / "timelines", {}
    folder.mkdir(exist_ok=True)
    for name, timeline in kept.items():
        file = f"{bench.name} {name}".replace(" ", "-").replace(",", "").replace("%", "") + ".json"
        timeline.save(folder / file)
        traces[name] = {"trace": f"timelines/{file}"}
    bench.note(timelines=traces)


def judge(bench: Bench, scores: Mapping[str, Score], peers: Sequence[Kind]) -> None:
    """Targets of what ran: AdamW, peers, the bound, the prediction, CPU only, and all fixed policies."""

    def between(some: str, other: str) -> float | None:
        return ratio(scores[some], scores[other]) if {some, other} <= scores.keys() else None

    def worst(title: str, found: Mapping[str, float], limit: float) -> None:
        if found:
            name = max(found, key=lambda n: found[n])
            bench.target(Target.at_most(title, found[name], limit, f"worst: {name}"))

    for adamw in (MASTERS, PLAIN):
        found = between(named(1.0), adamw)
        if found is not None:
            bench.target(Target.at_most(f"iteration over {adamw}", found, 1.02, named(1.0)))
        elif adamw in scores:
            bench.target(Target(f"iteration over {adamw}", None, "at most 1.02", None, scores[adamw].dropped))
    for peer in peers:
        for name in (named(0.5), CPU, named(SLOTS_SHARE)):
            if (found := between(peer.name, name)) is not None:
                note = f"iterations; the peer has {peer.precision}"
                bench.target(Target.at_least(f"{peer.name} over {name}", found, 1.0, note))
    updates = {name: score.typical() for name, score in scores.items() if score.updates}
    ours = {named(share): share for share in SHARES if named(share) in updates}
    bounds = {n: updates[n]["exposed_s"] / updates[n]["bound_s"] for n in ours if updates[n].get("bound_s")}
    errors = {name: abs(u["predicted_s"] / u["exposed_s"] - 1) for name, u in updates.items() if u.get("predicted_s")}
    bench.note(over_bound=bounds, prediction_errors=errors)
    worst("update over its bound", bounds, 1.10)
    worst("error of the predicted update", errors, 0.10)
    if (gain := between(CPU, named(0.5))) is not None:
        bench.target(Target.at_least("CPU only over adaptive with memory for half", gain, 1.5, "iterations"))
    compared = {
        f"{name} against {other}": quotient
        for name, share in ours.items()
        for other, (_, needs) in FIXED.items()
        if needs <= share and (quotient := between(name, other)) is not None
    }
    bench.note(adaptive_over_fixed=compared)
    worst("adaptive over any fixed policy that needs no more memory", compared, 1 + NOISE)
