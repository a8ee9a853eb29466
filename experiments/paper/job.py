"""A job of many ranks, live: processes that train one sharded model, each with an emulated accelerator.

    python -m experiments.job [--ranks 1 2 4 8 16] [--json]

The runs are those of the paper's figure of data-parallel ranks (7B on A100 nodes), with a small model in place of the
large one: FSDP2 divides it over N processes under torchrun, each with as many subgroups as a rank of that run, placed
by the same policy, on an emulated machine in which the ranks of a node share the host's memory as the profile says.
Rates are slowed together, so far that the real work of N processes on a few cores does not count. Compared is the
update, from `step()` to the last transfer on the slowest rank, with what the model says of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dos import DOSAdam, EmulatedDevice
from experiments.command import Parser, positive, table_of
from experiments.gpt import GPT, Corpus, standard_library
from experiments.harness import finish, measuring
from experiments.miniature import equal_subgroups, slowed
from experiments.paper.runs import read_runs
from experiments.paper.sweep.device import CONTEXT, small_model
from experiments.paper.sweep.predict import Predictor, policy_plan
from experiments.paper.sweep.spec import Configuration
from perfmodel import Plan, Workload
from perfmodel.hardware import HardwareProfile
from perfmodel.scope import Scope
from perfmodel.simulate import exposed

BATCH, SETTLING, STEPS = 2, 2, 3
"""Sequences; steps that move state to where it stays, and steps that are measured."""
UPDATE_S = 2.0
"""Seconds that an update on the CPU alone is made to last with one rank; with more, as much less as there."""
POLICIES = {"ZeRO-Offload": "cpu", "the paper's schedule": "stride", "adaptive": "adaptive"}
PUBLISHED = {"cpu": "zero3_offload", "stride": "dos"}
"""The loop that was published, for each policy of ours that stands for it."""


def configuration(ranks: int, policy: str, device: str = "emulated") -> Configuration:
    """A run of the figure with one of our policies."""
    values: dict[str, object] = {
        "machine": "a100_unbound",
        "model": "7B",
        "micro_batch": 4,
        "ranks": ranks,
        "ranks_per_node": min(ranks, 4),
        "policy": policy,
        "device": device,
    }
    return Configuration.of(values | ({"stride": 5} if policy in ("stride", "dos") else {}))


def emulated(config: Configuration, predictor: Predictor, numel: int, update_s: float) -> HardwareProfile:
    """The machine of a rank with `numel` parameters, so slow that one rank alone updates for `update_s` on the CPU."""
    alone = predictor.run_of(configuration(1, "cpu"))
    work = equal_subgroups(int(alone.params), -(-int(alone.params) // alone.subgroups))
    slow = slowed(dataclasses.replace(config.profile(), ranks_per_host=1), work, update_s)
    scaled = slow.scaled(numel / predictor.run_of(config).params)
    return dataclasses.replace(scaled, ranks_per_host=config.ranks_per_node)


def train(config: Configuration, predictor: Predictor, update_s: float) -> dict[str, float]:
    """One rank's part of a live run: seconds of its update, measured and as the model says."""
    model: nn.Module = small_model(config)
    mesh = init_device_mesh("cpu", (config.ranks,))
    assert isinstance(model, GPT), "the experiments' model"
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    numel = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    profile = emulated(config, predictor, numel, update_s)
    run = predictor.run_of(config)
    size = -(-numel // run.subgroups)  # so that there are as many as in the run
    modelled_s = 0.0

    def policy(workload: Workload) -> Plan:
        nonlocal modelled_s
        plan = policy_plan(config, run, workload, profile)
        # Beside backward, which copies gradients; its seconds do not count, as in the measured update.
        modelled_s = exposed(plan, workload, profile, Scope.beside(workload))
        return plan

    optimizer = DOSAdam(
        model.parameters(),
        policy=policy,
        subgroup_size=size,
        profile=profile,
        # A staging slot, as the run has it, and some for what does not divide evenly.
        device=EmulatedDevice(profile, capacity=4 * 12 * size),
    )
    found: list[dict[str, float]] = []
    for tokens, targets in Corpus(standard_library(), CONTEXT).batches(SETTLING + STEPS, BATCH, seed=0):
        model(tokens, targets).backward()
        dist.barrier()  # ranks that wait for each other in backward do not count
        optimizer.step()
        optimizer.zero_grad()
        metrics = optimizer.metrics()
        found.append({"measured_s": metrics["update_s"], "modelled_s": modelled_s})
    steady = found[SETTLING:]
    return {name: statistics.median(each[name] for each in steady) for name in found[0]}


def work(out: Path) -> NoReturn:
    """Do the work of a process under torchrun, and end it. The first writes the times of the slowest rank to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    predictor = Predictor(read_runs())
    results = []
    for policy in POLICIES.values():
        mine = train(configuration(dist.get_world_size(), policy), predictor, UPDATE_S)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        results.append({"policy": policy, **{name: max(each[name] for each in gathered) for name in mine}})
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo's may free a tensor while the interpreter ends, which aborts (torch 2.13)


def run(ranks: int) -> list[dict[str, Any]]:
    """A job of so many processes; a row for each policy.

    Raises RuntimeError with what the processes wrote if one of them fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = subprocess.run(
            [*torchrun, "-m", "experiments.job", "--worker", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not out.exists():
            raise RuntimeError(f"a job of {ranks} processes failed:\n{done.stderr[-4000:]}")
        return [{"ranks": ranks, **row} for row in json.loads(out.read_text())]


def beside_published(row: dict[str, Any], predictor: Predictor) -> dict[str, Any]:
    """The row with what was published and what is simulated of the large model, in seconds on the real machine."""
    loop = PUBLISHED.get(row["policy"])
    config = configuration(row["ranks"], loop or row["policy"], "simulated")
    outcome = predictor.outcome(config)
    return {
        **row,
        "error": row["measured_s"] / row["modelled_s"] - 1,
        "published_update_s": outcome.published_update_s if loop else None,
        "simulated_update_s": outcome.update_s,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("job", __doc__)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--worker", type=Path, help="for torchrun")
    arguments = parser.parse_args(argv)
    if arguments.worker:
        work(arguments.worker)
    predictor = Predictor(read_runs())
    rows = []
    with measuring(arguments.json, emulated=False) as (console, progress):
        for ranks in arguments.ranks:
            progress(f"{ranks} ranks")
            rows += [beside_published(row, predictor) for row in run(ranks)]
    names = {policy: name for name, policy in POLICIES.items()}
    shown = [{**row, "policy": names[row["policy"]], "error": f"{row['error']:+.1%}"} for row in rows]
    console.print(table_of("Seconds of an update; published and simulated are of the large model", shown, left=2))
    return finish({"rows": rows}, console, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
