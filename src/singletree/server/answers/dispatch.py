"""The side events of a stream, for harnesses that run a tool as soon as its call is complete."""

from __future__ import annotations

from typing import Any

from singletree.conversation import Request
from singletree.events import (
    ArgumentsDelta,
    Event,
    Finished,
    PromptLogprobs,
    ReasoningDelta,
    TokenLogprobs,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    UsageUpdate,
)
from singletree.protocols.answer import EventEncoder, Frame
from singletree.protocols.openai import custom_tools
from singletree.server.answers.choices import DispatchOptions


class DispatchEncoder:
    """An encoder that adds side events to the output of another encoder, for the choice number ``index``.

    They are complete calls and complete spans of reasoning. ``tool_call_dispatch`` and ``reasoning_dispatch`` have
    Dynamo's names and formats (ai-dynamo/dynamo, ``--enable-streaming-tool-dispatch``). Their data is also a valid
    event of the protocol without content (``Encoder.side_event``): clients which validate every event accept it.
    """

    def __init__(self, encoder: EventEncoder, request: Request, options: DispatchOptions, index: int) -> None:
        self._encoder = encoder
        self.start, self.keep_alive = encoder.start, encoder.keep_alive
        self.tail, self.fail, self.side_event = encoder.tail, encoder.fail, encoder.side_event
        self._options = options
        self._index = index
        self._tools = {tool.name: tool for tool in request.conversation.tools}
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []
        self._calls = 0
        self._thought: list[str] = []

    def feed(self, event: Event) -> list[Frame]:
        """Encode an event. A call's side event follows its last event, that of reasoning follows its end."""
        if isinstance(event, ReasoningDelta):
            self._thought.append(event.text)
            return self._encoder.feed(event)
        if isinstance(event, TokenLogprobs | PromptLogprobs | UsageUpdate):
            return self._encoder.feed(event)
        before = self._end_thought() if self._thought else []
        frames = before + self._encoder.feed(event)
        if isinstance(event, ArgumentsDelta):
            self._arguments.append(event.json)
        elif isinstance(event, ToolCallStart):
            self._call, self._arguments = event, []
        elif isinstance(event, ToolCallEnd):
            return [*frames, *self._end_call()]
        elif isinstance(event, ToolCallBroken):
            # The protocol counts the call if it has sent it, which happens with the first piece of its arguments.
            self._calls += any(self._arguments)
            self._call = None
        return frames

    def end(self, finished: Finished) -> list[Frame]:
        """Encode the end. Unfinished reasoning gets its side event, an unfinished call never does."""
        return [*self._end_thought(), *self._encoder.end(finished)]

    def _end_thought(self) -> list[Frame]:
        text, self._thought = "".join(self._thought), []
        if not text or not self._options.reasoning:
            return []
        return self.side_event("reasoning_dispatch", {"index": self._index, "reasoning_content": text})

    def _end_call(self) -> list[Frame]:
        call, self._call = self._call, None
        if call is None:
            return []
        index, self._calls = self._calls, self._calls + 1
        if not self._options.calls:
            return []
        fields = {"index": index, "id": call.id, **self._call_fields(call.name, "".join(self._arguments))}
        return self.side_event("tool_call_dispatch", {"choice_index": self._index, "tool_call": fields})

    def _call_fields(self, name: str, arguments: str) -> dict[str, Any]:
        """Return the call under the client's names: Responses tools in a namespace have another name internally."""
        tool = self._tools.get(name)
        known = {} if tool is None else {"name": tool.client_name, "namespace": tool.namespace}
        names = {key: value for key, value in known.items() if value}
        if tool is not None and tool.kind == "custom":
            text = custom_tools.to_input(arguments, complete=True)
            return {"type": "custom", "custom": {"name": name, "input": text} | names}
        return {
            "type": "function",
            "function": {"name": name, "arguments": arguments.strip() or "{}"} | names,
        }
