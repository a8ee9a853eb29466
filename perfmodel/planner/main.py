"""Plan training before renting hardware.

python -m perfmodel --params 7e9 --machine rtx_4090_desktop --host 128GiB --checkpointing
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from perfmodel.planner.answer import answer
from perfmodel.planner.machine import ALIASES, CARDS, FABRICS, GPUS, PCIE, UNKNOWN, find_machine
from perfmodel.planner.question import Question, add_options
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import (
    format_bytes,
    format_count,
    format_rate,
    parse_memory,
    parse_parameters,
    parse_positive,
    parse_rate,
    parse_share,
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status; bad arguments exit with 2 after one line on stderr."""
    parser = command_line()
    options = parser.parse_args(argv)
    try:
        question, notes = question_of(options)
        found = answer(question, notes)
    except OSError as error:
        parser.error(f"cannot read {error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    if options.plot is not None:
        try:
            from perfmodel.planner import picture

            picture.save(found, question, options.plot)
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            parser.error(f"cannot write {options.plot}: {reason}")
    if options.json:
        print(json.dumps(found, allow_nan=False))
        return 0
    try:
        from perfmodel.planner.text import show
    except ImportError:
        parser.error("rich is needed to print the answer: pip install rich")
    show(found)
    return 0


def question_of(options: argparse.Namespace) -> tuple[Question, list[str]]:
    """What was asked, and how it was understood, a line each.

    Raises OSError for a file that cannot be read, ValueError for what cannot be.
    """
    settings = {f.name: getattr(options, f.name) for f in dataclasses.fields(Question) if hasattr(options, f.name)}
    model = _model(options)
    machine = find_machine(options.machine, options.gpu)
    dtype = settings.get("dtype", Question.dtype)
    settings["flops_rate"], source = machine.flops_rate(dtype, options.tflops, options.utilisation)
    settings["flops_source"] = source
    reached = f"forward and backward reach {settings['flops_rate'] / 1e12:.3g} TFLOP/s per GPU"
    notes = [*machine.notes, f"{reached}: {source} (--utilisation, --tflops)"]
    if options.host is not None:
        settings["host_bytes"] = options.host.nbytes
        if options.host.nominal:
            size = format_bytes(options.host.nbytes)
            notes.append(f"--host {options.host.text}: {size}, as memory modules are sold")
    if "trainable" in settings:
        settings["trainable"] = _trainable(settings["trainable"], model)
    if settings.get("micro_batches") == 1:
        settings["accumulation"] = False
    if options.hsdp:
        settings |= {"fsdp": True, "replicas": _replicas_of_nodes(settings)}
    settings.setdefault("sequence", min(Question.sequence, model.longest or Question.sequence))
    settings["fabric"] = FABRICS.get(machine.profile.name, PCIE) if machine.gpu else PCIE
    for name, label in (("interconnect", "within"), ("network", "between")):
        if (rate := getattr(options, name)) is not None:
            given = {name: rate, label: f"the {format_rate(rate)} given"}
            settings["fabric"] = dataclasses.replace(settings["fabric"], **given)
    profile = machine.profile
    if settings.get("disk_bytes") is None and (options.disk_read or options.disk_write or "disk_endurance" in settings):
        raise ValueError(
            "--disk-read, --disk-write and --disk-endurance are of disks that state is on; add --disk, such as 2TB"
        )
    for name, rate in (("disk_read_bandwidth", options.disk_read), ("disk_write_bandwidth", options.disk_write)):
        if rate is not None:  # beside each other they do the same share of it as before
            beside = getattr(profile, f"{name}_duplex") / getattr(profile, name) * rate
            profile = profile.replace(**{name: rate, f"{name}_duplex": beside})
    question = Question(model, profile, machine.device_bytes, **settings)
    if options.host is not None and options.host.nbytes <= question.reserved_on_host:
        raise ValueError(
            f"--host {options.host.text} leaves nothing to the optimizer: the system and the processes of a node take "
            f"{format_bytes(question.reserved_on_host)} (--host-reserved); name a host with more memory"
        )
    return question, notes


def _model(options: argparse.Namespace) -> Transformer:
    """By its size or its configuration. Raises as `question_of` does."""
    if (options.params is None) == (options.config is None):
        raise ValueError(
            "expected a model: --params 7e9, or a Hugging Face config.json or name such as "
            "meta-llama/Llama-3.1-8B, and not both"
        )
    if options.config is None:
        return Transformer.of_size(options.params)
    return Transformer.load(options.config)


def _trainable(text: str, model: Transformer) -> float:
    """The share of the parameters that is trained. Raises ValueError for what is not in (0, 1]."""
    try:
        share = parse_share(text) if text.strip().endswith("%") else parse_parameters(text) / model.numel
    except ValueError as error:
        raise ValueError(f"--trainable takes parameters such as 40M, or their share such as 0.5%: {error}") from None
    if share > 1:
        raise ValueError(f"--trainable {text} is more than the model's {format_count(model.numel)} parameters")
    return share


def _replicas_of_nodes(settings: dict[str, int]) -> int:
    """One on each of several nodes. Raises ValueError for options that contradict that."""
    nodes = settings.get("nodes", 1)
    if "replicas" in settings or nodes < 2:
        raise ValueError(
            "--hsdp keeps a replica of the model on each of several nodes, found "
            f"--nodes {nodes} and --replicas {settings.get('replicas', nodes)}; choose --nodes 2 or more without "
            "--replicas, or --fsdp with --replicas N for replicas within a node"
        )
    return nodes


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def command_line() -> argparse.ArgumentParser:
    """Options about the model, the machine and the output; those of `Question` are added to them."""
    parser = _Parser(
        prog="python -m perfmodel",
        description="What fits on which machine, how long it takes there, and what more would buy. Nothing is run.",
    )
    model = parser.add_argument_group("the model")
    config = (
        "a Hugging Face config.json, a folder that has one, or a name whose configuration is in the cache: "
        "meta-llama/Llama-3.1-8B"
    )
    model.add_argument("config", nargs="?", metavar="CONFIG", help=config)
    model.add_argument("--params", type=parse_parameters, metavar="N", help="parameters instead: 7e9, 7B, 350M")
    machine = parser.add_argument_group("the machine")
    names = f"{', '.join((*ALIASES, *CARDS, *GPUS))}, or a calibrated profile"
    machine.add_argument("--machine", default=UNKNOWN, metavar="NAME|PROFILE", help=names)
    reached = "that forward and backward reach, instead of a data sheet's share"
    share = "share of the peak that is reached: 0.4, 40%% (by GPU, docs/planning.md)"
    for name, parse, metavar, text in (
        ("gpu", parse_memory, "SIZE", "memory of one GPU: 24GB, 23.6GiB"),
        ("host", parse_memory, "SIZE", "memory of each node: 128GB"),
        ("interconnect", parse_rate, "RATE", "of each GPU within its node, one way: 450GB"),
        ("network", parse_rate, "RATE", "of each node, all adapters, one way: 400Gb"),
        ("disk-read", parse_rate, "RATE", "of a node's disks while they do nothing else: 7GB"),
        ("disk-write", parse_rate, "RATE", "of a node's disks likewise: 5GB"),
        ("tflops", parse_positive, "X", reached),
        ("utilisation", parse_share, "X", share),
    ):
        machine.add_argument(f"--{name}", type=parse, metavar=metavar, help=text)
    training = parser.add_argument_group("training")
    steps = training.add_mutually_exclusive_group()
    add_options({"model": model, "machine": machine, "training": training, "steps": steps})
    training.add_argument("--hsdp", action="store_true", help="FSDP2 with a replica of the model on each node")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object")
    output.add_argument("--plot", type=Path, metavar="FILE", help="also a picture")
    return parser
