"""DOSAdam beside its peers, each in a contest of its own, if it is installed."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from dos.deciding.controller import AdaptivePolicy, resolve_policy
from experiments.checks.base import Bench, Settings, Skipped, Target
from experiments.checks.contenders import Ours
from experiments.checks.contest import ratio
from experiments.checks.peers import BitsAndBytes, DeepSpeed, Peer, PeerError, TorchAo
from experiments.checks.speed import CPU, SLOTS_SHARE, Stage, named
from experiments.checks.training import HOST_BYTES, MEDIUM

PEER_HOST_BYTES = 32
"""For each parameter: state, and pinned memory that is rounded up to a power of two."""


def check_torchao(bench: Bench) -> None:
    """torchao's CPUOffloadOptimizer."""
    compare(bench, TorchAo)


def check_deepspeed(bench: Bench) -> None:
    """DeepSpeed's ZeRO-Offload."""
    compare(bench, DeepSpeed)


def check_bitsandbytes(bench: Bench) -> None:
    """bitsandbytes' paged AdamW."""
    compare(bench, BitsAndBytes)


def missing(kind: type[Peer]) -> Callable[[Settings], str | None]:
    """What a check needs to know beforehand."""

    def reason(settings: Settings) -> str | None:
        if not settings.cuda:
            return "no GPU: there is nothing to compare"
        return None if kind.installed() else f"{kind.package} is not installed (pip install {kind.package})"

    return reason


def compare(bench: Bench, kind: type[Peer]) -> None:
    """The peer, DOSAdam with nothing on the device, with memory for two slots, and with memory for half its state."""
    stage = Stage(bench, MEDIUM[bench.size], live=False, each=HOST_BYTES + PEER_HOST_BYTES)
    peer = kind(stage.job, stage.machine.torch_device)
    bench.note(peer=peer.name, precision=peer.precision)
    ours = [Ours(CPU, stage.rig, resolve_policy("cpu"))]
    ours += [Ours(named(s), stage.rig, AdaptivePolicy(stage.profile), s) for s in (SLOTS_SHARE, 0.5)]
    try:
        scores = stage.hold([peer, *ours])
    except PeerError as error:
        traceback.print_exc()  # goes into the check's log
        raise Skipped(str(error)) from error
    if scores[peer.name].dropped:
        raise Skipped(f"{peer.name}: {scores[peer.name].dropped}")
    for contender in ours:
        found = ratio(scores[peer.name], scores[contender.name])
        title = f"{peer.name} over {contender.name}"
        if found is not None:
            bench.target(Target.at_least(title, found, 1.0, f"iterations; the peer has {peer.precision}"))
