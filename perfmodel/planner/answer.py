"""The planner's answer: one value, of which the text and the picture are made, and which `--json` prints."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from perfmodel.bounds import Bound, lower_bound
from perfmodel.plan import Placement
from perfmodel.planner.assumptions import assumptions
from perfmodel.planner.outcome import Outcome, by_label, outcomes
from perfmodel.planner.question import MARGIN, Question
from perfmodel.planner.situation import DEVICE, DISK, HOST, Situation
from perfmodel.planner.whatif import SMALLEST, Lever, Remedy, fastest_batch, largest, levers, most, remedies
from perfmodel.timeline import Op

DAY_S = 86_400


@dataclass(frozen=True)
class Answer:
    """All that the planner says; every time in it is simulated, every size counted.

    policies: adaptive last. best_batch: the question with the batch of most tokens per second; None if none fits.
    bound: of an update's time; None if the model does not fit, and with parameters on the host.
    largest_parameters: of a model of the usual shape; 0 if not even the smallest fits, for smallest_lacks.
    largest_batch, largest_sequence: each with the other as it was asked for; 0 if none fits.
    """

    situation: Situation
    policies: tuple[Outcome, ...]
    best_batch: tuple[Question, Outcome] | None
    bound: Bound | None
    levers: tuple[Lever, ...]
    remedies: tuple[Remedy, ...]
    largest_parameters: int
    smallest_lacks: list[str]
    largest_batch: int
    largest_sequence: int
    assumptions: tuple[str, ...]

    @property
    def question(self) -> Question:
        """The question that is answered."""
        return self.situation.question

    @property
    def fits(self) -> bool:
        """Whether device, host and disk have enough memory."""
        return self.situation.fits

    @property
    def best(self) -> Outcome:
        """Outcome of adaptive, or of the only policy that there is."""
        return self.policies[-1]

    @property
    def alternative(self) -> Outcome | None:
        """Return the fastest of the other policies that fit."""
        fitting = (each for each in self.policies[:-1] if each.fits)
        return min(fitting, key=lambda each: each.seconds, default=None)

    @property
    def resident_state(self) -> int:
        """Bytes of state that the best plan keeps on a rank's device."""
        plan = self.best.plan
        return self.situation.update_workload.state_bytes_of(plan.served(Placement.GPU_RESIDENT)) if plan else 0

    @property
    def all_resident_bytes(self) -> int | None:
        """Memory that a device needs for all of a rank's state; None with parameters on the host."""
        peak, state = self.situation.peak, self.situation.update_workload.state_bytes
        return None if self.question.offload_parameters else math.ceil((peak + state) / (1 - MARGIN))

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of a rank's saved tensors that the best plan moves to the host."""
        return self.best.plan.activation_bytes if self.best.plan else self.situation.least_offloaded

    @property
    def host_per_rank(self) -> int:
        """Host memory of one rank with the best plan, in bytes."""
        return self.situation.host_per_rank + self.offloaded_bytes - self.situation.least_offloaded

    @property
    def state_on_disk(self) -> int:
        """Bytes of a rank's state that the best plan has on disk."""
        return self.situation.update_workload.state_bytes_of(self.best.plan.on_disk) if self.best.plan else 0

    @functools.cached_property
    def written_per_step(self) -> int:
        """Bytes that a step writes to the disks of a node."""
        tasks = self.situation.operations(self.best.plan) if self.best.plan else []
        return sum(task.size for task in tasks if task.op is Op.WRITE) * self.question.per_node

    @property
    def written_per_day(self) -> float | None:
        """Bytes that a day of training writes there; None if it does not fit."""
        return self.written_per_step * DAY_S / self.best.iteration_s if self.best.iteration_s else None

    @property
    def worn_per_day(self) -> float | None:
        """Return the share of what disks are rated to be written that a day writes; None if one of them is unknown."""
        written, endurance = self.written_per_day, self.question.disk_endurance
        return None if written is None or endurance is None else written / endurance

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the whole job; None if it does not fit."""
        return self.question.step_tokens / self.best.iteration_s if self.best.iteration_s else None

    @functools.cached_property
    def busy_s(self) -> dict[str, float]:
        """Seconds for which each resource works in a step; empty if it does not fit."""
        return self.situation.busy_s(self.best.plan) if self.best.plan else {}

    @property
    def limit(self) -> str:
        """Return the memory that the job does not fit into, else the resource that works longest."""
        lacking = self.situation.lacking
        return lacking[0] if lacking else max(self.busy_s, key=self.busy_s.__getitem__)

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
            "all_resident_total": self.all_resident_bytes,
        }
        host = vars(situation.host) | {
            "model": situation.host_model,
            "window_bytes": situation.spill.window_bytes,
            "activations": self.offloaded_bytes,
            "per_rank": self.host_per_rank,
            "per_node": self.host_per_rank * question.per_node,
            "all_ranks": self.host_per_rank * question.ranks,
            "available": question.host_bytes,
            "reserved": question.reserved_on_host,
            "fits": HOST not in situation.lacking,
        }
        tokens = self.tokens_per_s
        of_job = {
            "ranks": question.ranks,
            "nodes": question.nodes,
            "ranks_per_node": question.per_node,
            "replicas": question.replicas,
            "tokens_per_s": tokens,
            "tokens_per_s_per_gpu": tokens and tokens / question.ranks,
            "limit": self.limit,
            "busy_s": self.busy_s,
            "forward_s": job.forward_s(),
            "backward_s": job.backward_s,
            "exposed_communication_s": situation.exposed_communication_s,
            "collectives": job.collectives,
            "copied_bytes": job.copied,
            "interconnect": job.interconnect,
            "network": job.network,
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
            "fits": self.fits,
            "device": device,
            "host": host,
            "disk": None if question.disk_bytes is None else self._disk(),
            "compute_s": situation.compute_s,
            "best_batch": batch,
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
        """Return the entries of the disk; bytes written are of a node."""
        question, situation, worn = self.question, self.situation, self.worn_per_day
        return {
            "state": self.state_on_disk,
            "windows": situation.spill.windows,
            "per_rank": situation.disk_per_rank,
            "per_node": situation.disk_needed,
            "available": question.disk_bytes,
            "fits": DISK not in situation.lacking,
            "written_per_step": self.written_per_step,
            "written_per_day": self.written_per_day,
            "endurance": question.disk_endurance,
            "endurance_share_per_day": worn,
            "endurance_days": 1 / worn if worn else None,
        }


def to_json(value: Any) -> dict[str, Any]:
    """Return the entries of an answer or a part of it, for `json.dumps(answer, default=to_json)`."""
    return dict(value.to_json() if hasattr(value, "to_json") else vars(value))


def answer(question: Question, notes: list[str]) -> Answer:
    """Plan what is asked. notes: what is assumed of the machine, a line each; the other assumptions follow them."""
    situation = Situation(question)
    policies = tuple(outcomes(situation))
    numel = largest(question)
    # With parameters on the host the update is where it has to be.
    bounded = situation.fits and not question.offload_parameters
    return Answer(
        situation,
        policies,
        best_batch=fastest_batch(question),
        bound=lower_bound(situation.update_workload, situation.profile) if bounded else None,
        levers=tuple(levers(question, policies[-1])),
        remedies=tuple(remedies(situation)),
        largest_parameters=numel,
        smallest_lacks=[] if numel else Situation(question.with_model(SMALLEST)).lacking,
        largest_batch=most(question, "batch"),
        largest_sequence=most(question, "sequence", question.model.longest),
        assumptions=(*notes, *assumptions(situation)),
    )
