"""One row: iterations of one setting on one machine. In a process of its own, where torch.cuda is exchanged.

`PROGRAM` is what such a process runs: its arguments are the folder of dos and perfmodel, that of the experiments, and
JSON of a `Row`; it prints one line of JSON.
"""

from __future__ import annotations

import cProfile
import dataclasses
import gc
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.dry.machines import SETTINGS, THREADS, Costs, Setting, interpolated, machine
from perfmodel.hardware import HardwareProfile

OF_CONTEST = 50
"""Subgroups that the contest had on the machines."""
PROGRAM = """import sys
sys.path[:0] = sys.argv[1:3]
if sys.argv[1] != sys.argv[2]:  # an editable installation looks for its own dos before sys.path
    sys.meta_path[:] = [each for each in sys.meta_path if isinstance(each, type)]
from experiments.dry.row import main
main(sys.argv[3])
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """What runs. policy: in place of the setting's own, as DOSAdam takes it. layers: of the model, which then is small.

    contest: whether all settings of this one's format take turns on one optimizer, as in the contest that the machines
        ran: after some iterations that are not attached, ROUNDS of WARM_UP iterations that do not count and `steps`
        that do, `warm_up` more before the first turn of an adaptive policy.
    process_group: whether there is one, of this process alone. warm_up, steps: iterations that do not count, and do.
    trace: a file for cProfile's figures of the caller's thread, which then is slower.
    costs: of the host, in place of those of `machines.Costs`, by their names. updates: as for `attach`.
    threads: of the CPU lane; 0: as dos chooses.
    """

    machine: str
    setting: str
    attached: bool
    warm_up: int = 60
    steps: int = 8
    policy: str | None = None
    process_group: bool = False
    contest: bool = False
    layers: int | None = None
    trace: str | None = None
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    updates: str = "step"
    threads: int = 0


ROUNDS, WARM_UP, UNATTACHED = 3, 2, 7
"""Of a contest, as it was on the machines."""


def run(row: Row) -> list[dict[str, Any]]:
    """Train; return the figures, of one setting or a contest's. `dos` must not have been imported."""
    import torch

    from experiments.dry import gpu

    gpu.install(machine(row.machine), Costs(**row.costs), row.threads)
    if row.process_group:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    trained = _Trained(row)
    if not row.contest:
        trained.turn(SETTINGS[row.setting], row.warm_up, row.steps)
    else:
        settings = [each for each in SETTINGS.values() if each.format is SETTINGS[row.setting].format]
        if row.attached:
            trained.attach = False
            trained.turn(settings[0], UNATTACHED, 0)
            trained.attach = True
        for number in range(ROUNDS):
            for setting in settings:
                learning = row.warm_up if number == 0 and setting.share is not None else 0
                trained.turn(setting, WARM_UP + learning, row.steps)
    return [trained.figures(setting) for setting in trained.rounds]


class _Trained:
    """A model and its optimizer, which runs under the policy of each turn."""

    def __init__(self, row: Row) -> None:
        import torch

        from dos import DOSAdam
        from experiments.dry import gpu
        from experiments.dry.model import CONFIG, dry_gpt
        from experiments.dry.switch import Switch
        from perfmodel.subgroups import automatic_subgroup_size

        self.row, self.machine = row, machine(row.machine)
        self.rounds: dict[Setting, list[dict[str, list[float]]]] = {}
        self.attach = row.attached
        self._beliefs: dict[Setting, dict[str, Any]] = {}
        config = CONFIG if row.layers is None else dataclasses.replace(CONFIG, layers=row.layers, width=64, heads=1)
        self.model = dry_gpt(torch.device(gpu.KIND, 0), config=config)
        self._size = automatic_subgroup_size(self.model.numel, self.machine.device_bytes)
        if row.contest:
            self._size = -(-self.model.numel // OF_CONTEST)
        self._budget = 0
        self._policies: dict[Setting, Any] = {}
        self.profile = interpolated(self.machine.profile, row.threads or THREADS)
        self._switch = Switch(self.profile)
        setting = SETTINGS[row.setting]
        self._attached = False
        self.optimizer: Any = None
        if setting.name == "none":
            return
        self.optimizer = DOSAdam(
            self.model.parameters(),
            lr=1e-4,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            policy=self._switch if row.contest else self._policy(setting),
            subgroup_size=self._size,
            state_format="int8" if setting.format.name == "int8" else None,
            memory_budget=lambda: self._budget,
        )

    def _policy(self, setting: Setting) -> Any:
        from dos.planning.policies import AdaptivePolicy

        if setting not in self._policies:
            named: Any = self.row.policy or ("cpu" if setting.share is None else None)
            if named is not None and named.replace(".", "", 1).isdecimal():
                named = float(named)  # a ratio
            self._policies[setting] = AdaptivePolicy(self.profile) if named is None else named
        return self._policies[setting]

    def turn(self, setting: Setting, warm_up: int, steps: int) -> None:
        """Train under a setting; iterations that count come last."""
        # As in the contest: half a subgroup more than the whole ones that fit.
        share = round((setting.share or 0.0) * self.model.numel / self._size) + 0.5
        self._budget = int(share * setting.format.state_bytes * self._size)
        self._switch.choose(self._policy(setting))
        if self.attach and not self._attached and self.optimizer:
            how: dict[str, Any] = {} if self.row.updates == "step" else {"updates": self.row.updates}
            self.optimizer.attach(self.model, **how)  # not named where it is the default: `--dos` may be older
            self._attached = True
        for _ in range(warm_up):
            self.model().backward()
            _step(self.model, self.optimizer)
        if not steps:
            return
        gc.collect()
        profiler = cProfile.Profile() if self.row.trace else None
        if profiler is not None:
            profiler.enable()
        self.rounds.setdefault(setting, []).append(_iterate(self.model, self.optimizer, steps))
        if profiler is not None:
            profiler.disable()
            profiler.dump_stats(str(self.row.trace))
        self._beliefs[setting] = _beliefs(self.optimizer, self.profile)

    def figures(self, setting: Setting) -> dict[str, Any]:
        """The figures of all turns of a setting: medians of the medians of its turns."""
        row, rounds = self.row, self.rounds[setting]
        found = {
            key: statistics.median(medians)
            if (medians := [statistics.median(r[key]) for r in rounds if r[key]])
            else None
            for key in rounds[0]
        }
        known: dict[str, float | None] = {"floor_ms": None, "physical_ms": None, "measured_ms": None}
        if row.layers is None and row.policy is None and self.optimizer:
            measured_s = self.machine.measured_s(setting, row.updates) if row.attached else None
            numel, of = self.model.numel, self.machine
            seconds = of.floor_s(setting, numel, row.attached), of.physical_s(setting, numel)
            known = dict(zip(known, map(_ms, (*seconds, measured_s)), strict=True))
        return {
            "machine": row.machine,
            "setting": setting.name if row.policy is None else f"{setting.name}, {row.policy}",
            "attached": row.attached,
            "updates": row.updates,
            "iteration_ms": found.pop("iteration_ms"),
            **known,
            **found,
            **self._beliefs[setting],
            "iterations_ms": [[round(each, 1) for each in r["iteration_ms"]] for r in rounds],
        }


def _iterate(model: Any, optimizer: Any, count: int) -> dict[str, list[float]]:
    """Milliseconds by name, of so many iterations, each from the end of one backward to the next."""
    import torch

    from experiments.dry import gpu

    host = "host_forward_ms", "host_backward_ms", "step_ms", "step_before_issue_ms"
    found: dict[str, list[float]] = {n: [] for n in ("iteration_ms", *host, "device_backward_ms", "lane_gap_ms")}
    marks = []
    queued_s = _queued_s()
    called_s = returned_s = None
    for _ in range(count + 1):
        forward_s = gpu.now_s()
        loss = model()
        found["host_forward_ms"].append(1e3 * (gpu.now_s() - forward_s))
        first_s, updates = gpu.issued_s(), gpu.host_updates()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        before_s = gpu.now_s()
        loss.backward()
        found["host_backward_ms"].append(1e3 * (gpu.now_s() - before_s))
        end.record()
        marks.append((begin, end))
        if called_s is not None and returned_s is not None:
            found["step_ms"].append(1e3 * (returned_s - called_s))
            found["step_before_issue_ms"] += [1e3 * (first_s - called_s)] if math.isfinite(first_s) else []
            found["lane_gap_ms"] += [1e3 * (begins - ended) for (_, ended), (begins, _) in itertools.pairwise(updates)]
        gpu.issued_s()
        called_s = gpu.now_s()
        _step(model, optimizer)
        returned_s = gpu.now_s()
    if optimizer:
        optimizer.synchronize()
    torch.cuda.synchronize()
    found["noise_ms"] = [1e3 * (_queued_s() - queued_s) / (count + 1)]
    found["device_backward_ms"] = [begin.elapsed_time(end) for begin, end in marks]
    found["iteration_ms"] = [last.elapsed_time(end) for (_, last), (_, end) in itertools.pairwise(marks)]
    return found


def _step(model: Any, optimizer: Any) -> None:
    if optimizer:
        optimizer.step()
    model.zero_grad()


def _queued_s() -> float:
    """Seconds for which threads of this process could have run and had no core: other programs', and each other's."""
    return sum(int(task.read_text().split()[1]) for task in Path("/proc/self/task").glob("*/schedstat")) / 1e9


def _beliefs(optimizer: Any, profile: HardwareProfile) -> dict[str, Any]:
    """The plan, the forward in which the planner believes, and the iteration that it predicts."""
    from perfmodel.simulate import Scope, exposed

    if not optimizer:
        return {"plan": "", "believed_forward_ms": None, "predicted_ms": None}
    counts = Counter(placement.name.lower().removeprefix("gpu_") for placement in optimizer.plan().placements)
    text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    decisions = optimizer._session.assembly.on_device.decisions
    report, forward_s = decisions.ended, decisions.pace.forward.seconds
    work = report.lasting
    predicted_s = exposed(report.plan, work, decisions.profile or profile, Scope.beside(work))
    # The workload has only the part of backward beside which gradients leave, and no forward where none runs beside it.
    rest_s = 0.0 if work.in_backward else decisions.pace.rest.seconds
    predicted_s += forward_s + max(rest_s, work.backward_s)
    return {"plan": text, "believed_forward_ms": _ms(forward_s), "predicted_ms": _ms(predicted_s)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def main(text: str) -> None:
    """Run the row that JSON describes, and print its figures."""
    print(json.dumps(run(Row(**json.loads(text)))), flush=True)
