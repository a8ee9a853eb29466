"""docs/results.md: what the ready sweeps found, published and simulated told apart, from their rows alone."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.paper.published import Prediction, cross_validation
from experiments.paper.sweep.compare import METRICS, Comparison, Results, Series, Table, compare, markdown, tick
from experiments.paper.sweep.evidence import (
    error_table,
    interleaving_table,
    interleavings,
    lane_table,
    point_errors,
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

HEADLINE = 2.5
"""Times as fast as the state of the art, by the paper's abstract."""

Found = Mapping[str, tuple[Sweep, Results]]
Cases = Mapping[str, Mapping[str, Sequence[Prediction]]]
"""Predictions of published runs, by what was left out of the fit, then by machine."""

HEAD = """# Results: the paper's experiments, reproduced in simulation

*Written by `make experiments`. To change it, change `experiments/sweep/ready/` or the model, not this file.*

**Nothing here was measured by us.** *Published* are medians from the training logs that the authors of *Deep
Optimizer States* (Maurya et al., Middleware '24) published (`experiments/data/`); they are the markers in the charts.
*Simulated* is what our model says; these are the lines. DeepSpeed's loops (ZeRO-Offload, and the paper's schedule on
top of it) are simulated by a model fitted to those logs ([performance-model.md](performance-model.md)), the adaptive
policy by the simulation of our engine on the same machines. The engine agrees with that simulation on emulated
devices (`python -m experiments.emulation`); it has not run on these GPUs.

Times are seconds of one iteration. Speedups are over ZeRO-Offload: published over published, simulated over
simulated. The published interleaved runs' losses do not match their own baselines', so read their times as times of a
schedule.
"""

SHORT = """## In short

Speedups of the whole iteration over ZeRO-Offload, least to most along each sweep:

{table}

- **The paper's headline is {headline:g}×.** The most in its published logs is {published:.2f}×. Simulated, the paper's
  schedule comes to {paper:.2f}× where all state of the 20B model is on the host of the H100 node; there adaptive comes
  to {same:.2f}× with the paper's memory and {free_memory:.2f}× with free memory.
- *The paper's memory* compares schedules: adaptive has the GPU memory that the paper's schedule takes, and no more.
- *Free memory* shows what that memory leaves unused. On the H100 node {free:.1f} GiB stayed free, and the whole state
  of a 20B rank is {state:.1f} GiB: adaptive keeps it on the GPU, and nothing is left to schedule.
"""

ASSUMPTIONS = """## What is assumed

- **Memory.** *The paper's memory* is the share of the state that the ratio keeps on the GPU, and one staging slot.
  *Free memory* is what a published trace leaves when it leaves least: {h100:.1f} GiB on the H100 node (an interleaved
  run of 20B on 4 ranks), {a100:.1f} GiB on the A100s (ZeRO-Offload, 13B; by its period on one rank with micro-batch
  1). It is taken as it is for all models up to that size, although smaller ones leave more, and for all
  micro-batches, although larger ones leave less. Of larger models the parameters are counted, and the rest grows with
  parameters to the power of 2/3, as layers times hidden size do: {h100_30b:.1f} GiB for 30B on the H100 node.
- **Compute.** Forward is the published one of the configuration, or, where there is none, fitted (median error
  {forward:.0%}). Adaptive's backward is the fitted model's, including what asynchronous gradients cost DeepSpeed, for
  each subgroup that is not resident; in the simulation these gradients then take their time on the link as well.
- **Adaptive's update** lasts from the end of backward to the last transfer. That the engine can hide it behind the
  next forward is not used here, as the published loops cannot.
- **Contention.** Others take a share of both links and of the host's memory bandwidth, so that copies, gradients that
  leave and updates on the CPU that its memory limits take longer. The authors' scripts name the shares, but not what
  is taken; no such run was published.
- **DeepSpeed's overheads** are not adaptive's: {bookkeeping:.1f} ms of bookkeeping for each offloaded subgroup (H100
  node), and a pass over the gradients to clip them. [Lane by lane](#lane-by-lane) shows how much that is.
"""

LANES = """## Lane by lane

Where adaptive's margin comes from, on two published configurations. Seconds for which each lane is busy in an
iteration, with what it does during backward; host DRAM is the bytes moved over the rank's part of its bandwidth.
DeepSpeed's loops are fitted in closed form and have no lanes. The bound is of any plan with the same memory; it is
loose where residents and staging slots share that memory.
"""

REPRODUCE = """## Reproduce

`make experiments` (simulation only: seconds, no GPU) writes this file and its pictures, and one row for each run to
`out/sweep/*.csv`. `python -m experiments.sweep FILE.toml` runs a sweep of yours; `python -m experiments.sweep
emulated` one that updates a small model on an emulated H100 node against the clock.
"""


def write_report(path: Path, pictures: Path, found: Found, predictor: Predictor) -> None:
    """Write the report and those of its pictures that are not charts of a sweep. pictures: the folder of all."""
    cases = left_out(predictor)
    save_speedups(cases["a model"], pictures / "sweep_speedups.png")
    first = _by_machine(found["lanes"][1])[0]
    timelines = {_name(c): predictor.simulation(c).timeline() for c, o in first.items() if o.resident is not None}
    save_timelines(timelines, pictures / "sweep_lanes.png", title=f"Simulated, {_where(next(iter(first)))}")
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
    parts = [HEAD, _short(comparisons, found, predictor), _assumptions(predictor), "## The paper's experiments\n"]
    for name in CHARTS:
        sweep, results = found[name]
        parts += [f"### {sweep.title}\n\n{sweep.about}\n"]
        for number, comparison in enumerate(comparisons[name]):
            title = f", {comparison.facet}" if comparison.facet else ""
            parts += [f"![{sweep.title}{title}]({images}/sweep_{name}{f'_{number}' if number else ''}.png)\n"]
            parts += [f"{m.capitalize()}{title}:\n\n{markdown(comparison.table(m))}\n" for m in METRICS]
        missing = [
            f"{_name(c)} with subgroups of {tick(c.subgroup_size)} {o.note}" for c, o in results.items() if o.note
        ]
        parts += [f"Missing: {text}.\n" for text in missing]
    parts += [LANES]
    for group in _by_machine(found["lanes"][1]):
        parts += [f"**{_where(next(iter(group)))}**\n\n{markdown(lane_table(group))}\n", _explained(group)]
    parts += [f"![Timelines of the first of them]({images}/sweep_lanes.png)\n"]
    parts += [_errors(comparisons, cases, images), _doubtful(found, predictor), REPRODUCE]
    return "\n".join(parts)


def _short(comparisons: Mapping[str, Sequence[Comparison]], found: Found, predictor: Predictor) -> str:
    table: Table = [
        ["sweep", "paper\npublished", "paper\nsimulated", "adaptive\nthe paper's memory", "adaptive\nfree memory"]
    ]
    kinds = (("dos", None, "published"), ("dos", None, "simulated"))
    kinds += tuple(("adaptive", memory, "simulated") for memory in ("ratio", "trace"))  # type: ignore[assignment]
    for name, of_sweep in comparisons.items():
        table.append([found[name][0].title, *(_range(_speedups(of_sweep, *kind)) for kind in kinds)])
    on_host = comparisons["ratio"][0].ticks.index("1")
    paper, same, free = (_speedups(comparisons["ratio"], *kind)[on_host] for kind in kinds[1:])
    published = [max(_speedups(of_sweep, *kinds[0]), default=0.0) for of_sweep in comparisons.values()]
    twenty = Configuration.of({"machine": "h100", "model": "20B", "policy": "cpu"})
    state = STATE_BYTES * predictor.run_of(twenty).params
    return SHORT.format(
        table=markdown(table),
        headline=HEADLINE,
        published=max(published),
        paper=paper,
        same=same,
        free_memory=free,
        free=_free_gib(predictor, "h100", "20B"),
        state=state / 2**30,
    )


def _speedups(of_sweep: Sequence[Comparison], policy: str, memory: str | None, kind: str) -> list[float]:
    """Of a series' iterations over ZeRO-Offload's, along the axis and facet by facet, where there are both."""
    return [
        speedup
        for comparison in of_sweep
        for series in comparison.series
        if (series.policy, series.memory) == (policy, memory)
        for speedup in comparison.speedups(series, kind, "iteration")
        if speedup is not None
    ]


def _range(speedups: Sequence[float]) -> str:
    """Least and most."""
    if not speedups:
        return "-"
    low, high = f"{min(speedups):.2f}", f"{max(speedups):.2f}"
    return f"{low}×" if low == high else f"{low}-{high}×"


def _assumptions(predictor: Predictor) -> str:
    return ASSUMPTIONS.format(
        h100=_free_gib(predictor, "h100", "20B"),
        a100=_free_gib(predictor, "a100_bound", "7B"),
        h100_30b=_free_gib(predictor, "h100", "30B"),
        forward=statistics.median(predictor.published.forward_errors()),
        bookkeeping=1e3 * predictor.bookkeeping_s("h100"),
    )


def _free_gib(predictor: Predictor, machine: str, model: str) -> float:
    free = predictor.published.free_bytes(Configuration.of({"machine": machine, "model": model, "policy": "cpu"}))
    assert free is not None, "a published machine"
    return free / 2**30


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
            " What is resident loads no lane but the GPU.\n",
        ]
    )


def _busiest(o: Outcome) -> str:
    busy = {
        "the CPU": o.cpu_busy_s,
        "the GPU": o.gpu_busy_s,
        "H2D": o.h2d_busy_s,
        "D2H": o.d2h_busy_s,
        "host DRAM": o.host_dram_s,
    }
    lane = max(busy, key=lambda name: busy[name] or 0.0)
    return f"{lane} is busiest, {busy[lane]:.2f} s"


def _update_s(o: Outcome) -> float:
    assert o.update_s is not None, "the configuration fits"
    return o.update_s


def _errors(comparisons: Mapping[str, Sequence[Comparison]], cases: Cases, images: str) -> str:
    table: Table = [["sweep", "published points", "update\nmedian / max", "iteration speedup\nmedian / max"]]
    for name, of_sweep in comparisons.items():
        errors = point_errors(of_sweep)
        if not errors[0]:
            continue  # nothing of it was published
        cells = [f"{statistics.median(e):.1%} / {max(e):.1%}" for e in errors]
        table.append([name.replace("_", " "), str(len(errors[0])), *cells])
    return "\n".join(
        [
            "## Simulated against published\n",
            "Errors of the paper's schedule in the sweeps above, whose published runs are among those fitted:\n",
            markdown(table) + "\n",
            "Errors on runs that were not fitted, of all modes (`python -m experiments.published`; the errors that"
            " [performance-model.md](performance-model.md) discusses):\n",
            markdown(error_table(cases)) + "\n",
            f"![Simulated against published speedups]({images}/sweep_speedups.png)\n",
            "Interleaved runs of the two machines whose runs repeat to 1%, predicted from other models' runs alone:\n",
            markdown(speedup_table(cases["a model"], ("h100", "a100_bound"))) + "\n",
        ]
    )


def _doubtful(found: Found, predictor: Predictor) -> str:
    known = interleavings(predictor.published.runs)
    gains = [item.gain for item in known]
    doubtful = sum(item.doubtful for item in known)
    spread = max(known, key=lambda item: predictor.published.nodes(item.interleaved))
    resident = [str(c.ranks) for c, o in found["data_parallel"][1].items() if o.resident == o.subgroups]
    sizes = found["subgroup_size"][1]
    unstreamed = {c.subgroup_size: o for c, o in sizes.items() if o.streamed == 0 and c.memory == "trace"}
    largest = max(unstreamed)
    dos = next(o for c, o in sizes.items() if (c.policy, c.subgroup_size) == ("dos", largest))
    return "\n".join(
        [
            "## Where interleaving does not help\n",
            "Against `async_grad_only` (all updates on the CPU, gradients leave asynchronously) interleaving gains"
            f" {min(gains):.1%} to {max(gains):.1%} of the iteration in {len(known)} published pairs of configuration"
            f" and stride. In {doubtful} of them that is no more than repeats differ by (1%; 3% for unbound ranks), or"
            " some interleaved run was slower than some other, or backward lost a tenth or more of what the update"
            " gained. The last two columns are simulated: what the model promises of interleaving, and of adaptive with"
            " free memory.\n",
            markdown(interleaving_table(known, predictor)) + "\n",
            f"- **Several nodes.** At {predictor.published.ranks(spread.interleaved)} ranks over"
            f" {predictor.published.nodes(spread.interleaved)} nodes the update is"
            f" {spread.interleaved.update_s:.1f} s of {spread.interleaved_s:.1f} s; the rest is compute and gathering"
            f" parameters over the network. Interleaving takes {spread.update_saved_s:.2f} s off the update, less than"
            f" iterations differ by. Each rank's state is small there: at {' and '.join(resident)} ranks adaptive does"
            " not interleave but keeps all of it on the GPU.",
            "- **13B on one A100.** Memory is full, the allocator retries, and backward loses much of what the update"
            " gains. The model does not describe that. It promises too much of interleaving, and of adaptive too,"
            " which is given memory that ZeRO-Offload leaves free there and this schedule may not.",
            "- **Accumulation.** The more micro-batches, the smaller the update's part: no schedule changes that.",
            f"- **Large subgroups.** Those of {', '.join(map(tick, unstreamed))} parameters do not fit into a slot:"
            " adaptive streams nothing. With so few, its pipeline is mostly ends: at"
            f" {tick(largest)} its update takes {_update_s(unstreamed[largest]):.2f} s, the paper's, whose model has no"
            f" such ends, {_update_s(dos):.2f} s. The default is 100M.\n",
        ]
    )


def _by_machine(results: Results) -> list[dict[Configuration, Outcome]]:
    machines = dict.fromkeys(config.machine for config in results)
    return [{c: o for c, o in results.items() if c.machine == machine} for machine in machines]


def _name(config: Configuration) -> str:
    return Series(config.policy, config.memory, bool(config.attach), ()).name


def _where(config: Configuration) -> str:
    return f"{config.model} on {config.machine}, {config.ranks} ranks, ratio {config.ratio}"
