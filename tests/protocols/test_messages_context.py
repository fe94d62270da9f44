"""``context_management``: read as the API documents it, and told in the answer as the API tells it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anthropic.types.beta as beta
import pytest
from pydantic import TypeAdapter

from singletree.conversation import PromptReport, Request
from singletree.errors import InvalidRequest
from singletree.protocols import messages
from singletree.request_options import AppliedEdit, ClearThinking, ClearToolUses

from . import event_stream, grammar_messages
from .shapes import USAGE, by_name
from .test_messages_decode import decode
from .test_messages_sdk import accumulated_by_beta, parsed

TOOL_USES = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"
EDITS = [
    ({"type": THINKING}, ClearThinking(1)),
    ({"type": THINKING, "keep": "all"}, ClearThinking(None)),
    ({"type": THINKING, "keep": {"type": "all"}}, ClearThinking(None)),
    ({"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}}, ClearThinking(2)),
    ({"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}, ClearThinking(1)),
    ({"type": TOOL_USES}, ClearToolUses(trigger_tokens=100_000, keep=3)),
    (
        {
            "type": TOOL_USES,
            "trigger": {"type": "input_tokens", "value": 30000},
            "keep": {"type": "tool_uses", "value": 5},
            "clear_at_least": {"type": "input_tokens", "value": 5000},
            "exclude_tools": ["memory"],
            "clear_tool_inputs": True,
        },
        ClearToolUses(30000, None, 5, 5000, frozenset(["memory"]), inputs=True),
    ),
    (
        {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 9}, "clear_tool_inputs": ["Write"]},
        ClearToolUses(None, 9, 3, inputs=frozenset(["Write"])),
    ),
    (
        {"type": TOOL_USES, "clear_at_least": None, "exclude_tools": None, "clear_tool_inputs": None},
        ClearToolUses(trigger_tokens=100_000),
    ),
]


@pytest.mark.parametrize(("edit", "expected"), EDITS)
def test_edits(edit: dict[str, Any], expected: Any) -> None:
    assert decode(context_management={"edits": [edit]}).context_edits == (expected,)


@pytest.mark.parametrize("empty", [None, {}, {"edits": []}, {"edits": None}])
def test_none(empty: Any) -> None:
    assert decode(context_management=empty).context_edits == ()


def test_an_edit_that_only_the_vendor_can_do_is_a_warning() -> None:
    request = decode(context_management={"edits": [{"type": "compact_20260112"}, {"type": THINKING}]})
    assert request.context_edits == (ClearThinking(1),)
    assert request.warnings == ("context_management edits of type 'compact_20260112' are ignored",)


WRONG = [
    ({"edits": [{"type": THINKING, "keep": "some"}]}, "context_management.edits.0.keep"),
    (
        {"edits": [{"type": TOOL_USES, "keep": {"type": "tokens", "value": 1}}]},
        "context_management.edits.0.keep",
    ),
    ({"edits": [{"type": TOOL_USES, "trigger": {"type": "time"}}]}, "context_management.edits.0.trigger"),
    (
        {"edits": [{"type": TOOL_USES, "clear_at_least": {"type": "tool_uses", "value": 1}}]},
        "context_management.edits.0.clear_at_least",
    ),
    ({"edits": [{"keep": "all"}]}, "context_management.edits.0.type"),
    ({"edits": 3}, "context_management.edits"),
    ("yes", "context_management"),
]


@pytest.mark.parametrize(("asked", "path"), WRONG, ids=[path for _, path in WRONG])
def test_what_cannot_be_read_is_named(asked: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(context_management=asked)
    assert refused.value.param == path
    assert refused.value.message.startswith(f"{path}: ")


APPLIED = (AppliedEdit("thinking", 2, 300), AppliedEdit("tool_uses", 8, 50000))
REPORTED = {
    "applied_edits": [
        {"type": THINKING, "cleared_thinking_turns": 2, "cleared_input_tokens": 300},
        {"type": TOOL_USES, "cleared_tool_uses": 8, "cleared_input_tokens": 50000},
    ]
}


def answer(request: Request) -> tuple[bytes, bytes]:
    """A stream and the body that says the same."""
    shape = by_name["text_only"]
    encode = event_stream.encoder(messages, request, id="msg_1", usage=USAGE)
    stream = encode.whole(shape.events, shape.finished)
    grammar_messages.check(stream)
    return stream, event_stream.body(messages, request, shape.turn, shape.finished, id="msg_1")


def test_what_was_applied_is_reported_by_stream_and_body() -> None:
    asked = decode(context_management={"edits": [{"type": THINKING}]})
    stream, body = answer(replace(asked, model="m", prompt_report=PromptReport(applied_edits=APPLIED)))
    assert json.loads(body)["context_management"] == REPORTED
    TypeAdapter(beta.BetaContextManagementResponse).validate_python(REPORTED, strict=True)
    streamed = accumulated_by_beta(stream)
    assert streamed["context_management"] == parsed(body)["context_management"] == REPORTED


def test_nothing_applied_and_nothing_asked() -> None:
    keep = {"edits": [{"type": THINKING, "keep": "all"}]}
    asked, unasked = answer(decode(context_management=keep)), answer(decode())
    assert json.loads(asked[1])["context_management"] == {"applied_edits": []}
    assert b'"context_management":{"applied_edits":[]}' in asked[0]
    assert not any(b"context_management" in written for written in unasked)


def test_a_count_reports_what_it_was_before() -> None:  # C27
    counted = json.loads(messages.encode_count(25000, 70000))
    assert counted == {"input_tokens": 25000, "context_management": {"original_input_tokens": 70000}}
    TypeAdapter(beta.BetaMessageTokensCount).validate_python(counted, strict=True)
