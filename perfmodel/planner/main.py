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
from perfmodel.hardware import HardwareProfile, builtin_profiles
from perfmodel.planner.advise import Advice, advise
from perfmodel.planner.datasheets import GPUS, UTILISATION
from perfmodel.planner.fabric import FABRICS, PCIE, Fabric
from perfmodel.planner.question import DEFAULT_RESERVED, VALUE_BYTES, Question
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import format_bytes, format_rate, parse_bytes, parse_count, parse_rate

OVERSTATED = 1.1
"""GPUs have less memory than their names say, but never by more than this factor."""

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status; bad arguments exit with 2 after one line on stderr."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        question = _question(options)
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
    notes = text.assumptions(advice, _compute_source(options))
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


def _question(options: argparse.Namespace) -> Question:
    """What was asked. Raises OSError for a file that cannot be read, ValueError for what cannot be."""
    if (options.params is None) == (options.config is None):
        raise ValueError("expected a model: --params 7e9, or the path of a Hugging Face config.json, and not both")
    model = Transformer.of_size(options.params) if options.config is None else Transformer.load(options.config)
    profile = _profile(options.machine)
    gpu = GPUS.get(options.machine)
    if options.gpu is None and gpu is None:
        raise ValueError(f"how much memory the GPU of {options.machine} has is not known: pass --gpu, such as 24GiB")
    device_bytes = options.gpu or (gpu.memory_bytes if gpu else 0)
    if gpu is not None and device_bytes > OVERSTATED * gpu.memory_bytes:
        raise ValueError(
            f"--gpu {format_bytes(device_bytes)} is more than the {gpu.name} of {options.machine} has, "
            f"{format_bytes(gpu.memory_bytes)}; pass a --machine profile of your own for another GPU"
        )
    return Question(
        model=model,
        profile=profile,
        device_bytes=device_bytes,
        host_bytes=options.host,
        dtype=options.dtype,
        batch=options.batch,
        sequence=options.seq or min(2048, model.longest or 2048),
        checkpointing=options.checkpointing,
        eager_attention=options.eager_attention,
        ranks=options.ranks,
        zero=options.zero,
        subgroup_size=options.subgroup_size,
        reserved=options.reserved,
        attach=not options.no_attach,
        flops_rate=_flops_rate(options),
        offload_gradients=options.offload_gradients,
        state_format=options.state_format,
        accumulation=not options.no_accumulation,
        nodes=options.nodes,
        fsdp=options.fsdp or options.hsdp,
        replicas=_replicas(options),
        offload_parameters=options.offload_parameters,
        fabric=_fabric(options),
    )


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


def _fabric(options: argparse.Namespace) -> Fabric:
    """How GPUs reach one another: the machine's data sheet, and what was given instead."""
    fabric = FABRICS.get(options.machine, PCIE)
    if (rate := options.interconnect) is not None:
        fabric = dataclasses.replace(fabric, interconnect=rate, within=f"the {format_rate(rate)} given")
    if (rate := options.network) is not None:
        fabric = dataclasses.replace(fabric, network=rate, between=f"the {format_rate(rate)} given")
    return fabric


def _flops_rate(options: argparse.Namespace) -> float | None:
    """FLOP/s that forward and backward reach; None if not known."""
    gpu = GPUS.get(options.machine)
    if options.tflops is not None:
        return float(options.tflops) * 1e12 * (options.utilisation or 1.0)
    if gpu is not None:
        return gpu.peak(options.dtype) * (options.utilisation or UTILISATION)
    if options.utilisation is not None:
        raise ValueError(f"the peak of the GPU of {options.machine} is not known: pass --tflops, not --utilisation")
    return None


def _compute_source(options: argparse.Namespace) -> str:
    """Where `_flops_rate` comes from, for people."""
    share = f"{options.utilisation or UTILISATION:.0%}"
    if options.tflops is not None:
        return "as given" if options.utilisation is None else f"{share} of --tflops"
    gpu = GPUS.get(options.machine)
    if gpu is None:
        return "not known"
    told = "" if options.utilisation else ", an assumption (--utilisation, --tflops)"
    return f"{share} of the {gpu.name}'s data sheet, {gpu.peak(options.dtype) / 1e12:g}{told}"


def _profile(machine: str) -> HardwareProfile:
    """A built-in profile by name, or one from a file."""
    known = builtin_profiles()
    if machine in known:
        return known[machine]
    if machine.endswith(".json") or Path(machine).exists():
        try:
            return HardwareProfile.load(machine)
        except UnicodeDecodeError as error:
            raise ValueError(f"{machine}: expected a profile in JSON: {error}") from error
    raise ValueError(f"no machine {machine!r}; there are {', '.join(known)}, or pass the file of a profile")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m perfmodel",
        description="What fits on which machine, how long it takes there, and what more would buy. Nothing is run.",
    )
    model = parser.add_argument_group("the model")
    model.add_argument("config", nargs="?", metavar="CONFIG.json", help="a Hugging Face config.json")
    model.add_argument("--params", type=_by(parse_count), metavar="N", help="parameters instead: 7e9, 7B, 350M")
    model.add_argument("--dtype", choices=VALUE_BYTES, default="bf16", help="of parameters and gradients")
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--machine", default="unknown", metavar="NAME|PROFILE", help=f"{', '.join(GPUS)}, or a calibrated profile"
    )
    machine.add_argument("--gpu", type=_by(parse_bytes), metavar="SIZE", help="memory of one GPU: 24GiB")
    machine.add_argument("--host", type=_by(parse_bytes), metavar="SIZE", help="memory of each node: 128GiB")
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
    training = parser.add_argument_group("training")
    training.add_argument("--batch", type=_by(parse_count), default=1, metavar="N", help="sequences per GPU")
    training.add_argument("--seq", type=_by(parse_count), metavar="N", help="tokens per sequence (2048)")
    training.add_argument("--checkpointing", action="store_true", help="recompute each block's activations")
    training.add_argument("--eager-attention", action="store_true", help="attention keeps its matrices")
    training.add_argument("--offload-gradients", action="store_true", help="DOSAdam(offload_gradients=True)")
    training.add_argument("--no-accumulation", action="store_true", help="one micro-batch in each step")
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
