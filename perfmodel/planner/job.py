"""Work of a job's ranks beside the optimizer: compute, collectives, copies of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perfmodel.hardware import HardwareProfile
from perfmodel.planner.overlap import Pass, backward_s, forward_s
from perfmodel.planner.question import Question

EFFICIENCY = 0.8
"""Share of NVLink's nominal bandwidth that NCCL's large collectives reach: on an H100 all-gather reached 350
and reduce-scatter 360 of 450 GB/s (github.com/NVIDIA/nccl/issues/1281).
Links through the host count at the profile's rates, which are reached already."""
FORWARD, BACKWARD = "forward", "backward"
"""Moments of an iteration at which collectives run."""
GATHER = "all-gather of weights", "gather", 1
SCATTER = "reduce-scatter of gradients", "reduce", 1
REDUCE = "all-reduce of gradients", "reduce", 2
"""Names of collectives, their lanes of `overlap.Pass`, and rounds of the ring."""


@dataclass(frozen=True)
class Collective:
    """One kind of collective, summed over all layers of an iteration.

    what, part: its name, and the moment of an iteration at which it runs. lane: of `overlap.Pass`.
    moved: bytes that each rank sends, and as many that it receives.
    seconds: alone on each GPU's link to the others, in both directions. The latency of a ring's steps is not counted.
    """

    what: str
    part: str
    lane: str
    moved: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return its name, bytes and seconds."""
        return {"what": self.what, "part": self.part, "bytes": self.moved, "seconds": self.seconds}


class Job:
    """One iteration of one rank, all others doing the same.

    interconnect: bytes/s, one way, that collectives get of one GPU's link to the others. over_pcie: whether that is
        PCIe.
    collectives: of more than one rank.
    copied, returned: bytes of parameters on the host that a pass copies up, and of gradients that come down.
    compute_s: seconds of forward's and backward's arithmetic.
    """

    def __init__(self, question: Question, profile: HardwareProfile) -> None:
        """profile: with the question's ranks on each host."""
        self.question, self._profile, nominal = question, profile, question.fabric.interconnect
        pcie = min(profile.h2d_bandwidth_duplex, profile.d2h_bandwidth_duplex)
        self.over_pcie = nominal is None
        self.interconnect = pcie if nominal is None else EFFICIENCY * nominal
        self.collectives = tuple(self._collectives()) if question.ranks > 1 else ()
        self.copied = self.returned = 0
        if question.offload_parameters:
            self.copied = question.share(question.model.numel) * question.value_bytes
            self.returned = question.state_numel * question.value_bytes
        forward, backward = question.flops
        self.compute_s = forward / question.flops_rate, backward / question.flops_rate

    def _collectives(self) -> Iterator[Collective]:
        """Yield the collectives of data-parallel training, with FSDP2 or without.

        Volumes as in Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
        section 7: twice the model without FSDP2, three times with it (stage 3 there), which gathers weights in forward
        and again in backward (reshard_after_forward).
        """
        question = self.question
        weights, gradients = (float(n * question.value_bytes) for n in (question.model.numel, question.trained))
        if question.fsdp:
            yield self._collective(GATHER, FORWARD, weights)
            yield self._collective(GATHER, BACKWARD, weights)
            yield self._collective(SCATTER, BACKWARD, gradients)
        else:
            yield self._collective(REDUCE, BACKWARD, gradients)

    def _collective(self, kind: tuple[str, str, int], part: str, nbytes: float) -> Collective:
        """Return the collective of `nbytes` of whole tensors.

        In a ring (nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth") (n - 1) / n of the bytes pass every link in each
        round.
        """
        what, lane, rounds = kind
        moved = rounds * (self.question.ranks - 1) / self.question.ranks * nbytes
        return Collective(what, part, lane, moved, moved / self.interconnect)

    @property
    def has_communication(self) -> bool:
        """Whether there is anything beside compute."""
        return bool(self.collectives) or self.copied > 0

    def forward_s(self, updated: float = 0.0) -> float:
        """Seconds of forward. updated: as for `overlap.forward_s`."""
        if not self.has_communication:
            return self.compute_s[0]
        whole = self._pass(FORWARD, self.compute_s[0], self.copied / self._profile.h2d_bandwidth)
        return forward_s(whole, self.question.model.layers, updated)

    @property
    def backward_s(self) -> float:
        """Seconds of backward."""
        if not self.has_communication:
            return self.compute_s[1]
        whole = self._pass(BACKWARD, self.compute_s[1], self.copied / self._profile.h2d_bandwidth_duplex)
        down = self.returned / self._profile.d2h_bandwidth_duplex
        return backward_s(whole._replace(down=down), self.question.model.layers)

    def _pass(self, part: str, compute: float, copied: float) -> Pass:
        """Return a pass with `copied` seconds of copying up, which one rank alone does not hide.

        Where nothing has to be gathered FSDP2 copies on the stream on which it computes (torch 2.13,
        `FSDPParamGroup.unshard` and `wait_for_unshard` with a world of one rank).
        """
        beside = {each.lane: each.seconds for each in self.collectives if each.part == part}
        if self.question.ranks == 1:
            return Pass(compute + copied, **beside)
        return Pass(compute, up=copied, **beside)
