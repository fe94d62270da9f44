"""Characters that some line readers end a line at never stand in an event stream as themselves.

Python's ``str.splitlines`` (httpx's ``iter_lines`` and what is built on it) ends a line at U+0085, U+2028 and U+2029
and at control characters; Node's ``readline`` ends one at U+2028 and U+2029. JSON escapes only the control characters.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocols import event_stream
from protocols.shapes import USAGE
from singletree.conversation import Conversation, Request
from singletree.errors import EngineFailed
from singletree.protocols import chat, messages, responses
from singletree.raw_tokens import completions
from singletree.testing.scripts import Script

from .memory import events
from .serving import body, serving

SEPARATORS = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj\u2027\u202a\u20a8\u0185"
ANSWER = (
    f"<think>\nplan{SEPARATORS}\n</think>\n\nsays{SEPARATORS}\n<tool_call>\n"
    f'{{"name": "read", "arguments": {json.dumps({"path": SEPARATORS}, ensure_ascii=False)}}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": SEPARATORS}}}
MORE: dict[str, dict[str, Any]] = {
    "/v1/messages": {"tools": [{"name": "read", "input_schema": SCHEMA}]},
    "/v1/chat/completions": {
        "tools": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}],
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/responses": {
        "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}],
        "instructions": SEPARATORS,
        "metadata": {"note": SEPARATORS},
        "reasoning": {"summary": "auto"},
    },
    "/v1/completions": {"logprobs": 2, "echo": True},
}


@pytest.mark.parametrize("path", MORE)
@pytest.mark.parametrize("chunk", [1, 7])
async def test_every_line_reader_finds_the_same_lines(path: str, chunk: int) -> None:
    async with serving({"it": Script(ANSWER, chunk=chunk)}) as served:
        asked = body(path, f"[[script:it]]{SEPARATORS}", stream=True, **MORE[path])
        if path == "/v1/completions":
            asked = {**asked, "prompt": asked.pop("messages")[0]["content"], "max_tokens": 900}
        reply = await served.client.post(path, json.dumps(asked, ensure_ascii=False).encode())
    assert reply.status == 200, reply.body
    text = reply.body.decode()
    assert text.splitlines() == text.removesuffix("\n").split("\n")
    assert all(f"\\u{code}" in text for code in ("2028", "2029", "0085"))
    assert "\u2027" in "".join(strings_in(events(reply.body)))


@pytest.mark.parametrize("protocol", [chat, messages, responses, completions], ids=lambda p: p.__name__)
def test_an_error_inside_a_stream_too(protocol: Any) -> None:
    request = Request("org/model", Conversation(()))
    encoder = event_stream.encoder(protocol, request, usage=USAGE)
    text = (encoder.start() + encoder.fail(EngineFailed(f"broke at {SEPARATORS}"))).decode()
    assert text.splitlines() == text.removesuffix("\n").split("\n")


def strings_in(value: Any) -> list[str]:
    """Every string in ``value``."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for v in value.values() for s in strings_in(v)]
    return [s for v in value for s in strings_in(v)] if isinstance(value, list | tuple) else []
