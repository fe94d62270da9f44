"""Anthropic Messages: requests in, events and bodies out.

https://platform.claude.com/docs/en/api/messages and .../messages-count-tokens. Fields that the API does not
have are accepted and skipped; a refusal names the field by its path (``messages.0.content.1.text``), as the
API does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec

from singletree.conversation import (
    Conversation,
    Extra,
    Part,
    Request,
    ResponseFormat,
    Role,
    Sampling,
    Thinking,
    Tool,
    ToolChoice,
    ToolResult,
    Turn,
)
from singletree.errors import InvalidRequest, ThreadUnsupported
from singletree.protocols import limits, wire
from singletree.protocols.limits import shown
from singletree.protocols.messages_blocks import Block, Content, parts
from singletree.protocols.messages_context import context_edits
from singletree.protocols.messages_encode import (
    ID_PREFIX,
    Encoder,
    encode,
    encode_count,
    encode_error,
)
from singletree.protocols.messages_tools import Reading, ToolDefinition, required, tool

__all__ = [
    "ID_PREFIX",
    "ROUTES",
    "Encoder",
    "decode",
    "decode_count",
    "encode",
    "encode_count",
    "encode_error",
]

ROUTES: list[tuple[str, str, str]] = [
    ("POST", "/v1/messages", "create"),
    ("POST", "/v1/messages/count_tokens", "count_tokens"),
]

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class _OutputFormat(msgspec.Struct, frozen=True):
    type: str
    schema: dict[str, Any] | None = None


class _OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: _OutputFormat | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: Content | msgspec.UnsetType = msgspec.UNSET
    output_config: _OutputConfig | None = None


class _ThinkingConfig(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class _ToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Metadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class _User(msgspec.Struct, frozen=True):
    session_id: str | None = None


class _Body(msgspec.Struct, frozen=True):
    model: str
    messages: list[msgspec.Raw]
    max_tokens: int | None = None
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: _Metadata | None = None
    context_management: Any = None
    cache_control: Any = None
    mcp_servers: Any = None
    container: Any = None
    fallbacks: Any = None
    thread: Any = None
    compaction: Any = None


_SPEAKERS: dict[str, Literal["user", "assistant", "system"]] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
}
_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_CHOICES: dict[str, ToolChoice] = {
    "auto": ToolChoice(),
    "any": ToolChoice("required"),
    "tool": ToolChoice("required"),
    "none": ToolChoice("none"),
}
# Accepted, without effect here.
_WITHOUT_EFFECT = ("mcp_servers", "container", "fallbacks")
# Claude Code before 2.1: user_<hash>_account_<uuid>_session_<uuid>. Since then a JSON object in the string.
_SESSION_OF_USER = re.compile(r"_session_([0-9a-fA-F-]{8,})$")


def decode(body: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> Request:
    """The request that ``body`` makes. ``max_tokens`` is clamped later, where the model's limits are known.

    ``Request.extra`` holds ``context_management`` and ``display`` (of thinking) when the client sent them, and
    ``only_reads`` when ``max_tokens`` is 0.

    Raises:
        InvalidRequest: in the API's words, ``param`` being the field's path.
    """
    read = wire.read(body, _Body)
    if read.max_tokens is None:
        raise InvalidRequest("max_tokens: Field required", param="max_tokens")
    return _request(read)


def decode_count(body: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> Request:
    """The request whose prompt is to be counted: as ``decode``, without the need for ``max_tokens``."""
    return _request(wire.read(body, _Body))


def _request(body: _Body) -> Request:
    try:
        return _build(body)
    except RecursionError:
        raise InvalidRequest("the request body is nested too deep; send flatter content") from None


def _build(body: _Body) -> Request:
    reading = Reading()
    limits.check(body)
    _refuse_other_answers(body)
    if not body.messages:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    messages = wire.read_each(body.messages, _Message, _read, "messages", _is_all_said)
    turns = (*_system(body, reading), *chain.from_iterable(message.turns for message in messages))
    for message in messages:
        reading.take(message.reading)
    tools = (*_tools(body, reading), *reading.tools)
    choice = _tool_choice(body, tools, reading)
    for name in _WITHOUT_EFFECT:
        if getattr(body, name):
            reading.warn(f"{name} is ignored: it has no meaning on this server")
    return Request(
        model=required(body.model, "model"),
        conversation=Conversation(turns, tools),
        sampling=_sampling(body),
        stream=bool(body.stream),
        tool_choice=choice,
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        thinking=_thinking(body, messages),
        response_format=_response_format(body),
        context_edits=context_edits(body.context_management, reading),
        session=_session(body.metadata.user_id if body.metadata else None),
        warnings=reading.warnings,
        extra=_extra(body),
    )


def _refuse_other_answers(body: _Body) -> None:
    """What makes another request of it is not passed over: the answer would be that to a question nobody asked."""
    if body.thread is not None:
        raise ThreadUnsupported
    if body.compaction is not None:
        told = "compaction: this server writes no summaries; ask for one in messages"
        raise InvalidRequest(told, param="compaction")


def _system(body: _Body, reading: Reading) -> Iterator[Turn]:
    said = tuple(parts(body.system, "system", "system", reading))
    if said:
        yield Turn("system", said)


class _Read(NamedTuple):
    """What one message says, and what was gathered on the way through it."""

    turns: tuple[Turn, ...]
    effort: str | None
    reading: Reading


def _is_all_said(message: _Read) -> bool:
    """Whether the turns are all that was made of it: tools know their place in the request."""
    return not message.reading.tools and not message.reading.warnings


def _read(message: _Message, at: str) -> _Read:
    reading = Reading()
    effort = message.output_config.effort if message.output_config else None
    role = _SPEAKERS.get(message.role)
    if role is None:
        _refuse_type(f"{at}.role", message.role, _SPEAKERS)
    content = message.content
    if content is not msgspec.UNSET:
        said = parts(content, role, f"{at}.content", reading)
        return _Read(tuple(_split(role, said)), effort, reading)
    if message.output_config is None:
        raise InvalidRequest(f"{at}.content: Field required", param=f"{at}.content")
    return _Read((), effort, reading)


def _split(role: Role, said: Iterator[Part]) -> Iterator[Turn]:
    """The turns of one message: results of tools are turns of the tools, at their place among the rest."""
    runs: list[tuple[Role, list[Part]]] = []
    for part in said:
        speaker: Role = "tool" if type(part) is ToolResult else role
        if not runs or runs[-1][0] != speaker:
            runs.append((speaker, []))
        runs[-1][1].append(part)
    for speaker, run in runs or [(role, [])]:
        yield Turn(speaker, tuple(run))


def _tools(body: _Body, reading: Reading) -> Iterator[Tool]:
    for i, definition in enumerate(body.tools or ()):
        if own := tool(definition, f"tools.{i}", reading):
            yield own


def _tool_choice(body: _Body, tools: tuple[Tool, ...], reading: Reading) -> ToolChoice:
    asked = body.tool_choice
    if asked is None:
        return ToolChoice()
    choice = _CHOICES.get(asked.type)
    if choice is None:
        _refuse_type("tool_choice.type", asked.type, _CHOICES)
    if choice.mode != "required":
        return choice
    name = required(asked.name, "tool_choice.name") if asked.type == "tool" else None
    if any(name in (None, t.name) for t in tools):
        return ToolChoice("required", name)
    if any(name in (None, t.name) for t in body.tools or ()):
        reading.warn("tool_choice is ignored: the tool it asks for is ignored")
        return ToolChoice()
    if name is None:
        raise InvalidRequest("tool_choice: 'any' needs at least one tool in tools", param="tool_choice")
    raise InvalidRequest(f"tool_choice.name: no tool {shown(name)} in tools", param="tool_choice.name")


def _thinking(body: _Body, messages: Sequence[_Read]) -> Thinking:
    own = body.output_config.effort if body.output_config else None
    effort = next((message.effort for message in reversed(messages) if message.effort), own or None)
    asked = body.thinking
    if asked is None:
        return Thinking(effort=effort)
    enabled = _THINKS.get(asked.type)
    if enabled is None:
        _refuse_type("thinking.type", asked.type, _THINKS)
    # Claude and qwen-code send budgets at or over max_tokens; the API's bounds are not ours to hold.
    budget = None if asked.budget_tokens is None else max(asked.budget_tokens, 0)
    return Thinking(enabled, effort, budget)


def _response_format(body: _Body) -> ResponseFormat | None:
    at, asked = "output_config.format", body.output_config.format if body.output_config else None
    if asked is None:
        at, asked = "output_format", body.output_format
    if asked is None:
        return None
    if asked.type != "json_schema":
        _refuse_type(f"{at}.type", asked.type, ("json_schema",))
    if asked.schema is None:
        raise InvalidRequest(f"{at}.schema: Field required", param=f"{at}.schema")
    return ResponseFormat(asked.schema, strict=True, schema_at=f"{at}.schema")


def _refuse_type(at: str, got: str, known: Iterable[str]) -> NoReturn:
    raise InvalidRequest(f"{at}: {shown(got)} is not known; send one of {', '.join(known)}", param=at)


def _sampling(body: _Body) -> Sampling:
    return Sampling(
        max_tokens=limits.at_least_one(body.max_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        stop=tuple(s for s in body.stop_sequences or () if s),
    )


def _session(user_id: str | None) -> str | None:
    """The session inside ``metadata.user_id``, as Claude Code writes it; else the whole of it."""
    if not user_id:
        return None
    try:
        return msgspec.json.decode(user_id, type=_User).session_id or user_id
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        found = _SESSION_OF_USER.search(user_id)
        return found[1] if found else user_id


def _extra(body: _Body) -> Extra:
    display = body.thinking.display if body.thinking else None
    kept = {
        "context_management": body.context_management,
        "cache_control": body.cache_control,
        "display": display,
        "only_reads": body.max_tokens == 0 or None,
    }
    return {name: value for name, value in kept.items() if value is not None}
