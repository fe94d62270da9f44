"""Sessions: which one a request belongs to, and how its prompt goes on from the session's last one.

A session holds several lines, each the last prompt of one conversation: sub-agents, title requests and web searches
come under their session's name with prompts of their own. A request goes on from the line that has most of its
tokens. They are compared as bytes, and messages are looked at when they are new, so a request costs what is new in it.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from singletree.conversation import Request, Tool, Turn
from singletree.events import FinishReason
from singletree.server.catalog import Model
from singletree.server.causes import Break, explain
from singletree.server.pipeline import Generation, Prompt
from singletree.server.prefix import WIDTH, Fingerprint, Line, ToolList, common_tokens, fingerprint, part

SESSION_HEADERS: tuple[tuple[str, ...], ...] = (
    ("x-singletree-session",),
    ("x-dynamo-session-id",),
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("session-id", "thread-id"),
    ("thread-id",),
    ("session_id",),
    ("x-session-id",),
    ("x-session-affinity",),
)
"""The headers, in lower case, in which clients name their session, the plainest word first. Those behind the first
of a row tell what runs side by side in one session: Claude Code's sub-agents and Codex's threads. ``session_id`` is
pi's, the two after it OpenCode's."""

_LONGEST_KEY = 256
_LINES = 8
_STEPS = 64
_STEP_BYTES = 1000
_HEAD_TOKENS = 16
_ALIKE = 16
"""How many sessions without a name are looked through that begin with the same tokens."""
_HEADS = 4096
_SAID: tuple[FinishReason, ...] = ("stop", "length", "context_overflow")

Course = Literal["first", "appended", "back", "broken"]
"""How a prompt goes on: it begins a line; it has all of its line's last prompt and turn; it goes on from an earlier
turn of its line; it lacks something that should be there."""


def session_key(headers: Mapping[str, str], request: Request) -> str | None:
    """The client's own name of the session that ``request`` belongs to: by header, else by the body's field
    (``prompt_cache_key``, ``metadata.user_id`` …); None when it gives none.

    Args:
        headers: with lower-case names.
    """
    for names in SESSION_HEADERS:
        if headers.get(names[0], "").strip():
            parts = dict.fromkeys(headers.get(name, "").strip() for name in names)
            return "/".join(filter(None, parts))[:_LONGEST_KEY]
    return request.session[:_LONGEST_KEY] if request.session else None


@dataclass(slots=True)
class Step:
    """One request of a session.

    Attributes:
        session: the session's key.
        at: unix seconds.
        line: the number of its line in the session, from 1.
        matched: tokens that the prompt begins with and its line has.
        generated: tokens that were generated on it.
        cached: tokens of the prompt that the engine had; None until it has told.
    """

    session: str
    at: float
    model: str
    line: int
    course: Course
    prompt_tokens: int
    matched: int
    broken: Break | None = None
    generated: int = 0
    cached: int | None = None

    @property
    def new(self) -> int:
        """Tokens that have to be read if the engine has all that matched."""
        return self.prompt_tokens - self.matched

    @property
    def lost(self) -> int:
        """Tokens that should have matched and did not."""
        return self.broken.lost if self.broken else 0


@dataclass(slots=True)
class Session:
    """What is kept of one session: its lines by number, the one used last at the end, and its last steps.

    Attributes:
        requests, lines_made: how many there were, those no longer kept included.
        head: what its first prompt began with, when the session has no name of its own.
    """

    key: str
    head: bytes | None = None
    lines: OrderedDict[int, Line] = field(default_factory=OrderedDict)
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=_STEPS))
    requests: int = 0
    lines_made: int = 0

    @property
    def bytes(self) -> int:
        """About what it costs."""
        tools = {id(line.tools): line.tools.bytes for line in self.lines.values()}
        lines = sum(line.bytes for line in self.lines.values())
        return lines + sum(tools.values()) + _STEP_BYTES * (1 + len(self.steps))


class _Found(NamedTuple):
    session: Session
    number: int
    line: Line
    matched: int


@dataclass(frozen=True, slots=True)
class Opened:
    """A request under way: its step, what its line will be made of, and the line in whose place that will be."""

    step: Step
    model: Model
    tokens: bytes
    messages: tuple[Fingerprint, ...]
    tools: ToolList
    ends: tuple[tuple[int, int], ...] = ()
    head: bytes | None = None
    line: Line | None = None


class Sessions:
    """The sessions of one server, least recently used out first, bounded in bytes. With a ``limit`` of 0 nothing is
    kept: every request is its session's first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._nameless: OrderedDict[bytes, deque[str]] = OrderedDict()
        self.bytes = 0

    def __iter__(self) -> Iterator[Session]:
        """The sessions, the one used last first."""
        return reversed(self._sessions.values())

    def get(self, key: str) -> Session | None:
        """The session of that name, if anything is kept of it."""
        return self._sessions.get(key)

    def tools_of(self, key: str | None, turns: Sequence[Turn]) -> tuple[Tool, ...]:
        """The tools of the session's conversation to which ``turns`` only add a question; none without such a one."""
        session = self._sessions.get(key) if key else None
        if session is None or len(turns) < 2 or turns[-1].role not in ("user", "system"):
            return ()
        lines = (line for line in reversed(session.lines.values()) if line.tools.tools)
        return next((line.tools.tools for line in lines if _asks_once_more(line, turns)), ())

    def open(self, key: str | None, model: Model, prompt: Prompt) -> Opened:
        """Compare ``prompt`` with what is kept of its session: the one called ``key`` or, for None, one whose prompts
        begin alike.
        """
        tokens = prompt.token_ids.tobytes()
        head = tokens[: _HEAD_TOKENS * WIDTH] if key is None else None
        found = self._longest(self._candidates(key, head), model.name, tokens)
        tools = ToolList.of(prompt.tools, None if found is None else found.line.tools)
        if found is None:
            messages = tuple(map(fingerprint, prompt.turns))
            return Opened(self._first(key, model, tokens), model, tokens, messages, tools, head=head)
        appended = found.matched >= found.line.expected
        known = found.line.messages if appended else ()
        edited = bool(prompt.applied_edits)
        parting = part(
            found.line, found.matched, prompt.turns, tools, prompt.settings, known=known, edited=edited
        )
        if not appended and parting.starts_over:
            first = self._first(key, model, tokens, found.matched)
            return Opened(first, model, tokens, parting.messages, tools, head=head)
        back = not appended and parting.goes_back
        broken = None if appended or back else explain(parting, tokens, model)
        course: Course = "appended" if appended else "back" if back else "broken"
        number = found.session.lines_made + 1 if back else found.number
        step = _step(found.session.key, model, number, course, tokens, found.matched, broken)
        ends = tuple(end for end in found.line.ends if end[0] <= found.matched)
        replaced = None if back else found.line
        return Opened(step, model, tokens, parting.messages, tools, ends, found.session.head, replaced)

    def close(self, opened: Opened, generation: Generation) -> None:
        """The request is over: the next one goes on from its prompt and what was generated."""
        step = opened.step
        step.generated, step.cached = len(generation.told), generation.known_cached()
        if self._limit == 0:
            return
        session = self._sessions.pop(step.session, None) or Session(step.session, opened.head)
        self.bytes -= session.bytes if session.requests else 0
        line = _line(opened, generation)
        if opened.line is None or session.lines.get(step.line) is not opened.line:
            # Another request went on from there meanwhile.
            step.line = session.lines_made = session.lines_made + 1
        session.lines[step.line] = line
        session.lines.move_to_end(step.line)
        if len(session.lines) > _LINES:
            session.lines.popitem(last=False)
        session.steps.append(step)
        session.requests += 1
        self._sessions[step.session] = session
        if session.head is not None:
            self._index(session.key, session.head)
        self.bytes += session.bytes
        self._shrink()

    def _candidates(self, key: str | None, head: bytes | None) -> list[Session]:
        keys = [key] if key is not None else self._nameless.get(head or b"", ())
        return [self._sessions[each] for each in keys if each in self._sessions]

    def _longest(self, sessions: Sequence[Session], model: str, tokens: bytes) -> _Found | None:
        """The line of ``model`` with most of ``tokens``, of several the one that was used last."""
        best: _Found | None = None
        for session in sessions:
            for number, line in reversed(session.lines.items()):
                matched = common_tokens(tokens, line.tokens) if line.model == model else 0
                if matched and (best is None or matched > best.matched):
                    best = _Found(session, number, line, matched)
        return best

    def _first(self, key: str | None, model: Model, tokens: bytes, matched: int = 0) -> Step:
        named = key if key is not None else f"nameless-{hashlib.blake2b(tokens, digest_size=6).hexdigest()}"
        session = self._sessions.get(named)
        number = 1 if session is None else session.lines_made + 1
        return _step(named, model, number, "first", tokens, matched)

    def _index(self, key: str, head: bytes) -> None:
        """The session without a name is the one used last of those that begin with ``head``."""
        alike = self._nameless.setdefault(head, deque(maxlen=_ALIKE))
        if key in alike:
            alike.remove(key)
        alike.append(key)
        self._nameless.move_to_end(head)
        if len(self._nameless) > _HEADS:
            self._nameless.popitem(last=False)

    def _shrink(self) -> None:
        """Sessions go, and of the last one its lines, until what is left fits."""
        while self.bytes > self._limit and self._sessions:
            key, oldest = next(iter(self._sessions.items()))
            self.bytes -= oldest.bytes
            if len(self._sessions) > 1 or len(oldest.lines) < 2:
                del self._sessions[key]
            else:
                oldest.lines.popitem(last=False)
                self.bytes += oldest.bytes


def _step(
    session: str,
    model: Model,
    line: int,
    course: Course,
    tokens: bytes,
    matched: int,
    broken: Break | None = None,
) -> Step:
    return Step(session, time.time(), model.name, line, course, len(tokens) // WIDTH, matched, broken)


def _line(opened: Opened, generation: Generation) -> Line:
    said = _said(generation)
    prompt_tokens = opened.step.prompt_tokens
    expected = prompt_tokens + said
    return Line(
        model=opened.model.name,
        tokens=opened.tokens + generation.told.tobytes(),
        prompt_tokens=prompt_tokens,
        expected=expected,
        messages=opened.messages,
        tools=opened.tools,
        settings=generation.prompt.settings,
        answer=generation.recording.turn if said and generation.recording else None,
        ends=(*opened.ends, (expected, len(opened.messages) + (said > 0))),
    )


def _said(generation: Generation) -> int:
    """How many tokens the turn has that the next prompt should hold. The one that ended it is the engine's: the
    template may end it with another.
    """
    told, recording = generation.told, generation.recording
    if generation.ended not in _SAID:
        return 0
    if recording is not None:
        return recording.tokens
    return len(told) - (bool(told) and told[-1] in generation.model.tokenizer.stop_token_ids)


def _asks_once_more(line: Line, turns: Sequence[Turn]) -> bool:
    """Whether ``turns`` are the line's, perhaps without its last ones, with more behind them.

    A harness that compacts after the window overflowed leaves out what made it overflow.
    """
    same = 0
    for old, turn in zip(line.messages, turns, strict=False):
        if old != fingerprint(turn):
            break
        same += 1
    in_a_loop = any(turn.role == "tool" for turn in turns[:-1])
    return in_a_loop and same in (len(line.messages), len(turns) - 1)
