"""The planner's answer: one value, which the text is made of, and which `--json` prints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from perfmodel.bounds import Bound, lower_bound
from perfmodel.footprint import DeviceBytes, HostBytes
from perfmodel.plan import Placement
from perfmodel.planner.assumptions import assumptions
from perfmodel.planner.job import Collective
from perfmodel.planner.outcome import Outcome, by_label, outcomes
from perfmodel.planner.question import MARGIN, Question
from perfmodel.planner.situation import DEVICE, DISK, HOST, Situation
from perfmodel.planner.whatif import SMALLEST, Lever, Remedy, fastest_batch, largest, levers, most, remedies
from perfmodel.timeline import Op

DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class DeviceMemory(DeviceBytes):
    """Memory of one rank's device, in bytes.

    peak: without optimizer state. total: that there is. fits: whether the peak does.
    state: of the optimizer, wherever it is. room_for_state: beside the peak. resident_state: that adaptive keeps there.
    all_resident_total: what the device must have for all of it; None with parameters on the host.
    """

    peak: int
    total: int
    fits: bool
    state: int
    room_for_state: int
    resident_state: int
    all_resident_total: int | None


@dataclass(frozen=True, kw_only=True)
class HostMemory(HostBytes):
    """Memory of one rank on the host, and of more where the name says it, in bytes.

    model: parameters and gradients that are there. window_bytes: for state on disk. activations: saved tensors.
    available: that a node has; None if it is not known. reserved: of it for the system and the processes.
    """

    model: int
    window_bytes: int
    activations: int
    per_rank: int
    per_node: int
    all_ranks: int
    available: int | None
    reserved: int
    fits: bool


@dataclass(frozen=True)
class DiskSpace:
    """State on disk, in bytes. What is written, in a step and in a day of training, is of a node.

    state: of one rank with the adaptive plan. windows: through which it passes. per_rank, per_node: the room needed.
    available: of a node. endurance: that its disks are rated to be written; None if that was not given.
    """

    state: int
    windows: int
    per_rank: int
    per_node: int
    available: int
    fits: bool
    written_per_step: int
    written_per_day: float | None
    endurance: int | None
    endurance_share_per_day: float | None
    endurance_days: float | None


@dataclass(frozen=True)
class BestBatch:
    """The batch of most tokens per second."""

    batch: int
    iteration_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float


@dataclass(frozen=True)
class JobAnswer:
    """All ranks together. Times in seconds; bandwidths in bytes/s, one way, as collectives reach them.

    limit: what the job does not fit into, else the resource that works longest. busy_s: by resource.
    copied_bytes: of parameters on the host that a pass copies up. network: None if not known.
    """

    ranks: int
    nodes: int
    ranks_per_node: int
    replicas: int
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    limit: str
    busy_s: dict[str, float]
    forward_s: float
    backward_s: float
    exposed_communication_s: float
    collectives: tuple[Collective, ...]
    copied_bytes: int
    interconnect: float
    network: float | None


@dataclass(frozen=True)
class Answer:
    """All that the planner says; every time in it is simulated, every size counted.

    disk: None without one. best_batch: None if none fits. compute_s: of forward's and backward's arithmetic.
    policies: adaptive last. alternative: the best of the others that fit.
    bound: of an update's time; None if the model does not fit, and with parameters on the host.
    largest_parameters: of a model of the usual shape; 0 if not even the smallest fits, for smallest_lacks.
    largest_batch, largest_sequence: each with the other as it was asked for; 0 if none fits.
    """

    fits: bool
    question: Question
    device: DeviceMemory
    host: HostMemory
    disk: DiskSpace | None
    compute_s: float
    best_batch: BestBatch | None
    job: JobAnswer
    policies: tuple[Outcome, ...]
    alternative: Outcome | None
    bound: Bound | None
    levers: tuple[Lever, ...]
    remedies: tuple[Remedy, ...]
    largest_parameters: int
    smallest_lacks: list[str]
    largest_batch: int
    largest_sequence: int
    assumptions: tuple[str, ...]

    @property
    def best(self) -> Outcome:
        """Outcome of adaptive, or of the only policy that there is."""
        return self.policies[-1]

    def to_json(self) -> dict[str, Any]:
        """Return the fields; the question as model, machine and settings, the alternative by how adaptive compares."""
        settings, rest = vars(self.question) | {"subgroup_size": self.question.subgroup_size}, vars(self).copy()
        del rest["question"]
        asked = {"model": settings.pop("model"), "machine": settings.pop("profile"), "settings": settings}
        other, bound = self.alternative, self.bound
        rest["alternative"] = other and {
            "policy": other.policy,
            "speedup": other.seconds / self.best.seconds if self.best.fits else None,
        }
        rest["bound"] = bound and {
            "update_s": bound.seconds,
            "binding": bound.binding,
            "shares": by_label(bound.shares),
        }
        return asked | rest


def to_json(value: Any) -> dict[str, Any]:
    """Return the entries of an answer or a part of it, for `json.dumps(answer, default=to_json)`."""
    return dict(value.to_json() if hasattr(value, "to_json") else vars(value))


def answer(question: Question, notes: list[str]) -> Answer:
    """Plan what is asked. notes: what is assumed of the machine, a line each; the other assumptions follow them."""
    situation = Situation(question)
    policies = tuple(outcomes(situation))
    *others, best = policies
    numel = largest(question)
    return Answer(
        fits=situation.fits,
        question=question,
        device=_device(situation, best),
        host=_host(situation, best),
        disk=_disk(situation, best, question.disk_bytes) if question.disk_bytes is not None else None,
        compute_s=situation.compute_s,
        best_batch=_best_batch(question),
        job=_job(situation, best),
        policies=policies,
        alternative=min((each for each in others if each.fits), key=lambda each: each.seconds, default=None),
        # With parameters on the host the update is where it has to be.
        bound=lower_bound(situation.update_workload, situation.profile) if others and situation.fits else None,
        levers=tuple(levers(question, best)),
        remedies=tuple(remedies(situation)),
        largest_parameters=numel,
        smallest_lacks=[] if numel else Situation(question.with_model(SMALLEST)).lacking,
        largest_batch=most(question, "batch"),
        largest_sequence=most(question, "sequence", question.model.longest),
        assumptions=(*notes, *assumptions(situation)),
    )


def _device(situation: Situation, best: Outcome) -> DeviceMemory:
    question, work = situation.question, situation.update_workload
    resident = best.plan.served(Placement.GPU_RESIDENT) if best.plan else ()
    whole = math.ceil((situation.peak + work.state_bytes) / (1 - MARGIN))
    return DeviceMemory(
        **vars(situation.device),
        peak=situation.peak,
        total=question.device_bytes,
        fits=DEVICE not in situation.lacking,
        state=situation.state_bytes,
        room_for_state=situation.room,
        resident_state=work.state_bytes_of(resident),
        all_resident_total=None if question.offload_parameters else whole,
    )


def _host(situation: Situation, best: Outcome) -> HostMemory:
    question = situation.question
    activations = best.plan.activation_bytes if best.plan else situation.least_offloaded
    per_rank = situation.host_per_rank + activations - situation.least_offloaded
    return HostMemory(
        **vars(situation.host),
        model=situation.host_model,
        window_bytes=situation.spill.window_bytes,
        activations=activations,
        per_rank=per_rank,
        per_node=per_rank * question.per_node,
        all_ranks=per_rank * question.ranks,
        available=question.host_bytes,
        reserved=question.reserved_on_host,
        fits=HOST not in situation.lacking,
    )


def _disk(situation: Situation, best: Outcome, available: int) -> DiskSpace:
    question, plan = situation.question, best.plan
    writes = [task.size for task in situation.operations(plan) if task.op is Op.WRITE] if plan else []
    written = sum(writes) * question.per_node
    per_day = written * DAY_S / best.iteration_s if best.iteration_s else None
    endured = per_day / question.disk_endurance if per_day is not None and question.disk_endurance else None
    return DiskSpace(
        state=situation.update_workload.state_bytes_of(plan.on_disk) if plan else 0,
        windows=situation.spill.windows,
        per_rank=situation.disk_per_rank,
        per_node=situation.disk_needed,
        available=available,
        fits=DISK not in situation.lacking,
        written_per_step=written,
        written_per_day=per_day,
        endurance=question.disk_endurance,
        endurance_share_per_day=endured,
        endurance_days=1 / endured if endured else None,
    )


def _best_batch(question: Question) -> BestBatch | None:
    if (found := fastest_batch(question)) is None:
        return None
    asked, outcome = found
    tokens = asked.step_tokens / outcome.seconds
    return BestBatch(asked.batch, outcome.seconds, tokens, tokens / question.ranks)


def _job(situation: Situation, best: Outcome) -> JobAnswer:
    question, job = situation.question, situation.job
    busy_s = situation.busy_s(best.plan) if best.plan else {}
    tokens = question.step_tokens / best.iteration_s if best.iteration_s else None
    return JobAnswer(
        ranks=question.ranks,
        nodes=question.nodes,
        ranks_per_node=question.per_node,
        replicas=question.replicas,
        tokens_per_s=tokens,
        tokens_per_s_per_gpu=tokens and tokens / question.ranks,
        limit=situation.lacking[0] if situation.lacking else max(busy_s, key=busy_s.__getitem__),
        busy_s=busy_s,
        forward_s=job.forward_s(),
        backward_s=job.backward_s,
        exposed_communication_s=situation.exposed_communication_s,
        collectives=job.collectives,
        copied_bytes=job.copied,
        interconnect=job.interconnect,
        network=job.network,
    )
