"""Conversations of a coding agent, of an exact length in tokens, as each protocol writes them.

What the tools give back is source code of Python's own library: real text, another stretch for every session,
so that nothing of a new session can be known to a server.
"""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.servers import MODEL
from benchmarks.stream_reader import post
from singletree.checking import returned_turns
from singletree.checking.returned_turns import Reply, ReturnedBlock, TurnProtocol, WireBody

_TOOLS = 20
_STEPS = 25
_STRETCH = 1 << 18  # characters of source for one session
_VERBS = ("read", "write", "list", "search", "run")
_NOUNS = ("file", "folder", "symbol", "test")


@dataclass(frozen=True, slots=True)
class Step:
    """The text and the call of the assistant, and the result of the tool."""

    text: str
    call_id: str
    tool: str
    arguments: str
    result: str


@dataclass(frozen=True, slots=True)
class Session:
    """A system prompt, tools, a question, and steps since."""

    system: str
    tools: tuple[tuple[str, str, dict[str, Any]], ...]
    question: str
    steps: tuple[Step, ...]


@cache
def library() -> str:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


class Sessions:
    """Makes sessions whose tool results come to ``tokens`` tokens.

    Args:
        tokenizer: counts them.
        tokens: of a whole prompt, closely; what stands around the results is taken off.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._stretch = len(library()) // (len(library()) // _STRETCH)

    def session(self, number: int, marker: str) -> Session:
        """The session of that number; another number shares no text with it but the tools' schemas.

        ``marker`` ends the last result, and stays there as the session grows.
        """
        begin = number * self._stretch % len(library())
        source = (library() * 2)[begin : begin + self._stretch]
        beginning = "\n".join(source.split("\n")[:40])
        system = f"You are the coding agent of project {number}. {beginning}"
        session = Session(system, tools(number), f"Find out why test {number} fails, and mend it.", ())
        rest = source[len(system) :]
        around = self._tokenizer.encode(json.dumps(CHAT.body(session)), add_special_tokens=False)
        spare = self._tokens - len(around) - _STEPS * 70
        ids = self._tokenizer.encode(rest, add_special_tokens=False)
        each = spare // _STEPS
        for at in range(_STEPS):
            begin, end = ids.offsets[at * each][0], ids.offsets[(at + 1) * each][0]
            last = f" {marker}" if at == _STEPS - 1 else ""
            session = grown(session, rest[begin:end] + last, f"{number}_{at}")
        return session


def opening(marker: str) -> Session:
    """A session that has only begun, with four tools."""
    return Session("You are a coding agent.", tools(0)[:4], f"Tell me about the harbour. {marker}", ())


def grown(session: Session, result: str, name: str) -> Session:
    """The session one step later."""
    tool, _, _ = session.tools[len(session.steps) % _TOOLS]
    arguments = json.dumps({"path": f"src/module_{name}.py", "first_line": 1, "pattern": f"step {name}"})
    step = Step(f"Step {name}: I look at the next place.", f"call_{name}", tool, arguments, result)
    return replace(session, steps=(*session.steps, step))


def tools(number: int) -> tuple[tuple[str, str, dict[str, Any]], ...]:
    schema = {
        "type": "object",
        "properties": {
            "path": {
                "type": "string",
                "description": "Path from the root of the project, with / between folders.",
            },
            "first_line": {"type": "integer", "description": "Line at which to begin, counted from 1."},
            "pattern": {"type": "string", "description": "Regular expression that a line must match."},
        },
        "required": ["path"],
    }
    return tuple(
        (
            f"{verb}_{noun}",
            f"Use this to {verb} a {noun} of project {number}. Results longer than 2000 lines are cut; ask "
            "again with first_line for the rest. Never use a shell command where this tool can do the same.",
            schema,
        )
        for verb in _VERBS
        for noun in _NOUNS
    )


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of them.

    Attributes:
        turns: how it writes the turns of a session.
        mark: bytes that only an event with the answer's text has.
        limit: the field for the longest answer.
        more: fields of every request.
        headers: of every request.
    """

    turns: TurnProtocol
    mark: bytes
    limit: str = "max_tokens"
    more: tuple[tuple[str, Any], ...] = ()
    headers: str = ""

    @property
    def name(self) -> str:
        """Its name."""
        return self.turns.name

    @property
    def path(self) -> str:
        """Its route."""
        return self.turns.path

    def body(self, session: Session) -> WireBody:
        """Return a session's own fields."""
        first: WireBody = {"role": "user", "content": session.question}
        is_responses = self.name == "responses"
        history = [{"type": "message", **first} if is_responses else first]
        for step in session.steps:
            call = ReturnedBlock("call", step.arguments, step.call_id, step.tool)
            blocks = [ReturnedBlock("text", step.text), call]
            history += self.turns.written(blocks, Reply(result=step.result, listed=is_responses))
        for item in history if is_responses else ():
            if item.get("role") == "assistant":
                item["content"][0]["annotations"] = []
        tools = [self.turns.tool(*tool) for tool in session.tools]
        if self.name == "chat":
            history.insert(0, {"role": "system", "content": session.system})
            return {"messages": history, "tools": tools}
        instructions = "instructions" if is_responses else "system"
        return {instructions: session.system, self.turns.history: history, "tools": tools}

    def request(self, session: Session, tokens: int) -> bytes:
        """A request for the next turn, streamed, of at most so many tokens and a few."""
        body = {
            "model": MODEL,
            "stream": True,
            self.limit: tokens + 16,
            **dict(self.more),
            **self.body(session),
        }
        return post(self.path, json.dumps(body).encode(), self.headers)


def marker(tokens: int, delay: float = 0.0) -> str:
    """Asks the scripted engine for so many tokens, one at a time, so many seconds apart."""
    return f"[[gen:{tokens}:1:{delay:g}]]"


MESSAGES, CHAT, RESPONSES = PROTOCOLS = (
    Protocol(returned_turns.PROTOCOLS[0], b'"text_delta"', headers="anthropic-version: 2023-06-01\r\n"),
    Protocol(
        returned_turns.PROTOCOLS[1], b'"content":"R', more=(("stream_options", {"include_usage": True}),)
    ),
    Protocol(returned_turns.PROTOCOLS[2], b"output_text.delta", "max_output_tokens", (("store", False),)),
)
