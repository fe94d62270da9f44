"""The three protocols, as far as a benchmark needs to speak them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import tool_session
from benchmarks.servers import MODEL
from benchmarks.stream_reader import Answer, post
from benchmarks.tool_session import Session

_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens":(\d+)')
# Messages counts what came from the cache beside input_tokens.
_CACHED_TOKENS = re.compile(rb'"cache_read_input_tokens":(\d+)')


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of them.

    Attributes:
        mark: bytes that only an event with the answer's text has.
        limit: the field for the longest answer.
        body: a session's own fields.
        more: fields of every request.
        headers: of every request.
    """

    name: str
    path: str
    mark: bytes
    limit: str
    body: Callable[[Session], dict[str, Any]]
    more: tuple[tuple[str, Any], ...] = ()
    headers: str = ""

    def request(self, session: Session, tokens: int) -> bytes:
        """A request for the next turn, streamed, of at most so many tokens and a few."""
        body = {
            "model": MODEL,
            "stream": True,
            self.limit: tokens + 16,
            **dict(self.more),
            **self.body(session),
        }
        return post(self.path, json.dumps(body).encode(), self.headers)


def prompt_tokens(answer: Answer) -> int:
    """What the server counted; 0 when it does not say."""
    tail = b"".join(answer.tail)
    last = (found.findall(tail)[-1:] for found in (_PROMPT_TOKENS, _CACHED_TOKENS))
    return sum(int(count) for counts in last for count in counts)


def marker(tokens: int, delay: float = 0.0) -> str:
    """Asks the scripted engine for so many tokens, one at a time, so many seconds apart."""
    return f"[[gen:{tokens}:1:{delay:g}]]"


PROTOCOLS = (
    Protocol(
        "messages",
        "/v1/messages",
        b'"text_delta"',
        "max_tokens",
        tool_session.body_of_messages,
        headers="anthropic-version: 2023-06-01\r\n",
    ),
    Protocol(
        "chat",
        "/v1/chat/completions",
        b'"content":"R',
        "max_tokens",
        tool_session.body_of_chat,
        (("stream_options", {"include_usage": True}),),
    ),
    Protocol(
        "responses",
        "/v1/responses",
        b"response.output_text.delta",
        "max_output_tokens",
        tool_session.body_of_responses,
    ),
)
