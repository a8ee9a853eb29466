"""Reports of the last step, with reasons: for people, for logs and for monitors."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dos.devices.pin_limit import remedy
from dos.kernels.gpu_update import gpu_kernel_name
from dos.planning.monitor import SPARE_TO_GROW, TOO_LITTLE
from dos.planning.reading import Reading
from dos.step.iteration import Iteration
from perfmodel import Placement, Plan, Timeline, Workload
from perfmodel.bounds import Bound, lower_bound
from perfmodel.hardware import HardwareProfile
from perfmodel.simulate import Scope, exposed
from perfmodel.workload import peak_room

SEEN = 0.05
"""The share of compute from which a late host is reported."""
ROUNDING = 0.005
"""The amount by which an efficiency may exceed 1."""


@dataclass(frozen=True)
class Report:
    """One step of one accelerator.

    iteration: of the step. plan: of the step. workload: the one for which the plan was made, memory included.
    profile: the rates of that time; None if the policy needs none.
    measured: the timeline; None while the step is still running. origin: its 0, on the clock of time.perf_counter.
    reading: device memory when the step had ended. held_bytes: bytes of optimizer state on the device.
    host_bytes: host memory of state's homes, including state that is on the device. pool_bytes: host memory pinned for
        saved tensors.
    why: the reason of the last change of plan.
    real: whether a GPU updates, and not an emulated device.
    pinned_bytes: the pinned bytes of `host_bytes` and `pool_bytes`.
    late_s: seconds for which the device waited for the host in the last forward, see `Pace`.
    late_in_backward_s: seconds by which a backward in which updates run lasts longer than the workload says, likewise.
    """

    iteration: Iteration
    plan: Plan
    workload: Workload
    profile: HardwareProfile | None
    measured: Timeline | None
    origin: float
    reading: Reading
    held_bytes: int
    host_bytes: int
    pool_bytes: int
    why: str
    real: bool
    pinned_bytes: int = 0
    late_s: float = 0.0
    late_in_backward_s: float = 0.0

    @property
    def exposed_s(self) -> float | None:
        """Seconds for which the caller waited; None while the step is still running."""
        return None if self.measured is None else self.iteration.exposed_s

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the step and of saved tensors before it, with forward and backward; None while it runs."""
        if self.measured is None:
            return None
        moved = (span.since(self.origin) for span in self.iteration.moved)
        timeline = Timeline.of([*self.measured.spans, *moved])
        return dataclasses.replace(timeline, beside=self.iteration.spans(self.origin))

    @property
    def disk_bytes(self) -> int:
        """Bytes of state that rests on disk by the plan."""
        return self.workload.state_bytes_of(self.plan.on_disk)

    @property
    def update_s(self) -> float | None:
        """Seconds from the call of step() to the end of the last transfer or update; None while it runs."""
        return None if self.measured is None else max((0.0, *(span.end for span in self.measured.spans)))

    @property
    def waited_s(self) -> float | None:
        """The part of `update_s` for which the caller waited; None while the step is still running.

        The rest of `exposed_s` lies before step() or after the last transfer: waits for weights that a block used.
        """
        return None if self.update_s is None else self.iteration.waited_s(self.origin, self.origin + self.update_s)

    @property
    def predicted_s(self) -> float | None:
        """Seconds for which the caller waits by the model's prediction; None without a profile."""
        return None if self.profile is None else _predicted(self.plan, self.lasting, self.profile)

    @property
    def lasting(self) -> Workload:
        """The workload with a backward that lasts as long as the host that updates in it makes it.

        The plan is made without: it would leave more to the CPU, whose updates make the host later.
        """
        work = self.workload
        if not work.in_backward:
            return work
        return dataclasses.replace(work, backward_s=max(0.0, work.backward_s + self.late_in_backward_s), host_share=0.0)

    @property
    def bound(self) -> Bound | None:
        """The least time for which the caller waits under any plan with this memory; None if not known."""
        found = None if self.profile is None else _bound(self.workload, self.profile)
        return None if isinstance(found, str) else found

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward behind which the update can hide."""
        return Scope.beside(self.workload).compute_s(self.workload)

    @property
    def efficiency(self) -> float | None:
        """The shortest iteration over the measured one, `(compute + bound) / (compute + exposed)`; None if not known.

        The bound is the part of the update that cannot hide behind compute (`perfmodel.bounds.lower_bound`): 1 means
        that no plan could make the iteration shorter. A shorter measured iteration shows that the rates are not the
        machine's, so that the bound is not known either.
        """
        found = self._over_shortest
        return None if found is None or found > 1 + ROUNDING else min(found, 1.0)

    @property
    def _over_shortest(self) -> float | None:
        """The shortest iteration by the model over the measured one."""
        if self.bound is None or self.exposed_s is None or self.compute_s + self.exposed_s <= 0:
            return None
        return (self.compute_s + self.bound.seconds) / (self.compute_s + self.exposed_s)

    def metrics(self) -> dict[str, float]:
        """Return plain numbers by name; numbers that are not known are missing."""
        numel = max(self.workload.numel, 1)
        loads = self.workload.subgroups
        share = {p: sum(loads[i].numel for i in self.plan.served(p)) / numel for p in Placement}
        streamed = self.workload.state_bytes_of(self.plan.served(Placement.GPU_STREAMED))
        on_cpu = [loads[i] for i in self.plan.served(Placement.CPU)]
        found: dict[str, float | None] = {
            **{f"share_{placement.label}": value for placement, value in share.items()},
            "slots": self.plan.slots,
            "cpu_threads": self.plan.threads or None,
            "h2d_bytes": streamed + sum(load.parameter_bytes for load in on_cpu),
            "d2h_bytes": streamed + sum(load.gradient_bytes for load in on_cpu),
            "exposed_s": self.exposed_s,
            "update_s": self.update_s,
            "waited_s": self.waited_s,
            "predicted_s": self.predicted_s,
            "bound_s": None if self.bound is None else self.bound.seconds,
            "compute_s": self.compute_s,
            "efficiency": self.efficiency,
            "memory_free_bytes": self.reading.memory.free,
            "memory_total_bytes": self.reading.memory.total,
            "memory_held_bytes": self.held_bytes,
            "host_held_bytes": self.host_bytes,
            "disk_held_bytes": self.disk_bytes if self.workload.windows else None,
            "memory_for_state_bytes": self.workload.peak_free_bytes,
        }
        if self.workload.blocks:
            found |= {"blocks_on_device": len(self.plan.blocks_on_device), "weight_bytes_fetched": self._fetched_bytes}
        if self._leaving is not None:
            left, whole = self._leaving
            found |= {"activation_bytes": left, "activation_share": left / max(whole, 1)}
            found |= {"activation_host_bytes": self.pool_bytes}
        return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}

    def summary(self, iteration_s: float) -> str:
        """Return one line for people. iteration_s: seconds from the step before to this one."""
        numel = self.workload.numel
        on_device = sum(self.workload.subgroups[i].numel for i in self.plan.served(Placement.GPU_RESIDENT))
        text = (
            f"DOSAdam: {numel:,} parameters, {on_device / max(numel, 1):.0%} of their state on the device; "
            f"{_ms(iteration_s)} an iteration, to which the optimizer adds {_ms(self.exposed_s or 0.0)}"
        )
        if self.predicted_s is not None:
            text += f", predicted {_ms(self.predicted_s)}"
        if self.bound is not None:
            text += f", at least {_ms(self.bound.seconds)} under any plan"
        return f"{text}; optimizer.explain() says why"

    def __str__(self) -> str:
        memory, bound, work = self.reading.memory, self.bound, self.workload
        lines = [
            f"Plan: {self.plan}",
            f"Memory: {size_of(memory.free)} free of {size_of(memory.total)}, says {self.reading.source.value}; "
            f"{self._room()}; {size_of(self.held_bytes)} of state is there now",
            f"Formats: {self._formats()}; {work.state_bytes / max(work.numel, 1):.3g} bytes of state per parameter",
            f"Last change of plan: {self.why}",
        ]
        if work.windows:
            lines += [f"Disk: {size_of(self.disk_bytes)} of state rests there; {self._host()}"]
        if work.blocks:
            count, kept = len(work.blocks), len(self.plan.blocks_on_device)
            written = ", in which updates write them there" if work.in_backward else ""
            lines += [
                f"Weights: {kept} of {count} blocks stay on the device; those of the others, "
                f"{size_of(self._fetched_bytes)}, come from the host for each forward and each backward{written}"
            ]
        if self._leaving is not None:
            lines += [f"Saved tensors: {self._saved(*self._leaving)}"]
        if self.real:
            lines += [self._pinned()]
        lines += unused(self.plan, self.workload, self.profile, self.iteration.withheld)
        if self.real:
            lines += [f"Updates on the device are done by {gpu_kernel_name()}"]
        if self.measured is not None:
            lines += [f"Measured: {self._times(self.measured)}"]
        if self.late_s >= SEEN * self.compute_s and self.late_s:
            lines += [
                f"Host: the last forward lasted {_ms(self.late_s)} longer than its compute: the device waited for the "
                "host, or user code did other work between two steps; that does not count as time beside which "
                "updates run"
            ]
        late_s = self.lasting.backward_s - self.workload.backward_s
        if late_s >= SEEN * self.compute_s and late_s:
            lines += [
                f"Host: a backward that updates, with its step(), lasts {_ms(late_s)} longer than its compute: the "
                "device waits for the host, which issues updates; fewer subgroups (subgroup_size=) take it less time"
            ]
        if self.profile is None or self.predicted_s is None:
            lines += ["Predicted: nothing, because this policy needs no profile; policy='adaptive' has one"]
            return "\n".join(lines)
        during = f" beside {_ms(self.compute_s)} of forward and backward" if self.compute_s else ""
        during += ", in which updates begin" if self.compute_s and work.in_backward else ""
        lines += [f"Predicted: the caller waits {_ms(self.predicted_s)}{during}, by the rates of {self.profile.name}"]
        if bound is None:
            lines += [f"Bound: {_bound(self.workload, self.profile)}"]
        else:
            least = f"with this memory it waits at least {_ms(bound.seconds)} under any plan"
            lines += [f"Bound: {least}; {_bottleneck(bound)}"]
        if self.efficiency is not None:
            what = "the shortest possible iteration over this one" if self.compute_s else "the bound over the wait"
            lines += [f"Efficiency: {self.efficiency:.0%} ({what})"]
        elif self._over_shortest is not None:
            took = f"this iteration took {1 / self._over_shortest:.0%} of the shortest time that the rates allow"
            lines += [
                f"Efficiency: not known. The prediction is off: {took}. Rates are corrected while training; if this "
                "stays, measure them with `python -m dos.calibrate`"
            ]
        return "\n".join(lines)

    def _room(self) -> str:
        """Return the text about device memory for state."""
        work, state = self.workload, size_of(self.workload.state_bytes)
        if work.blocks:
            return f"room for {size_of(work.peak_free_bytes)} of weights and of optimizer state, which takes {state}"
        return f"room for {size_of(min(work.peak_free_bytes, work.state_bytes))} of {state} of optimizer state"

    def _times(self, measured: Timeline) -> str:
        """Return the text about the times of a step that has ended."""
        update, waited, exposed = self.update_s or 0.0, self.waited_s or 0.0, self.exposed_s or 0.0
        text = f"{_ms(update)} from step() to the last transfer, of which the caller waited {_ms(waited)}"
        if _ms(exposed - waited) != _ms(0):
            why = ", such as for weights in forward and backward" if self.workload.blocks else ""
            text += f", and {_ms(exposed - waited)} outside of it{why}"
        busy = ", ".join(f"{lane.value} {_ms(measured.busy(lane))}" for lane in measured.lanes)
        return f"{text}; lanes were busy, from backward on, for: {busy}"

    def _host(self) -> str:
        """Return the text about room for state on the host."""
        work, free = self.workload, self.workload.host_free_bytes
        room = "all" if math.isinf(free) else f"{size_of(free)}, and gradients and parameters on their way"
        return f"the host has room for {room}, beside {work.windows} windows"

    def _pinned(self) -> str:
        """Return the text about host memory that is pinned."""
        total = self.host_bytes + self.pool_bytes
        text = f"Host memory: {self.pinned_bytes / 2**30:.2f} of {total / 2**30:.2f} GiB pinned"
        return text if self.pinned_bytes >= total else f"{text}; the rest is copied more slowly: {remedy()}"

    @property
    def _fetched_bytes(self) -> int:
        """Bytes of the weights that a forward fetches."""
        blocks, there = self.workload.blocks, self.plan.blocks_on_device
        return sum(block.nbytes for b, block in enumerate(blocks) if b not in there)

    @property
    def _leaving(self) -> tuple[int, int] | None:
        """Bytes of saved tensors that move, and of all that may move: by the plan, or as the user has chosen."""
        activations, saved = self.workload.activations, self.iteration.saved
        if activations:
            whole = sum(each.nbytes for each in activations)
            return min(self.plan.activation_bytes, whole), whole
        # Where weights stream, hooks see saved tensors even if the user has not asked that any move.
        return None if saved is not None and not saved[0] and self.workload.blocks else saved

    def _saved(self, left: int, nbytes: int) -> str:
        """Return the text about saved tensors that move, and the reason."""
        work, whole = self.workload, size_of(nbytes)
        pool = f"; {size_of(self.pool_bytes)} of host memory is kept for them"
        if not work.activations:
            return f"{size_of(left)} of {whole} moved to the host in forward, {left / max(nbytes, 1):.0%}{pool}"
        if not left and self.profile is None:
            return f"all {whole} stay on the device, because this policy moves none; policy='adaptive' may"
        if not left:
            return f"all {whole} stay on the device, because moving some would not make the iteration shorter"
        why = f"which makes room for {size_of(peak_room(work.activations, left))}"
        if work.activation_least_bytes:
            least = size_of(min(left, work.activation_least_bytes))
            why += f"; training would run out of memory if less than {least} moved"
        return f"{size_of(left)} of {whole} move to the host in forward, {why}{pool}"

    def _formats(self) -> str:
        """Return the formats of the state, each with its share of the parameters."""
        numel: Counter[str] = Counter()
        for load in self.workload.subgroups:
            numel[load.format] += load.numel
        return ", ".join(f"{count / max(self.workload.numel, 1):.1%} {name}" for name, count in numel.most_common())

    def change(self) -> str:
        """Return one line for the log when the plan has changed."""
        text = f"plan changed: {self.why}; {self.plan}"
        if self.predicted_s is not None and self.bound is not None:
            text += f"; predicted {_ms(self.predicted_s)}, bound {_ms(self.bound.seconds)}, {_bottleneck(self.bound)}"
        return text


def why_changed(
    before: Workload | None, now: Workload, believed: HardwareProfile | None, profile: HardwareProfile | None
) -> str:
    """Return the differences from the facts of the plan before.

    believed, profile: the rates then and now; None if the policy needs none.
    """
    memory = size_of(now.peak_free_bytes)
    if before is None:
        return f"this is the first plan, with memory for {memory} of state"
    reasons = []
    if before.subgroups != now.subgroups:
        reasons += ["the parameters to update have changed"]
    for what, then, since in (
        ("memory for state", size_of(before.peak_free_bytes), memory),
        ("memory for the update", size_of(before.shared_free_bytes), size_of(now.shared_free_bytes)),
        ("memory in the second half of backward", _late(before), _late(now)),
        ("forward", _ms(before.forward_s), _ms(now.forward_s)),
        ("backward", _ms(before.backward_s), _ms(now.backward_s)),
        ("the host's part of backward", f"{before.host_share:.0%}", f"{now.host_share:.0%}"),
        ("what the host needs to issue a step", *(_ms(_issuing_s(work)) for work in (before, now))),
        ("the time from the step's issue to the end of backward", _ms(before.ahead_s), _ms(now.ahead_s)),
    ):
        if then != since:
            reasons += [f"{what} went from {then} to {since}"]
    if believed != profile:
        reasons += ["measured steps corrected the rates"]
    other = (
        "the policy chose another plan"
        if profile is None
        else "saved tensors, weights or memory of the host have changed"
    )
    return ", ".join(reasons) or other


def _issuing_s(work: Workload) -> float:
    """Return the seconds in which the host issues a step that updates half on the CPU and streams the other half."""
    return float(work.host.seconds(len(work.subgroups) / 2, len(work.subgroups) / 2))


def _late(work: Workload) -> str:
    """Return the memory that slots may share with resident state before backward ends, as text."""
    return "unknown" if work.half_freed_bytes is None else size_of(work.peak_free_bytes + work.half_freed_bytes)


@functools.lru_cache(maxsize=8)
def _predicted(plan: Plan, workload: Workload, profile: HardwareProfile) -> float:
    return max(0.0, exposed(plan, workload, profile, Scope.beside(workload)))  # a difference of two long times


@functools.lru_cache(maxsize=8)
def _bound(workload: Workload, profile: HardwareProfile) -> Bound | str:
    """Return the bound, or the reason why there is none."""
    try:
        return lower_bound(workload, profile, Scope.beside(workload))
    except ValueError as error:
        return str(error)


def _bottleneck(bound: Bound) -> str:
    return f"{bound.binding} is the bottleneck" if bound.binding != "nothing" else "nothing holds it up"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def unused(
    plan: Plan, workload: Workload, profile: HardwareProfile | None, withheld: Sequence[tuple[int, str]]
) -> list[str]:
    """Return lines about device memory that state could use and does not, the reasons, and a remedy if nothing fits.

    workload: the one for which the plan was made. profile: None if the policy needs none.
    withheld: see MemoryMonitor.
    """
    loads = workload.subgroups
    away = [load for load, p in zip(loads, plan.placements, strict=True) if p is not Placement.GPU_RESIDENT]
    if not away:
        return []
    reasons: list[tuple[float, str]] = list(withheld)
    resident = workload.state_bytes_of(plan.served(Placement.GPU_RESIDENT))
    rest = min(workload.peak_free_bytes, workload.state_bytes) - resident
    if profile is not None:
        beyond = workload.shared_free_bytes - workload.peak_free_bytes  # is free in the update alone
        staged = min(rest, workload.staged_bytes(plan) - max(0, beyond))
        if staged > 0:
            reasons += [(staged, f"for {plan.slots} staging slot{'s' * (plan.slots > 1)}")]
            rest -= staged
    if rest >= min(load.state_bytes for load in away):
        reasons += [
            (rest, "because the step would not be faster" if profile else "because this policy does not use it")
        ]
    lines = [f"Not used for state: {', '.join(f'{size_of(n)} {why}' for n, why in reasons)}"] if reasons else []
    room = sum(nbytes for nbytes, why in withheld if why == TOO_LITTLE)
    if workload.shared_free_bytes == 0 < room:
        most = max(loads, key=lambda load: load.state_bytes)
        numel = int(room / (1 + SPARE_TO_GROW) * most.numel / most.state_bytes)
        advice = f"choose subgroup_size={numel:_} or less" if numel else "that of one parameter does not fit either"
        lines += [
            f"Nothing fits: a subgroup of {most.numel:,} parameters takes {size_of(most.state_bytes)} and "
            f"{size_of(room)} may be used; {advice}"
        ]
    return lines


def size_of(nbytes: float) -> str:
    """Return bytes as a text with a unit."""
    if not math.isfinite(nbytes):
        return "unlimited memory"
    for unit, each in ("GiB", 2**30), ("MiB", 2**20):
        if nbytes >= each / 10:
            return f"{nbytes / each:.2f} {unit}"
    return f"{nbytes / 2**10:.2f} KiB"
