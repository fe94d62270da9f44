"""OpenAI Chat Completions: the request.

https://platform.openai.com/docs/api-reference/chat/create, with the fields that vLLM, SGLang, llama.cpp,
OpenRouter and the makers of open models add. Unknown fields are accepted. ``chat.stream`` encodes the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec

from singletree import request_limits
from singletree.conversation import Conversation, Request, ResponseFormat, Sampling, Thinking
from singletree.protocols import limits, wire
from singletree.protocols.chat.messages import (
    ChatMessage,
    DecodedMessage,
    collect_turns,
    decode_messages,
    reasoning_fields,
)
from singletree.protocols.chat.tools import (
    SentChoice,
    SentName,
    decode_function_call,
    decode_functions,
    decode_tool_choice,
    decode_tools,
)
from singletree.protocols.limits import malformed, quote_value, refused
from singletree.protocols.openai.answers import compared_answer
from singletree.protocols.openai.engine_fields import (
    EngineFields,
    engine_sampling_of,
    format_from_fields,
    ignored,
)
from singletree.protocols.openai.nvext import NvExt, agent_of, cache_salt_of, hints_of, session_of
from singletree.request_options import RequestOptions

_ABSENT = msgspec.Raw()


class _JsonSchema(msgspec.Struct):
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Format(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None
    schema: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct):
    """What a stream reports of its usage, as sent in the body."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_NO_OPTIONS = StreamOptions()


class _ThinkingField(msgspec.Struct):
    type: str | None = None
    budget_tokens: int | None = None


class _ReasoningField(msgspec.Struct):
    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None


_NO_THINKING_FIELD, _NO_REASONING_FIELD = _ThinkingField(), _ReasoningField()


class SamplingFields(EngineFields, kw_only=True):
    """The sampling and output fields that Chat Completions and Completions share, as sent in the body."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    response_format: _Format | None = None
    nvext: NvExt | None = None


_NOT_STORED = "store is ignored: only responses are stored here; use /v1/responses"


class ChatBody(SamplingFields, kw_only=True):
    """The request body of Chat Completions, as the client sends it."""

    model: str = ""
    messages: list[msgspec.Raw]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: msgspec.Raw = _ABSENT
    tool_choice: str | SentChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: msgspec.Raw = _ABSENT
    function_call: str | SentName | None = None
    reasoning_effort: str | None = None
    reasoning: _ReasoningField | None = None
    include_reasoning: bool | None = None
    thinking: _ThinkingField | bool | None = None
    thinking_budget: int | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    session_id: str | None = None
    store: bool | None = None


def decode(body: bytes, headers: Mapping[str, str] = {}) -> Request:
    """Decode the JSON ``body``. Raises InvalidRequest with ``param`` as a path such as ``messages.0.content``."""
    return build_request(wire.decode_body(body, ChatBody))


def build_request(wanted: ChatBody) -> Request:
    """Return the ``Request`` for a body that is already parsed. Raises as ``decode`` does."""
    sent, functions = decode_tools(wanted.tools), decode_functions(wanted.functions)
    _refuse_unsupported(wanted, has_tools=sent.are_given, has_functions=functions.are_given)
    is_legacy = functions.are_given
    agent = agent_of(wanted.nvext)
    messages = decode_messages(wanted.messages)
    tools = functions.tools or sent.tools
    if later := tuple(chain.from_iterable(map(attrgetter("tools"), messages))):
        # Without any tool at the head, no template says how to call one.
        tools += later if tools else tuple(replace(tool, deferred=False) for tool in later)
        limits.check_tools(tools, "messages")
    conversation = Conversation(collect_turns(messages), tools)
    opens_turn, continues = _continuation(wanted, messages[-1].message)
    return Request(
        model=wanted.model or "",
        conversation=conversation,
        sampling=sampling_of(
            wanted,
            wanted.max_tokens if wanted.max_completion_tokens is None else wanted.max_completion_tokens,
            (wanted.top_logprobs or 0) if wanted.logprobs else None,
        ),
        stream=bool(wanted.stream),
        tool_choice=decode_function_call(wanted.function_call, tools)
        if wanted.function_call is not None
        else decode_tool_choice(wanted.tool_choice, tools),
        opens_turn=opens_turn,
        continues=continues,
        # A message in the legacy form has room for one call.
        parallel_tool_calls=wanted.parallel_tool_calls is not False and not is_legacy,
        thinking=_thinking(wanted),
        response_format=format_of(wanted),
        session=wanted.prompt_cache_key or wanted.session_id or session_of(agent),
        hints=hints_of(wanted.nvext),
        cache_salt=cache_salt_of(wanted.cache_salt, wanted.nvext),
        agent=agent,
        choices=choices_of(wanted),
        warnings=(
            *(() if is_legacy else sent.warnings),
            *((_NOT_STORED,) if wanted.store else ()),
            *ignored(wanted),
        ),
        options=output_options(
            wanted,
            reasoning_fields=_reasoning_fields(wanted, messages),
            legacy_functions=is_legacy,
            compared_answer=compared_answer(wanted.prompt_cache_options),
        ),
    )


def _refuse_unsupported(body: ChatBody, *, has_tools: bool, has_functions: bool) -> None:
    legacy = (
        ("functions", has_functions, "tools", has_tools),
        ("function_call", bool(body.function_call), "tool_choice", bool(body.tool_choice)),
    )
    for old, has_old, new, has_new in legacy:
        if has_old and has_new:
            raise refused(old, f"and {new} are two forms of the same field; send one of them")
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", f"is {body.top_logprobs} but logprobs is not true; send both")
    check_sampling_fields(body)


def check_sampling_fields(body: SamplingFields) -> None:
    """Raise InvalidRequest for a value out of its limits, and for fields that a stream has no place for."""
    if body.prompt_logprobs is not None and body.stream:
        raise refused("prompt_logprobs", "cannot be streamed; send stream=false, or omit prompt_logprobs")
    limits.check_limits(body)


def choices_of(body: SamplingFields) -> int:
    """Return the number of choices that ``body`` asks for (``n``); raise InvalidRequest if it is out of range."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= limits.MAX_CHOICES:
        raise refused("n", f"is {n!s:.40}; send a number from 1 to {limits.MAX_CHOICES}")
    return n


def output_options(body: SamplingFields, **more: Any) -> RequestOptions:
    """Return which usage and token ids ``body`` wants in the response, and the options in ``more``."""
    options = body.stream_options or _NO_OPTIONS
    return RequestOptions(
        include_usage=bool(options.include_usage),
        continuous_usage_stats=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        return_tokens_as_token_ids=bool(body.return_tokens_as_token_ids),
        **more,
    )


def sampling_of(body: SamplingFields, most: int | None, logprobs: int | None) -> Sampling:
    """Return the sampling parameters of ``body``, with the largest number of tokens to generate; None for no limit.

    ``logprobs`` is the number of alternatives reported for each token; None for no log-probabilities.
    """
    return engine_sampling_of(
        body,
        most,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias) if body.logit_bias else None,
    )


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float] | None:
    request_limits.check("logit_biases", len(biases), what="tokens", param="logit_bias")
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise malformed("logit_bias", f"{quote_value(token)} is not a token id; send token ids as keys")
    return {int(token): bias for token, bias in biases.items()} or None


def format_of(body: SamplingFields) -> ResponseFormat | None:
    """Return the format that the response text must have, from whichever field of ``body`` sets it.

    Raises InvalidRequest for an invalid field, or if two fields set a format.
    """
    return format_from_fields(body, _response_format(body.response_format))


def _response_format(given: _Format | None) -> ResponseFormat | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ResponseFormat(given.schema, schema_at="response_format.schema")
    if given.type != "json_schema":
        why = f"is {quote_value(given.type)}; send 'text', 'json_object' or 'json_schema'"
        raise refused("response_format.type", why)
    wanted = given.json_schema or _JsonSchema()
    at = "response_format.json_schema.schema"
    if wanted.schema is None:
        raise malformed(at, "Field required; send the JSON schema, or type 'json_object'")
    return ResponseFormat(wanted.schema, wanted.name or "", wanted.strict, at)


_THINKING_TYPES = {"enabled": True, "adaptive": True, "disabled": False}


def _thinking(body: ChatBody) -> Thinking:
    """Decode the reasoning fields; the most explicit one wins.

    The order is: a field of its own, then the effort ``none``, then a chat-template variable.
    """
    arguments = body.chat_template_kwargs
    reasoning = body.reasoning or _NO_REASONING_FIELD
    field = body.thinking if isinstance(body.thinking, _ThinkingField) else _NO_THINKING_FIELD
    effort = body.reasoning_effort or reasoning.effort
    candidates = (
        body.enable_thinking,
        body.thinking if isinstance(body.thinking, bool) else _THINKING_TYPES.get(field.type or ""),
        reasoning.enabled,
        False if effort == "none" else None,
        *((arguments or {}).get(name) for name in ("enable_thinking", "thinking")),
    )
    budgets = (field.budget_tokens, reasoning.max_tokens, body.thinking_budget)
    return Thinking(
        enabled=next((value for value in candidates if isinstance(value, bool)), None),
        effort=effort,
        budget_tokens=next((b for b in budgets if b is not None), None),
        template_arguments=arguments,
    )


def _reasoning_fields(body: ChatBody, messages: Sequence[DecodedMessage]) -> tuple[str, ...] | None:
    # Those in which the client reads reasoning; None if the request does not show them.
    if body.include_reasoning is False or (body.reasoning and body.reasoning.exclude):
        return ()
    return reasoning_fields(messages) or None


def _continuation(body: ChatBody, last: ChatMessage) -> tuple[bool, bool]:
    """Return ``Request.opens_turn`` and ``Request.continues``.

    They come from vLLM's switches, or from the field that DeepSeek (``prefix``) and Moonshot (``partial``) set on the
    last message. Without any of them, a trailing assistant message is continued.
    """
    at = "continue_final_message"
    if body.continue_final_message and last.role != "assistant":
        cure = "end with a message of role 'assistant'"
        raise refused(at, f"is true but the last message is of role {last.role!r}; {cure}")
    if body.continue_final_message and body.add_generation_prompt:
        raise refused(at, "and add_generation_prompt are both true; send one of them")
    if body.continue_final_message or last.prefix or last.partial:
        return True, True
    return body.add_generation_prompt is not False, not (
        body.add_generation_prompt or body.continue_final_message is False
    )
