"""What a response says when it stands still: the response object, its output items, and errors.

https://platform.openai.com/docs/api-reference/responses/object. The stream (``responses_encode``) takes its
items and response objects from here, so that it cannot end in anything but what ``encode`` gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from singletree.conversation import Reasoning, Request, Text, Tool, ToolCall, Turn
from singletree.errors import ContextOverflow, Overloaded, Rejected, SingletreeError
from singletree.events import Finished, FinishReason, Token, Usage
from singletree.protocols import custom_tools, openai_error, wire
from singletree.protocols.logprobs import Telling
from singletree.protocols.responses_native import NATIVE, call_fields

Item = dict[str, Any]

_encode = msgspec.json.Encoder().encode

# Status of the response, reason of ``incomplete_details``. What does not end by itself is incomplete; an
# overflow of the window has no word of its own.
_ENDS: dict[FinishReason, tuple[str, str | None]] = {
    "stop": ("completed", None),
    "stop_sequence": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "context_overflow": ("incomplete", "max_output_tokens"),
    "refusal": ("incomplete", "content_filter"),
    "cancelled": ("cancelled", None),
    "error": ("failed", None),
}
# The first that fits. Codex retries ``server_error`` and, after the time that the message names,
# ``rate_limit_exceeded``. It gives up on the others and on ``server_is_overloaded``, so that is not here.
_FAILURES: tuple[tuple[type[SingletreeError], str], ...] = (
    (ContextOverflow, "context_length_exceeded"),
    (Overloaded, "rate_limit_exceeded"),
    (Rejected, "invalid_prompt"),
    (SingletreeError, "server_error"),
)


def text_part(text: str, logprobs: Sequence[Item] = ()) -> Item:
    """The content part of a message."""
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def reasoning_part(text: str) -> Item:
    """The content part of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def summary_part(text: str) -> Item:
    """The part of a summary."""
    return {"type": "summary_text", "text": text}


class Output:
    """The items and the response object of one response, in the words of the request that it answers.

    ``summarizes`` says whether reasoning has a summary: open models hide nothing, so all of it.

    ``seal`` is called with the ordinal of a reasoning item that ended (they count from 0), and gives the
    ``encrypted_content`` of that item. The API has it by default, whatever ``include`` and ``store`` say
    (https://platform.openai.com/docs/api-reference/responses/object). ``clock`` gives the time in unix seconds.
    """

    def __init__(
        self,
        request: Request,
        *,
        id: str,
        created: int,
        seal: Callable[[int], str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._seal = seal
        self._clock = clock
        self._telling = Telling.of(request)
        self.summarizes = bool(request.extra.get("summary"))
        self._tools = {tool.name: tool for tool in request.conversation.tools}
        self._head = {"id": id, "object": "response", "created_at": created}
        sampling = request.sampling
        told = {
            "model": request.model,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "presence_penalty": sampling.presence_penalty or 0.0,
            "frequency_penalty": sampling.frequency_penalty or 0.0,
        }
        echo: bytes = request.extra.get("echo", b'{"metadata":{}}')
        self._tail = b"," + _encode(told)[1:-1] + b"," + echo[1:]

    def is_custom(self, name: str) -> bool:
        """Whether calls of the tool are custom tool calls."""
        tool = self._tool(name)
        return tool is not None and tool.kind == "custom"

    def is_native(self, name: str) -> bool:
        """Whether calls of the tool may have an item type of their own, which only whole arguments tell."""
        return self._kind(name) in NATIVE

    def logprobs(self, tokens: Sequence[Token]) -> list[Item]:
        """Those of the visible ones among ``tokens``; none where none were asked for."""
        if not self._telling.logprobs:
            return []
        return [self._telling.one(t) for t in tokens if t.is_visible and t.logprob is not None]

    def message(self, id: str, text: str, status: str, logprobs: Sequence[Item] = ()) -> Item:
        """A message item; without content while it is in progress."""
        content = [text_part(text, logprobs)] if status != "in_progress" else []
        return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}

    def reasoning(self, id: str, text: str, status: str, ordinal: int) -> Item:
        """A reasoning item; ``ordinal`` counts those of the response from 0."""
        open_ = status == "in_progress"
        sealed = self._seal(ordinal) if self._seal and not open_ else ""
        return {
            "id": id,
            "type": "reasoning",
            "status": status,
            "summary": [summary_part(text)] if self.summarizes and not open_ else [],
            "content": [] if open_ else [reasoning_part(text)],
            **({"encrypted_content": sealed} if sealed else {}),
        }

    def call(self, id: str, call: ToolCall) -> Item:
        """A function or custom tool call, under the names that the client knows."""
        tool = self._tool(call.name)
        said = (tool.extra if tool else None) or {}
        status = "completed" if call.complete else "incomplete"
        names = {"call_id": call.id, "name": said.get("name", call.name)}
        if "namespace" in said:
            names["namespace"] = said["namespace"]
        if tool is not None and tool.kind == "custom":
            told = custom_tools.to_input(call.arguments, complete=call.complete)
            return {"id": id, "type": "custom_tool_call", "status": status, "input": told, **names}
        arguments = call.arguments or ("{}" if call.complete else "")
        return {"id": id, "type": "function_call", "status": status, "arguments": arguments, **names}

    def compaction(self, id: str, sealed: str) -> Item:
        """A compaction item."""
        return {"id": id, "type": "compaction", "encrypted_content": sealed}

    def whole_call(self, call: ToolCall, new_id: Callable[[str], str]) -> Item:
        """The item of a call that is over, of its tool's own type where the arguments allow it."""
        native = NATIVE.get(self._kind(call.name))
        fields = call_fields(native, call.arguments) if native and call.complete else None
        if native is None or fields is None:
            return self.call(new_id("ctc_" if self.is_custom(call.name) else "fc_"), call)
        head = {"id": new_id(native.prefix), "type": native.item, "status": "completed", "call_id": call.id}
        return {**head, **fields}

    def response(
        self,
        output: Sequence[bytes] = (),
        *,
        status: str = "in_progress",
        reason: str | None = None,
        error: Item | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """The response object with these items, each of them JSON."""
        said = {
            **self._head,
            "status": status,
            "completed_at": int(self._clock()) if status == "completed" else None,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": [msgspec.Raw(item) for item in output],
            "usage": None if usage is None else usage_of(usage),
        }
        return _encode(said)[:-1] + self._tail

    def _tool(self, name: str) -> Tool | None:
        """The tool that the model means by ``name``: one of a namespace by its own name too, if no other has that."""
        if name in self._tools:
            return self._tools[name]
        own = [tool for tool in self._tools.values() if tool.extra and tool.extra.get("name") == name]
        return own[0] if len(own) == 1 else None

    def _kind(self, name: str) -> str:
        tool = self._tool(name)
        return str(tool.extra.get("type")) if tool is not None and tool.extra else ""


def ending(finished: Finished) -> Item:
    """What ``Output.response`` is told about the end."""
    status, reason = _ENDS[finished.reason]
    error = {"code": "server_error", "message": "The generation failed; send the request again."}
    failed = error if finished.reason == "error" else None
    return {"status": status, "reason": reason, "error": failed, "usage": finished.usage}


def is_cut(finished: Finished) -> bool:
    """Whether what was open at the end is not whole."""
    return _ENDS[finished.reason][0] != "completed"


def failure(error: SingletreeError) -> Item:
    """``error`` as it stands in a failed response."""
    message = openai_error.error_object(error, prompt="input")["message"]
    if isinstance(error, Overloaded):
        message = f"{message.rstrip('.')}. Please try again in {error.retry_after:g}s."
    return {"code": next(code for kind, code in _FAILURES if isinstance(error, kind)), "message": message}


def encode(
    request: Request,
    turn: Turn,
    finished: Finished,
    *,
    id: str,
    created: int,
    new_id: Callable[[str], str],
    seal: Callable[[int], str] | None = None,
    clock: Callable[[], float] = time.time,
) -> bytes:
    """The body of a response that is not streamed; times in unix seconds, ``seal`` is ``Output``'s."""
    output = Output(request, id=id, created=created, seal=seal, clock=clock)
    items: list[Item] = []
    thoughts = 0
    for i, part in enumerate(turn.parts):
        open_ = is_cut(finished) and i == len(turn.parts) - 1 and bool((turn.extra or {}).get("is_open"))
        status = "incomplete" if open_ else "completed"
        if isinstance(part, Text):
            logprobs = output.logprobs((part.extra or {}).get("tokens", ()))
            items.append(output.message(new_id("msg_"), part.text, status, logprobs))
        elif isinstance(part, Reasoning):
            items.append(output.reasoning(new_id("rs_"), part.text, status, thoughts))
            thoughts += 1
        elif isinstance(part, ToolCall):
            items.append(output.whole_call(part, new_id))
    if turn.extra and "compaction" in turn.extra:
        items.append(output.compaction(new_id("cmp_"), turn.extra["compaction"]))
    return output.response([wire.dump(item) for item in items], **ending(finished))


def encode_error(error: SingletreeError) -> tuple[int, bytes]:
    """HTTP status and JSON body of ``error``."""
    return openai_error.encode_error(error, prompt="input")


def usage_of(usage: Usage) -> Item:
    """The counts as the API has them."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
