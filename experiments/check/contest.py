"""How fast is it, against everything else, its bound and its prediction? Contenders take turns, in rounds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dos import EmulatedDevice
from dos.planning.policies import AdaptivePolicy, resolve_policy
from dos.planning.reading import Source
from experiments.check.base import Bench, Size
from experiments.check.calibration import measured_profile
from experiments.check.contenders import (
    MASTERS,
    NOTHING,
    PLAIN,
    Broken,
    Contender,
    Kind,
    Ours,
    Own,
    Rig,
    installed,
    reference,
)
from experiments.check.models import HOST_BYTES, MEDIUM, Batch, Job, emulated_device, fitted, prepare
from experiments.harness import Dropped, Limit, medians, ratio, take_turns, timed
from perfmodel import Timeline
from perfmodel.format import CODED, SPLIT, Format
from perfmodel.hardware import HardwareProfile


@dataclass(frozen=True)
class Effort:
    """Iterations of one turn, and rounds. updates: iterations that wait for backward before they step.

    learning: warm-up before the first turn of an adaptive policy, until it knows the rates and has searched for plans.
    """

    warm_up: int
    timed: int
    updates: int
    rounds: int
    learning: int = 0


SUBGROUPS = {Size.TINY: 8, Size.SMALL: 16, Size.FULL: 20}
"""Of the model: at full size about as many as DOSAdam chooses on an H200."""
EFFORTS = {
    Size.TINY: Effort(warm_up=1, timed=1, updates=1, rounds=1),
    Size.SMALL: Effort(warm_up=2, timed=2, updates=2, rounds=2),
    Size.FULL: Effort(warm_up=2, timed=3, updates=1, rounds=5, learning=10),
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
INT8 = ", int8 state"
IN_BACKWARD = ", updates in backward"
PEER_HOST_BYTES = 32
"""For each parameter: a peer's state, and pinned memory that is rounded up to a power of two."""


def named(share: float) -> str:
    """DOSAdam's adaptive policy with memory for a share of the state."""
    return f"adaptive, memory for {share:.0%}"


@dataclass(frozen=True)
class Field:
    """The job of a contest, and what all of its contenders share. size: elements of a subgroup."""

    job: Job
    device: torch.device
    emulated: EmulatedDevice | None
    profile: HardwareProfile
    size: int
    peers: Sequence[Kind]

    @classmethod
    def of(cls, bench: Bench) -> Field:
        """Of the model for which there is memory. Peers take part on a GPU alone. Raises Skipped for want of memory."""
        device, peers = prepare(bench), installed() if bench.cuda else []
        host_bytes = HOST_BYTES + CODED.held_bytes + PEER_HOST_BYTES * len(peers)
        job = fitted(MEDIUM[bench.size], bench, each=math.ceil(host_bytes))
        size = -(-job.numel // SUBGROUPS[bench.size])
        emulated = None if bench.cuda else emulated_device(job, size)
        profile = measured_profile(bench.out, device) if emulated is None else emulated.profile
        bench.note(
            model=dataclasses.asdict(job.config),
            parameters=job.numel,
            batch=job.batch,
            profile=profile.to_json(),
            peers={peer.name: peer.precision for peer in peers},
        )
        return cls(job, device, emulated, profile, size, peers)

    def rig(self, state: Format = SPLIT) -> Rig:
        """A model with its DOSAdam."""
        return Rig(self.job, self.device, self.emulated, self.profile, self.size, state)

    def ours(self, rig: Rig, *names: str, of: str = "", updates: str | None = None) -> list[Contender]:
        """Fixed policies by their names, and adaptive ones. updates: of `attach`; None: the model is not attached."""
        adaptive = {named(share): (AdaptivePolicy(self.profile), share) for share in SHARES}
        policies = adaptive | {name: (resolve_policy(policy), share) for name, (policy, share) in FIXED.items()}
        return [Ours(name + of, rig, policies[name][0], policies[name][1], updates) for name in names]

    def on_device(self, *names: str, rigs: Sequence[Rig]) -> list[Contender]:
        """References, for which the state of the rigs leaves the device."""

        def release() -> None:
            for rig in rigs:
                rig.release()

        return [Own(reference(name, self.emulated), self.job, self.device, before=release) for name in names]

    def others(self) -> list[Contender]:
        """Peers. Each is built once before the first round, which would seem to take longer than the next."""
        others = [Own(peer, self.job, self.device) for peer in self.peers]
        for other in others:
            with contextlib.suppress(Broken, torch.OutOfMemoryError):
                other.open()
            other.close()
        return [*others]


def run(bench: Bench) -> None:
    """AdamW on the GPU, peers that are installed, fixed policies, and adaptive plans with memory for some of the state.

    No model is attached: an update begins when backward has ended, and ends before the next forward.
    """
    field = Field.of(bench)
    batches = field.job.batches(2, field.device)
    start = time.perf_counter()
    rig = field.rig()
    rig.model(*batches[0]).backward()
    rig.optimizer.step()  # allocates the state
    rig.optimizer.synchronize()
    said = rig.optimizer.explain()
    state = [tensor for entry in rig.optimizer.state.values() for tensor in entry.values() if tensor.dim()]
    bench.note(
        subgroups=rig.subgroups,
        set_up_s=time.perf_counter() - start,
        pinned=all(tensor.is_pinned() for tensor in state) if bench.cuda else None,  # what is emulated need not be
        memory_source=next((source.value for source in Source if f"says {source.value}" in said), None),
    )
    # The ones that matter most come first, in case that there is no time for the others.
    contenders = [
        *field.ours(rig, CPU, named(0.5), named(1.0)),
        *field.on_device(MASTERS, NOTHING, rigs=[rig]),
        *field.others(),
        *field.on_device(PLAIN, rigs=[rig]),
        *field.ours(rig, named(SLOTS_SHARE), "stride 2", "ratio 0.5", *map(named, SHARES[3:]), *list(FIXED)[3:]),
    ]
    compete(bench, contenders, batches, EFFORTS[bench.size], field.peers)


def run_attached(bench: Bench) -> None:
    """The contest of attached models, whose updates go on in the next forward, or begin in backward.

    Only iterations are compared. Of ours with exact state and in int8.
    """
    field = Field.of(bench)
    exact, small = rigs = [field.rig(), field.rig(CODED)]
    contenders: list[Contender] = []
    for updates, of in (("step", ""), ("backward", IN_BACKWARD)):
        contenders += field.ours(exact, CPU, named(SLOTS_SHARE), named(0.5), of=of, updates=updates)
        contenders += field.ours(small, CPU, named(SLOTS_SHARE), of=INT8 + of, updates=updates)
    scores = run_rounds(
        [*contenders, *field.on_device(MASTERS, NOTHING, rigs=rigs), *field.others()],
        field.job.batches(2, field.device),
        dataclasses.replace(EFFORTS[bench.size], updates=0),
        Clock(bench.cuda),
        bench.left,
        lambda scores: bench.note(attached=summaries(scores)),
    )
    judge_peers(bench, scores, field.peers, [contender.name for contender in contenders], "attached ")


def compete(
    bench: Bench,
    contenders: Sequence[Contender],
    batches: Sequence[Batch],
    effort: Effort,
    peers: Sequence[Kind] = (),
) -> None:
    """The contest, with its targets; an update of each of ours is kept as a Chrome trace."""
    kept: dict[str, Timeline] = {}
    mine = {c.name: c for c in contenders if isinstance(c, Ours)}

    def on_progress(scores: dict[str, Score]) -> None:
        last = [name for name, score in scores.items() if score.updates and name in mine and name not in kept]
        kept.update({name: mine[name].timeline() for name in last})
        bench.note(contenders=summaries(scores))

    scores = run_rounds(contenders, batches, effort, Clock(bench.cuda), bench.left, on_progress)
    judge(bench, scores, peers)
    folder, traces = bench.out / "timelines", {}
    folder.mkdir(exist_ok=True)
    for name, timeline in kept.items():
        file = f"{bench.record.name} {name}".replace(" ", "-").replace(",", "").replace("%", "") + ".json"
        timeline.save(folder / file)
        traces[name] = {"trace": f"timelines/{file}"}
    bench.note(timelines=traces)


def judge(bench: Bench, scores: Mapping[str, Score], peers: Sequence[Kind]) -> None:
    """Targets of what ran: AdamW, peers, the bound, the prediction, CPU only, and all fixed policies."""

    def between(some: str, other: str) -> float | None:
        return scores[some].over(scores[other]) if {some, other} <= scores.keys() else None

    def worst(title: str, found: Mapping[str, float], limit: float) -> None:
        if found:
            name = max(found, key=lambda n: found[n])
            bench.target(Limit.at_most(title, found[name], limit, f"worst: {name}"))

    for adamw in (name for name in (MASTERS, PLAIN) if name in scores):
        found = between(named(1.0), adamw)
        note = scores[adamw].dropped if found is None else named(1.0)
        bench.target(Limit.at_most(f"iteration over {adamw}", found, 1.02, note))
    judge_peers(bench, scores, peers, (named(0.5), CPU, named(SLOTS_SHARE)))
    updates = {name: score.typical() for name, score in scores.items() if score.updates}
    ours = {named(share): share for share in SHARES if named(share) in updates}
    bounds = {n: updates[n]["exposed_s"] / updates[n]["bound_s"] for n in ours if updates[n].get("bound_s")}
    errors = {name: abs(u["predicted_s"] / u["exposed_s"] - 1) for name, u in updates.items() if u.get("predicted_s")}
    worst("update over its bound", bounds, 1.10)
    worst("error of the predicted update", errors, 0.10)
    if (gain := between(CPU, named(0.5))) is not None:
        bench.target(Limit.at_least("CPU only over adaptive with memory for half", gain, 1.5, "iterations"))
    compared = {
        f"{name} against {other}": quotient
        for name, share in ours.items()
        for other, (_, needs) in FIXED.items()
        if needs <= share and (quotient := between(name, other)) is not None
    }
    worst("adaptive over any fixed policy that needs no more memory", compared, 1 + NOISE)
    bench.note(over_bound=bounds, prediction_errors=errors, adaptive_over_fixed=compared)


def judge_peers(
    bench: Bench, scores: Mapping[str, Score], peers: Sequence[Kind], names: Sequence[str], how: str = ""
) -> None:
    """Targets of each peer against ours by their names. how: they train."""
    for peer in peers:
        for name in names:
            if {peer.name, name} <= scores.keys() and (found := scores[peer.name].over(scores[name])) is not None:
                note = f"iterations; the peer has {peer.precision}"
                bench.target(Limit.at_least(f"{peer.name} over {how}{name}", found, 1.0, note))


@dataclass
class Score:
    """Figures of one contender.

    rounds: seconds of its iterations, a list for each round. steps: seconds of the host in their `step()`, likewise.
    updates: metrics of updates that began when all gradients were there.
    reserved_bytes: the most that the allocator held. dropped: why it takes no further turn.
    """

    rounds: list[list[float]] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    updates: list[dict[str, float]] = field(default_factory=list)
    reserved_bytes: int = 0
    dropped: str = ""

    def typical(self) -> dict[str, float]:
        """The metrics of the update of median time."""
        found = sorted(self.updates, key=lambda metrics: metrics["update_s"])
        return found[len(found) // 2] if found else {}

    def over(self, other: Score) -> float | None:
        """How many times as long as the other's its iterations are."""
        return ratio(*(list(map(statistics.median, score.rounds)) for score in (self, other)))

    def summary(self) -> dict[str, Any]:
        """For the results. Iterations: the median over the rounds of the medians within them."""
        found = medians(
            {"iteration": [*map(statistics.median, self.rounds)], "step": [*map(statistics.median, self.steps)]}
        )
        return {
            "iteration_s": found.get("iteration"),
            "rounds_s": self.rounds,
            "step_on_host_s": found.get("step"),
            "reserved_bytes": self.reserved_bytes,
            "update": self.typical() or None,
            "dropped": self.dropped or None,
        }


def summaries(scores: Mapping[str, Score]) -> dict[str, dict[str, Any]]:
    """The figures of all contenders, for the results."""
    return {name: score.summary() for name, score in scores.items()}


class Clock:
    """Reads the time at which the device reaches a point of its work."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda

    def mark(self) -> Any:
        """A point: all that was queued before it has been done then."""
        if not self._cuda:
            return time.perf_counter()  # an emulated device computes on the caller's thread
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Return when the device has done everything."""
        if self._cuda:
            torch.cuda.synchronize()

    def between(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from each mark to the next; all have been passed."""
        pairs = itertools.pairwise(marks)
        return [begin.elapsed_time(end) / 1e3 if self._cuda else end - begin for begin, end in pairs]


def run_rounds(
    contenders: Sequence[Contender],
    batches: Sequence[Batch],
    effort: Effort,
    clock: Clock,
    left: Callable[[], float],
    on_progress: Callable[[dict[str, Score]], None],
) -> dict[str, Score]:
    """Rounds of all contenders until there have been enough or there is no time for another.

    left: seconds that remain. on_progress: called after each turn. A contender that does not fit into memory or does
    not work is dropped, with the reason.
    """
    scores = {c.name: Score() for c in contenders}

    def play(contender: Contender, _: int) -> None:
        score = scores[contender.name]
        try:
            turn(contender, batches, effort, clock, score)
        except torch.OutOfMemoryError as error:
            score.dropped = f"does not fit: {str(error).partition('.')[0]}"
        except Broken as error:
            score.dropped = str(error)
        gc.collect()
        if batches[0][0].is_cuda:
            torch.cuda.empty_cache()
        on_progress(scores)
        if score.dropped:
            raise Dropped

    take_turns({c.name: functools.partial(play, c) for c in contenders}, range(effort.rounds), left=left)
    for score in scores.values():
        if not (score.rounds or score.dropped):
            score.dropped = "not run: no time was left"
    return scores


def iterate(
    contender: Contender, batches: Iterator[Batch], clock: Clock, count: int
) -> tuple[list[float], list[float]]:
    """Seconds of as many iterations, each from the end of one backward to the next, and of the host in each `step()`.

    There is one `step()` more. Nothing is in flight at the end.
    """
    marks, steps = [], []
    for _ in range(count + 1):
        contender.compute(next(batches))
        marks.append(clock.mark())
        steps.append(timed(contender.step))
    contender.metrics()  # waits for what is in flight
    clock.wait()
    return clock.between(marks), steps


def turn(contender: Contender, batches: Sequence[Batch], effort: Effort, clock: Clock, score: Score) -> None:
    """One contender's iterations of one round."""
    cycle = itertools.cycle(batches)
    cuda = batches[0][0].is_cuda
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        contender.open()
        for _ in range(effort.warm_up + effort.learning * (contender.learns and not score.rounds)):
            contender.compute(next(cycle))
            contender.step()
        seconds, steps = iterate(contender, cycle, clock, effort.timed)
        score.rounds.append(seconds)
        score.steps.append(steps)
        for _ in range(effort.updates):
            contender.compute(next(cycle))
            clock.wait()
            contender.step()
            found = contender.metrics()
            if "update_s" in found:
                score.updates.append(found)
    finally:
        if cuda:
            score.reserved_bytes = max(score.reserved_bytes, torch.cuda.max_memory_reserved())
        contender.close()
