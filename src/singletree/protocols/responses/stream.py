"""Encode events as server-sent events of the Responses API.

https://platform.openai.com/docs/api-reference/responses-streaming. One item for each span of the model's
turn, in its order. Codex, the AI SDK and others run a tool at its ``response.output_item.done``: a call gets
one when its arguments are complete, while the generation goes on; one that was cut or broken never gets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from singletree.conversation import ToolCall
from singletree.errors import SingletreeError
from singletree.events import (
    ArgumentsDelta,
    Compacted,
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from singletree.protocols import wire
from singletree.protocols.answer import AnswerContext, EncodedItem, Frame
from singletree.protocols.openai.custom_tools import InputText
from singletree.protocols.responses.output import (
    Output,
    OutputItem,
    ending,
    failure,
    is_cut,
    reasoning_part,
    summary_part,
    text_part,
)
from singletree.protocols.wire import encode_ascii

ID_PREFIX = "resp_"

_Span = type[TextDelta] | type[ReasoningDelta]

_TERMINAL = {"completed": "response.completed", "failed": "response.failed"}


class Encoder:
    """Encode the events of one stream as Responses events. ``context.usage`` is not sent before the end."""

    def __init__(self, context: AnswerContext) -> None:
        self._output = Output(context)
        self._new_id = context.new_id
        self._sequence_number = 0
        self._items: list[EncodedItem] = []
        self._reasoned = 0
        self._called = False
        # The open item: its id, the name and the beginning of its delta events (empty until the item is sent) and
        # those of the second delta event of each piece, if there is one; whether it has no delta events; its text or
        # arguments so far.
        self._id = ""
        self._delta_name, self._delta_start = "", b""
        self._second_delta_name, self._second_delta_start = "", b""
        self._is_silent = False
        self._pieces: list[str] = []
        # Log-probabilities of the next text, and of the open message.
        self._next_logprobs: list[OutputItem] = []
        self._sent_logprobs: list[OutputItem] = []
        # The open span by its kind, or the open call with its raw text. ``_streamed`` is the kind if the next piece of
        # the span makes one delta event.
        self._kind: _Span | None = None
        self._streamed: _Span | None = None
        self._call: ToolCallStart | None = None
        self._raw: list[str] = []
        self._input: InputText | None = None

    def start(self) -> list[Frame]:
        response = msgspec.Raw(self._output.response())
        created = self._event("response.created", response=response)
        return [created, self._event("response.in_progress", response=response)]

    def keep_alive(self) -> list[Frame]:
        # Clients' idle timers ignore comments (openai/codex#31539).
        return [self._event("response.in_progress", response=msgspec.Raw(self._output.response()))]

    def feed(self, event: Event) -> list[Frame]:
        # The next piece of the open span comes first and in full, because it is most of the tokens.
        if type(event) is self._streamed and (text := event.text):
            self._pieces.append(text)
            number = self._sequence_number
            self._sequence_number = number + 1
            encoded = encode_ascii(text) if text.isascii() else wire.dump(text)
            return [(self._delta_name, b'%b%b,"sequence_number":%d}' % (self._delta_start, encoded, number))]
        if isinstance(event, TextDelta | ReasoningDelta):
            return self._feed_span(event)
        if isinstance(event, ArgumentsDelta):
            return self._feed_arguments(event)
        if isinstance(event, ToolCallStart):
            return [*self._end_open_item(), *self._start_call(event)]
        if isinstance(event, ToolCallEnd):
            return self._end_call()
        if isinstance(event, TokenLogprobs):
            self._next_logprobs += self._output.logprobs(event.tokens)
            self._streamed = None
            return []
        if isinstance(event, ToolCallBroken):
            raw = "".join([*self._raw, event.raw])
            return [*self._end_open_item(), *self._feed_span(TextDelta(raw, raw))]
        if isinstance(event, Compacted):
            return [*self._end_open_item(), *self._compaction(event.sealed)]
        if self._call is not None:
            self._raw.append(event.raw)
        return self._end_open_item() if self._kind is ReasoningDelta else []

    def end(self, finished: Finished) -> list[Frame]:
        # A cut item is incomplete, and a cut call gets no ``done``.
        status = "incomplete" if is_cut(finished) else "completed"
        return [*self._end_open_item(status), *self._capsule(finished), self._end(**ending(finished))]

    def tail(self, usage: Usage) -> list[Frame]:
        return []

    def fail(self, error: SingletreeError) -> list[Frame]:
        return [*self._end_open_item("incomplete"), self._end(status="failed", error=failure(error))]

    def side_event(self, name: str, data: Mapping[str, Any]) -> list[Frame]:
        return [(name, self._event(f"response.{name}", **data)[1])]

    def _event(self, kind: str, **fields: Any) -> Frame:
        data = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return kind, wire.dump(data)

    def _item_event(self, kind: str, **fields: Any) -> Frame:
        return self._event(kind, item_id=self._id, output_index=len(self._items), **fields)

    def _delta_event(self, text: str) -> list[Frame]:
        # Only the text is encoded, no dict is built.
        if self._is_silent:
            return []
        number, encoded = self._sequence_number, wire.dump(text)
        self._sequence_number = number + 1
        data = b'%b%b,"sequence_number":%d}' % (self._delta_start, encoded, number)
        if not self._second_delta_start:
            return [(self._delta_name, data)]
        self._sequence_number = number + 2
        second = b'%b%b,"sequence_number":%d}' % (self._second_delta_start, encoded, number + 1)
        return [(self._delta_name, data), (self._second_delta_name, second)]

    def _delta_with_logprobs(self, text: str) -> Frame:
        logprobs, self._next_logprobs = self._next_logprobs, []
        self._sent_logprobs += logprobs
        at = {"content_index": 0, "logprobs": logprobs}
        return self._item_event("response.output_text.delta", **at, delta=text)

    def _open(self, item: OutputItem, deltas: str, **fields: Any) -> Frame:
        self._id = item["id"]
        self._delta_name, self._delta_start = deltas, self._delta_head(deltas, **fields)
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _delta_head(self, kind: str, **fields: Any) -> bytes:
        head = {"type": kind, "item_id": self._id, "output_index": len(self._items), **fields}
        return wire.dump(head)[:-1] + b',"delta":'

    def _done(self, item: OutputItem) -> Frame:
        encoded = wire.dump(item)
        at = len(self._items)
        done = self._event("response.output_item.done", output_index=at, item=msgspec.Raw(encoded))
        self._finish_item(item, encoded)
        return done

    def _finish_item(self, item: OutputItem, encoded: bytes) -> None:
        self._items.append(EncodedItem(item, encoded))
        self._delta_start, self._second_delta_start, self._is_silent = b"", b"", False
        self._pieces, self._raw, self._sent_logprobs = [], [], []
        self._kind, self._call, self._input, self._streamed = None, None, None, None

    def _capsule(self, finished: Finished) -> list[Frame]:
        sealed = self._output.sealed_end(finished) if self._called else ""
        if not sealed:
            return []
        item = self._output.capsule(self._new_id("rs_"), sealed)
        opened = {k: v for k, v in item.items() if k != "encrypted_content"} | {"status": "in_progress"}
        return [self._open(opened, ""), self._done(item)]

    def _compaction(self, sealed: str) -> list[Frame]:
        item = self._output.compaction(self._new_id("cmp_"), sealed)
        return [self._open({**item, "encrypted_content": ""}, ""), self._done(item)]

    def _end_open_item(self, status: str = "completed") -> list[Frame]:
        """End the open item: a span with ``status``, a call without ``done``."""
        if self._call is not None:
            return self._abandon_call(self._call)
        if self._delta_start:
            return self._end_span(status)
        self._kind = None
        return []

    def _end(self, **fields: Any) -> Frame:
        response = msgspec.Raw(self._output.finish(self._items, **fields))
        return self._event(_TERMINAL.get(fields["status"], "response.incomplete"), response=response)

    # Spans of text and of reasoning

    def _feed_span(self, event: TextDelta | ReasoningDelta) -> list[Frame]:
        frames = [] if type(event) is self._kind else self._end_open_item()
        self._kind = type(event)
        if not event.text:
            return frames
        if not self._delta_start:
            frames += self._open_span()
        self._pieces.append(event.text)
        if self._next_logprobs and self._kind is TextDelta:
            return [*frames, self._delta_with_logprobs(event.text)]
        if not (self._is_silent or self._second_delta_start or self._next_logprobs):
            self._streamed = self._kind
        return frames + self._delta_event(event.text)

    def _open_span(self) -> list[Frame]:
        if self._kind is TextDelta:
            item = self._output.message(self._new_id("msg_"), "", "in_progress")
            opened = self._open(item, "response.output_text.delta", content_index=0, logprobs=[])
            return [opened, self._part("response.content_part.added", text_part(""), content_index=0)]
        item = self._output.reasoning(self._new_id("rs_"), "", "in_progress", self._reasoned)
        added = [self._open(item, "response.reasoning_text.delta", content_index=0)]
        summarizes, shows_reasoning = self._output.summarizes, self._output.shows_reasoning
        self._is_silent = not (summarizes or shows_reasoning)
        if shows_reasoning:
            added.append(self._part("response.content_part.added", reasoning_part(""), content_index=0))
        if not summarizes:
            return added
        # The summary is the reasoning itself, so it is streamed in the same way.
        name = "response.reasoning_summary_text.delta"
        start = self._delta_head(name, summary_index=0)
        if shows_reasoning:
            self._second_delta_name, self._second_delta_start = name, start
        else:
            self._delta_name, self._delta_start = name, start
        part = self._part("response.reasoning_summary_part.added", summary_part(""), summary_index=0)
        return [*added, part]

    def _part(self, kind: str, part: OutputItem, **at: int) -> Frame:
        return self._item_event(kind, **at, part=part)

    def _end_span(self, status: str) -> list[Frame]:
        # The text is encoded once for all events that repeat it.
        text = msgspec.Raw(wire.dump("".join(self._pieces)))
        if self._kind is TextDelta:
            item = self._output.message(self._id, text, status, self._sent_logprobs)
        else:
            item = self._output.reasoning(self._id, text, status, self._reasoned)
            self._reasoned += 1
        done: list[Frame] = []
        for i, part in enumerate(item.get("content", ())):
            whole = {name: part[name] for name in ("text", "logprobs") if name in part}
            done.append(self._item_event(f"response.{part['type']}.done", content_index=i, **whole))
            done.append(self._part("response.content_part.done", part, content_index=i))
        for i, summary in enumerate(item.get("summary", ())):
            text = summary["text"]
            done.append(self._item_event("response.reasoning_summary_text.done", summary_index=i, text=text))
            done.append(self._part("response.reasoning_summary_part.done", summary, summary_index=i))
        return [*done, self._done(item)]

    # Calls

    def _start_call(self, event: ToolCallStart) -> list[Frame]:
        self._kind, self._call, self._raw = None, event, [event.raw]
        # The item type of a native call depends on its complete arguments, so it is sent when the call ends.
        return [] if self._output.is_native(event.name) else [self._open_call(event)]

    def _open_call(self, event: ToolCallStart) -> Frame:
        custom = self._output.is_custom(event.name)
        self._input = InputText() if custom else None
        item = self._output.call(self._new_id("ctc_" if custom else "fc_"), _cut(event, ""))
        return self._open({**item, "status": "in_progress"}, f"response.{_field(item)}.delta")

    def _feed_arguments(self, event: ArgumentsDelta) -> list[Frame]:
        if self._call is None:
            return []
        self._raw.append(event.raw)
        self._pieces.append(event.json)
        piece = event.json if self._input is None else self._input.feed(event.json)
        return self._delta_event(piece) if piece and self._delta_start else []

    def _end_call(self) -> list[Frame]:
        if self._call is None:
            return []
        self._called = True
        call = ToolCall(self._call.name, "".join(self._pieces), self._call.id)
        if not self._delta_start:
            return self._end_native(call)
        item = self._output.call(self._id, call)
        if self._input is not None:
            rest = self._input.close(call.arguments, complete=True)
        else:
            rest = "" if call.arguments else item["arguments"]
        return [*(self._delta_event(rest) if rest else ()), *self._end_sent(item)]

    def _end_native(self, call: ToolCall) -> list[Frame]:
        item = self._output.whole_call(call, self._new_id)
        if item["type"] != "function_call":
            return [self._open({**item, "status": "in_progress"}, ""), self._done(item)]
        begun = {**item, "status": "in_progress", "arguments": ""}
        opened = self._open(begun, f"response.{_field(item)}.delta")
        return [opened, *self._delta_event(item["arguments"]), *self._end_sent(item)]

    def _end_sent(self, item: OutputItem) -> list[Frame]:
        field = _field(item)
        value = {"input": item["input"]} if "input" in item else {"arguments": item["arguments"]}
        return [self._item_event(f"response.{field}.done", **value), self._done(item)]

    def _abandon_call(self, event: ToolCallStart) -> list[Frame]:
        """Send what there is of a cut or broken call without ``done``, on which clients would run it."""
        arguments = "".join(self._pieces)
        opened: list[Frame] = []
        rest = ""
        if not self._delta_start:
            opened, rest = [self._open_call(event)], arguments
        elif self._input is not None:
            rest = self._input.close(arguments, complete=False)
        sent = opened + (self._delta_event(rest) if rest else [])
        item = self._output.call(self._id, _cut(event, arguments))
        self._finish_item(item, wire.dump(item))
        return sent


def _cut(event: ToolCallStart, arguments: str) -> ToolCall:
    return ToolCall(event.name, arguments, event.id, complete=False)


def _field(item: OutputItem) -> str:
    return "custom_tool_call_input" if item["type"] == "custom_tool_call" else "function_call_arguments"
