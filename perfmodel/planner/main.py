"""Plan training before renting hardware.

python -m perfmodel --params 7e9 --machine rtx_4090_desktop --host 128GiB --checkpointing
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from perfmodel.hardware import HardwareProfile
from perfmodel.planner.answer import Answer, to_json
from perfmodel.planner.machine import (
    ALIASES,
    CARDS,
    FABRICS,
    GPUS,
    PCIE,
    UNKNOWN,
    Fabric,
    Machine,
    find_machine,
)
from perfmodel.planner.options import add_options, given, option
from perfmodel.planner.question import Question
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.units import (
    Memory,
    format_bytes,
    format_count,
    format_rate,
    format_tflops,
    parse_memory,
    parse_parameters,
    parse_positive,
    parse_rate,
    parse_share,
)

MACHINES = ", ".join((*ALIASES, *CARDS, *GPUS))


_machine = partial(option, None, group="the machine")
_rate = partial(_machine, metavar="RATE", type=parse_rate)


@dataclass(frozen=True)
class CommandLine:
    """Options beside those of `Question`: the model, the machine, and the output."""

    config: str | None = option(
        None,
        "a Hugging Face config.json, a folder that has one, or a name whose configuration is in the cache: "
        "meta-llama/Llama-3.1-8B",
        "the model",
        name="config",
        nargs="?",
        metavar="CONFIG",
    )
    params: int | None = option(
        None, "parameters instead: 7e9, 7B, 350M", "the model", metavar="N", type=parse_parameters
    )
    machine: str = option(UNKNOWN, f"{MACHINES}, or a calibrated profile", "the machine", metavar="NAME|PROFILE")
    gpu: Memory | None = _machine("memory of one GPU: 24GB, 23.6GiB", metavar="SIZE", type=parse_memory)  # noqa: RUF009
    interconnect: float | None = _rate("of each GPU within its node, one way: 450GB")
    disk_read: float | None = _rate("of a node's disks while they do nothing else: 7GB")
    disk_write: float | None = _rate("of a node's disks likewise: 5GB")
    tflops: float | None = _machine(
        "that forward and backward reach, instead of a data sheet's share", metavar="X", type=parse_positive
    )
    utilisation: float | None = _machine(
        "share of the peak that is reached: 0.4, 40%% (by GPU, docs/planning.md)", metavar="X", type=parse_share
    )
    json: bool = option(False, "one JSON object", "output")
    plot: Path | None = option(None, "also a picture", "output", metavar="FILE", type=Path)  # noqa: RUF009


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit status; bad arguments exit with 2 after one line on stderr."""
    parser = command_line()
    options = parser.parse_args(argv)
    asked = CommandLine(**given(CommandLine, options))
    try:
        question, notes = question_of(options)
        found = Answer(question, notes)
    except OSError as error:
        parser.error(f"cannot read {error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    if asked.plot is not None:
        try:
            from perfmodel.planner import picture

            picture.save(found, asked.plot)
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            parser.error(f"cannot write {asked.plot}: {reason}")
    if asked.json:
        print(json.dumps(found, default=to_json, allow_nan=False))
        return 0
    try:
        from perfmodel.planner.text import show
    except ImportError:
        parser.error("rich is needed to print the answer: pip install rich")
    show(found)
    return 0


def question_of(options: argparse.Namespace) -> tuple[Question, list[str]]:
    """Return the question, and how it was understood, a line each.

    Raises OSError for a file that cannot be read, ValueError for a question that cannot be.
    """
    asked, settings = CommandLine(**given(CommandLine, options)), given(Question, options)
    model = _model(asked)
    machine = find_machine(asked.machine, asked.gpu)
    dtype = settings.get("dtype", Question.dtype)
    rate, source = machine.flops_rate(dtype, asked.tflops, asked.utilisation)
    reached = f"forward and backward reach {format_tflops(rate)} per GPU"
    notes = [*machine.notes, f"{reached}: {source} (--utilisation, --tflops)"]
    settings |= {"flops_rate": rate, "flops_source": source, "fabric": _fabric(asked, machine)}
    host: Memory | None = settings.get("host_bytes")
    if host is not None:
        settings["host_bytes"] = host.nbytes
        if host.nominal:
            notes.append(f"--host {host.text}: {format_bytes(host.nbytes)}, as memory modules are sold")
    if "trainable" in settings:
        settings["trainable"] = _trainable(settings["trainable"], model)
    if settings.get("micro_batches") == 1:
        settings["accumulation"] = False
    settings.setdefault("sequence", min(Question.sequence, model.longest or Question.sequence))
    if "disk_bytes" not in settings and (asked.disk_read or asked.disk_write):
        raise ValueError("--disk-read and --disk-write are of disks that state is on; add --disk, such as 2TB")
    question = Question(model, _profile(asked, machine.rates(dtype)), machine.device_bytes, **settings)
    if host is not None and host.nbytes <= question.reserved_on_host:
        raise ValueError(
            f"--host {host.text} leaves nothing to the optimizer: the system and the processes of the node take "
            f"{format_bytes(question.reserved_on_host)} (--host-reserved); name a host with more memory"
        )
    return question, notes


def _model(asked: CommandLine) -> Transformer:
    """Return the model by its size or its configuration. Raises as `question_of` does."""
    if asked.params is not None and asked.config is not None:
        raise ValueError(
            f"expected one model, found --params and {asked.config!r}; leave one out, and write units without a space: "
            "--gpu 24GB"
        )
    if asked.params is not None:
        return Transformer.of_size(asked.params)
    if asked.config is None:
        raise ValueError(
            "expected a model: --params 7e9, or a Hugging Face config.json or name such as meta-llama/Llama-3.1-8B"
        )
    try:
        parse_parameters(asked.config)
    except ValueError:
        return Transformer.load(asked.config)
    raise ValueError(f"expected a configuration, found {asked.config!r}; for a size write --params {asked.config}")


def _fabric(asked: CommandLine, machine: Machine) -> Fabric:
    """The machine's, or the bandwidth that was given."""
    if asked.interconnect is not None:
        return Fabric(asked.interconnect, f"the {format_rate(asked.interconnect)} given")
    return FABRICS.get(machine.profile.name, PCIE) if machine.gpu else PCIE


def _profile(asked: CommandLine, profile: HardwareProfile) -> HardwareProfile:
    """The profile with the rates of disks that were given; at once they reach the same share of them as before."""
    for name, rate in (("disk_read_bandwidth", asked.disk_read), ("disk_write_bandwidth", asked.disk_write)):
        if rate is not None:
            at_once = getattr(profile, f"{name}_duplex") / getattr(profile, name) * rate
            profile = profile.replace(**{name: rate, f"{name}_duplex": at_once})
    return profile


def _trainable(text: str, model: Transformer) -> float:
    """The share of the parameters that is trained. Raises ValueError for a share outside (0, 1]."""
    try:
        share = parse_share(text) if text.strip().endswith("%") else parse_parameters(text) / model.numel
    except ValueError as error:
        raise ValueError(f"--trainable takes parameters such as 40M, or their share such as 0.5%: {error}") from None
    if share > 1:
        raise ValueError(f"--trainable {text} is more than the model's {format_count(model.numel)} parameters")
    return share


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def command_line() -> argparse.ArgumentParser:
    """The parser of all options: of `CommandLine` and of `Question`."""
    parser = _Parser(
        prog="python -m perfmodel",
        description="What fits on which machine, how long it takes there, which settings would help. Nothing is run.",
    )
    groups: dict[str, Any] = {
        title: parser.add_argument_group(title) for title in ("the model", "the machine", "training", "output")
    }
    groups["steps"] = groups["training"].add_mutually_exclusive_group()
    for kind in (CommandLine, Question):
        add_options(kind, groups)
    return parser
