"""docs/results.md: what the ready sweeps found, published and simulated told apart, from their rows alone.

The words are those of `results.template.md`, beside this file.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.command import markdown
from experiments.paper.published import Prediction, cross_validation
from experiments.paper.sweep.compare import METRICS, Comparison, Results, Series, compare, tick
from experiments.paper.sweep.evidence import (
    LANES,
    error_table,
    interleaving_table,
    interleavings,
    lane_table,
    point_error_table,
    speedup_table,
)
from experiments.paper.sweep.plots import save_speedups
from experiments.paper.sweep.predict import STATE_BYTES, Outcome, Predictor
from experiments.paper.sweep.spec import Configuration, Sweep
from experiments.plots import save_timelines

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
Cases = Mapping[str, Mapping[str, Sequence[Prediction]]]
"""Predictions of published runs, by what was left out of the fit, then by machine."""


def write_report(path: Path, pictures: Path, found: Found, predictor: Predictor) -> None:
    """Write the report and those of its pictures that are not charts of a sweep. pictures: the folder of all."""
    cases = left_out(predictor)
    save_speedups(cases["a model"], pictures / "sweep_speedups.png")
    first = _by_machine(found["lanes"][1])[0]
    timelines = {_name(c): predictor.simulation(c).timeline() for c, o in first.items() if o.resident is not None}
    save_timelines(timelines, pictures / "sweep_lanes.png", title=f"Simulated, {_where(first)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report(found, predictor, cases, os.path.relpath(pictures, path.parent)))


def left_out(predictor: Predictor) -> Cases:
    """The cross-validation that the report shows."""
    return {
        "a model": cross_validation(predictor.runs, lambda r: r.model),
        "a stride": cross_validation(predictor.runs, lambda r: r.run.stride),
    }


def report(found: Found, predictor: Predictor, cases: Cases, images: str = PICTURES) -> str:
    """The report as Markdown. images: where its pictures are."""
    comparisons = {name: compare(*found[name]) for name in CHARTS}
    lanes = [
        f"**{_where(group)}**\n\n{markdown(lane_table(group))}\n\n{_explained(group)}\n"
        for group in _by_machine(found["lanes"][1])
    ]
    return TEMPLATE.read_text().format(
        images=images,
        headline=HEADLINE,
        experiments="\n".join(_experiment(*found[name], comparisons[name], images) for name in CHARTS),
        lanes="\n".join(lanes),
        point_errors=markdown(point_error_table(comparisons)),
        errors=markdown(error_table(cases)),
        speedups=markdown(speedup_table(cases["a model"], ("h100", "a100_bound"))),
        **_speedups(comparisons, found),
        **_memory(predictor),
        **_interleaving(found, predictor),
        forward=statistics.median(predictor.published.forward_errors()),
        bookkeeping=1e3 * predictor.models["h100"].profile.launch_latency_s,
    )


def _experiment(sweep: Sweep, results: Results, comparisons: Sequence[Comparison], images: str) -> str:
    """The section of a sweep: a chart and a table for each facet and metric."""
    parts = [f"### {sweep.title}\n\n{sweep.about}\n"]
    for number, comparison in enumerate(comparisons):
        title = f", {comparison.facet}" if comparison.facet else ""
        parts += [f"![{sweep.title}{title}]({images}/sweep_{sweep.name}{f'_{number}' if number else ''}.png)\n"]
        parts += [f"{m.capitalize()}{title}:\n\n{markdown(comparison.table(m))}\n" for m in METRICS]
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
    free = {name: (predictor.published.free_bytes(config(*case)) or 0.0) / 2**30 for name, case in cases.items()}
    return free | {"free": free["h100"], "state": STATE_BYTES * predictor.run_of(config("h100", "20B")).params / 2**30}


def _explained(group: Results) -> str:
    """What each step from ZeRO-Offload to the adaptive policy saves, and on which lane."""
    plans: dict[tuple[str, object], Outcome] = {(c.policy, c.memory): o for c, o in group.items()}
    loop, dos = plans["zero3_offload", None], plans["dos", None]
    ratio, stride = plans["ratio", None], plans["stride", None]
    same, free = plans["adaptive", "ratio"], plans["adaptive", "trace"]

    def saved(slow: Outcome, fast: Outcome) -> str:
        return f"{_update_s(slow) - _update_s(fast):.2f} s"

    def placed(o: Outcome) -> str:
        return f"{o.resident} resident, {o.streamed} streamed, {o.on_cpu} on the CPU; {_busiest(o)}"

    return "\n".join(
        [
            "- From DeepSpeed's loop to our engine, with the same placements: ZeRO-Offload's update takes"
            f" {saved(loop, ratio)} less, the paper's {saved(dos, stride)}. No bookkeeping per subgroup, no second pass"
            " over the gradients, parameters that leave while the CPU goes on: implementation, not policy.",
            f"- The paper's stride in our engine, against no streaming ({_busiest(ratio)}): {saved(ratio, stride)} less"
            f" ({placed(stride)}).",
            f"- Adaptive with the same memory: {saved(stride, same)} less ({placed(same)}).",
            f"- Adaptive with the memory that the trace leaves free: another {saved(same, free)} less ({placed(free)})."
            " What is resident loads no lane but the GPU.",
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
    known = interleavings(predictor.published.runs)
    spread = max(known, key=lambda item: item.interleaved.nodes)
    sizes = found["subgroup_size"][1]
    unstreamed = {c.subgroup_size: o for c, o in sizes.items() if o.streamed == 0 and c.memory == "trace"}
    largest = max(unstreamed)
    dos = next(o for c, o in sizes.items() if (c.policy, c.subgroup_size) == ("dos", largest))
    resident = [str(c.ranks) for c, o in found["data_parallel"][1].items() if o.resident == o.subgroups]
    return {
        "interleavings": markdown(interleaving_table(known, predictor)),
        "least_gain": min(item.gain for item in known),
        "most_gain": max(item.gain for item in known),
        "pairs": len(known),
        "doubtful": sum(item.doubtful for item in known),
        "spread": spread,
        "ranks": spread.interleaved.ranks,
        "nodes": spread.interleaved.nodes,
        "resident": " and ".join(resident),
        "unstreamed": ", ".join(map(tick, unstreamed)),
        "largest": tick(largest),
        "largest_s": _update_s(unstreamed[largest]),
        "dos_s": _update_s(dos),
    }


def _by_machine(results: Results) -> list[dict[Configuration, Outcome]]:
    machines = dict.fromkeys(config.machine for config in results)
    return [{c: o for c, o in results.items() if c.machine == machine} for machine in machines]


def _name(config: Configuration) -> str:
    return Series(config.policy, config.memory, ()).name


def _where(group: Results) -> str:
    config = next(iter(group))
    return f"{config.model} on {config.machine}, {config.ranks} ranks, ratio {config.ratio}"
