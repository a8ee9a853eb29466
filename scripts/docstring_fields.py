"""For mkdocstrings: shows the fields that this project's docstrings describe, `name: what it is`, as a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

_FIELD = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


class DocstringFields(griffe.Extension):
    """Rewrites docstrings before they are rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each class, function and attribute once it has been read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Each line that begins with names and a colon becomes an item; indented lines below it continue the item."""
    lines: list[str] = []
    in_list = False
    for line in docstring.splitlines():
        field = _FIELD.match(line)
        if field is not None:
            if not in_list:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in field[1].split(", "))
            line = f"- {names}: {line[field.end() :]}"
        elif in_list and line and not line.startswith(" "):
            lines.append("")
        in_list = field is not None or (in_list and (not line or line.startswith(" ")))
        lines.append(line.removesuffix(" ::"))  # after which reStructuredText, too, has a block of code
    return "\n".join(lines)
