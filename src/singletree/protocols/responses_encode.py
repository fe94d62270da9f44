"""Events to the server-sent events of the Responses API.

https://platform.openai.com/docs/api-reference/responses-streaming. One item for each span of the model's
turn, in its order. Codex, the AI SDK and others run a tool at its ``response.output_item.done``: a call gets
one when its arguments are complete, while the generation goes on; one that was cut or broken never gets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from singletree.conversation import Request, ToolCall
from singletree.errors import SingletreeError
from singletree.events import (
    ArgumentsDelta,
    Compacted,
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokensRead,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from singletree.protocols import sse, wire
from singletree.protocols.custom_tools import InputText
from singletree.protocols.responses_output import (
    Item,
    Output,
    ending,
    failure,
    is_cut,
    reasoning_part,
    summary_part,
    text_part,
)

ID_PREFIX = "resp_"

_TERMINAL = {"completed": "response.completed", "failed": "response.failed"}


class Encoder:
    """Events to Responses events; one for each stream.

    ``usage`` is not shown before the end. ``seal`` and ``clock`` are ``Output``'s.
    """

    def __init__(
        self,
        request: Request,
        *,
        id: str,
        created: int,
        usage: Usage,
        new_id: Callable[[str], str],
        seal: Callable[[int], str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._output = Output(request, id=id, created=created, seal=seal, clock=clock)
        self._new_id = new_id
        self._sequence_number = 0
        self._items: list[bytes] = []
        self._thoughts = 0
        # The open item: its id, how its delta events begin and those of its summary (empty while it is not shown, or
        # has none), what it holds.
        self._id = ""
        self._delta = b""
        self._summary_delta = b""
        self._pieces: list[str] = []
        # Log-probabilities of the text to come, and of the open message.
        self._next: list[Item] = []
        self._told: list[Item] = []
        # What is open: a span of this kind, or this call with its raw text.
        self._kind: type[TextDelta] | type[ReasoningDelta] | None = None
        self._call: ToolCallStart | None = None
        self._raw: list[str] = []
        self._input: InputText | None = None

    def start(self) -> bytes:
        """The response was created and is in progress."""
        response = msgspec.Raw(self._output.response())
        return self._event("response.created", response=response) + self.keep_alive()

    def keep_alive(self) -> bytes:
        """An event of the protocol: clients' idle timers do not count comments (openai/codex#31539)."""
        return self._event("response.in_progress", response=msgspec.Raw(self._output.response()))

    def feed(self, event: Event) -> bytes:
        """What ``event`` adds, ``b""`` when nothing."""
        if type(event) is TextDelta or type(event) is ReasoningDelta:
            if type(event) is self._kind and self._delta and event.text and not self._next:
                self._pieces.append(event.text)
                return self._more(event.text)
            return self._feed_span(event)
        if isinstance(event, ArgumentsDelta):
            return self._feed_arguments(event)
        if isinstance(event, ToolCallStart):
            return self._leave() + self._start_call(event)
        if isinstance(event, ToolCallEnd):
            return self._end_call()
        if isinstance(event, TokensRead):
            self._next += self._output.logprobs(event.tokens)
            return b""
        if isinstance(event, ToolCallBroken):
            raw = "".join([*self._raw, event.raw])
            return self._leave() + self._feed_span(TextDelta(raw, raw))
        if isinstance(event, Compacted):
            return self._leave() + self._compaction(event.sealed)
        if self._call is not None:
            self._raw.append(event.raw)
        return self._leave() if self._kind is ReasoningDelta else b""

    def close(self, finished: Finished) -> bytes:
        """Ends what is open and the response. What was cut is incomplete, and a cut call gets no ``done``."""
        if finished.reason == "error":
            self._abandon_span()
        elif self._kind is not None and self._delta:
            left = self._end_span("incomplete" if is_cut(finished) else "completed")
            return left + self._end(**ending(finished))
        return self._leave() + self._end(**ending(finished))

    def fail(self, error: SingletreeError) -> bytes:
        """Leaves what is open as it is, incomplete, and ends the response as failed."""
        self._abandon_span()
        return self._leave() + self._end(status="failed", error=failure(error))

    def side_event(self, name: str, said: Mapping[str, Any]) -> bytes:
        """An event beside the API's, of a type that clients do not know; the sequence has no gap."""
        data = {"type": f"response.{name}", "sequence_number": self._sequence_number, **said}
        self._sequence_number += 1
        return sse.frame(wire.dump(data), name)

    def _event(self, kind: str, **fields: Any) -> bytes:
        said = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return sse.frame(wire.dump(said), kind)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._id, output_index=len(self._items), **fields)

    def _more(self, text: str) -> bytes:
        """A delta of the open item. One for every token: no dict is made, only the text is encoded."""
        number, encoded = self._sequence_number, wire.dump(text)
        self._sequence_number = number + 1
        said = b'%b%b,"sequence_number":%d}\n\n' % (self._delta, encoded, number)
        if not self._summary_delta:
            return said
        self._sequence_number = number + 2
        return said + b'%b%b,"sequence_number":%d}\n\n' % (self._summary_delta, encoded, number + 1)

    def _more_with_logprobs(self, text: str) -> bytes:
        logprobs, self._next = self._next, []
        self._told += logprobs
        at = {"content_index": 0, "logprobs": logprobs}
        return self._item_event("response.output_text.delta", **at, delta=text)

    def _open(self, item: Item, deltas: str, **fields: Any) -> bytes:
        """Shows ``item``; its deltas will be of the type ``deltas``."""
        self._id = item["id"]
        self._delta = self._delta_head(deltas, **fields)
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _delta_head(self, kind: str, **fields: Any) -> bytes:
        said = {"type": kind, "item_id": self._id, "output_index": len(self._items), **fields}
        return b"event: %b\ndata: %b" % (kind.encode(), wire.dump(said)[:-1]) + b',"delta":'

    def _done(self, item: Item) -> bytes:
        encoded = wire.dump(item)
        done = self._event(
            "response.output_item.done", output_index=len(self._items), item=msgspec.Raw(encoded)
        )
        self._keep(encoded)
        return done

    def _keep(self, item: bytes) -> None:
        self._items.append(item)
        self._delta, self._summary_delta = b"", b""
        self._pieces, self._raw, self._told = [], [], []
        self._kind, self._call, self._input = None, None, None

    def _compaction(self, sealed: str) -> bytes:
        item = self._output.compaction(self._new_id("cmp_"), sealed)
        return self._open({**item, "encrypted_content": ""}, "") + self._done(item)

    def _leave(self) -> bytes:
        """Ends what is open, since something else begins."""
        if self._call is not None:
            return self._abandon_call(self._call)
        if self._delta:
            return self._end_span("completed")
        self._kind = None
        return b""

    def _end(self, **said: Any) -> bytes:
        response = self._output.response(self._items, **said)
        return self._event(
            _TERMINAL.get(said["status"], "response.incomplete"), response=msgspec.Raw(response)
        )

    # Spans of text and of reasoning

    def _feed_span(self, event: TextDelta | ReasoningDelta) -> bytes:
        left = b"" if type(event) is self._kind else self._leave()
        self._kind = type(event)
        if not event.text:
            return left
        opened = b"" if self._delta else self._open_span()
        self._pieces.append(event.text)
        if self._next and self._kind is TextDelta:
            return left + opened + self._more_with_logprobs(event.text)
        return left + opened + self._more(event.text)

    def _open_span(self) -> bytes:
        if self._kind is TextDelta:
            item = self._output.message(self._new_id("msg_"), "", "in_progress")
            added = self._open(item, "response.output_text.delta", content_index=0, logprobs=[])
            return added + self._part("response.content_part.added", text_part(""), content_index=0)
        item = self._output.reasoning(self._new_id("rs_"), "", "in_progress", self._thoughts)
        added = self._open(item, "response.reasoning_text.delta", content_index=0)
        added += self._part("response.content_part.added", reasoning_part(""), content_index=0)
        if not self._output.summarizes:
            return added
        # The summary is the thought itself, and comes with it: some clients show nothing else.
        self._summary_delta = self._delta_head("response.reasoning_summary_text.delta", summary_index=0)
        return added + self._part("response.reasoning_summary_part.added", summary_part(""), summary_index=0)

    def _part(self, kind: str, part: Item, **at: int) -> bytes:
        return self._item_event(kind, **at, part=part)

    def _span_item(self, status: str) -> Item:
        text = "".join(self._pieces)
        if self._kind is TextDelta:
            return self._output.message(self._id, text, status, self._told)
        return self._output.reasoning(self._id, text, status, self._thoughts)

    def _end_span(self, status: str) -> bytes:
        item = self._span_item(status)
        part = item["content"][0]
        text = part["text"]
        if self._kind is TextDelta:
            told = {"text": text, "logprobs": part["logprobs"]}
            done = self._item_event("response.output_text.done", content_index=0, **told)
        else:
            done = self._item_event("response.reasoning_text.done", content_index=0, text=text)
            self._thoughts += 1
        done += self._part("response.content_part.done", part, content_index=0)
        for i, summary in enumerate(item.get("summary", ())):
            done += self._item_event("response.reasoning_summary_text.done", summary_index=i, text=text)
            done += self._part("response.reasoning_summary_part.done", summary, summary_index=i)
        return done + self._done(item)

    def _abandon_span(self) -> None:
        if self._kind is not None and self._delta:
            self._keep(wire.dump(self._span_item("incomplete")))

    # Calls

    def _start_call(self, event: ToolCallStart) -> bytes:
        self._kind, self._call, self._raw = None, event, [event.raw]
        # Only whole arguments tell the type of the item of a native call, so it is shown when it ends.
        return b"" if self._output.is_native(event.name) else self._open_call(event)

    def _open_call(self, event: ToolCallStart) -> bytes:
        custom = self._output.is_custom(event.name)
        self._input = InputText() if custom else None
        item = self._output.call(self._new_id("ctc_" if custom else "fc_"), _cut(event, ""))
        return self._open({**item, "status": "in_progress"}, f"response.{_field(item)}.delta")

    def _feed_arguments(self, event: ArgumentsDelta) -> bytes:
        if self._call is None:
            return b""
        self._raw.append(event.raw)
        self._pieces.append(event.json)
        piece = event.json if self._input is None else self._input.feed(event.json)
        return self._more(piece) if piece and self._delta else b""

    def _end_call(self) -> bytes:
        if self._call is None:
            return b""
        call = ToolCall(self._call.name, "".join(self._pieces), self._call.id)
        if not self._delta:
            return self._end_native(call)
        item = self._output.call(self._id, call)
        if self._input is not None:
            rest = self._input.close(call.arguments, complete=True)
        else:
            rest = "" if call.arguments else item["arguments"]
        return (self._more(rest) if rest else b"") + self._end_shown(item)

    def _end_native(self, call: ToolCall) -> bytes:
        item = self._output.whole_call(call, self._new_id)
        if item["type"] != "function_call":
            return self._open({**item, "status": "in_progress"}, "") + self._done(item)
        opened = self._open(
            {**item, "status": "in_progress", "arguments": ""}, f"response.{_field(item)}.delta"
        )
        return opened + self._more(item["arguments"]) + self._end_shown(item)

    def _end_shown(self, item: Item) -> bytes:
        field = _field(item)
        said = {"input": item["input"]} if "input" in item else {"arguments": item["arguments"]}
        return self._item_event(f"response.{field}.done", **said) + self._done(item)

    def _abandon_call(self, event: ToolCallStart) -> bytes:
        """Shows what there is of a call that is no call, or not yet; ``done`` would have it run."""
        arguments = "".join(self._pieces)
        opened, rest = b"", ""
        if not self._delta:
            opened, rest = self._open_call(event), arguments
        elif self._input is not None:
            rest = self._input.close(arguments, complete=False)
        shown = opened + (self._more(rest) if rest else b"")
        self._keep(wire.dump(self._output.call(self._id, _cut(event, arguments))))
        return shown


def _cut(event: ToolCallStart, arguments: str) -> ToolCall:
    return ToolCall(event.name, arguments, event.id, complete=False)


def _field(item: Item) -> str:
    return "custom_tool_call_input" if item["type"] == "custom_tool_call" else "function_call_arguments"
