"""Tokens per second of each optimizer, in a process of its own: where AdamW does not fit, or beside AdamW.

    python -m experiments.headline [--model 6.6B|1.2B|8B] [--rounds N] [--micro-batches N] [--contender NAME] [--json]

6.6 billion parameters on one GPU of 80 GB, where AdamW with float32 masters does not fit; or 1.2 billion, of which
DOSAdam has memory for a half or a tenth of the state, beside AdamW and all peers that are installed, each with its best
settings; or 8 billion whose weights stream, in all of the GPU's memory and in a slice of it (`--slice`). All parameters
are trained, in bfloat16 with float32 masters where nothing else is said; a micro-batch has 4 sequences of 2,048 tokens
(`--batch`). "No optimizer" is the ceiling. Beside DOSAdam's figure is what the planner (`python -m perfmodel`) says.
Without a GPU the same commands run with an emulated accelerator and tiny models, and say that no figure means
anything; with `--dry h100` they run DOSAdam, at full size, on the GPU of `experiments.dry`, which is only time.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.util
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dos import DOSAdam, EmulatedDevice
from experiments.check import environment
from experiments.check.base import Bench, Check, Record, Settings, Size, Skipped, Status, run_isolated
from experiments.check.contenders import (
    MASTERS,
    NOTHING,
    PEERS,
    PLAIN,
    Broken,
    Contender,
    Kind,
    Own,
    Trains,
    deepspeed,
    reference,
)
from experiments.check.contest import Clock, iterate
from experiments.check.gpu_check import RESULTS, find_gpu, slug
from experiments.check.models import SETTINGS, Batch, Job, emulated_device, prepare
from experiments.check.streaming import GPU_BYTES, taken
from experiments.check.streaming import LARGE as STREAMED
from experiments.command import Parser, positive, table_of
from experiments.dry.machines import FILES, machine
from experiments.gpt import GPT, GPTConfig
from experiments.harness import finish, measuring
from perfmodel.format import CODED, SPLIT
from perfmodel.planner.machine import Machine, find_machine
from perfmodel.planner.outcome import adaptive_outcome
from perfmodel.planner.question import Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import parse_bytes

LARGE, MEDIUM, STREAMING = "6.6B", "1.2B", "8B"
JOBS = {
    LARGE: Job(GPTConfig(32, 4096, 32, context=2048, vocabulary=32000, checkpointing=True), batch=4),
    MEDIUM: Job(GPTConfig(36, 1600, 25, context=2048, vocabulary=50304, checkpointing=True), batch=4),
    STREAMING: Job(GPTConfig(39, 4096, 32, context=2048, vocabulary=32000, checkpointing=True), batch=4),
}
TINY = {
    **dict.fromkeys(JOBS, Job(GPTConfig(2, 32, 2, context=16, vocabulary=64, checkpointing=True), batch=2)),
    STREAMING: STREAMED[Size.TINY],
}
TIMED = {Size.TINY: 2, Size.FULL: 6}
LEARNING = {Size.TINY: 2, Size.FULL: 14}
"""Iterations of DOSAdam before those that count; of others SETTLING."""
SETTLING = 2
SECONDS = 150.0
"""That a contender may take, with four micro-batches or fewer."""
DOES_NOT_FIT, NEEDS_GPU = "does not fit", "needs a GPU"
COLUMNS = (
    *("contender", "parameters", "tokens_per_step", "tokens_per_s", "spread", "predicted_tokens_per_s"),
    *("gpu_bytes", "host_bytes", "note"),
)
EMULATED = (
    "No GPU was found: the accelerator is emulated, and a tiny model stands for {model}. The command runs; no figure "
    "means anything."
)
HERE = Path(__file__).parents[2]
DRY_PROGRAM = """import json, sys
from experiments.dry import gpu
from experiments.dry.machines import machine
words = json.loads(sys.argv[1])
gpu.install(machine(words[0]))  # before anything imports dos
from experiments.check.headline import figures_on_dry
print(json.dumps(figures_on_dry(*words)))
"""
DRY = (
    "A dry {machine}: forward and backward only pass as much time as the planner says, copies and updates as that "
    "machine did. So these figures show DOSAdam's plans and its host's work, not a GPU."
)


@dataclass(frozen=True)
class Way:
    """One way to train.

    options: of DOSAdam. attach: options of `DOSAdam.attach`; None: it is not called. share: of the state, for which
    DOSAdam has memory; None: whatever is free. sliced: in a slice of the GPU's memory. kind: another optimizer's.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    attach: Mapping[str, Any] | None = field(default_factory=dict)
    share: float | None = None
    sliced: bool = False
    kind: Kind | None = None

    @property
    def streams(self) -> bool:
        """Whether weights stream."""
        return "weights" in (self.attach or {})


DEFAULT = Way("DOSAdam")


def others(*kinds: Kind) -> list[Way]:
    """Ways with other optimizers."""
    return [Way(kind.name, kind=kind) for kind in kinds]


IN_BACKWARD, STREAM = {"updates": "backward"}, {"weights": "auto"}
OFFLOADS = {"offload_gradients": True}
CPU, INT8, CLIPS = {"policy": "cpu"}, {"state_format": "int8"}, {"max_grad_norm": 1.0}


def ways(model: str) -> list[Way]:
    """Those of a model, the ceiling first."""
    ceiling, plain = (reference(name, None) for name in (NOTHING, PLAIN))
    if model == STREAMING:
        return [
            *others(ceiling),
            Way("DOSAdam, weights stream", OFFLOADS, STREAM),
            Way("DOSAdam, weights stream, in the slice", OFFLOADS, STREAM, sliced=True),
            Way("DOSAdam int8, weights stream, in the slice", OFFLOADS | INT8, STREAM, sliced=True),
        ]
    if model == LARGE:
        ours = [
            DEFAULT,
            Way("DOSAdam, clipping", CLIPS),
            Way("DOSAdam, updates in backward", attach=IN_BACKWARD),
        ]
        return [*others(ceiling), *ours, *others(plain, *PEERS, FSDP2, *BEST)]
    ours = [
        Way("DOSAdam, memory for half", share=0.5),
        Way("DOSAdam, memory for half, clipping", CLIPS, share=0.5),
        Way("DOSAdam, memory for half, not attached", attach=None, share=0.5),
        Way("DOSAdam, memory for half, updates in backward", attach=IN_BACKWARD, share=0.5),
        Way("DOSAdam, memory for a tenth", share=0.1),
        Way("DOSAdam, CPU only", CPU),
        Way("DOSAdam, CPU only, updates in backward", CPU, IN_BACKWARD),
        Way("DOSAdam int8, memory for a tenth", INT8, share=0.1),
        Way("DOSAdam int8, CPU only", INT8 | CPU),
    ]
    return [*others(ceiling, reference(MASTERS, None), plain), *ours, *others(*PEERS, FSDP2, *BEST)]


def torchao_offloading(model: Any, job: Job) -> Any:
    """torchao's optimizer, which takes gradients away in backward, too: one micro-batch a step."""
    optimizer = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return optimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **SETTINGS)


def torchao_8bit(model: Any, job: Job) -> Any:
    """AdamW with moments in 8 bits, all on the GPU."""
    return importlib.import_module("torchao.optim").AdamW8bit(model.parameters(), **SETTINGS)


def bitsandbytes_8bit(model: Any, job: Job) -> Any:
    """The same of bitsandbytes."""
    return importlib.import_module("bitsandbytes.optim").AdamW8bit(model.parameters(), **SETTINGS)


def fsdp2(model: Any, job: Job) -> Any:
    """Parameters, gradients and float32 state on the host, updated there by fused AdamW."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29514")
    torch.distributed.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    model.cpu().float()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=mixed, offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()))
    return torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)


FSDP2 = Kind("FSDP2 CPUOffloadPolicy, fused AdamW", "torch", "float32 parameters on the host", fsdp2)
OVERLAPPING = {"overlap_comm": True, "contiguous_gradients": True}
OFFLOADED = {"device": "cpu", "pin_memory": True}
BEST = (
    Kind("torchao, offload_gradients", "torchao", "bfloat16 state", torchao_offloading),
    Kind("torchao AdamW8bit", "torchao", "8-bit moments, no masters", torchao_8bit),
    Kind("bitsandbytes AdamW8bit", "bitsandbytes", "8-bit moments, no masters", bitsandbytes_8bit),
    Kind(
        "DeepSpeed ZeRO-Offload, overlap_comm",
        "deepspeed",
        "float32 masters and moments",
        functools.partial(deepspeed, zero={"stage": 2, "offload_optimizer": OFFLOADED, **OVERLAPPING}),
    ),
    Kind(
        "DeepSpeed Twin-Flow, ratio 0.5",
        "deepspeed",
        "float32 masters and moments",
        functools.partial(
            deepspeed, zero={"stage": 3, "offload_optimizer": {**OFFLOADED, "ratio": 0.5}, **OVERLAPPING}
        ),
    ),
    Kind(
        "DeepSpeed SuperOffload",
        "deepspeed",
        "float32 masters and moments",
        functools.partial(
            deepspeed,
            zero={
                "stage": 3,
                "offload_optimizer": {**OFFLOADED, "super_offload": True, "cpuadam_cores_perc": 0.9},
                **OVERLAPPING,
            },
        ),
    ),
)
"""Peers with other settings, which are better for some models."""


class Accumulating(Contender):
    """A contender with several micro-batches in each step."""

    def __init__(self, inner: Contender, micro_batches: int) -> None:
        self.name, self._inner, self._count = inner.name, inner, micro_batches
        self.open, self.close, self.step, self.metrics = inner.open, inner.close, inner.step, inner.metrics  # type: ignore[method-assign]

    def compute(self, batch: Batch) -> None:
        """Forward and backward of each micro-batch."""
        for _ in range(self._count):
            self._inner.compute(batch)


def train(model: str, name: str, micro_batches: int, batch: int | None, slice_bytes: int, bench: Bench) -> None:
    """Train one way, and note its figures. batch: sequences, if not the job's. slice_bytes: of memory, if sliced."""
    way = {each.name: each for each in ways(model)}[name]
    if micro_batches > 1 and way.kind is not None and way.kind.package == "deepspeed":
        raise Skipped("its engine counts micro-batches itself, by another configuration")
    job, device = (JOBS if bench.cuda else TINY)[model], prepare(bench)
    job = dataclasses.replace(job, batch=batch or job.batch)
    size = -(-job.numel // 8)
    emulated = None if bench.cuda else emulated_device(job, size)
    if emulated is not None and way.sliced:
        emulated = EmulatedDevice(emulated.profile, capacity=GPU_BYTES[Size.TINY])
    ballast = taken(device, slice_bytes) if bench.cuda and way.sliced else None
    contender = made(way, job, device, emulated, None if bench.cuda else size)
    if measure(contender, job, micro_batches, bench, device, learns=way.kind is None):
        bench.note(host_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if bench.cuda:
            gpu_bytes = torch.cuda.max_memory_reserved() - (0 if ballast is None else ballast.nbytes)
            bench.note(gpu_bytes=gpu_bytes, predicted_tokens_per_s=predicted(job, micro_batches, way, slice_bytes))


def measure(
    contender: Contender, job: Job, micro_batches: int, bench: Bench, device: torch.device, *, learns: bool
) -> bool:
    """Iterate, and note the figures, or why there are none; return whether there are."""
    batches, clock = itertools.cycle(job.batches(2, device)), Clock(bench.cuda)
    tokens = micro_batches * job.batch * job.config.context
    bench.note(parameters=job.numel, tokens_per_step=tokens)
    try:
        contender.open()
        running = Accumulating(contender, micro_batches)
        iterate(running, batches, clock, LEARNING[bench.size] if learns else SETTLING)
        seconds, _ = iterate(running, batches, clock, TIMED[bench.size])
    except torch.OutOfMemoryError:
        bench.note(note=DOES_NOT_FIT)
        return False
    except Broken as error:
        bench.note(note=str(error))
        return False
    bench.note(
        iteration_s=statistics.median(seconds),
        tokens_per_s=tokens / statistics.median(seconds),
        spread=f"{tokens / max(seconds):,.0f} to {tokens / min(seconds):,.0f}",
        metrics=contender.metrics() if learns else {},
    )
    return True


def made(way: Way, job: Job, device: torch.device, emulated: Any, size: int | None) -> Contender:
    """The contender of a way, with a model of its own. Raises Skipped if its package is not installed."""
    if way.kind is not None:
        if importlib.util.find_spec(way.kind.package) is None:
            raise Skipped(f"{way.kind.package} is not installed")
        return Own(way.kind, job, device)
    model, options = job.on_host(device) if way.streams else job.model(device), {**way.options, **SETTINGS}
    if way.share is not None:
        state = CODED if "state_format" in way.options else SPLIT
        room = int(way.share * state.state_bytes * job.numel)
        options["memory_budget"] = lambda: room
    if emulated is None and way.streams:
        emulated = device
    optimizer = DOSAdam(model.parameters(), device=emulated, subgroup_size=size, **options)
    if way.attach is not None:
        optimizer.attach(model, **way.attach)
    return Trains(way.name, model, optimizer)


def predicted(
    job: Job, micro_batches: int, way: Way = DEFAULT, slice_bytes: int = 0, known: Machine | None = None
) -> float | None:
    """Tokens per second as the planner says of DOSAdam on a machine; None if it knows the machine or the way not.

    known: the machine; None for this GPU's.
    """
    if way != DEFAULT and not way.streams:
        return None
    try:
        known = known or find_machine(torch.cuda.get_device_name(), None)
    except ValueError:
        return None
    question = question_of(job, micro_batches, way, known, slice_bytes)
    return question.step_tokens / adaptive_outcome(Situation(question)).seconds


def question_of(job: Job, micro_batches: int, way: Way, known: Machine, slice_bytes: int) -> Question:
    """What the planner is asked about a way. known: the machine."""
    c = job.config
    rate, source = known.flops_rate("bf16", None, None)
    sizes = {"n_embd": c.width, "n_layer": c.layers, "n_head": c.heads, "n_positions": c.context}
    return Question(
        Transformer.from_config({**sizes, "vocab_size": c.vocabulary}),
        known.profile,
        slice_bytes if way.sliced else known.device_bytes,
        batch=job.batch,
        sequence=c.context,
        checkpointing=True,
        micro_batches=micro_batches,
        accumulation=micro_batches > 1,
        weights="auto" if way.streams else "stay",
        offload_gradients=way.streams,
        state_format=way.options.get("state_format"),
        flops_rate=rate,
        flops_source=source,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the contenders one after the other, and print; the last line is one JSON object with --json."""
    known = {model: [way.name for way in ways(model)] for model in JOBS}
    parser = Parser("headline", __doc__)
    parser.add_argument("--model", choices=JOBS, default=LARGE, help="parameters (%(default)s)")
    parser.add_count("rounds", 1, "of all contenders in turn; medians of them are shown")
    parser.add_count("micro-batches", 1, "of a step")
    parser.add_argument("--batch", type=positive, metavar="N", help="sequences of a micro-batch (4)")
    parser.add_argument(
        "--slice", type=parse_bytes, default=24 << 30, metavar="SIZE", help="GPU memory where a slice is used (24GiB)"
    )
    parser.add_out(None, "folder for the results (experiments/results/GPU-DATE-headline; out/headline without a GPU)")
    parser.add_argument("--contender", action="append", metavar="NAME", help="one of them (all); may be given again")
    parser.add_argument("--dry", choices=FILES, help="on a GPU that is only time, at the rates of this machine")
    arguments = parser.parse_args(argv)
    names = arguments.contender or known[arguments.model]
    for name in names:
        if name not in known[arguments.model]:
            parser.error(f"argument --contender: found {name!r}; there are {'; '.join(known[arguments.model])}")
    gpu = None if arguments.dry else find_gpu()[0]
    date = datetime.date.today().isoformat()
    out: Path = arguments.out or (RESULTS / f"{slug(gpu)}-{date}-headline" if gpu else Path("out/headline"))
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(Size.TINY if gpu is None else Size.FULL, cuda=gpu is not None, out=out)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    seconds = SECONDS * max(1.0, arguments.micro_batches / 4)
    with measuring(arguments.json, emulated=gpu is None and not arguments.dry) as (console, progress):
        for number, name in itertools.product(range(arguments.rounds), names):
            progress(f"{name}, round {number + 1}")
            how = arguments.micro_batches, arguments.batch, arguments.slice
            if arguments.dry and needs_gpu(arguments.model, name):
                row = {"contender": name, "note": NEEDS_GPU}
            elif arguments.dry:
                row = {"contender": name, **run_dry(arguments.dry, arguments.model, name, *how, out, 2 * seconds)}
            else:
                work = functools.partial(train, arguments.model, name, *how)
                row = row_of(name, run_isolated(Check(slug(name), name, work, 1.0), settings, seconds))
            turns[name].append(row)
            if not console.is_terminal:  # where no status is shown
                console.print(f"{name}: " + (row["note"] or f"{row['tokens_per_s']:,.0f} tokens/s"), soft_wrap=True)
    rows = [median_of(turn) for turn in turns.values()]
    shown = [key for key in COLUMNS if any(row.get(key) for row in rows)]
    where = gpu or (f"Dry {arguments.dry}" if arguments.dry else "Emulated")
    console.print(table_of(f"{where}: tokens per second", rows, *shown))
    if arguments.dry:
        console.print(DRY.format(machine=arguments.dry), soft_wrap=True)
    elif gpu is None:
        console.print(EMULATED.format(model=arguments.model), soft_wrap=True)
    head = {
        "gpu": gpu,
        "dry": arguments.dry,
        "date": date,
        **environment.commit(),
        "model": arguments.model,
        "micro_batches": arguments.micro_batches,
        "slice_bytes": arguments.slice,
    }
    return finish({**head, "rows": rows}, console, arguments.json)


def run_dry(
    on: str, model: str, name: str, micro_batches: int, batch: int | None, slice_bytes: int, out: Path, seconds: float
) -> dict[str, Any]:
    """The figures of `figures_on_dry`, or why there are none, from a process of its own. seconds: that it may take."""
    words = json.dumps([on, model, name, micro_batches, batch, slice_bytes, str(out.resolve())])
    command = [sys.executable, "-W", "ignore", "-c", DRY_PROGRAM, words]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"note": f"it did not end within {seconds:.0f} s and was killed"}
    if done.returncode:
        return {"note": done.stderr.strip().rpartition("\n")[2]}
    return {"note": "", **json.loads(done.stdout.splitlines()[-1])}


def figures_on_dry(
    on: str, model: str, name: str, micro_batches: int, batch: int | None, slice_bytes: int, out: str
) -> dict[str, Any]:
    """Train one way on a dry GPU, which is in torch.cuda's place already; return its figures."""
    from experiments.dry import gpu
    from experiments.dry.model import Times, dry_gpt
    from experiments.simdev.accelerator import lib

    way = {each.name: each for each in ways(model)}[name]
    profile = machine(on).profile
    known = find_machine(on, None)._replace(profile=profile, device_bytes=gpu.DEVICE_BYTES)
    job = dataclasses.replace(JOBS[model], batch=batch or JOBS[model].batch)
    asked = Situation(question_of(job, micro_batches, way, known, slice_bytes))
    forward_s, backward_s = (seconds / job.config.layers for seconds in asked.job.compute_s)

    class DryJob(Job):
        """The job with a model that computes nothing, for as long as the planner says."""

        def model(self, device: torch.device) -> GPT:
            return dry_gpt(device, self.config, Times(forward_s, backward_s))

        def on_host(self, device: torch.device) -> GPT:
            return self.model(torch.device("cpu"))

    device = torch.device(gpu.KIND, 0)
    lib.sim_capacity(slice_bytes if way.sliced else gpu.DEVICE_BYTES)
    lib.sim_others(asked.device.activations + asked.question.reserved)
    bench = Bench(slug(name), Settings(Size.FULL, cuda=True, out=Path(out)), 0.0, Path(out) / "dry.json")
    profiled = dataclasses.replace(way, options={**way.options, "profile": profile})
    contender = made(profiled, DryJob(job.config, job.batch), device, None, None)
    if measure(contender, job, micro_batches, bench, device, learns=way.kind is None):
        bench.note(gpu_bytes=torch.cuda.max_memory_reserved())
        if way.kind is None:
            bench.note(predicted_tokens_per_s=predicted(job, micro_batches, way, slice_bytes, known))
    return bench.record.figures


def needs_gpu(model: str, name: str) -> bool:
    """Whether a dry GPU does not run this way: another optimizer's kernels do not pass its time."""
    return any(each.name == name and each.kind is not None and each.kind.name != NOTHING for each in ways(model))


def median_of(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The round of median speed, with all rounds' speeds; the last one of a contender without any."""
    ran = sorted((turn for turn in turns if "tokens_per_s" in turn), key=lambda turn: turn["tokens_per_s"])
    if not ran:
        return turns[-1]
    return {**ran[len(ran) // 2], "rounds": [turn["tokens_per_s"] for turn in turns if "tokens_per_s" in turn]}


def row_of(name: str, record: Record) -> dict[str, Any]:
    """The figures of a contender, or why there are none."""
    ended = record.status is Status.PASSED
    return {"contender": name, "note": "" if ended else record.reason, **record.figures, "seconds": record.seconds}


if __name__ == "__main__":
    sys.exit(main())
