"""OpenAI Chat Completions: the request.

https://platform.openai.com/docs/api-reference/chat/create, with the fields that vLLM, SGLang, llama.cpp,
OpenRouter and the makers of open models add. Unknown fields are accepted. ``chat_encode`` makes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from singletree.conversation import (
    Conversation,
    Request,
    ResponseFormat,
    Sampling,
    Thinking,
    Tool,
    ToolChoice,
)
from singletree.errors import InvalidRequest
from singletree.protocols import custom_tools, limits, wire
from singletree.protocols.chat_encode import ID_PREFIX, Encoder, encode, encode_error
from singletree.protocols.chat_messages import Message, reasoning_fields, turns

__all__ = ["ID_PREFIX", "ROUTES", "Encoder", "decode", "encode", "encode_error"]

ROUTES: list[tuple[str, str, str]] = [("POST", "/v1/chat/completions", "create")]


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Grammar(msgspec.Struct):
    syntax: Literal["lark", "regex"]
    definition: str


class _CustomFormat(msgspec.Struct):
    type: Literal["text", "grammar"] = "text"
    grammar: _Grammar | None = None


class _Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: _CustomFormat | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _Function | None = None
    custom: _Custom | None = None


class _Named(msgspec.Struct):
    name: str


class _Choice(msgspec.Struct):
    """An object given as ``tool_choice``, or a tool that ``allowed_tools`` names."""

    type: str
    function: _Named | None = None
    custom: _Named | None = None
    name: str | None = None
    allowed_tools: _Allowed | None = None

    @property
    def tool(self) -> str | None:
        named = self.function or self.custom
        return named.name if named else self.name


class _Allowed(msgspec.Struct):
    mode: str = "auto"
    tools: list[_Choice] = []


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


class _ThinkingField(msgspec.Struct):
    type: str | None = None
    budget_tokens: int | None = None


class _ReasoningField(msgspec.Struct):
    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class Body(msgspec.Struct):
    """The body as it goes over the wire."""

    model: str
    messages: list[Message]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
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
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    response_format: _Format | None = None
    reasoning_effort: str | None = None
    reasoning: _ReasoningField | None = None
    include_reasoning: bool | None = None
    thinking: _ThinkingField | bool | None = None
    thinking_budget: int | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
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

    ``extra`` holds ``include_usage`` (bool), ``reasoning_fields`` (tuple of str: the fields that carry the
    reasoning) and ``continue_final_message`` (bool: the answer goes on with the last, assistant's, message).

    Raises:
        InvalidRequest: with ``param`` as a path such as ``messages.0.content``.
    """
    _refuse_what_cannot_be_done(wanted)
    warnings: list[str] = []
    tools = _tools(wanted.tools or [], warnings)
    return Request(
        model=wanted.model or "",
        conversation=Conversation(turns(wanted.messages), tools),
        sampling=_sampling(wanted),
        stream=bool(wanted.stream),
        tool_choice=_tool_choice(wanted.tool_choice, tools, warnings),
        parallel_tool_calls=wanted.parallel_tool_calls is not False,
        thinking=_thinking(wanted),
        response_format=_response_format(wanted.response_format),
        session=wanted.prompt_cache_key or wanted.session_id or None,
        warnings=tuple(warnings),
        extra={
            "include_usage": bool(wanted.stream_options and wanted.stream_options.include_usage),
            "reasoning_fields": _reasoning_fields(wanted),
            "continue_final_message": _continues(wanted),
        },
    )


_LEGACY = {
    "functions": "functions is the legacy form and not supported; send tools",
    "function_call": "function_call is the legacy form and not supported; send tool_choice",
}


def _refuse_what_cannot_be_done(body: Body) -> None:
    for field, message in _LEGACY.items():
        if getattr(body, field) is not None:
            raise InvalidRequest(message, param=field)
    if body.n is not None and body.n != 1:
        raise InvalidRequest(f"n is {body.n!s:.40}; a request makes one choice: send n=1", param="n")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(
            f"top_logprobs is {body.top_logprobs} but logprobs is not true; send both", param="top_logprobs"
        )
    limits.check(body)


def _sampling(body: Body) -> Sampling:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
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
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        logit_bias=_logit_bias(body.logit_bias or {}),
        ignore_eos=bool(body.ignore_eos),
    )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float] | None:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            at = "logit_bias"
            raise InvalidRequest(f"{at}: {limits.shown(token)} is no token id; send ids as keys", param=at)
    return {int(token): bias for token, bias in given.items()} or None


def _tools(given: list[_Tool], warnings: list[str]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for i, tool in enumerate(given):
        if tool.type == "function":
            tools.append(_function_tool(tool.function, f"tools.{i}.function"))
        elif tool.type == "custom":
            tools.append(_custom_tool(tool.custom, f"tools.{i}.custom"))
        else:
            warnings.append(f"tools.{i} is ignored: type {limits.shown(tool.type)} is not known here")
    return tuple(tools)


def _function_tool(function: _Function | None, at: str) -> Tool:
    if function is None or not function.name:
        raise InvalidRequest(f"{at}: Field required, with a name", param=at)
    return Tool(function.name, function.description, function.parameters, function.strict)


def _custom_tool(custom: _Custom | None, at: str) -> Tool:
    if custom is None or not custom.name:
        raise InvalidRequest(f"{at}: Field required, with a name", param=at)
    grammar = custom.format.grammar if custom.format else None
    syntax, definition = (grammar.syntax, grammar.definition) if grammar else (None, "")
    return Tool(
        custom.name,
        custom_tools.description(custom.description, syntax, definition),
        custom_tools.PARAMETERS,
        kind="custom",
        extra={"grammar": {"syntax": syntax, "definition": definition}} if grammar else None,
    )


_MODES: dict[str, ToolChoice] = {
    "auto": ToolChoice("auto"),
    "none": ToolChoice("none"),
    "required": ToolChoice("required"),
    "any": ToolChoice("required"),
}


def _tool_choice(given: str | _Choice | None, tools: tuple[Tool, ...], warnings: list[str]) -> ToolChoice:
    if given is None:
        return ToolChoice()
    if isinstance(given, _Choice) and given.allowed_tools is not None:
        choice = _allowed(given.allowed_tools, warnings)
    else:
        choice = _named(given)
    if choice.mode == "required" and not tools:
        raise _refused_choice("asks for a call but no tools are given; send tools")
    if choice.name is not None and all(t.name != choice.name for t in tools):
        name = limits.shown(choice.name)
        raise _refused_choice(f"names {name}, which is not in tools; send the name of one of them")
    return choice


def _refused_choice(why: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice {why}", param="tool_choice")


def _named(given: str | _Choice) -> ToolChoice:
    if isinstance(given, _Choice) and given.tool:
        return ToolChoice("required", given.tool)
    mode = given.type if isinstance(given, _Choice) else given
    if mode not in _MODES:
        shown = limits.shown(mode)
        raise _refused_choice(f"is {shown}; send 'auto', 'none', 'required' or an object that names a tool")
    return _MODES[mode]


def _allowed(allowed: _Allowed, warnings: list[str]) -> ToolChoice:
    """Narrowed where one tool is left; the tools themselves stay, since the prompt may not change."""
    choice = _named(allowed.mode)
    names = [tool.tool for tool in allowed.tools if tool.tool]
    if choice.mode == "required" and len(names) == 1:
        return ToolChoice("required", names[0])
    warnings.append("tool_choice.allowed_tools: the list is not enforced; every tool may be called")
    return choice


def _response_format(given: _Format | None) -> ResponseFormat | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ResponseFormat(given.schema)
    if given.type != "json_schema":
        at = "response_format.type"
        cure = "send 'text', 'json_object' or 'json_schema'"
        raise InvalidRequest(f"{at} is {limits.shown(given.type)}; {cure}", param=at)
    wanted = given.json_schema or _JsonSchema()
    if wanted.schema is None:
        at = "response_format.json_schema.schema"
        raise InvalidRequest(f"{at}: Field required; send the JSON schema, or type 'json_object'", param=at)
    return ResponseFormat(wanted.schema, wanted.name or "", wanted.strict)


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


def _reasoning_fields(body: Body) -> tuple[str, ...]:
    if body.include_reasoning is False or (body.reasoning and body.reasoning.exclude):
        return ()
    return reasoning_fields(body.messages) or ("reasoning_content",)


def _continues(body: Body) -> bool:
    """vLLM's switch, or the mark that DeepSeek (``prefix``) and Moonshot (``partial``) put on the message."""
    last = body.messages[-1]
    if last.role == "assistant":
        return bool(body.continue_final_message or last.prefix or last.partial)
    if body.continue_final_message:
        at, cure = "continue_final_message", "end with a message of role 'assistant'"
        raise InvalidRequest(f"{at} is true but the last message is of role {last.role!r}; {cure}", param=at)
    return False
