"""Finds in source code what a program can say to its user: exceptions, warnings, logs, command-line errors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SAYING = {"warn", "_warn", "info", "warning", "error", "log", "ArgumentTypeError", "SystemExit"}


class Message(NamedTuple):
    """One message. parts: its text between the values that are filled in."""

    where: str
    parts: tuple[str, ...]

    @property
    def essence(self) -> str:
        """The longest part, by which the message can be found."""
        return plain(max(self.parts, key=len, default=""))


def plain(text: str) -> str:
    """Without what Markdown marks code with, and with single spaces."""
    return " ".join(text.replace("`", "").split())


def messages(package: Path) -> Iterator[Message]:
    """All messages in the source files of a package that have words of their own."""
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _says(call.func):
                parts = tuple(part for argument in call.args for part in _parts(argument, constants))
                if any(len(part.split()) > 1 for part in parts):
                    yield Message(f"{path.relative_to(package.parent)}:{call.lineno}", parts)


def _says(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _SAYING or (name.endswith("Error") and name != "AssertionError")


def _parts(text: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    """The text of a literal, an f-string, or a logger's format, between the values."""
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        yield from text.value.replace("%d", "%s").split("%s")
    elif isinstance(text, ast.JoinedStr):
        for value in text.values:
            yield from _parts(value.value if isinstance(value, ast.FormattedValue) else value, constants)
    elif isinstance(text, ast.Name) and text.id in constants:
        yield from _parts(constants[text.id], constants)
