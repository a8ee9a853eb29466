"""Options of the command, each declared once, as a field of a frozen dataclass: name, type, unit, help and default."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class Option(NamedTuple):
    """The option that a field of a dataclass declares.

    group: of options, in which `--help` shows it.
    text: its help. name: as the user writes it; a positional argument has no dashes.
    write: makes the text of a value, as the user would write it.
    back: the words for a change to the default, if not `without --name`; empty if another option implies it.
    argument: further arguments of `argparse.add_argument`: type, unit (metavar), choices.
    """

    group: str
    text: str
    name: str
    write: Callable[[Any], str]
    back: str | None
    argument: Mapping[str, Any]


def option(
    default: Any,
    text: str,
    group: str = "training",
    *,
    name: str = "",
    write: Callable[[Any], str] = str,
    back: str | None = None,
    **argument: Any,
) -> Any:
    """A field with an option. name: if it is not the field's; the rest as in `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(group, text, name, write, back, argument)})


def options_of(kind: Any) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """The fields of a dataclass that have options, with the names of these: `--no-x` for a flag that is on."""
    for each in dataclasses.fields(kind):
        if found := each.metadata.get("option"):
            off = "no-" if each.default is True else ""
            yield each, found._replace(name=found.name or f"--{off}{each.name.replace('_', '-')}")


def add_options(kind: Any, groups: Mapping[str, Any]) -> None:
    """Add the options of a dataclass to their groups of the command line. Options that are not given are not set."""
    for each, found in options_of(kind):
        argument = {"default": argparse.SUPPRESS, "help": found.text, **found.argument}
        if isinstance(each.default, bool):
            argument["action"] = "store_false" if each.default else "store_true"
        if found.name.startswith("-"):
            argument["dest"] = each.name
        groups[found.group].add_argument(found.name, **argument)


def given(kind: Any, command_line: argparse.Namespace) -> dict[str, Any]:
    """The values that a command line gives to the fields of a dataclass."""
    names = {each.name for each, _ in options_of(kind)}
    return {name: value for name, value in vars(command_line).items() if name in names}


def difference(before: Any, after: Any) -> str:
    """Write the options that turn `before` into `after`: `--batch 1 --fsdp, without --checkpointing`."""
    added, left_out = [], []
    for each, found in options_of(after):
        value = getattr(after, each.name)
        if value == getattr(before, each.name):
            continue
        if value != each.default:
            added.append(found.name if isinstance(value, bool) else f"{found.name} {found.write(value)}")
        elif found.back is not None:
            added += [found.back] * bool(found.back)
        elif isinstance(value, bool | None):
            left_out.append(f"without {found.name}")
        else:
            added.append(f"{found.name} {found.write(value)}")
    return ", ".join([*[" ".join(added)] * bool(added), *left_out])
