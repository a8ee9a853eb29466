"""The planner's answer: one value, of which the text and the picture are made, and which `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from perfmodel.bounds import Bound, lower_bound
from perfmodel.plan import Placement
from perfmodel.planner.assumptions import assumptions
from perfmodel.planner.fastest import Fastest, fastest_batch, fastest_with
from perfmodel.planner.outcome import Outcome, by_label, outcomes
from perfmodel.planner.question import MARGIN, Question
from perfmodel.planner.situation import DEVICE, DISK, HOST, Situation
from perfmodel.planner.whatif import SMALLEST, largest, levers, most, remedies


class Answer:
    """The planner's answer; every time in it is simulated, every size counted. Bytes and seconds.

    Sizes are of one rank, where nothing else is said, with the best plan: adaptive's.

    notes: assumptions about the machine, a line each; `assumptions` begins with them.
    policies: their outcomes, adaptive last. best: that outcome, or of the only policy that there is.
    alternative: the fastest of the others that fit. bound: of an update's time; None if the model does not fit, and
        with parameters on the host.
    resident_state, state_on_disk: state that stays on the device, and on disk. offloaded: saved tensors on the host.
    streamed: weights that come from the host in each forward and each backward. staying: weights of blocks that stay on
        the device, beyond the window that the peak has.
    all_resident: memory that a device needs for all state; None with parameters on the host.
    tokens_per_s: of the whole job; None if it does not fit. busy_s: for which each resource works in a step.
    limit: the memory that the job does not fit into, else the resource that works longest.
    best_batch: the question with the batch of most tokens per second, and its outcome; None if none fits.
    fastest: the settings and the batch of most tokens per second with AdamW's results, or else with the first remedy;
        None if nothing fits.
    levers: changes that would help, if it fits; else the remedies say with which it does.
    remedies_at_best: each remedy's question with the batch of most tokens per second, and its outcome.
    largest_parameters: of a model of the usual shape; 0 if not even the smallest fits, for smallest_lacks.
    largest_batch, largest_sequence: each with the other as it was asked for; 0 if none fits.
    """

    def __init__(self, question: Question, notes: Sequence[str] = ()) -> None:
        self.question, self.situation = question, Situation(question)
        situation, work = self.situation, self.situation.update_workload
        self.policies = tuple(outcomes(situation))
        *others, self.best = self.policies
        self.alternative: Outcome | None = min(
            (each for each in others if each.fits), key=lambda each: each.seconds, default=None
        )
        bounded = situation.fits and not question.offload_parameters  # there the update is where it has to be
        self.bound: Bound | None = lower_bound(work, situation.profile) if bounded else None

        plan, seconds = self.best.plan, self.best.iteration_s
        self.resident_state = work.state_bytes_of(plan.served(Placement.GPU_RESIDENT)) if plan else 0
        window, blocks = work.weight_bytes(()), frozenset(range(len(work.blocks)))
        on_device = plan.blocks_on_device if plan else frozenset()
        self.staying = max(0, work.weight_bytes(on_device) - window)
        self.streamed = sum(work.blocks[b].nbytes for b in blocks - on_device)
        everything = situation.peak + work.state_bytes + work.weight_bytes(blocks) - window
        whole = math.ceil(everything / (1 - MARGIN))
        self.all_resident = None if question.offload_parameters else whole
        self.offloaded = plan.activation_bytes if plan else situation.least_offloaded
        self.host_per_rank = situation.host_per_rank + self.offloaded - situation.least_offloaded
        self.state_on_disk = work.state_bytes_of(plan.on_disk) if plan else 0

        self.tokens_per_s = question.step_tokens / seconds if seconds else None
        self.busy_s = situation.busy_s(plan) if plan else {}
        self.limit = situation.lacking[0] if situation.lacking else max(self.busy_s, key=self.busy_s.__getitem__)
        self.best_batch = fastest_batch(question)
        self.levers = tuple(levers(question, self.best)) if situation.fits else ()
        self.remedies = tuple(remedies(situation))
        self.fastest: Fastest | None = fastest_with(question, self.remedies)
        self.remedies_at_best = tuple(fastest_batch(each.situation.question) for each in self.remedies)
        self.largest_parameters = largest(question)
        self.smallest_lacks: list[str] = []
        if not self.largest_parameters:
            self.smallest_lacks = Situation(question.with_model(SMALLEST)).lacking
        self.largest_batch = most(question, "batch")
        self.largest_sequence = most(question, "sequence", question.model.longest)
        self.assumptions = (*notes, *assumptions(situation))

    def to_json(self) -> dict[str, Any]:
        """Return the entries: sizes in bytes, times in seconds, bandwidths in bytes/s, one way.

        Device, host and disk are of one rank, where no key says otherwise.
        """
        question, situation, job = self.question, self.situation, self.situation.job
        settings = vars(question) | {"subgroup_size": question.subgroup_size}
        asked = {"model": settings.pop("model"), "machine": settings.pop("profile"), "settings": settings}
        device = vars(situation.device) | {
            "peak": situation.peak,
            "total": question.device_bytes,
            "fits": DEVICE not in situation.lacking,
            "state": situation.state_bytes,
            "room_for_state": situation.room,
            "resident_state": self.resident_state,
            "weights_staying": self.staying,
            "all_resident_total": self.all_resident,
        }
        host = vars(situation.host) | {
            "model": situation.host_model,
            "window_bytes": situation.spill.window_bytes,
            "activations": self.offloaded,
            "per_rank": self.host_per_rank,
            "per_node": self.host_per_rank * question.ranks,
            "available": question.host_bytes,
            "reserved": question.reserved_on_host,
            "fits": HOST not in situation.lacking,
        }
        tokens = self.tokens_per_s
        of_job = {
            "ranks": question.ranks,
            "tokens_per_s": tokens,
            "tokens_per_s_per_gpu": tokens and tokens / question.ranks,
            "limit": self.limit,
            "busy_s": self.busy_s,
            "forward_s": job.forward_s(),
            "backward_s": job.backward_s,
            "exposed_communication_s": situation.exposed_communication_s,
            "collectives": job.collectives,
            "copied_bytes": job.copied,
            "streamed_weight_bytes": self.streamed,
            "interconnect": job.interconnect,
        }
        batch, other, bound = None, self.alternative, self.bound
        if self.best_batch:
            fastest, outcome = self.best_batch
            tokens = fastest.step_tokens / outcome.seconds
            batch = {"batch": fastest.batch, "iteration_s": outcome.seconds, "tokens_per_s": tokens}
            batch["tokens_per_s_per_gpu"] = tokens / question.ranks
        speedup = other.seconds / self.best.seconds if other and self.best.fits else None
        shares = bound and {"update_s": bound.seconds, "binding": bound.binding, "shares": by_label(bound.shares)}
        return asked | {
            "fits": situation.fits,
            "device": device,
            "host": host,
            "disk": None if question.disk_bytes is None else self._disk(),
            "compute_s": situation.compute_s,
            "best_batch": batch,
            "fastest": self.fastest,
            "job": of_job,
            "policies": self.policies,
            "alternative": other and {"policy": other.policy, "speedup": speedup},
            "bound": shares,
            "levers": self.levers,
            "remedies": self.remedies,
            "largest_parameters": self.largest_parameters,
            "smallest_lacks": self.smallest_lacks,
            "largest_batch": self.largest_batch,
            "largest_sequence": self.largest_sequence,
            "assumptions": self.assumptions,
        }

    def _disk(self) -> dict[str, Any]:
        """Return the entries of the disk."""
        question, situation = self.question, self.situation
        return {
            "state": self.state_on_disk,
            "windows": situation.spill.windows,
            "per_rank": situation.disk_per_rank,
            "per_node": situation.disk_needed,
            "available": question.disk_bytes,
            "fits": DISK not in situation.lacking,
        }


def to_json(value: Any) -> dict[str, Any]:
    """Return the entries of an answer or a part of it, for `json.dumps(answer, default=to_json)`."""
    return dict(value.to_json() if hasattr(value, "to_json") else vars(value))
