"""Runs a way of `experiments.headline` on a dry GPU, in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from experiments.check.base import Bench, Settings, Size
from experiments.check.contenders import NOTHING
from experiments.check.gpu_check import slug
from experiments.check.models import Job
from experiments.check.training_ways import Steps, divided, made, measure, predicted, question_of
from experiments.check.ways import JOBS, ways
from experiments.dry.machines import machine
from experiments.gpt import GPT
from perfmodel.planner.machine import find_machine
from perfmodel.planner.situation import Situation

HERE = Path(__file__).parents[2]
PROGRAM = """import json, sys
from experiments.dry import gpu
from experiments.dry.machines import machine
words = json.loads(sys.argv[1])
gpu.install(machine(words[0]))  # before anything imports dos
from experiments.check.headline_on_dry import figures_on_dry
print(json.dumps(figures_on_dry(*words)))
"""
SAID = (
    "A dry {machine}: forward and backward only pass as much time as the planner says, copies and updates as that "
    "machine did. So these figures show DOSAdam's plans and its host's work, not a GPU."
)


def run_dry(on: str, model: str, name: str, steps: Steps, out: Path, seconds: float) -> dict[str, Any]:
    """The figures of `figures_on_dry`, or why there are none, from a process of its own. seconds: that it may take."""
    words = json.dumps([on, model, name, dataclasses.asdict(steps), str(out.resolve())])
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, words]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"note": f"it did not end within {seconds:.0f} s and was killed"}
    if done.returncode:
        return {"note": done.stderr.strip().rpartition("\n")[2]}
    return {"note": "", **json.loads(done.stdout.splitlines()[-1])}


def figures_on_dry(on: str, model: str, name: str, made_of: dict[str, Any], out: str) -> dict[str, Any]:
    """Train one way on a dry GPU, which is in torch.cuda's place already; return its figures. made_of: of Steps."""
    from experiments.dry import gpu
    from experiments.dry.model import Times, dry_gpt
    from experiments.simdev.accelerator import lib

    way = {each.name: each for each in ways(model)}[name]
    profile = machine(on).profile
    known = find_machine(on, None)._replace(profile=profile, device_bytes=machine(on).device_bytes)
    steps = Steps(**made_of)
    job, micro_batches = divided(JOBS[model], way, steps, known)
    asked = Situation(question_of(job, micro_batches, way, known, steps.slice_bytes))
    forward_s, backward_s = (seconds / job.config.layers for seconds in asked.job.compute_s)

    class DryJob(Job):
        """The job with a model that computes nothing, for as long as the planner says."""

        def model(self, device: torch.device) -> GPT:
            return dry_gpt(device, self.config, Times(forward_s, backward_s))

        def on_host(self, device: torch.device) -> GPT:
            return self.model(torch.device("cpu"))

    device = torch.device(gpu.KIND, 0)
    lib.sim_capacity(steps.slice_bytes if way.sliced else machine(on).device_bytes)
    lib.sim_others(asked.device.activations + asked.question.reserved)
    bench = Bench(slug(name), Settings(Size.FULL, cuda=True, out=Path(out)), 0.0, Path(out) / "dry.json")
    profiled = dataclasses.replace(way, options={**way.options, "profile": profile})
    contender = made(profiled, DryJob(job.config, job.batch), device, None, None)
    if measure(contender, job, micro_batches, bench, device, learns=way.kind is None):
        bench.note(gpu_bytes=torch.cuda.max_memory_reserved())
        if way.kind is None:
            bench.note(predicted_tokens_per_s=predicted(job, micro_batches, way, steps.slice_bytes, known))
    return bench.record.figures


def needs_gpu(model: str, name: str) -> bool:
    """Whether a dry GPU does not run this way: another optimizer's kernels do not pass its time."""
    return any(each.name == name and each.kind is not None and each.kind.name != NOTHING for each in ways(model))
