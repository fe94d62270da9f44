"""Open models for agent harnesses: exact prompts in, exact events out.

This package is the library; parsing needs nothing outside the standard library. ``singletree serve`` runs the server.

Example:
    >>> from singletree import families, parse
    >>> turn = parse(families.get("hermes"), '<tool_call>\\n{"name": "ls", "arguments": {}}\\n</tool_call>')
    >>> turn.tool_calls[0].name
    'ls'
"""

from importlib.metadata import PackageNotFoundError, version

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

try:
    __version__ = version("singletree")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0"
