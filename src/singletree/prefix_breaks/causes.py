"""Find out why a prompt does not continue the one before: a table of likely causes, each with its cure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from singletree.prefix_breaks.context import HEAD_ROLES, PICTURE, BreakContext
from singletree.request_options import Change
from singletree.server.models.chat_format import ChatFormat
from singletree.server.sessions.divergence import Divergence
from singletree.server.sessions.step import Break, Fault


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of prefix breaks, with what helps (``cure``; ``cure_of`` where that depends on the model), and what
    changed in the words of the vendors' cache diagnostics. ``fault`` is through whose fault the engine reads again what
    it had read; most causes are what the harness sends.
    """

    name: str
    reason: str
    cure: str
    matches: Callable[[BreakContext], bool]
    cure_of: Callable[[BreakContext], str] | None = None
    change: Change = "messages"
    fault: Fault = "harness"


def _billing(context: BreakContext) -> bool:
    return any("-billing-header" in (context.before + side).lower() for side in (context.was, context.now))


def _differs(context: BreakContext, *roles: str) -> bool:
    return not context.unchanged and context.divergence.old is not None and context.role in roles


def _messages_agree(context: BreakContext) -> bool:
    return context.unchanged or context.in_answer


def _moved(context: BreakContext) -> bool:
    old, new = context.divergence.old_rest, context.divergence.new_rest
    return not context.unchanged and len(old) == 1 and len(new) > 1 and old[-1] == new[-1]


def _keep_thinking(context: BreakContext) -> str:
    if not context.switches:
        return "none: this model's template has no switch that keeps it; the prompt before the break stays cached"
    switches = json.dumps(dict(context.switches))
    return f"send chat_template_kwargs {switches}, or start the server with --default-chat-template-kwargs"


def _reasoning_removed(context: BreakContext) -> bool:
    old, new = context.divergence.old, context.divergence.new
    return (
        _differs(context, "assistant") and old is not None and new is not None
        and (old.role, old.words) == (new.role, new.words)
    )  # fmt: skip


CAUSES: tuple[Cause, ...] = (
    Cause(
        "billing_header",
        "Claude Code changed the value of the billing header that it puts into the system prompt",
        "leave the rule billing_header on (--stability-off, --no-strip-anthropic-preamble), or start Claude Code with "
        "CLAUDE_CODE_ATTRIBUTION_HEADER=0",
        lambda c: c.in_head and _billing(c),
        change="system",
    ),
    Cause(
        "tools_dropped",
        "the harness sent no tools this time",
        "the rule compaction_tools keeps the session's tools in compaction requests (--stability-off switches it off); "
        "otherwise let the harness send the tools with tool_choice none",
        lambda c: c.other_tools and not c.tools[1],
        change="tools",
    ),
    Cause(
        "tools_added",
        "tools were added to the list at the start of the prompt",
        "let the harness defer them (defer_loading), or load them before the first turn",
        lambda c: c.other_tools and set(c.tools[0]) < set(c.tools[1]),
        change="tools",
    ),
    Cause(
        "tools_removed",
        "tools were removed from the list",
        "let the harness keep its tools for the whole session",
        lambda c: c.other_tools and set(c.tools[0]) > set(c.tools[1]),
        change="tools",
    ),
    Cause(
        "tools_reordered",
        "the same tools were sent in a different order",
        "let the harness send its tools always in the same order",
        lambda c: c.other_tools and c.tools[0] != c.tools[1] and sorted(c.tools[0]) == sorted(c.tools[1]),
        change="tools",
    ),
    Cause(
        "tools_changed",
        "a tool's description or schema changed",
        "compare the excerpts: text that changes does not belong in a tool's description",
        lambda c: c.other_tools,
        change="tools",
    ),
    Cause(
        "context_edited",
        "the client let the server remove earlier content from the history (context_management)",
        "none needed if this was intended; a higher trigger makes it rarer",
        lambda c: bool(c.divergence.prompt.applied_edits) and _differs(c, "assistant", "user", "tool"),
        change="compacted",
    ),
    Cause(
        "date_in_system",
        "the system prompt contains a date or a time that changed",
        "let the harness put it into the last message, or omit it",
        lambda c: _differs(c, *HEAD_ROLES) and c.in_date,
        change="system",
    ),
    Cause(
        "message_moved",
        "a message that was the last one was moved behind the new messages",
        "in OpenClaw it is a block of internal context, which keeps its place with the Responses API "
        '(api "openai-responses"); otherwise the engine has to read the model\'s turn after it again',
        _moved,
    ),
    Cause(
        "message_inserted",
        "a message was inserted between earlier messages",
        "let the harness add messages only at the end",
        lambda c: not c.unchanged and c.divergence.old in c.divergence.new_rest[1:],
    ),
    Cause(
        "message_removed",
        "earlier messages were removed: the harness trimmed or compacted its history",
        "none needed if this was intended; a larger window for the harness makes it rarer",
        lambda c: (
            not c.unchanged
            and c.divergence.old is not None
            and (c.divergence.new is None or c.divergence.new in c.divergence.old_rest[1:])
        ),
        change="compacted",
    ),
    Cause(
        "system_changed",
        "the text of a system message changed",
        "let the harness keep it during the session and add new text at the end",
        lambda c: _differs(c, *HEAD_ROLES),
        change="system",
    ),
    Cause(
        "reasoning_removed",
        "the harness sent an earlier turn back without its reasoning",
        "let the harness keep reasoning; on Messages: context_management clear_thinking with keep all",
        # Where the template omits this reasoning as well, sending it would gain nothing.
        lambda c: _reasoning_removed(c) and not c.template_drops_thought,
    ),
    Cause(
        "answer_edited",
        "the harness sent an earlier turn of the assistant back with a different text",
        "none needed if this was intended; the turn is rendered as edited",
        lambda c: _differs(c, "assistant") and not _reasoning_removed(c),
    ),
    Cause(
        "picture_changed",
        "a picture in an earlier message was replaced by another one",
        "let the harness send earlier pictures unchanged; one that is encoded again has other bytes",
        lambda c: _differs(c, "user", "tool") and c.was.startswith(PICTURE) and c.now.startswith(PICTURE),
    ),
    Cause(
        "date_in_message",
        "an earlier message contains a date or a time that changed",
        "let the harness send earlier messages unchanged",
        lambda c: _differs(c, "user", "tool") and c.in_date,
    ),
    Cause(
        "message_changed",
        "the text of an earlier message changed",
        "let the harness send earlier messages unchanged",
        lambda c: _differs(c, "user", "tool"),
    ),
    Cause(
        "answer_dropped",
        "the harness continued without the generated turn",
        "harnesses drop a turn that was cut off, or that has no visible text",
        lambda c: c.in_answer and (c.divergence.new is None or c.divergence.new.role != "assistant"),
    ),
    Cause(
        "settings",
        "a setting of the request changed, such as the reasoning effort, and the chat template prints the setting or "
        "earlier reasoning differently",
        "let the harness keep its settings for the whole session",
        lambda c: (c.unchanged and c.in_head) or c.other_settings,
        change="settings",
    ),
    Cause(
        "calls_as_text",
        "the client writes calls and their results as text in its own format, so the chat template treats each "
        "result as a new question",
        "let the client use the API's own tool calls (Qwen-Agent: generate_cfg use_raw_api; smolagents writes them as "
        "text in all its requests)",
        lambda c: _messages_agree(c) and c.difference == "calls_as_text",
    ),
    Cause(
        "thinking_dropped",
        "the chat template omits earlier reasoning, as in the model's training",
        "models that can keep it have a switch, such as chat_template_kwargs preserve_thinking or clear_thinking",
        lambda c: (_messages_agree(c) or _reasoning_removed(c)) and c.template_drops_thought,
        _keep_thinking,
        fault="template",
    ),
    Cause(
        "reasoning_as_text",
        "the client sent the turn's reasoning back as text of the turn",
        "let the client send it back in its own field: reasoning_content on Chat, thinking blocks on Messages, "
        "reasoning items on Responses",
        lambda c: _messages_agree(c) and c.difference == "reasoning_as_text",
    ),
    Cause(
        "reasoning_left_out",
        "the client sent the turn back without its reasoning",
        "let the client send it back: reasoning_content on Chat, thinking blocks on Messages, reasoning items or their "
        "encrypted_content on Responses",
        lambda c: (
            _messages_agree(c)
            and (c.difference == "reasoning_left_out" or (c.difference is None and c.lacks_thought))
        ),
    ),
    Cause(
        "answer_interrupted",
        "the client put a message between the text and the calls of one turn",
        "let the client add its messages behind the results of the calls",
        lambda c: _messages_agree(c) and c.difference == "interrupted",
    ),
    Cause(
        "answer_in_part",
        "the client sent only a part of the turn back",
        "let the client send all of it: the reasoning, the text and every call",
        lambda c: _messages_agree(c) and c.difference == "in_part",
    ),
    Cause(
        "answer_in_pieces",
        "the client sent the turn back as several assistant messages",
        "let the client send it as one message",
        lambda c: _messages_agree(c) and c.difference == "in_pieces",
    ),
    Cause(
        "answer_respelled",
        "the generated turn has the same content in different tokens: the turn memory does not contain it, or the "
        "template's turns cannot be distinguished",
        "raise --turn-memory; for turns of before a restart, give --turn-memory-path and --capsule-key",
        lambda c: c.retokenized,
        # The turn memory of this server has dropped it.
        fault="eviction",
    ),
    Cause(
        "answer_rewritten",
        "the harness sent the generated turn back with a different text",
        "none needed if this was intended; the turn is rendered as edited",
        lambda c: c.in_answer,
    ),
    Cause(
        "template",
        "the chat template prints the same messages differently when others follow",
        "compare the excerpts; --chat-template sets another template",
        lambda c: c.unchanged,
        fault="template",
    ),
    Cause(
        "unknown",
        "none of the known causes matches",
        "compare the excerpts",
        lambda c: True,
        fault="unknown",
    ),
)
"""The known causes in the order in which they are tried; ``c`` is the break's context. The last matches every break."""


def explain_break(divergence: Divergence, tokens: bytes, chat_format: ChatFormat) -> Break:
    """Return the break at ``divergence`` with its likely cause. ``tokens`` are those of the new prompt, packed."""
    context = BreakContext(divergence, tokens, chat_format)
    cause = next(cause for cause in CAUSES if cause.matches(context))
    in_tools = cause.name.startswith("tools_")
    return Break(
        cause.name,
        cause.reason,
        cause.cure if cause.cure_of is None else cause.cure_of(context),
        message=None if in_tools else context.message,
        role="tools" if in_tools else context.role,
        before=context.before,
        was=context.was,
        now=context.now,
        lost=divergence.record.expected - divergence.matched,
        headers=context.headers,
        change=cause.change,
        fault=cause.fault,
    )
