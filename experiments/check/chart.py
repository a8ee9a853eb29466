"""The chart of README: iterations with attached models on the GPUs that have run them, from their results.

    python -m experiments.chart [--out docs/images]

Nothing runs. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.command import Parser
from experiments.plots import can_draw, picture

RESULTS = Path(__file__).parents[1] / "results"
NAMES = {
    "AdamW, float32 masters": "AdamW, all of its state on the GPU",
    "adaptive, memory for 50%, updates in backward": "DOSAdam, for half, updates in backward",
    "adaptive, memory for 50%": "DOSAdam, GPU memory for half of the state",
    "adaptive, memory for 10%": "DOSAdam, for a tenth",
    "adaptive, memory for 10%, int8 state": "DOSAdam, for a tenth, int8",
    "CPU only": 'DOSAdam, policy="cpu"',
    "CPU only, int8 state": 'DOSAdam, policy="cpu", int8',
    "torchao CPUOffloadOptimizer": "torchao CPUOffloadOptimizer, no masters",
    "DeepSpeed ZeRO-Offload": "DeepSpeed ZeRO-Offload",
}
"""Contenders in the order of their bars, and what the chart calls them."""
IN_HEADLINE = {
    "DOSAdam, memory for half, updates in backward": "adaptive, memory for 50%, updates in backward",
    "DOSAdam, memory for half": "adaptive, memory for 50%",
    "DOSAdam, memory for a tenth": "adaptive, memory for 10%",
    "DOSAdam int8, memory for a tenth": "adaptive, memory for 10%, int8 state",
    "DOSAdam, CPU only": "CPU only",
    "DOSAdam int8, CPU only": "CPU only, int8 state",
}
"""What the contest calls contenders of `experiments.headline`."""
IN_ROWS = {
    "half+b": "adaptive, memory for 50%, updates in backward",
    "half": "adaptive, memory for 50%",
    "tenth": "adaptive, memory for 10%",
    "cpu": "CPU only",
}
"""And those of the H100's rows."""


def times() -> dict[str, dict[str, float]]:
    """Seconds of an iteration by GPU and contender, attached models."""
    h200 = _read("nvidia-h200-2026-11-27-headline/headline-1.2B.json")["rows"]
    h100 = _read("nvidia-h100-2026-11-28/headline-1.2B.json")["rows"]
    lines = (RESULTS / "nvidia-h100-2026-11-28" / "rows.jsonl").read_text().splitlines()
    ours = {row["row"]: 1e-3 * row["iteration"] for row in map(json.loads, lines)}
    return {
        "H200": {IN_HEADLINE.get(row["contender"], row["contender"]): row["iteration_s"] for row in h200},
        "H100": {row["contender"]: row["iteration_s"] for row in h100}
        | {name: ours[row] for row, name in IN_ROWS.items()},
    }


def draw(path: Path, found: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a panel for each GPU, with the same scale."""
    with picture(path, ncols=len(found), figsize=(10, 3)) as (_, axes):
        for place, (axis, (gpu, seconds)) in enumerate(zip(axes, found.items(), strict=True)):
            for row, (name, label) in enumerate(reversed(NAMES.items())):
                ours = label.startswith("DOSAdam")
                if name in seconds:
                    axis.barh(row, 1e3 * seconds[name], color="#2f6fb0" if ours else "#b4bac3", height=0.72)
                    axis.text(1e3 * seconds[name] + 8, row, f"{1e3 * seconds[name]:.0f}", va="center", fontsize=9)
                else:
                    axis.text(8, row, "not run", va="center", fontsize=9, color="#5b6470")
            axis.set_xlim(0, 1050)
            axis.set_yticks(range(len(NAMES)), reversed(NAMES.values()) if not place else [""] * len(NAMES))
            axis.set_ylim(-0.6, len(NAMES) - 0.4)
            axis.set_title(f"NVIDIA {gpu}: ms per iteration")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("chart", __doc__, json=False)
    parser.add_out("docs/images", "folder for the picture")
    options = parser.parse_args(arguments)
    if not can_draw():
        return 2
    draw(options.out / "measured.png", times())
    return 0


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


if __name__ == "__main__":
    sys.exit(main())
