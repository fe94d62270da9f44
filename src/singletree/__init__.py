"""Open models for agent harnesses: exact prompts in, exact events out.

This package is the library; parsing needs nothing outside the standard library. ``singletree serve`` runs the server.

Example:
    >>> from singletree import families, parse
    >>> turn = parse(families.get("hermes"), '<tool_call>\\n{"name": "ls", "arguments": {}}\\n</tool_call>')
    >>> turn.tool_calls[0].name
    'ls'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from singletree import families
    from singletree.conversation import Reasoning, Text, Tool, ToolCall, Turn
    from singletree.errors import SingletreeError
    from singletree.events import (
        ArgumentsDelta,
        Event,
        Fold,
        Markup,
        ReasoningDelta,
        TextDelta,
        ToolCallBroken,
        ToolCallEnd,
        ToolCallStart,
        fold,
    )
    from singletree.parsing.family import Family, Form, Literals
    from singletree.parsing.parser import Parser, parse
    from singletree.parsing.render_turn import render_turn

    __version__: str

__all__ = [
    "ArgumentsDelta",
    "Event",
    "Family",
    "Fold",
    "Form",
    "Literals",
    "Markup",
    "Parser",
    "Reasoning",
    "ReasoningDelta",
    "SingletreeError",
    "Text",
    "TextDelta",
    "Tool",
    "ToolCall",
    "ToolCallBroken",
    "ToolCallEnd",
    "ToolCallStart",
    "Turn",
    "__version__",
    "families",
    "fold",
    "parse",
    "render_turn",
]

_HOMES = ("conversation", "errors", "events", "parsing.family", "parsing.parser", "parsing.render_turn")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: Ctrl-C could not end the command line quietly during the imports."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = _version() if name == "__version__" else _find(name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _find(name: str) -> Any:
    from importlib import import_module

    if name == "families":
        return import_module(f"{__name__}.families")
    modules = (import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(vars(module)[name] for module in modules if name in vars(module))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("singletree")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0"
