"""OpenAI Responses: the request.

https://platform.openai.com/docs/api-reference/responses/create, with the sampling fields that open-model
servers add. Unknown fields are accepted. ``responses.input`` decodes the items, ``responses.tools`` the tools;
``responses.output`` encodes the response as one body, ``responses.stream`` as a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from singletree.conversation import (
    Conversation,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    Thinking,
    Turn,
)
from singletree.errors import InvalidRequest
from singletree.protocols import wire
from singletree.protocols.openai.cache_diagnostics import compared_answer
from singletree.protocols.openai.engine_fields import engine_sampling_of, format_from_fields, ignored
from singletree.protocols.responses import body as responses_body
from singletree.protocols.responses import input
from singletree.protocols.responses.body import ReasoningOptions, ResponsesBody, TextField, TextFormat
from singletree.protocols.responses.compaction import OpenSummary, is_triggered, no_summaries, summary_request
from singletree.protocols.responses.input import InputItems
from singletree.protocols.responses.state import References, StoredItems, conversation_id
from singletree.protocols.responses.tools import declared_tools, decode_choice
from singletree.request_options import RequestOptions, StoredStateOptions

ROUTES: list[tuple[str, str, str]] = [
    ("POST", "/v1/responses", "create"),
    ("POST", "/v1/responses/input_tokens", "count_tokens"),
    ("GET", "/v1/responses/{id}", "get_response"),
    ("DELETE", "/v1/responses/{id}", "delete_response"),
    ("POST", "/v1/responses/{id}/cancel", "cancel_response"),
    ("GET", "/v1/responses/{id}/input_items", "list_input_items"),
    ("POST", "/v1/conversations", "create_conversation"),
    ("GET", "/v1/conversations/{id}", "get_conversation"),
    ("POST", "/v1/conversations/{id}", "update_conversation"),
    ("DELETE", "/v1/conversations/{id}", "delete_conversation"),
    ("GET", "/v1/conversations/{id}/items", "list_items"),
    ("POST", "/v1/conversations/{id}/items", "create_items"),
    ("GET", "/v1/conversations/{id}/items/{item}", "get_item"),
    ("DELETE", "/v1/conversations/{id}/items/{item}", "delete_item"),
]


_NO_THRESHOLD = (
    "context_management is ignored: a conversation is compacted if its input ends with an item of type "
    "compaction_trigger"
)


class SentRequest(NamedTuple):
    """The fields of a request, and its decoded items."""

    body: ResponsesBody
    items: InputItems

    @property
    def references(self) -> References:
        """Return the ids that the request refers to; raise InvalidRequest for two that cannot be sent together."""
        return input.references_of(self.body.previous_response_id, self.body.conversation, self.items)


def decode(
    body: bytes,
    headers: Mapping[str, str] = {},
    known: StoredItems | None = None,
    *,
    stores: bool | None = None,
    summaries: Callable[[str], OpenSummary] = no_summaries,
) -> Request:
    """Decode the JSON ``body`` into a ``Request``: ``parse_body`` and ``resolve_request`` in one.

    Args:
        known, summaries: as in ``resolve_request``.
        stores: whether the server stores a response on request; by default, if ``known`` is given.

    Raises:
        InvalidRequest: a field is invalid; ``param`` is a path such as ``input.3.name``.
    """
    stores = known is not None if stores is None else stores
    return resolve_request(parse_body(body), known, summaries, stores=stores)


def parse_body(body: bytes) -> SentRequest:
    """Decode the JSON ``body``, without what it refers to. Raises InvalidRequest."""
    try:
        sent = wire.decode_body(body, ResponsesBody)
        responses_body.check_body(sent)
        given: str | Sequence[msgspec.Raw] = () if sent.input is None else sent.input
        return SentRequest(
            sent, input.decode_text(given) if isinstance(given, str) else input.decode_sent(given)
        )
    except RecursionError:
        raise _too_deep() from None


def resolve_request(
    sent: SentRequest, known: StoredItems | None, summaries: Callable[[str], OpenSummary], *, stores: bool
) -> Request:
    """Return the ``Request`` for a body that was read.

    Args:
        known: the stored items that the body refers to; None if the server does not look any up.
        summaries: returns for a model the function that decrypts its compaction summaries.
        stores: whether the server stores a response on request.

    Raises:
        InvalidRequest: a field is invalid; ``param`` is a path such as ``input.3.name``.
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
    turns, references = input.decode_items(
        items, tools, history, lambda sealed, at: summaries(body.model)(sealed, at)
    )
    choice = decode_choice(body.tool_choice, tools)
    reasoning = wire.convert(body.reasoning, ReasoningOptions, "reasoning") if body.reasoning else _REASONING
    text = wire.convert(body.text, TextField, "text") if body.text else _TEXT
    stateful = () if known is not None else (*_stateful(body), *references)
    instructions = wire.decode_field(body.instructions, _TEXT_OR_NULL, _read_instructions, "instructions")
    turns = (*instructions.turns, *turns)
    if not turns and not stateful:
        raise InvalidRequest("input is empty; send a string or at least one item", param="input")
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
            echoed_fields=responses_body.echo(
                body, instructions=instructions.repeated, tools=declared.repeated, stores=stores
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
_REASONING, _TEXT = ReasoningOptions(), TextField()
_TEXT_OR_NULL = str | None


def _stateful(body: ResponsesBody) -> tuple[str, ...]:
    return tuple(f for f in ("previous_response_id", "conversation", "background") if getattr(body, f))


_LOGPROBS = "message.output_text.logprobs"


def _sampling(body: ResponsesBody) -> Sampling:
    wants_logprobs = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
    return engine_sampling_of(
        body,
        body.max_output_tokens,
        "max_output_tokens",
        logprobs=body.top_logprobs or 0 if wants_logprobs else None,
    )


def _thinking(
    reasoning: ReasoningOptions, verbosity: str | None, arguments: dict[str, Any] | None
) -> Thinking:
    """Decode whether to think; effort ``none`` wins over a chat-template variable.

    ``verbosity`` becomes a template variable, for templates that read it.
    """
    enabled = False if reasoning.effort == "none" else None
    if enabled is None and arguments:
        candidates = (arguments.get(name) for name in ("enable_thinking", "thinking"))
        enabled = next((value for value in candidates if isinstance(value, bool)), None)
    return Thinking(
        enabled=enabled,
        effort=reasoning.effort,
        template_arguments={"verbosity": verbosity, **(arguments or {})} if verbosity else arguments,
    )


def _response_format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat()
    if form.schema is None:
        at = "text.format.schema"
        raise InvalidRequest(f"{at}: Field required; send the JSON schema, or type 'json_object'", param=at)
    return ResponseFormat(form.schema, form.name or "", form.strict, "text.format.schema")
