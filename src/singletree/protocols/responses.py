"""OpenAI Responses: the request.

https://platform.openai.com/docs/api-reference/responses/create, with the sampling fields that open-model
servers add. Unknown fields are accepted. Items are read in ``responses_input``, tools in ``responses_tools``;
the answer is encoded in ``responses_output`` (whole) and ``responses_encode`` (streamed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from singletree.protocols import limits, responses_body, responses_input, wire
from singletree.protocols.responses_body import Body, Format, Reasoning, TextField
from singletree.protocols.responses_compaction import OpenSummary, asking, is_triggered, unopened_by
from singletree.protocols.responses_encode import ID_PREFIX, Encoder
from singletree.protocols.responses_output import encode, encode_error
from singletree.protocols.responses_state import Known, conversation_id, resolved
from singletree.protocols.responses_tools import Toolbox, read_choice

__all__ = ["ID_PREFIX", "ROUTES", "Encoder", "decode", "encode", "encode_error"]

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
    "context_management is ignored: a conversation is compacted when its input ends in an item of type "
    "compaction_trigger"
)


def decode(
    body: bytes,
    headers: Mapping[str, str] = {},
    known: Known | None = None,
    *,
    stores: bool | None = None,
    summaries: Callable[[str], OpenSummary] = unopened_by,
) -> Request:
    """``body`` as a request.

    ``known`` is what the server has found of what it refers to, None where it looks nothing up. ``stores`` is whether
    it stores the response if asked to; by default where it looks things up. ``summaries`` opens compactions.

    ``extra`` holds:

    * ``input``: the items as they were sent, a string as one message: nothing of them is lost there; items that were
      referred to stand in their place;
    * ``stateful``: the fields that ask for what a server has stored (``previous_response_id``,
      ``conversation``, ``background``, references such as ``input.3``): for the server to resolve or refuse;
    * ``previous_response_id``, the id of the ``conversation``, whether to ``store`` the response and to work in the
      ``background``;
    * ``allowed_tools``: the names that ``tool_choice`` allows, None for all;
    * ``compacts``: whether it is the summary of the conversation that is asked for;
    * ``echo``, ``include``, ``summary``: for the answer.

    Raises:
        InvalidRequest: with ``param`` as a path such as ``input.3.name``.
    """
    try:
        stores = known is not None if stores is None else stores
        request = _request(wire.read(body, Body), known, summaries, stores=stores)
    except RecursionError:
        raise InvalidRequest("the request is nested too deeply; flatten its schemas") from None
    return asking(request) if is_triggered(request.extra["input"]) else request


def _request(
    said: Body, known: Known | None, summaries: Callable[[str], OpenSummary], *, stores: bool
) -> Request:
    responses_body.check(said)
    items = _items(said) if known is None else resolved(_items(said), known)
    tools = Toolbox()
    tools.add(said.tools or (), "tools")
    history = known.history if known else ()
    turns, references = responses_input.read(items, tools, history, summaries(said.model))
    choice, allowed = read_choice(said.tool_choice, tools)
    reasoning = wire.convert(said.reasoning or {}, Reasoning, "reasoning")
    text = wire.convert(said.text or {}, TextField, "text")
    stateful = () if known is not None else (*_stateful(said), *references)
    if said.instructions:
        turns = (Turn("system", (Text(said.instructions),)), *turns)
    if not turns and not stateful:
        raise InvalidRequest("input is empty; send a string or at least one item", param="input")
    return Request(
        model=said.model,
        conversation=Conversation(turns, tools.tools),
        sampling=_sampling(said),
        stream=bool(said.stream),
        tool_choice=choice,
        parallel_tool_calls=said.parallel_tool_calls is not False,
        max_tool_calls=said.max_tool_calls,
        truncate=said.truncation == "auto",
        thinking=_thinking(reasoning, text.verbosity, said.chat_template_kwargs),
        response_format=_response_format(text.format),
        session=said.prompt_cache_key or None,
        warnings=(*tools.warnings, *((_NO_THRESHOLD,) if said.context_management else ())),
        extra={
            "input": items,
            "stateful": stateful,
            "previous_response_id": said.previous_response_id,
            "store": stores and said.store is not False,
            "background": bool(said.background),
            "conversation": conversation_id(said.conversation),
            "allowed_tools": allowed,
            "echo": responses_body.echo(said, stores=stores),
            "include": tuple(said.include or ()),
            "summary": (reasoning.summary or reasoning.generate_summary or "none") != "none",
        },
    )


def _items(said: Body) -> Sequence[Mapping[str, Any]]:
    if isinstance(said.input, str):
        return [{"type": "message", "role": "user", "content": said.input}]
    return said.input or []


def _stateful(said: Body) -> tuple[str, ...]:
    return tuple(f for f in ("previous_response_id", "conversation", "background") if getattr(said, f))


_LOGPROBS = "message.output_text.logprobs"


def _sampling(said: Body) -> Sampling:
    stop = [said.stop] if isinstance(said.stop, str) else said.stop or []
    tells_logprobs = bool(said.top_logprobs) or _LOGPROBS in (said.include or ())
    return Sampling(
        max_tokens=limits.at_least_one(said.max_output_tokens),
        temperature=said.temperature,
        top_p=said.top_p,
        top_k=said.top_k,
        min_p=said.min_p,
        presence_penalty=said.presence_penalty,
        frequency_penalty=said.frequency_penalty,
        repetition_penalty=said.repetition_penalty,
        seed=said.seed,
        stop=tuple(s for s in stop if s),
        logprobs=said.top_logprobs or 0 if tells_logprobs else None,
        ignore_eos=bool(said.ignore_eos),
    )


def _thinking(reasoning: Reasoning, verbosity: str | None, arguments: dict[str, Any] | None) -> Thinking:
    """Effort ``none`` is the clearest word, then a chat-template variable.

    ``verbosity`` is one too, for templates that read it.
    """
    said = (
        False if reasoning.effort == "none" else None,
        *((arguments or {}).get(name) for name in ("enable_thinking", "thinking")),
    )
    return Thinking(
        enabled=next((word for word in said if isinstance(word, bool)), None),
        effort=reasoning.effort,
        template_arguments={"verbosity": verbosity, **(arguments or {})} if verbosity else arguments,
    )


def _response_format(form: Format | None) -> ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat()
    if form.schema is None:
        at = "text.format.schema"
        raise InvalidRequest(f"{at}: Field required; send the JSON schema, or type 'json_object'", param=at)
    return ResponseFormat(form.schema, form.name or "", form.strict, "text.format.schema")
