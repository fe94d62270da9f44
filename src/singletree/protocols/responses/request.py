"""OpenAI Responses: the request.

https://platform.openai.com/docs/api-reference/responses/create, with the sampling fields that open-model servers add,
and the fields that the response object repeats. Unknown fields are accepted. ``responses.input`` decodes the items,
``responses.tools`` the tools; ``responses.output`` encodes the response as one body, ``responses.stream`` as a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from singletree.conversation import Conversation, Request, ResponseFormat, Sampling, Text, Thinking, Turn
from singletree.errors import InvalidRequest
from singletree.protocols import limits, wire
from singletree.protocols.limits import malformed, refused
from singletree.protocols.openai.answers import compared_answer
from singletree.protocols.openai.engine_fields import (
    EngineFields,
    engine_sampling_of,
    format_from_fields,
    ignored,
)
from singletree.protocols.responses import input
from singletree.protocols.responses.input import InputItems
from singletree.protocols.responses.native_tools import WireObject
from singletree.protocols.responses.state import (
    OpenSummary,
    conversation_id,
    is_triggered,
    no_summaries,
    summary_request,
)
from singletree.protocols.responses.tools import declared_tools, decode_choice, repeated_choice
from singletree.request_options import References, RequestOptions, StoredItems, StoredStateOptions

_ABSENT = msgspec.Raw()
_NO_THRESHOLD = (
    "context_management is ignored: a conversation is compacted if its input ends with an item of type "
    "compaction_trigger"
)


class ResponsesBody(EngineFields, kw_only=True):
    """The request body of Responses, as the client sends it. Unknown fields are accepted."""

    model: str = ""
    input: str | list[msgspec.Raw] | None = None
    instructions: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[dict[str, Any]] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    user: str | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _TextField(msgspec.Struct):
    format: _TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class SentRequest(NamedTuple):
    """The fields of a request, and its decoded items."""

    body: ResponsesBody
    items: InputItems

    @property
    def references(self) -> References:
        return input.references_of(self.body.previous_response_id, self.body.conversation, self.items)

    @property
    def needs_store(self) -> bool:
        return bool(self.references or self.body.background) or self.body.store is not False


def decode(
    body: bytes,
    headers: Mapping[str, str] = {},
    known: StoredItems | None = None,
    *,
    stores: bool | None = None,
    summaries: Callable[[str], OpenSummary] = no_summaries,
) -> Request:
    """Decode the JSON ``body`` into a ``Request``: ``parse_body`` and ``resolve_request`` in one.

    ``stores`` is by default whether ``known`` is given.
    """
    stores = known is not None if stores is None else stores
    return resolve_request(parse_body(body), known, summaries, stores=stores)


def parse_body(body: bytes) -> SentRequest:
    """Decode the JSON ``body``, without what it refers to. Raises InvalidRequest."""
    try:
        sent = wire.decode_body(body, ResponsesBody)
        _check(sent)
        given: str | Sequence[msgspec.Raw] = () if sent.input is None else sent.input
        items = input.decode_text(given) if isinstance(given, str) else input.decode_sent(given)
        return SentRequest(sent, items)
    except RecursionError:
        raise _too_deep() from None


def _check(body: ResponsesBody) -> None:
    if body.prompt is not None:
        why = "refers to a template that is not stored here; send its text as instructions and input"
        raise refused("prompt", why)
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise refused("max_tool_calls", f"is {body.max_tool_calls}; send at least 1, or tool_choice 'none'")
    limits.check_limits(body)
    limits.check_metadata(body.metadata)


def resolve_request(
    sent: SentRequest, known: StoredItems | None, summaries: Callable[[str], OpenSummary], *, stores: bool
) -> Request:
    """Return the ``Request`` for a body that was read. Raises InvalidRequest with a path such as ``input.3.name``.

    Args:
        known: the stored items that the body refers to; None if the server does not look any up.
        summaries: returns for a model the function that decrypts its compaction summaries.
        stores: whether the server stores a response on request.
    """
    try:
        request = _request(sent, known, summaries, stores=stores)
    except RecursionError:
        raise _too_deep() from None
    return summary_request(request) if is_triggered(request.options.stored_state.input_items) else request


def _too_deep() -> InvalidRequest:
    return InvalidRequest("the request is nested too deeply; flatten its schemas")


class _Instructions(NamedTuple):
    """The decoded field ``instructions``: the turn, if it is not empty, and the field as JSON."""

    turns: tuple[Turn, ...]
    repeated: msgspec.Raw


def _read_instructions(text: str | None, at: str) -> _Instructions:
    turns = (Turn("system", (Text(text),)),) if text else ()
    return _Instructions(turns, msgspec.Raw(msgspec.json.encode(text)))


def _request(
    sent: SentRequest, known: StoredItems | None, summaries: Callable[[str], OpenSummary], *, stores: bool
) -> Request:
    body, items = sent
    history = _NO_ITEMS
    if known is not None:
        items = input.resolve_references(items, known)
        if known.history:
            history = input.decode_sent(list(map(msgspec.Raw, known.history)), "history")
    declared = declared_tools(body.tools)
    tools = declared.toolbox.copy()
    turns, references, updated = input.decode_items(
        items, tools, history, lambda sealed, at: summaries(body.model)(sealed, at)
    )
    choice = decode_choice(body.tool_choice, tools)
    if updated:
        body = msgspec.structs.replace(
            body, **{f: (getattr(body, f) or {}) | new for f, new in updated.items()}
        )
    reasoning = wire.convert(body.reasoning, _Reasoning, "reasoning") if body.reasoning else _REASONING
    text = wire.convert(body.text, _TextField, "text") if body.text else _TEXT
    stateful: tuple[str, ...] = ()
    if known is None:
        stateful = (*[field for field in _STATEFUL if getattr(body, field)], *references)
    instructions = wire.decode_field(body.instructions, _TEXT_OR_NULL, _read_instructions, "instructions")
    turns = (*instructions.turns, *turns)
    if not turns and not stateful:
        raise refused("input", "is empty; send a string or at least one item")
    return Request(
        model=body.model,
        conversation=Conversation(turns, tools.tools),
        sampling=_sampling(body),
        stream=bool(body.stream),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_tool_calls=body.max_tool_calls,
        truncate=body.truncation == "auto",
        thinking=_thinking(reasoning, text.verbosity, body.chat_template_kwargs),
        response_format=format_from_fields(body, _response_format(text.format), "text.format"),
        session=body.prompt_cache_key or None,
        cache_salt=body.cache_salt or "",
        warnings=(*tools.warnings, *((_NO_THRESHOLD,) if body.context_management else ()), *ignored(body)),
        options=RequestOptions(
            reasoning_summary=(reasoning.summary or reasoning.generate_summary or "none") != "none",
            include=tuple(body.include or ()),
            reasoning_item_ids=True,
            compared_answer=compared_answer(body.prompt_cache_options),
            conversation_field="input",
            echoed_fields=_echo(
                body,
                instructions=instructions.repeated,
                tools=declared.repeated,
                tool_choice=repeated_choice(body.tool_choice),
                stores=stores,
            ),
            stored_state=StoredStateOptions(
                input_items=items.as_sent(),
                unresolved=stateful,
                previous_response_id=body.previous_response_id,
                conversation_id=conversation_id(body.conversation),
                store=stores and body.store is not False,
                background=bool(body.background),
            ),
        ),
    )


_NO_ITEMS = InputItems()
_REASONING, _TEXT = _Reasoning(), _TextField()
_TEXT_OR_NULL = str | None


_STATEFUL = ("previous_response_id", "conversation", "background")
_LOGPROBS = "message.output_text.logprobs"


def _sampling(body: ResponsesBody) -> Sampling:
    return engine_sampling_of(
        body,
        body.max_output_tokens,
        "max_output_tokens",
        logprobs=body.top_logprobs or (0 if _LOGPROBS in (body.include or ()) else None),
    )


def _thinking(reasoning: _Reasoning, verbosity: str | None, arguments: dict[str, Any] | None) -> Thinking:
    # The effort ``none`` wins over a chat-template variable. Some templates read ``verbosity`` as a variable.
    enabled = False if reasoning.effort == "none" else None
    if enabled is None and arguments:
        candidates = (arguments.get(name) for name in ("enable_thinking", "thinking"))
        enabled = next((value for value in candidates if isinstance(value, bool)), None)
    return Thinking(
        enabled=enabled,
        effort=reasoning.effort,
        template_arguments={"verbosity": verbosity, **(arguments or {})} if verbosity else arguments,
    )


def _response_format(form: _TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat()
    if form.schema is None:
        raise malformed("text.format.schema", "Field required; send the JSON schema, or type 'json_object'")
    return ResponseFormat(form.schema, form.name or "", form.strict, "text.format.schema")


def _echo(
    body: ResponsesBody,
    *,
    instructions: msgspec.Raw,
    tools: msgspec.Raw,
    tool_choice: str | WireObject,
    stores: bool,
) -> bytes:
    """Return the fields of the response object that repeat the request, as JSON: they are sent three times or more.

    Defaults are OpenAI's. ``service_tier`` is the tier that was used: ``auto`` becomes ``default``.
    """
    tier, conversation = body.service_tier or "default", body.conversation
    repeated = {
        "background": bool(body.background),
        "conversation": {"id": conversation} if isinstance(conversation, str) else conversation,
        "instructions": instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default" if tier == "auto" else tier,
        "store": stores and body.store is not False,
        "text": _echoed_text(body.text or {}),
        "tool_choice": tool_choice,
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    if body.prompt_cache_options is not None:
        repeated["prompt_cache_options"] = {"mode": "implicit", "ttl": "30m", **body.prompt_cache_options}
    return msgspec.json.encode(repeated)


_FORMAT: WireObject = {"name": "response", "description": None, "schema": {}, "strict": False}


def _echoed_text(text: WireObject) -> WireObject:
    form = text.get("format") or {"type": "text"}
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", **_FORMAT, **_set_fields(form)}
    return {"verbosity": "medium", **_set_fields(text), "format": {"type": "text", **form}}


def _set_fields(fields: WireObject) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
