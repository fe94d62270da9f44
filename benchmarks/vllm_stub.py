"""A server without a model that speaks vLLM's wire, in a process of its own: what singletree talks to in measurements.

    python -m benchmarks.vllm_stub PORT MODEL_DIR

It is to singletree what ``dynamo_worker`` is to Dynamo's frontend, and plays the same: what the markers of the scripted
engine (``singletree.testing.scripts``) ask for; the pace is kept on average. A prompt that ends with the beginning of
such a turn gets the rest. Events are those of ``/v1/completions`` in vLLM 0.32, one for each chunk.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import uvloop
from tokenizers import Tokenizer

from singletree.testing.scripts import Script, ScriptBook, ScriptChooser

_TAIL = 1024  # tokens at the end of a prompt that may be the beginning of its turn
_HEADER = 2  # tokens between <|im_start|> and the turn: "assistant" and a line break
_WINDOW = 262_144
_TOGETHER = 16  # chunks without a pace that go out before other streams have their turn
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":1790000000,"model":"qwen3","choices":[{"index":0,'
    b'"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":%b,"prompt_logprobs":null,'
    b'"prompt_token_ids":null}],"usage":null}\n\n'
)


def script_chooser(tokenizer: Tokenizer, default: str) -> ScriptChooser:
    """Return what chooses by the markers of a prompt, ``default`` where there is no marker."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    return ScriptChooser(ScriptBook(None, encode), Script(default), encode, decode)


class Asked(msgspec.Struct):
    prompt: list[int]
    max_tokens: int = 16


class Player:
    """Knows what to play for a prompt, as events that are ready to be sent."""

    def __init__(self, folder: Path, default: str = "Rain") -> None:
        self._tokenizer = tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._end: int = tokenizer.token_to_id("<|im_end|>") or 0
        self._start: int = tokenizer.token_to_id("<|im_start|>") or 0
        self._events: dict[tuple[int, ...], bytes] = {}
        self._chooser = script_chooser(tokenizer, default)

    def play(self, asked: Asked) -> tuple[list[bytes], float]:
        """Return the events, the end of the turn included, and the seconds between them."""
        _, script = self._chooser.choose(asked.prompt)
        tokens, size, delay = script.tokens, script.chunk or 1, script.delay or 0.0
        ids = asked.prompt[-_TAIL:]
        if self._start in ids and (had := ids[len(ids) - ids[::-1].index(self._start) + _HEADER :]):
            # A turn that another engine began goes on where it was.
            tokens = tokens[len(had) :] if [*tokens[: len(had)]] == had else tokens
        events = [self._event(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        is_cut = asked.max_tokens <= len(tokens)
        events = events[: asked.max_tokens]
        events.append(self._ending((), "length") if is_cut else self._ending((self._end,), "stop"))
        usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": len(tokens)}
        last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
        events[-1] += last
        return events, delay

    def _event(self, ids: tuple[int, ...]) -> bytes:
        known = self._events.get(ids)
        if known is None:
            known = self._events[ids] = self._ending(ids, None)
        return known

    def _ending(self, ids: tuple[int, ...], finish: str | None) -> bytes:
        text = self._tokenizer.decode(list(ids))
        return _EVENT % (*(json.dumps(value).encode() for value in (text, finish)), json.dumps(ids).encode())


class Connection(asyncio.Protocol):
    """One connection, with one request after the other."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._playing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of asyncio's classes

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self._transport = None
        if self._playing is not None:
            self._playing.cancel()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._buffer += data
        head, found, _ = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = _LENGTH.search(head)
        end = len(head) + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < end:
            return
        body = bytes(self._buffer[len(head) + 4 : end])
        del self._buffer[:end]
        self._answer(bytes(head.split(b" ", 2)[1]), body)

    def _answer(self, path: bytes, body: bytes) -> None:
        assert self._transport is not None
        if path == b"/v1/completions":
            events, delay = self._player.play(msgspec.json.decode(body, type=Asked))
            self._transport.write(_HEAD)
            self._playing = asyncio.ensure_future(self._stream(events, delay))
            return
        model = {"id": "qwen3", "root": "qwen3", "max_model_len": _WINDOW, "owned_by": "vllm"}
        pages = {b"/v1/models": {"object": "list", "data": [model]}, b"/version": {"version": "0.32.0"}}
        page = pages.get(path, {"status": "ok"} if path == b"/health" else None)
        status = b"200 OK" if page is not None else b"404 Not Found"
        content = json.dumps(page or {"detail": "Not Found"}).encode()
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (status, len(content)) + content)

    async def _stream(self, events: Sequence[bytes], delay: float) -> None:
        now = asyncio.get_running_loop().time
        due = now()
        for number, event in enumerate(events, 1):
            if (wait := due - now()) > 0:
                await asyncio.sleep(wait)
            elif number % _TOGETHER == 0:
                await asyncio.sleep(0)
            due += delay
            if self._transport is None:
                return
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        if self._transport is not None:
            self._transport.write(b"0\r\n\r\n")


async def main(port: int, folder: Path) -> None:
    """Serve until the process ends."""
    player = Player(folder)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(player), "127.0.0.1", port, backlog=8192
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    own_port, model_folder = sys.argv[1:]
    uvloop.run(main(int(own_port), Path(model_folder)))
