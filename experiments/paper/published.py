"""Fit the time model to published runs, and report how well it predicts others.

python -m experiments.published [--json]             # cross-validation over models, then strides; pictures
python -m experiments.published --write-profiles     # the built-in profiles of the published machines
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.command import Parser, table_of
from experiments.harness import finish
from experiments.paper.runs import DATA_SHEETS, DEVICE_BANDWIDTHS, PublishedRun, grouped, median_of, read_runs
from experiments.paper.zero3 import (
    UNCERTAINTY,
    BackwardRates,
    Mode,
    Run,
    backward_features,
    backward_seconds,
    fit_runs,
    non_negative,
    rest_features,
    rest_seconds,
    update_seconds,
)
from experiments.plots import can_draw, save_predictions
from perfmodel.hardware import HardwareProfile

MEASURED_AS_BEST = {"h100": 0.01, "a100_bound": 0.01, "a100_unbound": 0.03}
"""Strides whose measured updates are this close to the fastest count as fastest: what runs of the class repeat to."""


@dataclass(frozen=True)
class ClassModel:
    """All that is fitted to the runs of one machine class."""

    profile: HardwareProfile
    backward: BackwardRates
    rest: Sequence[float]

    @classmethod
    def fit(cls, machine_class: str, runs: Sequence[PublishedRun]) -> ClassModel:
        """Fit to runs of one class."""
        plain = [r.run for r in runs]
        rest_s = [max(r.iteration_s - r.forward_s - r.backward_s - r.update_s, 1e-3) for r in runs]
        uncertainty = dict(UNCERTAINTY)
        if machine_class.endswith("unbound"):
            uncertainty["cpu_traffic_factor"] = 0.3
        return cls(
            fit_runs(plain, [r.update_s for r in runs], DATA_SHEETS[machine_class], uncertainty),
            BackwardRates(*non_negative([backward_features(run) for run in plain], [r.backward_s for r in runs])),
            non_negative([rest_features(run) for run in plain], rest_s),
        )

    def update_s(self, run: Run) -> float:
        return update_seconds(run, self.profile)

    def backward_s(self, run: Run) -> float:
        return backward_seconds(run, self.backward)

    def iteration_s(self, run: Run) -> float:
        return run.forward_s + self.backward_s(run) + self.update_s(run) + rest_seconds(run, self.rest)


@dataclass(frozen=True)
class Prediction:
    """A run beside what the model says of it; times in seconds.

    baseline: median measured and predicted iteration of the CPU-only runs of its configuration, if there are any.
    """

    published: PublishedRun
    update_s: float
    backward_s: float
    iteration_s: float
    baseline: tuple[float, float] | None

    @property
    def speedups(self) -> tuple[float, float] | None:
        """Of the iteration over CPU-only, published and predicted; None for a CPU-only run or without one to compare
        with."""
        if self.baseline is None or self.published.run.mode is Mode.ZERO3_OFFLOAD:
            return None
        return self.baseline[0] / self.published.iteration_s, self.baseline[1] / self.iteration_s


Cases = Mapping[str, Mapping[str, Sequence[Prediction]]]
"""Predictions of published runs, by what was left out of the fit, then by machine."""


def predict(model: ClassModel, test: Sequence[PublishedRun], known: Sequence[PublishedRun]) -> list[Prediction]:
    """Predictions for the runs of one class; CPU-only runs to compare with are looked up in test, then in known."""
    baselines: dict[tuple[str, ...], tuple[float, float]] = {}
    for runs in (known, test):
        for config, group in grouped((r for r in runs if r.run.mode is Mode.ZERO3_OFFLOAD), lambda r: r.config):
            baselines[config] = (
                median_of(group, "iteration_s"),
                statistics.median(model.iteration_s(r.run) for r in group),
            )
    return [
        Prediction(r, model.update_s(r.run), model.backward_s(r.run), model.iteration_s(r.run), baselines.get(r.config))
        for r in test
    ]


def stride_hits(predictions: Sequence[Prediction], tolerance: float) -> tuple[int, int]:
    """Configurations whose predicted best stride is, within tolerance, the measured best; and how many there are.

    Counted are configurations with two strides or more; repeats count by their median.
    """
    hits = cases = 0
    interleaved = (p for p in predictions if p.published.run.mode is Mode.DOS and p.published.run.stride)
    for _, group in grouped(interleaved, lambda p: p.published.config):
        by_stride = dict(grouped(group, lambda p: p.published.run.stride))
        if len(by_stride) < 2:
            continue
        measured = {k: median_of((p.published for p in same), "update_s") for k, same in by_stride.items()}
        best = min(by_stride, key=lambda k: statistics.median(p.update_s for p in by_stride[k]))
        hits += measured[best] <= min(measured.values()) * (1 + tolerance)
        cases += 1
    return hits, cases


def summary(machine_class: str, predictions: Sequence[Prediction]) -> dict[str, float | int | None]:
    """The errors of a set of predictions, as fractions; None where there is nothing to take them of."""
    updates = [abs(p.update_s / p.published.update_s - 1) for p in predictions]
    backwards = [abs(p.backward_s / p.published.backward_s - 1) for p in predictions]
    speedups = [abs(p.speedups[1] / p.speedups[0] - 1) for p in predictions if p.speedups]
    hits, cases = stride_hits(predictions, MEASURED_AS_BEST[machine_class])
    return {
        "runs": len(predictions),
        "update_median_error": _median(updates),
        "update_max_error": max(updates, default=None),
        "backward_median_error": _median(backwards),
        "speedup_median_error": _median(speedups),
        "stride_hits": hits,
        "stride_cases": cases,
    }


def cross_validation(
    runs: Sequence[PublishedRun], key: Callable[[PublishedRun], object]
) -> dict[str, list[Prediction]]:
    """Per class, predictions of the runs of each value of a key from a fit to all others; runs without one are not left
    out."""
    found: dict[str, list[Prediction]] = defaultdict(list)
    for name, same in grouped(runs, lambda r: r.machine_class):
        for value, left_out in grouped(same, key):
            others = [r for r in same if key(r) != value]
            if value and others:
                found[name] += predict(ClassModel.fit(name, others), left_out, others)
    return dict(found)


def left_out(runs: Sequence[PublishedRun]) -> Cases:
    """The two cross-validations: no run of its model is fitted, or none of its stride."""
    return {
        "model": cross_validation(runs, lambda r: r.model),
        "stride": cross_validation(runs, lambda r: r.run.stride),
    }


def rows_of(predictions: Mapping[str, Sequence[Prediction]]) -> list[dict[str, Any]]:
    """Errors per class and mode, and how many strides were predicted to be best that are, of how many."""
    rows = []
    for name, of_class in predictions.items():
        for mode in (None, *Mode):
            chosen = [p for p in of_class if mode is None or p.published.run.mode is mode]
            if chosen:
                rows.append({"machine": name, "mode": mode.value if mode else "all", **summary(name, chosen)})
    return rows


def write_profiles(runs: Sequence[PublishedRun], folder: Path) -> None:
    """Write the fitted profiles of the published machines as JSON files."""
    for name, same in grouped(runs, lambda r: r.machine_class):
        fitted = ClassModel.fit(name, same).profile
        sheet = DATA_SHEETS[name]
        note = (
            f"least squares over {len(same)} published DeepSpeed runs; from the data sheet: links in both directions "
            f"at once, and gpu_update_rate as 80% of the device's bandwidth over 28 bytes (DeepSpeed's own update fits "
            f"{fitted.gpu_update_rate:.3g}/s); DeepSpeed's "
            f"{fitted.launch_latency_s * 1e3:.1f} ms per subgroup are left out"
        )
        duplex = sheet.h2d_bandwidth_duplex / sheet.h2d_bandwidth
        profile = dataclasses.replace(
            fitted,
            name=name,
            d2h_bandwidth=fitted.h2d_bandwidth,
            h2d_bandwidth_duplex=fitted.h2d_bandwidth * duplex,
            d2h_bandwidth_duplex=fitted.h2d_bandwidth * duplex,
            gpu_update_rate=0.8 * DEVICE_BANDWIDTHS[name] / 28,
            launch_latency_s=10e-6,
            provenance=dataclasses.replace(sheet.provenance, source="fitted", date="2024-04", note=note),
        )
        rounded = {
            f.name: float(f"{value:.4g}")
            for f in dataclasses.fields(profile)
            if isinstance(value := getattr(profile, f.name), float)
        }
        profile.replace(**rounded).save(folder / f"{name}.json")


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = Parser("published", __doc__)
    parser.add_argument("--write-profiles", action="store_true", help="store the fits as built-in profiles")
    parser.add_out("out/published", "folder for pictures")
    options = parser.parse_args(arguments)
    runs = read_runs()
    if options.write_profiles:
        write_profiles(runs, Path(__file__).parents[2] / "perfmodel" / "profiles")
        return 0
    report = left_out(runs)
    console = Console()
    for what, predictions in report.items():
        title = f"{what}s left out"
        console.print(table_of(title, rows_of(predictions), left=2))
        pairs = {n: [(p.published.update_s, p.update_s) for p in found] for n, found in predictions.items()}
        path = options.out / f"{title.replace(' ', '_')}.png"
        save_predictions(pairs, path, what="update (s)", title=f"Updates, {title}")
    if can_draw():
        print(f"\npictures in {options.out}")
    of_models = {name: summary(name, of_class) for name, of_class in report["model"].items()}
    return finish(of_models, console, options.json)


if __name__ == "__main__":
    sys.exit(main())
