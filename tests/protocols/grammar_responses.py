"""What a Responses stream may look like, as a checker that fails on the first thing out of place."""

from __future__ import annotations

import json
from typing import Any

from protocols import judge_responses
from singletree.checking.streams import Decoder, ServerSentEvent

Event = dict[str, Any]

TERMINAL = {
    "response.completed": {"completed"},
    "response.incomplete": {"incomplete", "cancelled"},
    "response.failed": {"failed"},
}
ASIDES = ("tool_call_dispatch", "reasoning_dispatch")
"""Events beside the protocol, which only who asks for them gets."""
# Of each type of item: the type of its deltas, and the field that they add up to.
SPANS = {"message": ("output_text", "output_text"), "reasoning": ("reasoning_text", "reasoning_text")}
CALLS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
NATIVE_CALLS = {"local_shell_call", "shell_call", "apply_patch_call", "tool_search_call"}


class Grammar:
    """Reads a stream whole.

    ``items`` are the items as a client puts them together; ``dispatched`` are those that got a ``done``, as
    they came with it; ``response`` is the response object of the last event, ``terminal`` its type. Every event goes
    before the judges that are not ours unless it is not ``judged``: what a client said is repeated, whatever it is.
    """

    def __init__(self, stream: bytes, *, judged: bool = True) -> None:
        self._logprobs: list[Event] = []
        self._judge = judge_responses.wrong_event if judged else lambda event: []
        self.items: list[Event] = []
        self.dispatched: list[Event] = []
        self.terminal = ""
        self.response: Event = {}
        self._open: Event | None = None
        self._part = False
        self._summary: str | None = None
        self._summarized = False
        self._text = ""
        self._is_complete = False
        assert stream.endswith(b"\n\n")
        events = [self._checked(e, n) for n, e in enumerate(Decoder().feed(stream))]
        assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
        self._head = events[0]["response"]
        for event in events[:2]:
            self._in_progress(event)
        for event in events[2:]:
            assert not self.terminal, "nothing follows the end"
            if event["type"].removeprefix("response.") not in ASIDES:
                self._event(event)
        assert self.terminal, "a stream ends with a terminal event"

    def _checked(self, event: ServerSentEvent, number: int) -> Event:
        data: Event = json.loads(event.data)
        prefix = "response." if event.event in ASIDES else ""
        assert prefix + event.event == data["type"], "the name of the event is its type"
        wrong = self._judge(data)
        assert not wrong, "\n".join(wrong)
        assert data["sequence_number"] == number, "sequence numbers have no gap"
        return data

    def _event(self, event: Event) -> None:
        kind = event["type"].removeprefix("response.")
        if kind == "in_progress":
            return self._in_progress(event)
        if event["type"] in TERMINAL:
            return self._end(event)
        if kind == "output_item.added":
            return self._added(event)
        item = self._open
        assert item is not None, f"{kind} without an open item"
        assert event["output_index"] == len(self.items) - 1
        if kind == "output_item.done":
            return self._done(event, item)
        assert event["item_id"] == item["id"]
        if kind.startswith("reasoning_summary"):
            return self._in_summary(kind, event)
        assert not self._is_complete, f"{kind} after the item was done"
        if item["type"] in SPANS:
            return self._in_span(kind, event, item)
        delta, field = CALLS[item["type"]]
        if kind == f"{delta}.done":
            assert event[field] == self._text
            self._is_complete = True
        else:
            assert kind == f"{delta}.delta"
            self._delta(event)
        return None

    def _in_progress(self, event: Event) -> None:
        response = event["response"]
        assert response == self._head
        assert response["status"] == "in_progress"
        assert response["output"] == []
        assert response["usage"] is None

    def _added(self, event: Event) -> None:
        item = event["item"]
        self._leave()
        assert event["output_index"] == len(self.items), "indices have no gap"
        assert all(item["id"] != other["id"] for other in self.items), "ids are distinct"
        assert item.get("status") == (None if item["type"] == "compaction" else "in_progress")
        empty = {"message": "content", "reasoning": "summary", **{k: f for k, (_, f) in CALLS.items()}}
        empty["compaction"] = "encrypted_content"
        assert item["type"] in NATIVE_CALLS or not item[empty[item["type"]]], "an item begins empty"
        assert not item.get("content")
        self.items.append(item)
        # Reasoning is shown as content only if that was asked for.
        is_shown = item["type"] != "reasoning" or "content" in item
        self._open, self._part, self._text, self._is_complete = item, False, "", not is_shown
        self._summary, self._summarized = None, False
        self._logprobs = []

    def _leave(self) -> None:
        """Only a call may be left without its done."""
        if self._open is not None:
            assert self._open["type"] in CALLS
            assert not self._is_complete, "a call whose arguments are done is done"
            self._put_together("incomplete")

    def _in_span(self, kind: str, event: Event, item: Event) -> None:
        delta, part_type = SPANS[item["type"]]
        assert event["content_index"] == 0
        if kind == "content_part.added":
            assert not self._part
            assert (event["part"]["type"], event["part"]["text"]) == (part_type, "")
            self._part = True
        elif kind == "content_part.done":
            assert (event["part"]["type"], event["part"]["text"]) == (part_type, self._text)
            assert not self._part
            self._is_complete = True
        elif kind == f"{delta}.done":
            assert self._part
            assert event["text"] == self._text
            self._part = False
        else:
            assert kind == f"{delta}.delta", kind
            assert self._part, "a part is added before its deltas"
            self._delta(event)
            self._logprobs += event.get("logprobs", ())

    def _delta(self, event: Event) -> None:
        assert event["delta"], "no empty deltas"
        self._text += event["delta"]

    def _in_summary(self, kind: str, event: Event) -> None:
        assert event["summary_index"] == 0
        assert not self._summarized
        if kind == "reasoning_summary_part.added":
            assert self._summary is None
            assert (event["part"]["type"], event["part"]["text"]) == ("summary_text", "")
            self._summary = ""
            return
        assert self._summary is not None, "a part of a summary is added before its deltas"
        if kind == "reasoning_summary_text.delta":
            assert event["delta"], "no empty deltas"
            self._summary += event["delta"]
            shown = self._open is not None and "content" in self._open
            assert not shown or self._summary == self._text, "it goes with the thought"
        elif kind == "reasoning_summary_text.done":
            assert event["text"] == self._summary
        else:
            assert kind == "reasoning_summary_part.done"
            assert event["part"]["text"] == self._summary
            self._summarized = True

    def _done(self, event: Event, item: Event) -> None:
        done = event["item"]
        if item["type"] == "compaction":
            assert done == {**item, "encrypted_content": done["encrypted_content"]}
            self.items[-1], self._open = done, None
            self.dispatched.append(done)
            return
        if _is_capsule(done):
            assert done == item | {"status": done["status"], "encrypted_content": done["encrypted_content"]}
            self.items[-1], self._open = done, None
            self.dispatched.append(done)
            return
        assert item["type"] in NATIVE_CALLS or self._is_complete, "an item is done after its parts"
        assert {**item, "status": ""}.keys() == done.keys() - {"encrypted_content"}
        assert self._summarized == (self._summary is not None)
        assert bool(done.get("summary")) == self._summarized
        if item["type"] in NATIVE_CALLS:
            assert done == {**item, "status": "completed"}
            self.items[-1], self._open = done, None
        else:
            self._put_together(done["status"])
            sent_at_the_end = {"encrypted_content"} & done.keys()
            assert done == self.items[-1] | {field: done[field] for field in sent_at_the_end}
            self.items[-1] = done
        if done["type"] not in SPANS:
            assert done["status"] == "completed"
        self.dispatched.append(done)

    def _put_together(self, status: str) -> None:
        item, kind = dict(self.items[-1]), self.items[-1]["type"]
        item["status"] = status
        if kind == "message":
            part = {"type": "output_text", "annotations": [], "logprobs": self._logprobs, "text": self._text}
            item["content"] = [part]
        elif kind == "reasoning":
            if "content" in item:
                item["content"] = [{"type": "reasoning_text", "text": self._text}]
            item["summary"] = [{"type": "summary_text", "text": self._summary}] if self._summary else []
        else:
            item[CALLS[kind][1]] = self._text
        self.items[-1], self._open = item, None

    def _end(self, event: Event) -> None:
        self.terminal, response = event["type"], event["response"]
        failed = self.terminal == "response.failed"
        self._leave()
        assert response["status"] in TERMINAL[self.terminal]
        assert (response["error"] is not None) == failed
        assert (response["incomplete_details"] is not None) == (response["status"] == "incomplete")
        assert (response["completed_at"] is not None) == (response["status"] == "completed")
        changing = {"status", "completed_at", "error", "incomplete_details", "output", "usage"}
        assert {k: v for k, v in response.items() if k not in changing} == {
            k: v for k, v in self._head.items() if k not in changing
        }
        assert [_unsealed(i) for i in response["output"]] == [_unsealed(i) for i in self.items]
        self.response = response


def _is_capsule(item: Event) -> bool:
    """Whether it is a reasoning item that only carries the turn."""
    return (
        item["type"] == "reasoning"
        and not item["summary"]
        and not item.get("content")
        and bool(item.get("encrypted_content"))
    )


def _unsealed(item: Event) -> Event:
    """A thought that was left open is sealed only when the response ends."""
    return {k: v for k, v in item.items() if k != "encrypted_content"}
