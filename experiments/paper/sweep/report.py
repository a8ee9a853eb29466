"""docs/results.md: what the ready sweeps found, published and simulated told apart, from their rows alone.

The words are those of `results.template.md`, beside this file.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.command import markdown
from experiments.paper.published import MEASURED_AS_BEST, Cases, left_out, summary
from experiments.paper.runs import PublishedRun, grouped, median_of
from experiments.paper.sweep.compare import Comparison, Results, Series, Table, compare, save_speedups, tick
from experiments.paper.sweep.predict import STATE_BYTES, Outcome, Predictor
from experiments.paper.sweep.spec import Configuration, Sweep
from experiments.paper.zero3 import Mode
from experiments.plots import save_timelines
from perfmodel.simulate import simulate

LANES = {
    "CPU": "cpu_busy_s",
    "GPU": "gpu_busy_s",
    "H2D": "h2d_busy_s",
    "D2H": "d2h_busy_s",
    "host DRAM": "host_dram_s",
}
"""Fields of an outcome that say how long each is busy."""
CHARTS = (
    *("model_size", "ratio", "stride", "data_parallel", "accumulation", "subgroup_size"),
    *("micro_batch", "contention"),
)
READY = (*CHARTS, "lanes")
"""The sweeps that the report is made of, in its order."""
PICTURES = "images"
"""Folder of pictures, beside the report."""
TEMPLATE = Path(__file__).with_name("results.template.md")

HEADLINE = 2.5
"""Times as fast as the state of the art, by the paper's abstract."""

Found = Mapping[str, tuple[Sweep, Results]]


def write_report(path: Path, found: Found, predictor: Predictor) -> None:
    """Write the report and those of its pictures that are not charts of a sweep."""
    pictures = path.parent / PICTURES
    cases = left_out(predictor.runs)
    save_speedups(cases["model"], pictures / "sweep_speedups.png")
    first = _by_machine(found["lanes"][1])[0]
    timelines = {_name(c): simulate(*predictor.simulation(c)) for c, o in first.items() if o.resident is not None}
    save_timelines(timelines, pictures / "sweep_lanes.png", title=f"Simulated, {_where(first)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report(found, predictor, cases))


def report(found: Found, predictor: Predictor, cases: Cases) -> str:
    """The report as Markdown."""
    comparisons = {name: compare(*found[name]) for name in CHARTS}
    lanes = _by_machine(found["lanes"][1])[0]
    return TEMPLATE.read_text().format(
        images=PICTURES,
        headline=HEADLINE,
        experiments="\n".join(_experiment(*found[name], comparisons[name]) for name in CHARTS),
        lanes=f"**{_where(lanes)}**\n\n{_explained(lanes)}\n",
        errors=markdown(error_table(cases)),
        **_speedups(comparisons, found),
        **_memory(predictor),
        **_interleaving(found, predictor),
        forward=statistics.median(predictor.forward_errors()),
        bookkeeping=1e3 * predictor.models["h100"].profile.launch_latency_s,
    )


def _experiment(sweep: Sweep, results: Results, comparisons: Sequence[Comparison]) -> str:
    """The section of a sweep: a chart for each facet, of updates and of iterations."""
    parts = [f"### {sweep.title}\n\n{sweep.about}\n"]
    for number, comparison in enumerate(comparisons):
        title = f", {comparison.facet}" if comparison.facet else ""
        parts += [f"![{sweep.title}{title}]({PICTURES}/sweep_{sweep.name}{f'_{number}' if number else ''}.png)\n"]
    missing = [(c, o.note) for c, o in results.items() if o.note]
    parts += [f"Missing: {_name(c)} with subgroups of {tick(c.subgroup_size)} {note}.\n" for c, note in missing]
    return "\n".join(parts)


def _speedups(comparisons: Mapping[str, Sequence[Comparison]], found: Found) -> dict[str, Any]:
    """Over ZeRO-Offload, of iterations: a table of the least and most of each sweep, and some of them."""
    kinds = {
        "paper\npublished": ("dos", None, "published"),
        "paper\nsimulated": ("dos", None, "simulated"),
        "adaptive\nthe paper's memory": ("adaptive", "ratio", "simulated"),
        "adaptive\nfree memory": ("adaptive", "trace", "simulated"),
    }
    speedups = {
        name: [
            [
                speedup
                for comparison in of_sweep
                for series in comparison.series
                if (series.policy, series.memory) == (policy, memory)
                for speedup in comparison.speedups(series, kind, "iteration")
                if speedup is not None
            ]
            for policy, memory, kind in kinds.values()
        ]
        for name, of_sweep in comparisons.items()
    }
    rows = [[found[name][0].title, *map(_range, of_kinds)] for name, of_kinds in speedups.items()]
    on_host = comparisons["ratio"][0].ticks.index("1")
    paper, same, free = (of_kind[on_host] for of_kind in speedups["ratio"][1:])
    published = max(speedup for published, *_ in speedups.values() for speedup in published)
    table = markdown([["sweep", *kinds], *rows])
    return {"speedup_ranges": table, "published": published, "paper": paper, "same": same, "free_memory": free}


def _range(speedups: Sequence[float]) -> str:
    """Least and most."""
    if not speedups:
        return "-"
    low, high = f"{min(speedups):.2f}", f"{max(speedups):.2f}"
    return f"{low}×" if low == high else f"{low}-{high}×"


def _memory(predictor: Predictor) -> dict[str, float]:
    """GiB that traces leave free, and of the state of a 20B rank."""

    def config(machine: str, model: str) -> Configuration:
        return Configuration.of({"machine": machine, "model": model, "policy": "cpu"})

    cases = {"h100": ("h100", "20B"), "a100": ("a100_bound", "7B"), "h100_30b": ("h100", "30B")}
    free = {name: (predictor.free_bytes(config(*case)) or 0.0) / 2**30 for name, case in cases.items()}
    return free | {"state": STATE_BYTES * predictor.run_of(config("h100", "20B")).params / 2**30}


def _explained(group: Results) -> str:
    """Say how much each step from ZeRO-Offload to the adaptive policy saves, and on which lane."""
    plans: dict[tuple[str, object], Outcome] = {(c.policy, c.memory): o for c, o in group.items()}
    loop, dos = plans["zero3_offload", None], plans["dos", None]
    ratio, stride = plans["ratio", None], plans["stride", None]
    same, free = plans["adaptive", "ratio"], plans["adaptive", "trace"]

    def saved(slow: Outcome, fast: Outcome) -> str:
        """Seconds less, or more."""
        seconds = round(_update_s(slow) - _update_s(fast), 2)
        return f"{abs(seconds):.2f} s {'less' if seconds >= 0 else 'more'}"

    return "\n".join(
        [
            "- From DeepSpeed's loop to our engine, with the same placements: ZeRO-Offload's update takes"
            f" {saved(loop, ratio)}, the paper's {saved(dos, stride)}: implementation, not policy.",
            f"- The paper's stride in our engine, against no streaming ({_busiest(ratio)}): {saved(ratio, stride)}"
            f" ({_busiest(stride)}).",
            f"- Adaptive with the same memory: {saved(stride, same)} ({_busiest(same)}).",
            f"- Adaptive with the memory that the trace leaves free: another {saved(same, free)} ({_busiest(free)}).",
        ]
    )


def _busiest(o: Outcome) -> str:
    busy = {lane: getattr(o, field) or 0.0 for lane, field in LANES.items()}
    lane = max(busy, key=busy.__getitem__)
    return f"{'the ' if lane in ('CPU', 'GPU') else ''}{lane} is busiest, {busy[lane]:.2f} s"


def _update_s(o: Outcome) -> float:
    assert o.update_s is not None, "the configuration fits"
    return o.update_s


def _interleaving(found: Found, predictor: Predictor) -> dict[str, Any]:
    """Where interleaving does not help: the published pairs, and what is simulated of them."""
    known = interleavings(predictor.published)
    spread = max(known, key=lambda item: item.interleaved[0].nodes)
    sizes = found["subgroup_size"][1]
    unstreamed = {c.subgroup_size: o for c, o in sizes.items() if o.streamed == 0 and c.memory == "trace"}
    largest = max(unstreamed)
    dos = next(o for c, o in sizes.items() if (c.policy, c.subgroup_size) == ("dos", largest))
    resident = [str(c.ranks) for c, o in found["data_parallel"][1].items() if o.resident == o.subgroups]
    return {
        "least_gain": min(item.gain for item in known),
        "most_gain": max(item.gain for item in known),
        "pairs": len(known),
        "doubtful": sum(item.doubtful for item in known),
        "spread": spread.interleaved[0],
        "spread_s": median_of(spread.interleaved, "iteration_s"),
        "spread_saved_s": spread.saved_s("update_s"),
        "resident": " and ".join(resident),
        "unstreamed": ", ".join(map(tick, unstreamed)),
        "largest": tick(largest),
        "largest_s": _update_s(unstreamed[largest]),
        "dos_s": _update_s(dos),
    }


def _by_machine(results: Results) -> list[dict[Configuration, Outcome]]:
    return [dict(group) for _, group in grouped(results.items(), lambda item: item[0].machine)]


def _name(config: Configuration) -> str:
    return Series(config.policy, config.memory, ()).name


def _where(group: Results) -> str:
    config = next(iter(group))
    return f"{config.model} on {config.machine}, {config.ranks} ranks, ratio {config.ratio}"


def error_table(cases: Cases) -> Table:
    """Errors on runs that were not fitted."""
    lines = [["left out", "machine", "runs", "update, median", "update, max", "backward, median", "speedup, median"]]
    for what, predictions in cases.items():
        for machine, of_class in predictions.items():
            found = summary(machine, of_class)
            keys = ("update_median_error", "update_max_error", "backward_median_error", "speedup_median_error")
            lines.append([f"a {what}", machine, str(found["runs"]), *(f"{float(found[k] or 0):.1%}" for k in keys)])
    return lines


@dataclass(frozen=True)
class Interleaving:
    """Published runs of one configuration: all updates on the CPU with asynchronous gradients, and interleaved."""

    cpu: Sequence[PublishedRun]
    interleaved: Sequence[PublishedRun]

    def saved_s(self, phase: str) -> float:
        """Seconds of a phase, such as "update_s", that interleaving takes off the median."""
        return median_of(self.cpu, phase) - median_of(self.interleaved, phase)

    @property
    def gain(self) -> float:
        """Of the median iteration."""
        return median_of(self.cpu, "iteration_s") / median_of(self.interleaved, "iteration_s") - 1

    @property
    def doubtful(self) -> bool:
        """Whether some interleaved run was slower than some other, or interleaving gained no more than what repeats
        differ by, or lost in backward a tenth of what it saved in the update or more."""
        overlap = max(r.iteration_s for r in self.interleaved) > min(r.iteration_s for r in self.cpu)
        noise = MEASURED_AS_BEST[self.interleaved[0].machine_class]
        return overlap or self.gain <= noise or -self.saved_s("backward_s") > 0.1 * self.saved_s("update_s")


def interleavings(runs: Sequence[PublishedRun]) -> list[Interleaving]:
    """Every published configuration and stride that has a counterpart without interleaving."""
    found = []
    for _, same in grouped(runs, lambda r: r.config):
        cpu = [r for r in same if r.run.mode is Mode.ASYNC_GRAD_ONLY]
        interleaved = (r for r in same if r.run.mode is Mode.DOS)
        found += [Interleaving(cpu, of_stride) for _, of_stride in grouped(interleaved, lambda r: r.run.stride) if cpu]
    return found
