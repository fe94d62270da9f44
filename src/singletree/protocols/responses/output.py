"""The response object of Responses, its output items, and errors.

https://platform.openai.com/docs/api-reference/responses/object. The stream (``responses.stream``) takes its items
and response objects from here, so that it always ends with the same object that ``encode`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from singletree.conversation import Reasoning, Text, Tool, ToolCall
from singletree.errors import BudgetSpent, ContextOverflow, Overloaded, RateLimited, Rejected, SingletreeError
from singletree.events import Finished, FinishReason, Token, Usage
from singletree.protocols import wire
from singletree.protocols.answer import AnswerContext, EncodedItem, EncodedResponse, FinishedChoice
from singletree.protocols.openai import answers, custom_tools
from singletree.protocols.responses.native_tools import NATIVE, call_fields

OutputItem = dict[str, Any]
WireText = str | msgspec.Raw
"""A text, or the same as JSON."""

_encode = msgspec.json.Encoder().encode

# Status of the response, reason of ``incomplete_details``. A response that was cut short is incomplete; the API has no
# reason for an overflow of the context window.
_ENDS: dict[FinishReason, tuple[str, str | None]] = {
    "stop": ("completed", None),
    "stop_sequence": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "context_overflow": ("incomplete", "max_output_tokens"),
    "refusal": ("incomplete", "content_filter"),
    "cancelled": ("cancelled", None),
    "error": ("failed", None),
}
# The first match counts. Codex retries ``server_error`` and, after the time that the message names,
# ``rate_limit_exceeded``. It gives up on the others and on ``server_is_overloaded``, which is therefore not used.
_FAILURES: tuple[tuple[type[SingletreeError], str], ...] = (
    (ContextOverflow, "context_length_exceeded"),
    (Overloaded, "rate_limit_exceeded"),
    (RateLimited, "rate_limit_exceeded"),
    (BudgetSpent, "insufficient_quota"),
    (Rejected, "invalid_prompt"),
    (SingletreeError, "server_error"),
)


def text_part(text: WireText, logprobs: Sequence[OutputItem] = ()) -> OutputItem:
    """Return the content part of a message."""
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def reasoning_part(text: WireText) -> OutputItem:
    """Return the content part of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def summary_part(text: WireText) -> OutputItem:
    """Return the part of a reasoning summary."""
    return {"type": "summary_text", "text": text}


INCLUDE_REASONING = "reasoning.content"
"""The value of ``include`` that asks for the reasoning itself. OpenAI's API has no such value: it never sends it."""

_INCLUDE_SEALED = "reasoning.encrypted_content"


class Output:
    """Encode the items and the response object of one response, as its request asks.

    A reasoning item has only what the request asks for, as on OpenAI's API: some clients take its ``content`` for
    response text, others fail on a part of type ``reasoning_text``.

    Capsules are the ``encrypted_content`` of items. They are made only if ``include`` asks for them.

    Attributes:
        summarizes: whether reasoning items have a summary. Open models hide nothing, so it is the whole reasoning.
        shows_reasoning: whether reasoning items have the reasoning itself, as ``content``.
    """

    def __init__(self, context: AnswerContext) -> None:
        request = context.request
        include = request.options.include
        self._seals = _INCLUDE_SEALED in include
        self._seal = context.seal if self._seals else None
        self._context = context
        self._details = answers.TokenDetails(request)
        self.summarizes = request.options.reasoning_summary
        self.shows_reasoning = INCLUDE_REASONING in include
        self._head = {"id": context.id, "object": "response", "created_at": context.created}
        sampling = request.sampling
        settings = {
            **answers.response_diagnostics(request.prompt_report),
            "model": request.model,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "presence_penalty": sampling.presence_penalty or 0.0,
            "frequency_penalty": sampling.frequency_penalty or 0.0,
        }
        self._tail = b"," + _encode(settings)[1:-1] + b"," + request.options.echoed_fields[1:]

    def is_custom(self, name: str) -> bool:
        tool = self._tool(name)
        return tool is not None and tool.kind == "custom"

    def is_native(self, name: str) -> bool:
        """Return whether calls of the tool may have their own item type, which depends on the complete arguments."""
        return self._kind(name) in NATIVE

    def logprobs(self, tokens: Sequence[Token]) -> list[OutputItem]:
        if not self._details.logprobs:
            return []
        return [self._details.encode_token(t) for t in tokens if t.is_visible and t.logprob is not None]

    def message(
        self, id: str, text: WireText, status: str, logprobs: Sequence[OutputItem] = ()
    ) -> OutputItem:
        content = [text_part(text, logprobs)] if status != "in_progress" else []
        return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}

    def reasoning(self, id: str, text: WireText, status: str, ordinal: int) -> OutputItem:
        """Return a reasoning item; ``ordinal`` counts the reasoning items of the response from 0."""
        open_ = status == "in_progress"
        sealed = self._seal(ordinal) if self._seal and not open_ else ""
        return {
            "id": id,
            "type": "reasoning",
            "status": status,
            "summary": [summary_part(text)] if self.summarizes and not open_ else [],
            **({"content": [] if open_ else [reasoning_part(text)]} if self.shows_reasoning else {}),
            **({"encrypted_content": sealed} if sealed else {}),
        }

    def call(self, id: str, call: ToolCall) -> OutputItem:
        """Return a function or custom tool call, with the names that the client knows."""
        tool = self._tool(call.name)
        sent = (tool.extra if tool else None) or {}
        status = "completed" if call.complete else "incomplete"
        names = {"call_id": call.id, "name": sent.get("name", call.name)}
        if "namespace" in sent:
            names["namespace"] = sent["namespace"]
        if tool is not None and tool.kind == "custom":
            text = custom_tools.to_input(call.arguments, complete=call.complete)
            return {"id": id, "type": "custom_tool_call", "status": status, "input": text, **names}
        arguments = call.arguments or ("{}" if call.complete else "")
        return {"id": id, "type": "function_call", "status": status, "arguments": arguments, **names}

    def sealed_end(self, finished: Finished) -> str:
        """Return the capsule of what follows the last reasoning in a response with calls; empty if there is none."""
        return self._context.sealed_end(finished) if self._seals else ""

    def capsule(self, id: str, sealed: str) -> OutputItem:
        content: OutputItem = {"content": []} if self.shows_reasoning else {}
        item = {"id": id, "type": "reasoning", "status": "completed", "summary": [], **content}
        return {**item, "encrypted_content": sealed}

    def compaction(self, id: str, sealed: str) -> OutputItem:
        return {"id": id, "type": "compaction", "encrypted_content": sealed}

    def whole_call(self, call: ToolCall, new_id: Callable[[str], str]) -> OutputItem:
        """Return the item of a finished call, of its tool's own item type if the arguments match it."""
        native = NATIVE.get(self._kind(call.name))
        fields = call_fields(native, call.arguments) if native and call.complete else None
        if native is None or fields is None:
            return self.call(new_id("ctc_" if self.is_custom(call.name) else "fc_"), call)
        head = {"id": new_id(native.prefix), "type": native.item, "status": "completed", "call_id": call.id}
        return {**head, **fields}

    def response(
        self,
        output: Sequence[EncodedItem] = (),
        *,
        status: str = "in_progress",
        reason: str | None = None,
        error: OutputItem | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        fields = {
            **self._head,
            "status": status,
            "completed_at": int(self._context.clock()) if status == "completed" else None,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": [msgspec.Raw(item.json) for item in output],
            "usage": None if usage is None else usage_of(usage),
        }
        return _encode(fields)[:-1] + self._tail

    def finish(self, output: Sequence[EncodedItem], **fields: Any) -> bytes:
        """Return the response object of an answer that is over, and give it to ``context.keep``."""
        response = self.response(output, **fields)
        if self._context.keep is not None:
            self._context.keep(EncodedResponse(self._context.id, response, output))
        return response

    @cached_property
    def _tools(self) -> dict[str, Tool]:
        # Most responses have no call, and a request may have hundreds of tools.
        return {tool.name: tool for tool in self._context.request.conversation.tools}

    def _tool(self, name: str) -> Tool | None:
        """Return the tool with the model's ``name``, or the one in a namespace with that own name, if it is unique."""
        if name in self._tools:
            return self._tools[name]
        own = [tool for tool in self._tools.values() if tool.extra and tool.extra.get("name") == name]
        return own[0] if len(own) == 1 else None

    def _kind(self, name: str) -> str:
        tool = self._tool(name)
        return str(tool.extra.get("type")) if tool is not None and tool.extra else ""


def ending(finished: Finished) -> OutputItem:
    """Return the arguments of ``Output.response`` for a finished response."""
    status, reason = _ENDS[finished.reason]
    error = {"code": "server_error", "message": "The generation failed; send the request again."}
    failed = error if finished.reason == "error" else None
    return {"status": status, "reason": reason, "error": failed, "usage": finished.usage}


def is_cut(finished: Finished) -> bool:
    """Return whether the item that was open at the end is incomplete."""
    return _ENDS[finished.reason][0] != "completed"


def failure(error: SingletreeError) -> OutputItem:
    """Return ``error`` in the form of a failed response."""
    message = answers.error_object(error, prompt="input")["message"]
    if isinstance(error, Overloaded | RateLimited):
        message = f"{message.rstrip('.')}. Please try again in {error.retry_after:g}s."
    return {"code": next(code for kind, code in _FAILURES if isinstance(error, kind)), "message": message}


def encode(choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    """Encode a response, which is one choice, as one body."""
    [(context, turn, finished)] = choices
    output, new_id = Output(context), context.new_id
    items: list[OutputItem] = []
    reasoned = 0
    for i, part in enumerate(turn.parts):
        open_ = is_cut(finished) and i == len(turn.parts) - 1 and bool((turn.extra or {}).get("is_open"))
        status = "incomplete" if open_ else "completed"
        if isinstance(part, Text):
            logprobs = output.logprobs((part.extra or {}).get("tokens", ()))
            items.append(output.message(new_id("msg_"), part.text, status, logprobs))
        elif isinstance(part, Reasoning):
            items.append(output.reasoning(new_id("rs_"), part.text, status, reasoned))
            reasoned += 1
        elif isinstance(part, ToolCall):
            items.append(output.whole_call(part, new_id))
    called = any(call.complete for call in turn.tool_calls)
    if called and (sealed := output.sealed_end(finished)):
        items.append(output.capsule(new_id("rs_"), sealed))
    if turn.extra and "compaction" in turn.extra:
        items.append(output.compaction(new_id("cmp_"), turn.extra["compaction"]))
    return output.finish([EncodedItem(item, wire.dump(item)) for item in items], **ending(finished))


def encode_in_progress(context: AnswerContext) -> bytes:
    """Encode the response object before its end, without output items, as a stream begins with it."""
    return Output(context).response()


def encode_count(tokens: int, original: int | None = None) -> bytes:
    """Encode the number of tokens of a prompt; this API has no context editing, so no ``original`` count."""
    return b'{"object":"response.input_tokens","input_tokens":%d}' % tokens


def usage_of(usage: Usage) -> OutputItem:
    """Return ``usage`` in the form of the API."""
    fields = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    return fields if usage.details is None else {**fields, **usage.details}
