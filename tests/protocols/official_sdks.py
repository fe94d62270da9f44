"""The official SDKs, one client of each: to make a client costs more than most answers that it reads here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import anthropic
import httpx2
import openai


class Pieces(httpx2.SyncByteStream):
    """A response body that arrives in pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces


class Answering(httpx2.BaseTransport):
    """Answers each request with the same status and pieces.

    Attributes:
        status: of the answer.
        content_type: its header.
        pieces: its body, in the pieces in which it arrives.
    """

    status = 200
    content_type = ""
    pieces: tuple[bytes, ...] = ()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        headers = {"content-type": self.content_type}
        return httpx2.Response(self.status, headers=headers, stream=Pieces(*self.pieces))

    def answer(self, status: int, content_type: str, pieces: tuple[bytes, ...]) -> None:
        """Answer so from now on."""
        self.status, self.content_type, self.pieces = status, content_type, pieces


@cache
def _anthropic() -> tuple[anthropic.Anthropic, Answering]:
    answering = Answering()
    http = httpx2.Client(transport=answering)
    return anthropic.Anthropic(
        api_key="k", base_url="http://singletree.test", max_retries=0, http_client=http
    ), answering


@cache
def _openai() -> tuple[openai.OpenAI, Answering]:
    answering = Answering()
    http = httpx2.Client(transport=answering)
    return openai.OpenAI(api_key="k", base_url="http://test/v1", http_client=http, max_retries=0), answering


def anthropic_sdk(status: int, content_type: str, *pieces: bytes) -> anthropic.Anthropic:
    """Return the client of Anthropic's SDK; every request of it is answered with ``pieces``."""
    sdk, answering = _anthropic()
    answering.answer(status, content_type, pieces)
    return sdk


def openai_sdk(data: bytes, status: int = 200) -> openai.OpenAI:
    """Return the client of OpenAI's SDK; every request of it is answered with ``data``, a stream or a body."""
    sdk, answering = _openai()
    is_stream = data.startswith((b"event:", b"data:", b":"))
    answering.answer(status, "text/event-stream" if is_stream else "application/json", (data,))
    return sdk
