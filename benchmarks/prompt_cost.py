"""Long prompts: time and CPU to the first token, CPU of a turn as its conversation grows, CPU of ``count_tokens``."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks import tool_session
from benchmarks.processor import Watch, wait_idle
from benchmarks.servers import MODEL, Server
from benchmarks.stream_reader import Answer, WrongAnswer, post, read_streams
from benchmarks.tool_session import Protocol, Session, Step, grown, marker, prompt_tokens

_ANSWER = 4  # tokens
MARKER = marker(_ANSWER)
_RESULT = 2000  # characters that a further step adds


class PromptCost(NamedTuple):
    """One request with a long prompt.

    Attributes:
        cpu: CPU ms of the measured process for the whole request, with an answer of four tokens.
        first: ms from the first byte sent to the first text read.
    """

    cpu: float
    first: float


def prompt_costs(server: Server, protocol: Protocol, session: Session) -> dict[str, list[PromptCost]]:
    """Send one session cold, twice again (``repeat``), and then longer by one step and by two (``grown``)."""
    longer = grown(session, f"{session.steps[3].result[:_RESULT]} {MARKER}", "next")
    longest = grown(longer, f"{session.steps[5].result[:_RESULT]} {MARKER}", "last")
    costs: dict[str, list[PromptCost]] = {}
    sessions = (session, session, session, longer, longest)
    for kind, each in zip(("cold", "repeat", "repeat", "grown", "grown"), sessions, strict=True):
        watch = Watch((server.pid,))
        (answer,) = read_streams(server.port, [protocol.request(each, _ANSWER)], protocol.mark)
        costs.setdefault(kind, []).append(PromptCost(watch.stop().cpu[0] * 1e3, answer.first * 1e3))
    return costs


_TURNS = 100
_TURN_TOKENS = 1900  # of a tool's result
_LONGEST = 120  # tokens, more than any turn has
_FIRST_WORD = b"Perhaps"
_CALL_ID = re.compile(rb'"(?:call_id|id)":"((?:call|toolu)[^"]*)"')

Point = tuple[float, float]
"""Thousands of tokens of a prompt, and CPU ms of its turn."""


def slopes(
    running: Sequence[Server], protocol: Protocol, number: int, tokenizer: Tokenizer
) -> dict[str, float]:
    """Hold one conversation of 100 turns with each server; return CPU ms for each 1000 tokens by server.

    The engine writes given turns, and they come back in the form in which a harness sends them.
    """
    library = tool_session.library()
    begin = number * 1_000_003 % len(library)
    text = (library * 2)[begin : begin + _TURN_TOKENS * (_TURNS + 8) * 6]
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    at = [offsets[_TURN_TOKENS * turn][0] for turn in range(_TURNS + 1)]
    results = [text[start:end] for start, end in pairwise(at)]
    talks = [_converse(server, protocol, results, number) for server in running]
    # Turn by turn, so that whatever else the machine does affects all alike.
    points = zip(*zip(*talks, strict=True), strict=True)
    return {server.name: theil_sen(each) for server, each in zip(running, points, strict=True)}


def _converse(server: Server, protocol: Protocol, results: Sequence[str], number: int) -> Iterator[Point]:
    session = replace(tool_session.opening(""), tools=tool_session.tools(number))
    for at, result in enumerate(results):
        step, echo = _next_step(session, number, at)
        asked = _with_result(session, f"{result}\n{echo}\nEnd of result {at}.")
        watch = Watch((server.pid,))
        (answer,) = read_streams(server.port, [protocol.request(asked, _LONGEST)], _FIRST_WORD)
        yield prompt_tokens(answer) / 1e3, watch.stop().cpu[0] * 1e3
        session = replace(asked, steps=(*asked.steps, replace(step, call_id=_call_id(answer))))


def _next_step(session: Session, number: int, at: int) -> tuple[Step, str]:
    """The next turn, and the marker that makes the engine write it."""
    tool, _, _ = session.tools[at % len(session.tools)]
    arguments = json.dumps({"path": f"src/{number}/module_{at}.py", "first_line": at})
    thought = f"Perhaps module {at} of {number} is at fault, as its test says nothing about the border."
    text = f"Step {at}: I look at the next place."
    call = f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'
    return Step(
        text, "", tool, arguments, "", thought
    ), f"[[echo:<think>\n{thought}\n</think>\n\n{text}\n{call}]]"


def _with_result(session: Session, result: str) -> Session:
    """The session with ``result`` as the answer to its last call, or to begin with as the question."""
    if not session.steps:
        return replace(session, question=result)
    *earlier, last = session.steps
    return replace(session, steps=(*earlier, replace(last, result=result)))


def _call_id(answer: Answer) -> str:
    found = _CALL_ID.findall(b"".join(answer.tail))
    if not found:
        raise WrongAnswer(f"an answer without a call: {answer.end!r}")
    return str(found[-1].decode())


def theil_sen(points: Sequence[Point]) -> float:
    """The median of the slopes between all pairs, which a few slow turns do not move."""
    return statistics.median(
        (y - v) / (x - u) for i, (x, y) in enumerate(points) for u, v in points[:i] if x != u
    )


_COUNTED_TOKENS = 100_000
_AT_ONCE = 25


def count_costs(
    server: Server, tokenizer: Tokenizer, number: int, repeats: int
) -> Iterator[tuple[str, float]]:
    """CPU ms of ``count_tokens``: of a new session, the same again, one step later, and 25 requests of one tool each.

    Claude Code's ``/context`` sends the last. Another ``number``, another text.
    """
    session = tool_session.Sessions(tokenizer, _COUNTED_TOKENS // 2).session(number, "")
    source, at, counted = tool_session.library(), number * 7919, 0
    while counted < _COUNTED_TOKENS // 2:
        result = source[at : at + 8000]
        at += len(result)
        counted += len(tokenizer.encode(result, add_special_tokens=False)) + 70
        session = grown(session, result, f"{number}_{at}")
    body = tool_session.MESSAGES.body(session)
    later = tool_session.MESSAGES.body(grown(session, source[:8000], "last"))
    yield "cold", _count_cost(server, [body])
    wait_idle(server.pid)  # singletree makes its tokenizer faster after the first long prompt.
    for _ in range(repeats):
        yield "known", _count_cost(server, [body])
    yield "a step later", _count_cost(server, [later])
    question = [{"role": "user", "content": "x"}]
    parts = [{"messages": question, "tools": [tool]} for tool in (body["tools"] * 2)[:_AT_ONCE]]
    for _ in range(repeats):
        yield f"{_AT_ONCE} tools at once", _count_cost(server, parts)


def _count_cost(server: Server, bodies: Sequence[Mapping[str, object]]) -> float:
    path, headers = f"{tool_session.MESSAGES.path}/count_tokens", tool_session.MESSAGES.headers
    requests = [post(path, json.dumps({"model": MODEL, **body}).encode(), headers) for body in bodies]
    watch = Watch((server.pid,))
    read_streams(server.port, requests, b'"input_tokens":')
    return watch.stop().cpu[0] * 1e3
