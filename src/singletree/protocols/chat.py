"""OpenAI Chat Completions: the request.

https://platform.openai.com/docs/api-reference/chat/create, with the fields that vLLM, SGLang, llama.cpp,
OpenRouter and the makers of open models add. Unknown fields are accepted. ``chat_encode`` makes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from singletree.conversation import Conversation, Request, ResponseFormat, Sampling, Thinking
from singletree.errors import InvalidRequest
from singletree.protocols import limits, wire
from singletree.protocols.chat_encode import ID_PREFIX, Encoder, encode, encode_choices, encode_error
from singletree.protocols.chat_messages import Message, Read, read, reasoning_fields, turns
from singletree.protocols.chat_tools import SentChoice, SentTool, tool_choice_of, tools_of
from singletree.protocols.hints import NvExt, agent_of, hints_of, session_of

__all__ = ["ID_PREFIX", "ROUTES", "Encoder", "decode", "encode", "encode_choices", "encode_error"]

ROUTES: list[tuple[str, str, str]] = [("POST", "/v1/chat/completions", "create")]


class _JsonSchema(msgspec.Struct):
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Format(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None
    schema: dict[str, Any] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _ThinkingField(msgspec.Struct):
    type: str | None = None
    budget_tokens: int | None = None


class _ReasoningField(msgspec.Struct):
    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class Drawn(msgspec.Struct, kw_only=True):
    """What Chat Completions and Completions ask of the drawing of tokens, as it goes over the wire."""

    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    response_format: _Format | None = None
    nvext: NvExt | None = None


class Body(Drawn, kw_only=True):
    """The body as it goes over the wire."""

    model: str
    messages: list[msgspec.Raw]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[SentTool] | None = None
    tool_choice: str | SentChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
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
    session_id: str | None = None


def decode(body: bytes, headers: Mapping[str, str] = {}) -> Request:
    """``body`` as a request.

    Raises:
        InvalidRequest: with ``param`` as a path such as ``messages.0.content``.
    """
    wanted = wire.read(body, Body)
    if not wanted.model:
        raise InvalidRequest("model is empty; send the name of a served model", param="model")
    return request(wanted)


def request(wanted: Body) -> Request:
    """What ``decode`` makes of a body that has been read; ``model`` may be empty.

    ``extra`` holds what ``told_of`` gives and, where the client shows which fields carry its reasoning,
    ``reasoning_fields`` (tuple of str).

    Raises:
        InvalidRequest: with ``param`` as a path such as ``messages.0.content``.
    """
    _refuse_what_cannot_be_done(wanted)
    warnings: list[str] = []
    tools = tools_of(wanted.tools or [], warnings)
    agent = agent_of(wanted.nvext)
    messages = read(wanted.messages)
    conversation = Conversation(turns(messages), tools)
    opens_turn, continues = _opening(wanted, messages[-1].message)
    return Request(
        model=wanted.model or "",
        conversation=conversation,
        sampling=sampling_of(
            wanted,
            wanted.max_tokens if wanted.max_completion_tokens is None else wanted.max_completion_tokens,
            (wanted.top_logprobs or 0) if wanted.logprobs else None,
        ),
        stream=bool(wanted.stream),
        tool_choice=tool_choice_of(wanted.tool_choice, tools),
        opens_turn=opens_turn,
        continues=continues,
        parallel_tool_calls=wanted.parallel_tool_calls is not False,
        thinking=_thinking(wanted),
        response_format=response_format_of(wanted.response_format),
        session=wanted.prompt_cache_key or wanted.session_id or session_of(agent),
        hints=hints_of(wanted.nvext),
        agent=agent,
        choices=choices_of(wanted),
        warnings=tuple(warnings),
        extra=told_of(wanted) | _reasoning_fields(wanted, messages),
    )


_LEGACY = {
    "functions": "functions is the legacy form and not supported; send tools",
    "function_call": "function_call is the legacy form and not supported; send tool_choice",
}


def _refuse_what_cannot_be_done(body: Body) -> None:
    for field, message in _LEGACY.items():
        if getattr(body, field) is not None:
            raise InvalidRequest(message, param=field)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            f"top_logprobs is {body.top_logprobs} but logprobs is not true; send both", param="top_logprobs"
        )
    check(body)


def check(body: Drawn) -> None:
    """Refuse, with InvalidRequest, what is out of limits and what a stream cannot say."""
    if body.prompt_logprobs is not None and body.stream:
        at = "prompt_logprobs"
        raise InvalidRequest(
            f"{at} have no place in a stream; send stream=false, or leave them out", param=at
        )
    limits.check(body)


def choices_of(body: Drawn) -> int:
    """How many answers ``body`` asks for (``n``); raises InvalidRequest for none and too many."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= limits.MOST_CHOICES:
        raise InvalidRequest(f"n is {n!s:.40}; send a number from 1 to {limits.MOST_CHOICES}", param="n")
    return n


def told_of(body: Drawn) -> dict[str, Any]:
    """What ``body`` wants to be told beside the answer, for ``Request.extra``."""
    options = body.stream_options or _StreamOptions()
    return {
        "include_usage": bool(options.include_usage),
        "continuous_usage_stats": bool(options.include_usage and options.continuous_usage_stats),
        "return_token_ids": bool(body.return_token_ids),
        "return_tokens_as_token_ids": bool(body.return_tokens_as_token_ids),
    }


def sampling_of(body: Drawn, most: int | None, logprobs: int | None) -> Sampling:
    """How ``body`` has tokens drawn: at most ``most``, with ``logprobs`` alternatives told."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Sampling(
        max_tokens=limits.at_least_one(most),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        stop=tuple(s for s in stop if s),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias or {}),
        ignore_eos=bool(body.ignore_eos),
    )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float] | None:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            at = "logit_bias"
            raise InvalidRequest(f"{at}: {limits.shown(token)} is no token id; send ids as keys", param=at)
    return {int(token): bias for token, bias in given.items()} or None


def response_format_of(given: _Format | None) -> ResponseFormat | None:
    """What the text must look like; raises InvalidRequest for what is not known."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ResponseFormat(given.schema, schema_at="response_format.schema")
    if given.type != "json_schema":
        at = "response_format.type"
        cure = "send 'text', 'json_object' or 'json_schema'"
        raise InvalidRequest(f"{at} is {limits.shown(given.type)}; {cure}", param=at)
    wanted = given.json_schema or _JsonSchema()
    at = "response_format.json_schema.schema"
    if wanted.schema is None:
        raise InvalidRequest(f"{at}: Field required; send the JSON schema, or type 'json_object'", param=at)
    return ResponseFormat(wanted.schema, wanted.name or "", wanted.strict, at)


_THINKING_TYPES = {"enabled": True, "adaptive": True, "disabled": False}


def _thinking(body: Body) -> Thinking:
    """The clearest word wins: a field of its own, then effort ``none``, then a chat-template variable."""
    arguments = body.chat_template_kwargs
    asked = body.reasoning or _ReasoningField()
    field = body.thinking if isinstance(body.thinking, _ThinkingField) else _ThinkingField()
    effort = body.reasoning_effort or asked.effort
    said = (
        body.enable_thinking,
        body.thinking if isinstance(body.thinking, bool) else _THINKING_TYPES.get(field.type or ""),
        asked.enabled,
        False if effort == "none" else None,
        *((arguments or {}).get(name) for name in ("enable_thinking", "thinking")),
    )
    budgets = (field.budget_tokens, asked.max_tokens, body.thinking_budget)
    return Thinking(
        enabled=next((word for word in said if isinstance(word, bool)), None),
        effort=effort,
        budget_tokens=next((b for b in budgets if b is not None), None),
        template_arguments=arguments,
    )


def _reasoning_fields(body: Body, messages: Sequence[Read]) -> dict[str, tuple[str, ...]]:
    """Which fields the client reads reasoning in, if it says so."""
    if body.include_reasoning is False or (body.reasoning and body.reasoning.exclude):
        return {"reasoning_fields": ()}
    known = reasoning_fields(messages)
    return {"reasoning_fields": known} if known else {}


def _opening(body: Body, last: Message) -> tuple[bool, bool]:
    """``Request.opens_turn`` and ``continues``: by vLLM's switches, or the mark that DeepSeek (``prefix``) and Moonshot
    (``partial``) put on the message. Unsaid, a message of the assistant's at the end is gone on with.
    """
    at = "continue_final_message"
    if body.continue_final_message and last.role != "assistant":
        cure = "end with a message of role 'assistant'"
        raise InvalidRequest(f"{at} is true but the last message is of role {last.role!r}; {cure}", param=at)
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(f"{at} and add_generation_prompt are both true; send one of them", param=at)
    if body.continue_final_message or last.prefix or last.partial:
        return True, True
    return body.add_generation_prompt is not False, not (
        body.add_generation_prompt or body.continue_final_message is False
    )
