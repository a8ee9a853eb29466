"""What the demo's runs did, as tables, sentences and pictures."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.bench.machines import Machine
from experiments.command import table
from experiments.plots import MemorySample, save_losses, save_memory, save_timelines
from perfmodel import Lane, Op, Plan, Span, Timeline

REFERENCE = "AdamW"
DEFAULT = "adaptive"
"""DOSAdam's policy where none is chosen."""
UNTIMED = 2
"""Steps at the beginning that the times leave out."""
LAST = 10
"""Steps at the end whose mean the table shows as the final loss."""
HEADERS = ("policy", "loss", "compute", "update", "iteration", "on device", "memory")


@dataclass(frozen=True)
class Iteration:
    """One training step. Times in seconds; update: what the optimizer's lanes did, since step() was called.

    plan: where DOSAdam's update was made.
    """

    loss: float
    forward_s: float
    backward_s: float
    update_s: float
    update: Timeline
    plan: Plan | None

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.update_s

    def timeline(self) -> Timeline:
        """Forward, backward and update, since the start of forward."""
        begins = self.forward_s + self.backward_s
        forward = Span(Lane.GPU, Op.FORWARD, None, 0.0, self.forward_s)
        backward = Span(Lane.GPU, Op.BACKWARD, None, self.forward_s, begins)
        return Timeline.of([forward, backward, *(span.since(-begins) for span in self.update.spans)])


@dataclass(frozen=True)
class Result:
    """One run.

    accelerator_share: of the parameters, updated on the accelerator in the last step.
    memory: who held the device's memory over the run; see `Machine.samples`. explanation: what the optimizer says.
    """

    iterations: list[Iteration]
    accelerator_share: float
    peak_device_bytes: int
    memory: Sequence[MemorySample]
    explanation: str

    @property
    def losses(self) -> list[float]:
        return [i.loss for i in self.iterations]

    @property
    def typical(self) -> Iteration:
        """The iteration of median time."""
        return sorted(self._timed(), key=lambda i: i.seconds)[len(self._timed()) // 2]

    def summary(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "iteration_s": statistics.median(i.seconds for i in self._timed()),
            "update_s": statistics.median(i.update_s for i in self._timed()),
            "accelerator_share": self.accelerator_share,
            "peak_device_bytes": self.peak_device_bytes,
        }

    def _timed(self) -> list[Iteration]:
        return self.iterations[UNTIMED:] or self.iterations


def report(results: Mapping[str, Result], machine: Machine, out: Path, console: Console) -> None:
    """Write summary and pictures, print the table."""
    device = machine.name
    reference = results[REFERENCE].losses
    gaps = [abs(a - b) for r in results.values() for a, b in zip(r.losses, reference, strict=True)]
    summary = {
        "device": device,
        "steps": len(reference),
        "max_loss_difference": max(gaps),
        "policies": {name: result.summary() for name, result in results.items()},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    save_losses({name: r.losses for name, r in results.items()}, out / "losses.png", reference=REFERENCE)
    fitting = [name for name, r in results.items() if r.peak_device_bytes <= machine.capacity]
    timelines = {name: results[name].typical.timeline() for name in fitting}
    save_timelines(timelines, out / "timeline.png", title=f"One iteration, {device}")

    cells = []
    for name, result in results.items():
        s = result.summary()
        times = (s["iteration_s"] - s["update_s"], s["update_s"], s["iteration_s"])
        shown = [f"{t * 1e3:.0f} ms" for t in times] if name in fitting else ["", "", "does not fit"]
        loss = f"{statistics.mean(s['losses'][-LAST:]):.4f}"
        cells.append([name, loss, *shown, f"{s['accelerator_share']:.0%}", f"{s['peak_device_bytes'] / 2**20:.0f} MiB"])
    console.print(table("", HEADERS, cells))
    console.print(
        f"Every run has {machine.capacity / 2**20:.0f} MiB of device memory. compute: forward and backward"
        + (f", made to last {machine.compute_s * 1e3:.0f} ms, more on a busy computer" if machine.compute_s else "")
        + "; update: how long step() held the training up; on device: parameters updated there; "
        f"memory: the most that was held. {DEFAULT!r} is the default.",
        highlight=False,
    )
    console.print(f"Largest difference of a loss from {REFERENCE}'s: {max(gaps):.1e}")
    if DEFAULT in results:
        console.print(
            f"What policy {DEFAULT!r} says of its last step:\n{results[DEFAULT].explanation}", highlight=False
        )
    console.print(f"Written to {out}")


def report_neighbour(beside: Result, alone: Result, machine: Machine, out: Path, console: Console) -> None:
    """What the adaptive policy did while another process took memory, and the same run without it."""
    thirds = [len(beside.iterations) * i // 3 for i in range(4)]
    before, during, after = (
        statistics.median(i.seconds for i in beside.iterations[start or UNTIMED : end] or beside.iterations)
        for start, end in itertools.pairwise(thirds)
    )
    title = f"Device memory while {len(beside.iterations)} steps run, policy {DEFAULT!r}, {machine.name}"
    end = beside.memory[-1].time_s + beside.iterations[-1].seconds
    samples = [*beside.memory, beside.memory[-1]._replace(time_s=end)]
    plans = itertools.pairwise(iteration.plan for iteration in beside.iterations)
    changes = [then.time_s for then, (one, next_one) in zip(samples[2:], plans, strict=True) if one != next_one]
    save_memory(samples, machine.capacity, changes, out / "memory.png", title=title)
    fullest = max(sum(sample[1:]) for sample in samples)
    console.print(
        f"{DEFAULT} while another process takes memory in the middle third: an iteration takes {before * 1e3:.0f} ms, "
        f"{during * 1e3:.0f} ms beside it, and {after * 1e3:.0f} ms when it has left. At most {fullest / 2**20:.0f} of "
        f"{machine.capacity / 2**20:.0f} MiB were held; the losses are "
        f"{'the same' if beside.losses == alone.losses else 'NOT the same'} to the bit.",
        soft_wrap=True,
        highlight=False,
    )
