"""The demo: a byte-level GPT learns real text with torch.optim.AdamW, and with DOSAdam under several policies.

    python -m experiments.train                                        # about a minute on two cores
    python -m experiments.train --data FILE --policies cpu,0.3,stride:3 --steps 200

All runs start from the same parameters, see the same batches and have the same memory. On a machine without GPU the
accelerator is emulated (`experiments.machines.EmulatedMachine`): AdamW's state does not fit there, and its losses are
those of a larger one. At the end the adaptive policy trains once more, and another process takes memory meanwhile.
Writes summary.json, losses.png, timeline.png and, of that last run, memory.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dos import DOSAdam
from dos.planning.policies import resolve_policy
from experiments.bench.machines import Machine, choose_machine
from experiments.command import Parser, positive, table
from experiments.gpt import GPT, Corpus, GPTConfig, standard_library
from experiments.harness import medians, take_turns
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
SUBGROUPS = 31
"""As many as one rank has in the published 20B runs."""
LR_WARM_UP = 0.2
"""Share of the steps until the full learning rate."""

Batch = tuple[Tensor, Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    args, policies, config, corpus = _asked(argv)
    console = Console()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(config, device=device, dtype=getattr(torch, args.dtype))
    start = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    subgroup_size = args.subgroup_size or math.ceil(model.numel / SUBGROUPS)
    batches = [(x.to(device), y.to(device)) for x, y in corpus.batches(args.steps, args.batch, args.seed)]
    machine = choose_machine(model, subgroup_size, args.steps, compute=lambda: model(*batches[0]).backward())
    sizes = f"{model.numel / 1e6:.1f}M parameters, {len(corpus) / 1e6:.1f} MB of text"
    console.print(f"{sizes}, {machine.name}", soft_wrap=True)

    def run(progress: Progress, name: str, beside_neighbour: bool) -> Result:
        """Train from the start, with the same batches in every run."""
        model.load_state_dict(start)
        model.zero_grad()
        machine.begin(beside_neighbour)
        settings = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
        optimizer: Optimizer
        if name == REFERENCE:
            optimizer = AdamW(model.parameters(), fused=True, **settings)
        else:
            settings |= {"policy": policies[name], "subgroup_size": subgroup_size, "device": machine.device}
            optimizer = DOSAdam(model.parameters(), **settings)
        began = time.perf_counter()
        task = progress.add_task(name, total=len(batches), loss=math.nan)
        iterations = []
        for iteration in train(model, optimizer, batches, machine):
            iterations.append(iteration)
            progress.update(task, advance=1, loss=iteration.loss)
        if not console.is_terminal:  # where no bar moves
            left = len(policies) + 1 + (machine.has_neighbour and DEFAULT in policies) - len(progress.tasks)
            seconds = time.perf_counter() - began
            figures = f"{len(batches)} iterations, last loss {iterations[-1].loss:.3f}, {seconds:.0f} s"
            console.print(f"{name}: {figures}; {left} more to come" if left else f"{name}: {figures}")
        share, explanation = 1.0, ""
        if isinstance(optimizer, DOSAdam):
            share, explanation = 1.0 - optimizer.metrics()["share_cpu"], optimizer.explain()
        return Result(iterations, share, machine.peak_bytes(optimizer), machine.samples, explanation)

    label, loss = TextColumn("{task.description:>9}"), TextColumn("loss {task.fields[loss]:.3f}")
    columns = label, BarColumn(), MofNCompleteColumn(), loss, TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        # One model is trained by all, so that a turn is a whole run.
        turns = take_turns({name: partial(run, progress, name) for name in (REFERENCE, *policies)}, [False])
        results = {name: result for name, (result,) in turns.items()}
        beside = None
        if machine.has_neighbour and DEFAULT in policies:
            beside = run(progress, DEFAULT, True)
    report(results, machine, args.out, console)
    if beside is not None:
        report_neighbour(beside, results[DEFAULT], machine, args.out, console)
    return 0


def _asked(
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, dict[str, str | float], GPTConfig, Corpus]:
    """The command line, the policies by name, the model and its text. Ends the program where one is no good."""
    parser = Parser("train", __doc__, json=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="text to learn; the standard library's sources if not given")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the results")
    parser.add_argument("--policies", default="cpu,0.5,stride:2,adaptive", help="DOSAdam's, separated by commas")
    parser.add_argument("--subgroup-size", type=positive, help=f"parameters; {SUBGROUPS} subgroups if not given")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters")
    parser.add_argument("--lr", type=float, default=1e-3, help="at its highest")
    parser.add_argument("--seed", type=int, default=1)
    for name, default, what in (
        ("steps", 24, "of each run"),
        ("batch", 8, "sequences in a batch"),
        ("context", 32, "bytes in a sequence"),
        ("layers", 3, "of the model"),
        ("width", 512, "of the model"),
        ("heads", 8, "of attention"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=what)
    args = parser.parse_args(argv)
    try:
        policies = {name: parse_policy(name) for name in args.policies.split(",")}
        if not 0 < args.lr < math.inf:
            raise ValueError(f"argument --lr: expected a number above 0, found {args.lr}")
        config = GPTConfig(args.layers, args.width, args.heads, args.context)
        text = standard_library() if args.data is None else args.data.read_bytes()
        corpus = Corpus(text, args.context, name=str(args.data or "the standard library"))
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args, policies, config, corpus


def parse_policy(name: str) -> str | float:
    """A `policy` of DOSAdam. Raises ValueError if there is none of that name."""
    policy: str | float
    try:
        policy = float(name)
    except ValueError:
        policy = name
    resolve_policy(policy)
    return policy


def train(model: GPT, optimizer: Optimizer, batches: Sequence[Batch], machine: Machine) -> Iterator[Iteration]:
    """One iteration for each batch. The learning rate warms up and falls towards 0, both in a straight line."""
    steps = len(batches)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (LR_WARM_UP * steps)) * (1.0 - step / steps))

    def now() -> float:
        machine.synchronize()
        return time.perf_counter()

    for batch in batches:
        times = [now()]
        loss = model(*batch)
        times.append(now())
        loss.backward()
        times.append(now())
        machine.step(optimizer)
        times.append(now())
        scheduler.step()
        optimizer.zero_grad()
        forward_s, backward_s, update_s = (end - start for start, end in itertools.pairwise(times))
        update, plan = (optimizer.timeline(), optimizer.plan()) if isinstance(optimizer, DOSAdam) else (None, None)
        update = update or Timeline((Span(Lane.GPU, Op.UPDATE, None, 0.0, update_s),))
        yield Iteration(loss.item(), forward_s, backward_s, update_s, update, plan)


@dataclass(frozen=True)
class Iteration:
    """One training step. Times in seconds; update: spans of the optimizer's lanes since step() was called.

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
    def timed(self) -> list[Iteration]:
        """Those that times are of, or all if there are no others."""
        return self.iterations[UNTIMED:] or self.iterations

    @property
    def typical(self) -> Iteration:
        """The iteration of median time."""
        return sorted(self.timed, key=lambda i: i.seconds)[len(self.timed) // 2]

    def summary(self) -> dict[str, Any]:
        seconds = {"iteration_s": [i.seconds for i in self.timed], "update_s": [i.update_s for i in self.timed]}
        return {
            "losses": self.losses,
            **medians(seconds),
            "accelerator_share": self.accelerator_share,
            "peak_device_bytes": self.peak_device_bytes,
        }


def report(results: Mapping[str, Result], machine: Machine, out: Path, console: Console) -> None:
    """Write summary and pictures, print the table."""
    reference = results[REFERENCE].losses
    gaps = [abs(a - b) for r in results.values() for a, b in zip(r.losses, reference, strict=True)]
    summaries = {name: result.summary() for name, result in results.items()}
    summary = {
        "device": machine.name,
        "steps": len(reference),
        "max_loss_difference": max(gaps),
        "policies": summaries,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    save_losses({name: r.losses for name, r in results.items()}, out / "losses.png", reference=REFERENCE)
    fitting = [name for name, r in results.items() if r.peak_device_bytes <= machine.capacity]
    timelines = {name: results[name].typical.timeline() for name in fitting}
    save_timelines(timelines, out / "timeline.png", title=f"One iteration, {machine.name}")

    cells = []
    for name, s in summaries.items():
        times = (s["iteration_s"] - s["update_s"], s["update_s"], s["iteration_s"])
        shown = [f"{t * 1e3:.0f} ms" for t in times] if name in fitting else ["", "", "does not fit"]
        loss = f"{statistics.mean(s['losses'][-LAST:]):.4f}"
        cells.append([name, loss, *shown, f"{s['accelerator_share']:.0%}", f"{s['peak_device_bytes'] / 2**20:.0f} MiB"])
    console.print(table("", HEADERS, cells))
    console.print(
        f"Every run has {machine.capacity / 2**20:.0f} MiB of device memory. loss: the mean of the last {LAST} "
        "iterations; compute: forward and backward"
        + (f", made to last {machine.compute_s * 1e3:.0f} ms, more on a busy computer" if machine.compute_s else "")
        + "; update: how long step() held the training up; on device: parameters updated there; "
        f"memory: the most that was held. {DEFAULT!r} is the default.",
        highlight=False,
    )
    console.print(f"Largest difference of a loss from {REFERENCE}'s: {max(gaps):.1e}")
    if DEFAULT in results:
        console.print(
            f"What policy {DEFAULT!r} says of its last step:\n{results[DEFAULT].explanation}",
            soft_wrap=True,
            highlight=False,
        )
    console.print(f"Written to {out}")


def report_neighbour(beside: Result, alone: Result, machine: Machine, out: Path, console: Console) -> None:
    """Iterations of the adaptive policy while another process took memory, beside the run without one."""
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
        f"{during * 1e3:.0f} ms beside it, and {after * 1e3:.0f} ms after it has ended. At most "
        f"{fullest / 2**20:.0f} of {machine.capacity / 2**20:.0f} MiB were held; the losses are "
        f"{'the same' if beside.losses == alone.losses else 'NOT the same'} to the bit.",
        soft_wrap=True,
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
