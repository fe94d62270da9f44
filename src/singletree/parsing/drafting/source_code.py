"""Writes a family as the Python source that declares it, and one of its turns as the TOML of a sample."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.parsing.family import Family, Form, Literals

_WIDTH = 100


def source_of(family: Family) -> str:
    """Return a Python module that declares ``family``, with only the fields that differ from the defaults."""
    used = [
        Family,
        *([Form] if family.forms else []),
        *([Literals] if any(f.literals for f in family.forms) else []),
    ]
    name = re.sub(r"\W", "_", family.name).upper() or "FAMILY"
    imported = ", ".join(kind.__name__ for kind in used)
    return f"from singletree.parsing.family import {imported}\n\n{name} = {_written(family, 0)}\n"


def _written(value: Any, depth: int) -> str:
    if isinstance(value, Family | Form | Literals):
        named = [(f.name, getattr(value, f.name)) for f in fields(value)]
        defaults = {f.name: f.default for f in fields(value) if f.default is not MISSING}
        items = [
            f"{name}={_written(item, depth + 1)}"
            for name, item in named
            if item != defaults.get(name, MISSING)
        ]
        return _laid_out(f"{type(value).__name__}(", items, ")", depth)
    if isinstance(value, tuple):
        items = [_written(item, depth + 1) for item in value]
        return _laid_out("(", [*items[:-1], f"{items[-1]},"] if len(items) == 1 else items, ")", depth)
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """Return ``text`` in double quotes, unless that needs escapes."""
    written = repr(text)
    return f'"{written[1:-1]}"' if written[0] == "'" and '"' not in text and "\\'" not in written else written


def _laid_out(opener: str, items: list[str], closer: str, depth: int) -> str:
    line = opener + ", ".join(items).removesuffix(",)") + closer
    if "\n" not in line and len(line) + 4 * depth <= _WIDTH and depth:
        return line
    indent = "    " * (depth + 1)
    return (
        opener
        + "".join(f"\n{indent}{item.removesuffix(',')}," for item in items)
        + f"\n{'    ' * depth}{closer}"
    )


def sample_of(case: str, text: str, tail: str, parts: Iterable[Part]) -> str:
    """Return one turn as an entry of a sample file.

    Args:
        case: name of the sample.
        text: the text of the model.
        tail: the end of the prompt before it.
        parts: the parts that the text is parsed into.
    """
    opened = f"tail = {_toml(tail)}\n" if tail else ""
    listed = "".join(f"  {{ {_part(part)} }},\n" for part in parts)
    return f"[[sample]]\ncase = {_toml(case)}\n{opened}text = {_toml(text)}\nparts = [\n{listed}]\n"


def _part(part: Part) -> str:
    if isinstance(part, ToolCall):
        return f"call = {_toml(part.name)}, arguments = {_toml(part.arguments)}"
    assert isinstance(part, Text | Reasoning)
    return f"{'text' if isinstance(part, Text) else 'reasoning'} = {_toml(part.text)}"


def _toml(text: str) -> str:
    """Return a TOML string; a literal one where possible, as it needs no escapes."""
    if "'" not in text and text.isprintable():
        return f"'{text}'"
    if "'''" not in text and not text.endswith("'") and text.replace("\n", "").isprintable():
        return f"'''\n{text}'''"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
