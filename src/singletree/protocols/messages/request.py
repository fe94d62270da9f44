"""Anthropic Messages: decode requests.

https://platform.claude.com/docs/en/api/messages and .../messages-count-tokens. Fields that the API does not
have are skipped; an error names the field by its path (``messages.0.content.1.text``), as the API does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import msgspec

from singletree.conversation import (
    Conversation,
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
from singletree.protocols.limits import malformed, quote_value
from singletree.protocols.messages.blocks import BlockContent, decode_blocks
from singletree.protocols.messages.tools import (
    RequestNotes,
    ToolDefinition,
    context_edits,
    decode_tool,
    required,
)
from singletree.request_options import RequestOptions

_ABSENT = msgspec.Raw()


class _OutputFormat(msgspec.Struct, frozen=True):
    type: str
    schema: dict[str, Any] | None = None


class _OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: _OutputFormat | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: BlockContent | msgspec.UnsetType = msgspec.UNSET
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


class _Diagnostics(msgspec.Struct, frozen=True):
    previous_message_id: str | None = None


class MessagesBody(msgspec.Struct, frozen=True):
    """The body of a request."""

    messages: list[msgspec.Raw]
    model: str = ""
    max_tokens: int | None = None
    system: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
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
    mcp_servers: Any = None
    container: Any = None
    fallbacks: Any = None
    diagnostics: _Diagnostics | None = None
    thread: Any = None
    compaction: Any = None
    cache_salt: limits.CacheSalt | None = None


_Role = Literal["user", "assistant", "system"]
_ROLES: Mapping[str, _Role] = {role: role for role in get_args(_Role)}
_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_CHOICES: dict[str, ToolChoice] = {
    "auto": ToolChoice(),
    "any": ToolChoice("required"),
    "tool": ToolChoice("required"),
    "none": ToolChoice("none"),
}
# Accepted, but without effect.
_WITHOUT_EFFECT = ("mcp_servers", "container", "fallbacks")
# Claude Code before 2.1: user_<hash>_account_<uuid>_session_<uuid>. Since then a JSON object in the string.
_SESSION_OF_USER = re.compile(r"_session_([0-9a-fA-F-]{8,})$")


def decode(body: bytes, headers: Mapping[str, str] = {}) -> Request:
    """Decode the JSON ``body`` into a ``Request``. ``max_tokens`` is clamped later, where the model's limits are known.

    Raises InvalidRequest, worded as the API does; ``param`` is the field's path.
    """
    read = wire.decode_body(body, MessagesBody)
    if read.max_tokens is None:
        raise malformed("max_tokens")
    return _request(read)


def decode_count(body: bytes, headers: Mapping[str, str] = {}) -> Request:
    """Decode a request whose prompt is to be counted: like ``decode``, but ``max_tokens`` is optional."""
    return _request(wire.decode_body(body, MessagesBody))


def _request(body: MessagesBody) -> Request:
    try:
        return _build(body)
    except RecursionError:
        raise InvalidRequest("the request body is nested too deeply; send flatter content") from None


def _build(body: MessagesBody) -> Request:
    notes = RequestNotes()
    limits.check_limits(body)
    # Ignoring these fields would answer a different question.
    if body.thread is not None:
        raise ThreadUnsupported
    if body.compaction is not None:
        raise malformed("compaction", "this server does not write summaries; ask for one in messages")
    if not body.messages:
        raise malformed("messages", "at least one message is required")
    system = wire.decode_field(body.system, BlockContent, _read_system, "system")
    # Tools and warnings name a path in their request, so they keep a message from being used again elsewhere.
    messages = wire.decode_each(
        body.messages, _Message, _read, "messages", lambda message: message.notes is None
    )
    turns = (*system.turns, *chain.from_iterable(map(attrgetter("turns"), messages)))
    declared = wire.decode_field(
        body.tools, list[ToolDefinition] | None, _read_tools, "tools", has_schemas=True
    )
    for noted in filter(None, (system.notes, *map(attrgetter("notes"), messages), declared.notes)):
        notes.merge(noted)
    tools = (*declared.tools, *notes.tools) if notes.tools else declared.tools
    choice = _tool_choice(body, declared, tools, notes)
    for name in _WITHOUT_EFFECT:
        if getattr(body, name):
            notes.warn(f"{name} is ignored: it has no meaning on this server")
    return Request(
        model=body.model,
        conversation=Conversation(turns, tools),
        sampling=_sampling(body),
        stream=bool(body.stream),
        tool_choice=choice,
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        thinking=_thinking(body, messages),
        response_format=_response_format(body),
        context_edits=context_edits(body.context_management, notes),
        cache_salt=body.cache_salt or "",
        session=_session(body.metadata.user_id if body.metadata else None),
        warnings=notes.warnings,
        options=RequestOptions(
            hidden_thinking=body.thinking is not None and body.thinking.display == "omitted",
            prefill_only=body.max_tokens == 0,
            reports_context_edits=body.context_management is not None,
            compared_answer=None if body.diagnostics is None else body.diagnostics.previous_message_id or "",
        ),
    )


class _Read(NamedTuple):
    """One decoded message, with its notes; None for none."""

    turns: tuple[Turn, ...]
    effort: str | None = None
    notes: RequestNotes | None = None


def _read_system(content: BlockContent, at: str) -> _Read:
    notes = RequestNotes()
    decoded = tuple(decode_blocks(content, "system", at, notes))
    return _Read((Turn("system", decoded),) if decoded else (), notes=notes.or_none)


def _read(message: _Message, at: str) -> _Read:
    notes = RequestNotes()
    effort = message.output_config.effort if message.output_config else None
    role = _ROLES.get(message.role)
    if role is None:
        _refuse_type(f"{at}.role", message.role, _ROLES)
    content = message.content
    if content is not msgspec.UNSET:
        decoded = decode_blocks(content, role, f"{at}.content", notes)
        return _Read(_split(role, decoded), effort, notes.or_none)
    if message.output_config is None:
        raise malformed(f"{at}.content")
    return _Read((), effort)


def _split(role: Role, decoded: Sequence[Part]) -> tuple[Turn, ...]:
    """Return the turns of one message; tool results become turns of their own, in their place."""
    if not decoded:
        return (Turn(role),)
    runs = groupby(decoded, lambda part: type(part) is ToolResult)
    return tuple(Turn("tool" if is_result else role, tuple(run)) for is_result, run in runs)


class _DeclaredTools(NamedTuple):
    """The decoded field ``tools``: the tools that can be called, the names of all, and notes; None for none."""

    tools: tuple[Tool, ...]
    names: tuple[str | None, ...]
    notes: RequestNotes | None


def _read_tools(definitions: Sequence[ToolDefinition] | None, at: str) -> _DeclaredTools:
    limits.check_tools(definitions, at)
    notes = RequestNotes()
    sent = definitions or ()
    decoded = (decode_tool(definition, f"{at}.{i}", notes) for i, definition in enumerate(sent))
    tools = tuple(tool for tool in decoded if tool is not None)
    return _DeclaredTools(tools, tuple(definition.name for definition in sent), notes.or_none)


def _tool_choice(
    body: MessagesBody, declared: _DeclaredTools, tools: Sequence[Tool], notes: RequestNotes
) -> ToolChoice:
    sent = body.tool_choice
    if sent is None:
        return ToolChoice()
    choice = _CHOICES.get(sent.type)
    if choice is None:
        _refuse_type("tool_choice.type", sent.type, _CHOICES)
    if choice.mode != "required":
        return choice
    name = required(sent.name, "tool_choice.name") if sent.type == "tool" else None
    if any(name in (None, t.name) for t in tools):
        return ToolChoice("required", name)
    if any(name in (None, sent_name) for sent_name in declared.names):
        notes.warn("tool_choice is ignored: the tool that it names is ignored")
        return ToolChoice()
    if name is None:
        raise malformed("tool_choice", "'any' needs at least one tool in tools")
    raise malformed("tool_choice.name", f"no tool {quote_value(name)} in tools")


def _thinking(body: MessagesBody, messages: Sequence[_Read]) -> Thinking:
    own = body.output_config.effort if body.output_config else None
    effort = next(filter(None, map(attrgetter("effort"), reversed(messages))), own or None)
    sent = body.thinking
    if sent is None:
        return Thinking(effort=effort)
    enabled = _THINKS.get(sent.type)
    if enabled is None:
        _refuse_type("thinking.type", sent.type, _THINKS)
    # Claude and qwen-code send budgets of max_tokens or more, so the API's bounds are not enforced here.
    budget = None if sent.budget_tokens is None else max(sent.budget_tokens, 0)
    return Thinking(enabled, effort, budget)


def _response_format(body: MessagesBody) -> ResponseFormat | None:
    at, sent = "output_config.format", body.output_config.format if body.output_config else None
    if sent is None:
        at, sent = "output_format", body.output_format
    if sent is None:
        return None
    if sent.type != "json_schema":
        _refuse_type(f"{at}.type", sent.type, ("json_schema",))
    if sent.schema is None:
        raise malformed(f"{at}.schema")
    limits.check_schema_fields(sent.schema, f"{at}.schema")
    return ResponseFormat(sent.schema, strict=True, schema_at=f"{at}.schema")


def _refuse_type(at: str, got: str, known: Iterable[str]) -> NoReturn:
    raise malformed(at, f"{quote_value(got)} is not known; send one of {', '.join(known)}")


def _sampling(body: MessagesBody) -> Sampling:
    return Sampling(
        max_tokens=limits.at_least_one(body.max_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        stop=limits.checked_stops(body.stop_sequences, "stop_sequences"),
    )


def _session(user_id: str | None) -> str | None:
    """Return the session inside ``metadata.user_id``, as Claude Code writes it; else the whole value."""
    if not user_id:
        return None
    try:
        return msgspec.json.decode(user_id, type=_User).session_id or user_id
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        found = _SESSION_OF_USER.search(user_id)
        return found[1] if found else user_id
