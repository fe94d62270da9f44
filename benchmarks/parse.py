"""CPU of the parser for each token: text, reasoning and one call with a long argument, in pieces of about a token."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence

from singletree import families
from singletree.conversation import Reasoning, Tool, ToolCall
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser
from singletree.parsing.render_turn import render_turn

FAMILIES = ("qwen3", "qwen3_coder", "kimi_k2", "deepseek_v4")

_PIECE = re.compile(r"<[|/]?[\w:▁｜|]+>|\s?\w{1,6}|\s+|[^\w\s]{1,2}")
_PROSE = 'The quick <b>brown</b> fox said "no", jumped\nover `x < y` the lazy dog (see step_12): a[i] = {"k": 1}.\n'
_CODE = 'def f(path: str) -> dict:\n    """Read `path`."""\n'
_CODE += "    if a < b and x[\"k\"] != 'v\\n': # naïve 数据\n        return {}\n"
_TOOL = Tool(
    "write_file", parameters={"properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
)
_ROUNDS = 3


def costs(name: str, sizes: Sequence[int]) -> dict[str, float]:
    """CPU µs a token of one family, by what is read; best of three."""
    family = families.get(name)
    return {kind: _cost(family, pieces) for kind, pieces in _streams(family, sizes).items()}


def _cost(family: Family, pieces: Sequence[str]) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        parser = Parser(family, [_TOOL], family.message_header or " ")
        feed = parser.feed
        began = time.process_time()
        for piece in pieces:
            feed(piece)
        parser.close()
        best = min(best, time.process_time() - began)
    return best / len(pieces) * 1e6


def _streams(family: Family, sizes: Sequence[int]) -> dict[str, list[str]]:
    """Text, reasoning, and a call by the tokens of its argument, in pieces."""
    found = {
        "text": _pieces(_PROSE * 200),
        "reasoning": _pieces(render_turn(family, [Reasoning(_PROSE * 200)])),
    }
    for size in sizes:
        content = _CODE * max(1, size // len(_pieces(_CODE)))
        arguments = json.dumps({"path": "a.py", "content": content}, ensure_ascii=False)
        found[f"an argument of {size} tokens"] = _pieces(
            render_turn(family, [ToolCall(_TOOL.name, arguments, "abcdefghi")])
        )
    return found


def _pieces(text: str) -> list[str]:
    cut = _PIECE.findall(text)
    assert "".join(cut) == text
    return cut
