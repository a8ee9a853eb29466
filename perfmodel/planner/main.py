"""Plan training before renting hardware.

python -m perfmodel --params 7e9 --machine rtx_4090_desktop --host 128GiB --checkpointing
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from perfmodel.format import STATE_FORMATS
from perfmodel.planner.advise import Advice, advise
from perfmodel.planner.datasheets import ALIASES, CARDS, GPUS, UTILISATION
from perfmodel.planner.fabric import FABRICS, PCIE, Fabric
from perfmodel.planner.hub import config_path
from perfmodel.planner.machine import UNKNOWN, find_machine
from perfmodel.planner.question import DEFAULT_RESERVED, VALUE_BYTES, Question
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import (
    format_bytes,
    format_count,
    format_rate,
    parse_bytes,
    parse_count,
    parse_memory,
    parse_rate,
)

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status; bad arguments exit with 2 after one line on stderr."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        question, notes = _question(options)
        advice = advise(question)
    except OSError as error:
        parser.error(f"cannot read {error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    try:
        from rich.console import Console

        from perfmodel.planner import plain, text
    except ImportError:
        parser.error("rich is needed to print the answer: pip install rich")
    if options.plot is not None:
        _plot(parser, options.plot, advice)
    notes += text.assumptions(advice)
    if options.json:
        print(json.dumps(plain.as_json(advice, notes), allow_nan=False))
    else:
        text.show(advice, notes, Console(markup=False))
    return 0


def _plot(parser: _Parser, path: Path, advice: Advice) -> None:
    try:
        from perfmodel.planner import picture
    except ImportError:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    try:
        picture.save(advice, path)
    except OSError as error:
        parser.error(f"cannot write {path}: {error.strerror or error}")
    except ValueError as error:
        parser.error(f"cannot write {path}: {str(error).splitlines()[0]}")


def _question(options: argparse.Namespace) -> tuple[Question, list[str]]:
    """What was asked, and how it was understood, a line each.

    Raises OSError for a file that cannot be read, ValueError for what cannot be.
    """
    model = _model(options)
    machine = find_machine(options.machine, options.gpu)
    rate, source = machine.flops_rate(options.dtype, options.tflops, options.utilisation)
    notes = [*machine.notes, f"forward and backward reach {rate / 1e12:.3g} TFLOP/s per GPU: {source}"]
    if options.host is not None and options.host.nominal:
        notes.append(f"--host {options.host.text}: {format_bytes(options.host.nbytes)}, as memory modules are sold")
    question = Question(
        model=model,
        profile=machine.profile,
        device_bytes=machine.device_bytes,
        host_bytes=None if options.host is None else options.host.nbytes,
        dtype=options.dtype,
        batch=options.batch,
        sequence=options.seq or min(2048, model.longest or 2048),
        checkpointing=options.checkpointing,
        eager_attention=options.eager_attention,
        ranks=options.ranks,
        zero=options.zero,
        chosen_size=options.subgroup_size,
        reserved=options.reserved,
        attach=not options.no_attach,
        flops_rate=rate,
        offload_gradients=options.offload_gradients,
        state_format=options.state_format,
        accumulation=not options.no_accumulation and options.accumulation != 1,
        micro_batches=options.accumulation or 1,
        trainable=_trainable(options.trainable, model),
        host_reserved=options.host_reserved,
        fused_loss=options.fused_loss,
        nodes=options.nodes,
        fsdp=options.fsdp or options.hsdp,
        replicas=_replicas(options),
        offload_parameters=options.offload_parameters,
        fabric=_fabric(options, machine.profile.name if machine.gpu else ""),
    )
    return question, notes


def _model(options: argparse.Namespace) -> Transformer:
    """By its size or its configuration. Raises as `_question` does."""
    if (options.params is None) == (options.config is None):
        raise ValueError(
            "expected a model: --params 7e9, or a Hugging Face config.json or name such as "
            "meta-llama/Llama-3.1-8B, and not both"
        )
    if options.config is None:
        return Transformer.of_size(options.params)
    return Transformer.load(config_path(options.config))


def _trainable(text: str | None, model: Transformer) -> float:
    """The share of the parameters that is trained. Raises ValueError for what is not in (0, 1]."""
    if text is None:
        return 1.0
    is_share = text.strip().endswith("%")
    share = _positive(text.strip().removesuffix("%")) / 100 if is_share else parse_count(text) / model.numel
    if share > 1:
        raise ValueError(f"--trainable {text} is more than the model's {format_count(model.numel)} parameters")
    return share


def _replicas(options: argparse.Namespace) -> int:
    """Of the model. Raises ValueError for options that contradict each other."""
    if not options.hsdp:
        return int(options.replicas or 1)
    if options.replicas is not None:
        raise ValueError(
            f"--hsdp keeps a replica of the model on each node, found --replicas {options.replicas} as "
            "well; choose one of them"
        )
    if options.nodes < 2:
        raise ValueError(
            "--hsdp keeps a replica of the model on each of several nodes, found 1 node; add --nodes, "
            "or choose --fsdp, with --replicas N for replicas within a node"
        )
    return int(options.nodes)


def _fabric(options: argparse.Namespace, machine: str) -> Fabric:
    """How GPUs reach one another: the machine's data sheet, and what was given instead."""
    fabric = FABRICS.get(machine, PCIE)
    if (rate := options.interconnect) is not None:
        fabric = dataclasses.replace(fabric, interconnect=rate, within=f"the {format_rate(rate)} given")
    if (rate := options.network) is not None:
        fabric = dataclasses.replace(fabric, network=rate, between=f"the {format_rate(rate)} given")
    return fabric


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m perfmodel",
        description="What fits on which machine, how long it takes there, and what more would buy. Nothing is run.",
    )
    model = parser.add_argument_group("the model")
    model.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a Hugging Face config.json, or a name whose configuration is in the cache: meta-llama/Llama-3.1-8B",
    )
    model.add_argument("--params", type=_by(parse_count), metavar="N", help="parameters instead: 7e9, 7B, 350M")
    model.add_argument("--dtype", choices=VALUE_BYTES, default="bf16", help="of parameters and gradients")
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--machine",
        default=UNKNOWN,
        metavar="NAME|PROFILE",
        help=f"{', '.join((*ALIASES, *CARDS, *GPUS))}, or a calibrated profile",
    )
    machine.add_argument("--gpu", type=_by(parse_memory), metavar="SIZE", help="memory of one GPU: 24GB, 23.6GiB")
    machine.add_argument("--host", type=_by(parse_memory), metavar="SIZE", help="memory of each node: 128GB")
    machine.add_argument(
        "--ranks", type=_by(parse_count), default=1, metavar="N", help="GPUs of the whole job, data-parallel"
    )
    machine.add_argument(
        "--nodes", type=_by(parse_count), default=1, metavar="N", help="hosts that share the ranks equally"
    )
    machine.add_argument(
        "--interconnect", type=_by(parse_rate), metavar="RATE", help="of each GPU within its node, one way: 450GB"
    )
    machine.add_argument(
        "--network", type=_by(parse_rate), metavar="RATE", help="of each node, all adapters, one way: 400Gb"
    )
    machine.add_argument(
        "--tflops", type=_positive, metavar="X", help="that forward and backward reach, instead of a data sheet's share"
    )
    machine.add_argument(
        "--utilisation", type=_share, metavar="X", help=f"share of the peak that is reached (assumed: {UTILISATION})"
    )
    machine.add_argument(
        "--reserved",
        type=_by(lambda text: 0 if text.strip() == "0" else parse_bytes(text)),
        default=DEFAULT_RESERVED,
        metavar="SIZE",
        help="GPU memory for CUDA and fragmentation (assumed: 1GiB)",
    )
    machine.add_argument(
        "--host-reserved",
        type=_by(lambda text: 0 if text.strip() == "0" else parse_bytes(text)),
        metavar="SIZE",
        help="host memory for the system and the processes of a node (assumed: 4GiB and 2GiB for each rank)",
    )
    training = parser.add_argument_group("training")
    training.add_argument("--batch", type=_by(parse_count), default=1, metavar="N", help="sequences per GPU")
    training.add_argument("--seq", type=_by(parse_count), metavar="N", help="tokens per sequence (2048)")
    training.add_argument("--checkpointing", action="store_true", help="recompute each block's activations")
    training.add_argument("--eager-attention", action="store_true", help="attention keeps its matrices")
    training.add_argument("--fused-loss", action="store_true", help="never all logits: Liger's linear cross-entropy")
    training.add_argument("--offload-gradients", action="store_true", help="DOSAdam(offload_gradients=True)")
    steps = training.add_mutually_exclusive_group()
    steps.add_argument(
        "--accumulation", type=_by(parse_count), metavar="N", help="micro-batches of each step, of which times are"
    )
    steps.add_argument("--no-accumulation", action="store_true", help="one micro-batch in each step")
    training.add_argument("--trainable", metavar="N|SHARE", help="parameters that are not frozen: 40M, 0.5%%")
    formats = [name for name in STATE_FORMATS if name is not None]
    training.add_argument("--state-format", choices=formats, help="DOSAdam(state_format=...)")
    training.add_argument(
        "--zero", type=int, choices=range(4), default=0, help="ZeRO stage that divides over the ranks (0: none)"
    )
    training.add_argument("--fsdp", action="store_true", help="FSDP2 divides the model over the ranks")
    training.add_argument("--hsdp", action="store_true", help="FSDP2 with a replica of the model on each node")
    training.add_argument(
        "--replicas", type=_by(parse_count), metavar="N", help="of the model with --fsdp (1); --hsdp: as many as nodes"
    )
    training.add_argument("--offload-parameters", action="store_true", help="FSDP2's CPUOffloadPolicy")
    training.add_argument(
        "--subgroup-size", type=_by(parse_count), default=0, metavar="N", help="parameters (as DOSAdam chooses)"
    )
    training.add_argument("--no-attach", action="store_true", help="step() waits for its updates")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object")
    output.add_argument("--plot", type=Path, metavar="FILE", help="also a picture")
    return parser


def _by(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A `type=` for argparse that keeps the parser's message."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1e-6 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"expected a number above 0 (1e-6 to 1e9), found {text!r}")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"expected a number in (0, 1], found {text!r}")
    return value
