"""What the inspector keeps of one turn and of one session, and who sent it."""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from singletree.conversation import Document, Image, Part, Reasoning, Text, Tool, ToolCall, ToolResult, Turn
from singletree.events import FinishReason, Usage
from singletree.inspector.prompt_history import MessagePart, PromptHistory
from singletree.inspector.wire_record import TurnTimeline, WireRecord
from singletree.owners import owned_id
from singletree.prompts.replay.turn_keys import Fingerprint
from singletree.prompts.replay.turn_places import text_length
from singletree.protocols.wire import dump
from singletree.server.sessions.divergence import ToolList
from singletree.server.sessions.sessions import Opened
from singletree.server.sessions.step import Step

_TURN_BYTES = 2500
_TOOL_BYTES = 200
_SESSION_BYTES = 1000
_MOST_TIPS = 64
_SESSION_ID = re.compile("s[0-9a-f]{16}")
_SETTING = 1000
"""Most characters of the name and of the value of a setting that are kept."""
_KINDS: dict[type, str] = {
    Text: "text",
    Reasoning: "reasoning",
    ToolCall: "call",
    ToolResult: "result",
    Image: "image",
    Document: "document",
}
HARNESSES: tuple[tuple[str, str, str], ...] = (
    ("user-agent", r"^claude-(?:cli|code)/", "Claude Code"),
    ("x-claude-code-session-id", r".", "Claude Code"),
    ("originator", r"^codex", "Codex"),
    ("user-agent", r"^codex", "Codex"),
    ("user-agent", r"opencode", "OpenCode"),
    ("user-agent", r"^kimi-code", "Kimi Code"),
    ("x-initiator", r".", "GitHub Copilot CLI"),
    ("user-agent", r"openclaw", "OpenClaw"),
    ("user-agent", r"qwen-?code", "qwen-code"),
    ("user-agent", r"^pi(?:-coding-agent)?[/ ]", "pi"),
    ("x-grok-session-id", r".", "Grok Build"),
    ("user-agent", r"^goose", "goose"),
    ("session_id", r".", "pi"),
    ("x-session-affinity", r".", "OpenCode"),
    ("user-agent", r"^(?:async)?anthropic/", "Anthropic SDK"),
    ("user-agent", r"^(?:async)?openai/", "OpenAI SDK"),
    ("user-agent", r"^curl/", "curl"),
)
"""(header in lower case, pattern of its value, name of the harness): the first that matches counts."""
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class InspectedTool:
    """A tool of a prompt: its name, the size and a digest of what the template gets, and that as JSON if it is kept."""

    name: str
    size: int
    digest: str
    encoded: bytes | None = None

    @property
    def bytes(self) -> int:
        return _TOOL_BYTES + len(self.encoded or b"")

    @classmethod
    def of(cls, tool: Tool, *, keeps_texts: bool) -> InspectedTool:
        fields = {"description": tool.description, "parameters": tool.parameters, "kind": tool.kind}
        encoded = dump(fields)
        digest = blake2b(encoded, digest_size=8).hexdigest()
        return cls(tool.name, len(encoded), digest, encoded if keeps_texts else None)


@dataclass(frozen=True, slots=True)
class LostPart:
    """What a broken prompt lacks: packed tokens that should have followed (None where texts are not kept), the messages
    of the earlier prompt from the first that differs on, and how the tools (by name) differ.
    """

    tokens: bytes | None
    messages: tuple[Fingerprint, ...]
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    reordered: bool = False


@dataclass(slots=True)
class TurnDetails:
    """What goes first when memory is short.

    Attributes:
        settings: the template variables for reasoning, as JSON.
        token_ids: the generated tokens; None where texts are not kept.
        logprobs: their log-probabilities; empty where the client asked for none.
    """

    wire: WireRecord
    tools: tuple[InspectedTool, ...]
    settings: Mapping[str, str]
    token_ids: array[int] | None
    body_bytes: int
    logprobs: array[float] = field(default_factory=lambda: array("f"))

    @property
    def bytes(self) -> int:
        return 600 + self.wire.bytes + 4 * len(self.token_ids or ()) + 4 * len(self.logprobs)


@dataclass(slots=True)
class InspectedTurn:
    """One turn. Times are milliseconds from the arrival, except ``received`` and ``ended``, which are unix seconds.

    Attributes:
        number: its number in the session, from 1.
        lane: the number of its conversation in the session.
        origin: (lane, turn, tokens) that its lane went on from; None for a lane that begins.
        before: the turn whose prompt it was compared with.
        repeats: the turn that the client sent again as this one.
        results: (id of the call, whether it failed) of the tool results that came with the request.
        fingerprint: stands for the new part of the prompt.
        same_messages: how many messages it has in common with the earlier prompt.
        details: None when memory was short.
        brief: what sums of its session need, once it is over.
    """

    id: str
    session: str
    number: int
    lane: int
    origin: tuple[int, str, int] | None
    before: str | None
    repeats: str | None
    request_id: str
    protocol: str
    path: str
    stream: bool
    process: int
    is_agent: bool
    step: Step
    results: tuple[tuple[str, bool], ...]
    timeline: TurnTimeline
    received: float
    fingerprint: int
    rules: tuple[str, ...]
    replayed_turns: int
    pictures: int
    same_messages: int
    lost: LostPart | None
    details: TurnDetails | None
    answer_id: str | None = None
    status: str = "running"
    finish: FinishReason | None = None
    error: tuple[str, str | None] | None = None
    usage: Usage | None = None
    prepared: float | None = None
    first_event: float | None = None
    total: float | None = None
    gap: float | None = None
    ended: float | None = None
    brief: Mapping[str, Any] | None = None

    @property
    def bytes(self) -> int:
        lost = len(self.lost.tokens or b"") + 8 * len(self.lost.messages) if self.lost is not None else 0
        details = 0 if self.details is None else self.details.bytes
        return _TURN_BYTES + self.timeline.bytes + lost + details

    @property
    def is_running(self) -> bool:
        return self.ended is None


@dataclass(slots=True)
class Lanes:
    """The numbers of turns and lanes that a session has given, and the lane of each turn that is the last of one
    (``tips``). It moves with the session.
    """

    turns: int = 0
    lanes: int = 0
    tips: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def next_turn(self) -> int:
        self.turns += 1
        return self.turns

    def place(
        self, turn: str, before: str | None, *, continues: bool, repeated: int | None
    ) -> tuple[int, bool]:
        """Return the lane of ``turn``, and whether it is a new one: it continues the turn ``before``, or repeats one of
        a lane.
        """
        lane, is_new = repeated, False
        if lane is None and continues and before is not None:
            lane = self.tips.pop(before, None)
        if lane is None:
            self.lanes += 1
            lane, is_new = self.lanes, True
        self.tips[turn] = lane
        while len(self.tips) > _MOST_TIPS:
            self.tips.popitem(last=False)
        return lane, is_new

    def merge(self, other: Lanes) -> None:
        self.turns, self.lanes = max(self.turns, other.turns), max(self.lanes, other.lanes)
        self.tips.update(other.tips)


@dataclass(slots=True)
class InspectedSession:
    """The turns of one session, in the order of their arrival.

    Attributes:
        key, owner: its key in ``Sessions``, and whose session it is.
        parent: the id of the session whose agent started this one's.
        dropped: how many turns are no longer kept.
        turn_bytes, tool_bytes: the approximate memory of the turns that are over, and of the tools.
        counted: the size that the inspector has counted.
    """

    id: str
    key: str
    owner: str = ""
    parent: str | None = None
    harness: str | None = None
    client: str | None = None
    is_agent: bool = False
    lanes: Lanes = field(default_factory=Lanes)
    turns: dict[str, InspectedTurn] = field(default_factory=dict)
    prompts: PromptHistory = field(default_factory=PromptHistory)
    tools: dict[bytes, tuple[InspectedTool, ...]] = field(default_factory=dict)
    dropped: int = 0
    turn_bytes: int = 0
    tool_bytes: int = 0
    counted: int = 0

    @property
    def bytes(self) -> int:
        return _SESSION_BYTES + self.turn_bytes + self.tool_bytes + self.prompts.bytes

    def tools_of(self, tools: ToolList, *, keeps_texts: bool) -> tuple[InspectedTool, ...]:
        """Return what is kept of ``tools``; the same object for the same tools."""
        digest = blake2b(tools.encoded, digest_size=16).digest()
        known = self.tools.get(digest)
        if known is None:
            known = tuple(InspectedTool.of(tool, keeps_texts=keeps_texts) for tool in tools.tools)
            self.tools[digest] = known
            self.tool_bytes += sum(tool.bytes for tool in known)
        return known

    def prune(self) -> None:
        detailed = [turn for turn in self.turns.values() if turn.details is not None]
        self.prompts.prune([turn.id for turn in detailed])
        used = {id(turn.details.tools) for turn in detailed if turn.details is not None}
        self.tools = {digest: tools for digest, tools in self.tools.items() if id(tools) in used}
        self.tool_bytes = sum(tool.bytes for tools in self.tools.values() for tool in tools)
        self.turn_bytes = sum(turn.bytes for turn in self.turns.values() if not turn.is_running)


def session_id(key: str, owner: str = "") -> str:
    """Return the id of the session ``key`` of ``owner`` in the inspector: the same in all processes."""
    return f"s{blake2b(owned_id(owner, key).encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def known_session_id(text: str, owner: str = "") -> str:
    """Return the id of the session that ``text`` names: by its id, else by its key among those of ``owner``."""
    return text if _SESSION_ID.fullmatch(text) else session_id(text, owner)


def message_parts(turn: Turn) -> tuple[MessagePart, ...]:
    """Return the shapes of the parts of a message."""
    return tuple(map(_shape, turn.parts))


def _shape(part: Part) -> MessagePart:
    kind = _KINDS.get(type(part), "other")
    if isinstance(part, ToolCall):
        return MessagePart(kind, part.name, len(part.arguments))
    if isinstance(part, Reasoning):
        return MessagePart(kind, None, len(part.text))
    if isinstance(part, Image | Document):
        return MessagePart(kind, None, len(part.data or "") + len(part.url or ""))
    return MessagePart(kind, None, text_length(part))


def tool_results(turns: Iterable[Turn]) -> tuple[tuple[str, bool], ...]:
    """Return (id of the call, whether it failed) of the results behind the last turn of the assistant."""
    found: list[tuple[str, bool]] = []
    for turn in reversed(tuple(turns)):
        if turn.role == "assistant":
            break
        found += [(part.call_id, bool(part.is_error)) for part in turn.parts if isinstance(part, ToolResult)]
    return tuple(found)


def settings_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return template variables with their values as JSON."""
    return {str(name)[:_SETTING]: dump(value).decode()[:_SETTING] for name, value in settings.items()}


def repeated_turn(
    session: InspectedSession, before: InspectedTurn | None, prompt: int, matched: int, fingerprint: int
) -> InspectedTurn | None:
    """Return the turn that has the same prompt as a new one; None for none."""
    if before is not None and prompt == matched == before.step.prompt_tokens:
        return before
    running = (turn for turn in session.turns.values() if turn.is_running)
    return next(
        (turn for turn in running if (turn.step.prompt_tokens, turn.fingerprint) == (prompt, fingerprint)),
        None,
    )


def forget_excerpts(turn: InspectedTurn) -> None:
    """Drop the texts of a break: of the inspector's own, not those of the session's report."""
    turn.step = turn.step.without_excerpts()


def lost_part(opened: Opened, *, keeps_texts: bool) -> LostPart | None:
    """Return what a broken prompt lacks of the one that it was compared with; None where there is none."""
    record = opened.compared
    if record is None:
        return None
    tokens = record.tokens_between(opened.step.matched, record.expected) if keeps_texts else None
    rest = record.messages[opened.same_messages :]
    return LostPart(tokens, rest, *_tool_changes(record.tools, opened.tools))


def _tool_changes(
    old: ToolList, new: ToolList
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], bool]:
    """Return the names of the tools that were added, removed and changed, and whether their order changed."""
    if old.encoded == new.encoded:
        return (), (), (), False
    was, now = ({tool.name: tool for tool in tools.tools} for tools in (old, new))
    changed = tuple(name for name in now if name in was and _shown(was[name]) != _shown(now[name]))
    common = [name for name in was if name in now], [name for name in now if name in was]
    added, removed = tuple(name for name in now if name not in was), tuple(n for n in was if n not in now)
    return added, removed, changed, common[0] != common[1]


_shown = attrgetter("description", "parameters", "kind")


def harness_of(headers: Mapping[str, str]) -> str | None:
    """Return the name of the harness; None where it is not known. Names of ``headers`` are in lower case."""
    found = (name for header, pattern, name in HARNESSES if re.search(pattern, headers.get(header, ""), re.I))
    return next(found, None)


def client_of(headers: Mapping[str, str]) -> str | None:
    """Return what the client calls itself; None where it does not."""
    return headers.get("user-agent", "")[:_LONGEST] or None
