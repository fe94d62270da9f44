"""The side channel for harnesses that run a tool the moment it can be run: complete calls and whole spans of
reasoning as events of their own, beside the protocol's.

``tool_call_dispatch`` and ``reasoning_dispatch`` are Dynamo's names and shapes (ai-dynamo/dynamo,
``--enable-streaming-tool-dispatch``). Their data is at the same time an event of the protocol that says nothing
(``Encoder.side_event``), so that clients which validate every event carry on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from singletree.conversation import Request
from singletree.errors import SingletreeError
from singletree.events import (
    ArgumentsDelta,
    Event,
    Finished,
    PromptRead,
    ReasoningDelta,
    TokensRead,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    Usage,
    UsageRead,
)
from singletree.protocols import custom_tools
from singletree.protocols.choices import ChoiceEncoder
from singletree.server.config import Config
from singletree.server.protocol import Encoder

TOOL_HEADER = "x-singletree-tool-dispatch"
REASONING_HEADER = "x-singletree-reasoning-dispatch"

_SAID = dict.fromkeys(("1", "true", "on", "yes"), True) | dict.fromkeys(("0", "false", "off", "no"), False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which side events a stream has."""

    calls: bool = False
    reasoning: bool = False


def wanted(config: Config, headers: Mapping[str, str]) -> Wanted:
    """By the request's headers (``1`` or ``0``), else by the server's flags; header names in lower case."""

    def said(header: str, default: bool) -> bool:
        return _SAID.get(headers.get(header, "").strip().lower(), default)

    return Wanted(
        said(TOOL_HEADER, config.enable_streaming_tool_dispatch),
        said(REASONING_HEADER, config.enable_streaming_reasoning_dispatch),
    )


def dispatching(encoder: Encoder, request: Request, wanted: Wanted) -> Encoder:
    """``encoder`` with the side events that are ``wanted``; itself where there are none."""
    wanted = _shown(request, wanted)
    return encoder if wanted == Wanted() else Dispatching(encoder, request, wanted)


def dispatching_choice(encoder: ChoiceEncoder, request: Request, wanted: Wanted, index: int) -> ChoiceEncoder:
    """The same for the choice with this number, in a stream that it shares."""
    wanted = _shown(request, wanted)
    return encoder if wanted == Wanted() else DispatchingChoice(encoder, request, wanted, index)


def _shown(request: Request, wanted: Wanted) -> Wanted:
    shows = request.extra.get("display") != "omitted" and bool(request.extra.get("reasoning_fields", True))
    return Wanted(wanted.calls, wanted.reasoning and shows)


class Dispatching:
    """An encoder that adds the side events to what another one says."""

    def __init__(self, encoder: Encoder, request: Request, wanted: Wanted, index: int = 0) -> None:
        self._encoder = encoder
        self._wanted = wanted
        self._index = index
        self._tools = {tool.name: tool for tool in request.conversation.tools}
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []
        self._calls = 0
        self._thought: list[str] = []

    def start(self) -> bytes:
        """See Encoder."""
        return self._encoder.start()

    def keep_alive(self) -> bytes:
        """See Encoder."""
        return self._encoder.keep_alive()

    def feed(self, event: Event) -> bytes:
        """A call's own event leaves right behind that of the protocol, a thought's when the thought is over."""
        if isinstance(event, ReasoningDelta):
            self._thought.append(event.text)
            return self._encoder.feed(event)
        if isinstance(event, TokensRead | PromptRead | UsageRead):
            return self._encoder.feed(event)
        before = self._end_thought() if self._thought else b""
        said = before + self._encoder.feed(event)
        if isinstance(event, ArgumentsDelta):
            self._arguments.append(event.json)
        elif isinstance(event, ToolCallStart):
            self._call, self._arguments = event, []
        elif isinstance(event, ToolCallEnd):
            return said + self._end_call()
        elif isinstance(event, ToolCallBroken):
            # The protocol counts it if it has shown it, which is with the first piece of its arguments.
            self._calls += any(self._arguments)
            self._call = None
        return said

    def close(self, finished: Finished) -> bytes:
        """See Encoder. A thought that was cut is told, a call never."""
        return self._end_thought() + self._encoder.close(finished)

    def fail(self, error: SingletreeError) -> bytes:
        """See Encoder."""
        return self._encoder.fail(error)

    def side_event(self, name: str, said: Mapping[str, Any]) -> bytes:
        """See Encoder."""
        return self._encoder.side_event(name, said)

    def _end_thought(self) -> bytes:
        text, self._thought = "".join(self._thought), []
        if not text or not self._wanted.reasoning:
            return b""
        return self.side_event("reasoning_dispatch", {"index": self._index, "reasoning_content": text})

    def _end_call(self) -> bytes:
        call, self._call = self._call, None
        if call is None:
            return b""
        index, self._calls = self._calls, self._calls + 1
        if not self._wanted.calls:
            return b""
        shown = {"index": index, "id": call.id, **self._called(call.name, "".join(self._arguments))}
        return self.side_event("tool_call_dispatch", {"choice_index": self._index, "tool_call": shown})

    def _called(self, name: str, arguments: str) -> dict[str, Any]:
        """The call under the names that the client knows: Responses tools in a namespace have another one inside."""
        tool = self._tools.get(name)
        known = (tool.extra if tool else None) or {}
        names = {key: known[key] for key in ("name", "namespace") if key in known}
        if tool is not None and tool.kind == "custom":
            text = custom_tools.to_input(arguments, complete=True)
            return {"type": "custom", "custom": {"name": name, "input": text} | names}
        return {
            "type": "function",
            "function": {"name": name, "arguments": arguments.strip() or "{}"} | names,
        }


class DispatchingChoice(Dispatching):
    """The same for the encoder of a choice."""

    def __init__(self, encoder: ChoiceEncoder, request: Request, wanted: Wanted, index: int) -> None:
        super().__init__(encoder, request, wanted, index)
        self._choice = encoder

    def end(self, finished: Finished) -> bytes:
        """See ChoiceEncoder."""
        return self._end_thought() + self._choice.end(finished)

    def tail(self, usage: Usage) -> bytes:
        """See ChoiceEncoder."""
        return self._choice.tail(usage)
