"""One row: iterations of one setting on one machine. In a process of its own, where torch.cuda is exchanged.

`PROGRAM` is what such a process runs: its arguments are the folder of dos and perfmodel, that of the experiments, and
JSON of a `Row`; it prints one line of JSON.
"""

from __future__ import annotations

import cProfile
import dataclasses
import itertools
import json
import statistics
from collections import Counter
from typing import Any

from experiments.dry.machines import SETTINGS, machine

SUBGROUPS = 50
PROGRAM = """import sys
sys.path[:0] = sys.argv[1:3]
from experiments.dry.row import main
main(sys.argv[3])
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """What runs. policy: in place of the setting's own, as DOSAdam takes it. layers: of the model, which then is small.

    process_group: whether there is one, of this process alone. warm_up, steps: iterations that do not count, and do.
    trace: a file for cProfile's figures of the caller's thread, which then is slower.
    """

    machine: str
    setting: str
    attached: bool
    warm_up: int = 12
    steps: int = 8
    policy: str | None = None
    process_group: bool = False
    layers: int | None = None
    trace: str | None = None


def run(row: Row) -> dict[str, Any]:
    """Train; return the figures. `dos` must not have been imported."""
    import torch

    from experiments.dry import gpu
    from experiments.dry.model import CONFIG, dry_gpt

    where, setting = machine(row.machine), SETTINGS[row.setting]
    gpu.install(where)
    if row.process_group:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from dos import DOSAdam
    from dos.planning.policies import AdaptivePolicy

    config = CONFIG if row.layers is None else dataclasses.replace(CONFIG, layers=row.layers, width=64, heads=1)
    model = dry_gpt(torch.device(gpu.KIND, 0), config=config)
    size = -(-model.numel // SUBGROUPS)
    # As in the contest: half a subgroup more than the whole ones that fit.
    budget = int((round((setting.share or 0.0) * SUBGROUPS) + 0.5) * setting.format.state_bytes * size)
    policy: Any = row.policy or ("cpu" if setting.share is None else AdaptivePolicy(where.profile))
    if isinstance(policy, str) and policy.replace(".", "", 1).isdecimal():
        policy = float(policy)  # a ratio
    optimizer = DOSAdam(
        model.parameters(),
        lr=1e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        policy=policy,
        subgroup_size=size,
        state_format="int8" if setting.format.name == "int8" else None,
        memory_budget=lambda: budget,
    )
    if row.attached:
        optimizer.attach(model)
    profiler = cProfile.Profile() if row.trace else None
    for _ in range(row.warm_up):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    if profiler is not None:
        profiler.enable()
    found = _iterate(model, optimizer, row.steps)
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(str(row.trace))
    known: dict[str, float | None] = {"floor_ms": None, "physical_ms": None, "measured_ms": None}
    if row.layers is None and row.policy is None:
        seconds = where.floor_s(setting, model.numel, row.attached), where.physical_s(setting, model.numel)
        known = dict(zip(known, map(_ms, (*seconds, where.measured_s(setting, row.attached))), strict=True))
    return {
        "machine": row.machine,
        "setting": row.setting if row.policy is None else f"{row.setting}, {row.policy}",
        "attached": row.attached,
        "iteration_ms": statistics.median(found["iteration_ms"]),
        **known,
        **{key: statistics.median(each) if each else None for key, each in found.items() if key != "iteration_ms"},
        **_beliefs(optimizer),
        "iterations_ms": [round(each, 1) for each in found["iteration_ms"]],
    }


def _iterate(model: Any, optimizer: Any, count: int) -> dict[str, list[float]]:
    """Milliseconds by name, of so many iterations, each from the end of one backward to the next."""
    import torch

    from experiments.dry import gpu

    names = "iteration_ms", "host_backward_ms", "device_backward_ms", "step_ms", "step_before_issue_ms", "lane_gap_ms"
    found: dict[str, list[float]] = {name: [] for name in names}
    marks = []
    called_s = returned_s = None
    for _ in range(count + 1):
        loss = model()
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
            found["step_before_issue_ms"].append(1e3 * (first_s - called_s))
            found["lane_gap_ms"] += [1e3 * (begins - ended) for (_, ended), (begins, _) in itertools.pairwise(updates)]
        gpu.issued_s()
        called_s = gpu.now_s()
        optimizer.step()
        optimizer.zero_grad()
        returned_s = gpu.now_s()
    optimizer.synchronize()
    torch.cuda.synchronize()
    found["device_backward_ms"] = [begin.elapsed_time(end) for begin, end in marks]
    found["iteration_ms"] = [last.elapsed_time(end) for (_, last), (_, end) in itertools.pairwise(marks)]
    return found


def _beliefs(optimizer: Any) -> dict[str, Any]:
    """The plan, and the forward in which the planner believes."""
    counts = Counter(placement.name.lower().removeprefix("gpu_") for placement in optimizer.plan().placements)
    text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return {"plan": text, "believed_forward_ms": _ms(optimizer._session.on_device.decisions.pace.forward.seconds)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def main(text: str) -> None:
    """Run the row that JSON describes, and print its figures."""
    print(json.dumps(run(Row(**json.loads(text)))), flush=True)
