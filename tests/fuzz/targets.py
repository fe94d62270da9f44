"""What bytes of a stranger reach first, each as a function of bytes that fails where the code is wrong.

A target raises nothing for any input, but for what the code promises to raise, which it catches. `run.py` lets Atheris
look for inputs, guided by coverage; `test_inputs.py` runs the seeds, changes of them, and what was found once.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from parsing.reading import turn
from parsing.test_any_text import TOOLS, fragments
from prompts.template_sources import ALTERNATING, HERMES, KIMI, PARTS, XML, cached_template, write_parts
from server.test_connection import REQUESTS, Answerer, connect, without_dates
from singletree import families
from singletree.conversation import Conversation
from singletree.errors import SingletreeError
from singletree.gguf import read_metadata
from singletree.prompts.replay.turn_memory import GenerationPrompt
from singletree.prompts.template.chat_template import CHATML, ChatTemplate, RenderPrompt
from singletree.prompts.tokenizer.tokenizer import load_tokenizer
from singletree.protocols import chat, messages, responses
from singletree.protocols.openai import answers
from singletree.protocols.responses import compact
from singletree.routing.event_cache import EventCache, KvEventStream
from singletree.routing.predicted_cache import PrefixIndex
from singletree.server.capsules import PREFIX, Capsules, Span, Tampered
from tiny_gguf import tiny_gguf

TARGETS: dict[str, tuple[Callable[[bytes], None], Sequence[bytes]]] = {}
"""The targets and their seeds, by name."""


def target(*seeds: bytes) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    """Enter a function as the target of its name."""

    def enter(function: Callable[[bytes], None]) -> Callable[[bytes], None]:
        TARGETS[function.__name__] = function, seeds
        return function

    return enter


class Choices:
    """Numbers that bytes stand for, one after the other; zeros where the bytes have an end."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def number(self, below: int) -> int:
        """Return one of 0 to ``below`` - 1."""
        size = 1 if below <= 256 else 2
        taken, self._data = self._data[:size], self._data[size:]
        return int.from_bytes(taken, "big") % below

    def rest(self) -> bytes:
        """Return the bytes that are left."""
        taken, self._data = self._data, b""
        return taken


def _check(error: SingletreeError) -> None:
    assert error.message
    error.message.encode()


@target(b"\x00\x20" + REQUESTS, b"\x00\x03GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x00\x99" + REQUESTS[80:])
def http(data: bytes) -> None:
    """A head or body that is cut anywhere is read as one that is not.

    A client that breaks the protocol loses the connection at once: of requests before that, fewer may be answered.
    Where one of them still is, its answer is the last one, and says so; otherwise a refusal stands behind them.
    """
    choices = Choices(data)
    at, sent = choices.number(2**16), choices.rest()
    at %= len(sent) + 1
    less, more = sorted((_served(sent), _served(sent[:at], sent[at:])), key=lambda served: len(served[1]))
    assert less[0] == more[0][: len(less[0])], (at, less, more)
    answers = [served[1].replace(b"connection: close\n", b"") for served in (more, less)]
    assert answers[0].startswith(answers[1]), (at, less, more)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _served(*pieces: bytes) -> tuple[list[Any], bytes]:
    """Return the requests that the application saw, and what it answered."""
    failures: list[Any] = []

    async def serve() -> tuple[list[Any], bytes]:
        app = Answerer()
        connection, transport = connect(app)
        for piece in pieces:
            if piece and not transport.is_closing():
                connection.data_received(piece)
                for _ in range(20):
                    await asyncio.sleep(0)
        connection.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        return app.seen, b"\n".join(without_dates(transport.written))

    _loop().set_exception_handler(lambda _, context: failures.append(context))
    result = _loop().run_until_complete(serve())
    assert not failures, failures
    return result


_BODIES: Sequence[dict[str, Any]] = json.loads(
    Path(__file__).with_name("bodies.json").read_text(encoding="utf-8")
)
"""A request of each protocol, with what agents send."""
_ODD: Sequence[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        1.5,
        1e308,
        "",
        "x",
        "auto",
        "\ud800",
        "\x00é😀",
        "<|im_end|>",
    ),
    *(
        [],
        {},
        [[]],
        [{}],
        [None],
        {"type": "text"},
        {"type": "x"},
        {"": None},
        [{"type": "text", "text": "y"}],
    ),
    *(
        {"role": "assistant", "content": "z"},
        {"role": "user", "content": []},
        "st1:",
        "{",
        '{"p": 1}',
        "a" * 300,
    ),
]


def _edited(choices: Choices) -> dict[str, Any]:
    """Return a body in which some values were replaced, removed, repeated, or moved to another name."""
    body: dict[str, Any] = json.loads(json.dumps(_BODIES[choices.number(len(_BODIES))]))
    names = sorted(_names())
    for _ in range(choices.number(6)):
        places = list(_places(body))
        at, key = places[choices.number(len(places))]
        kind = choices.number(5)
        if kind == 0:
            at[key] = json.loads(json.dumps(_ODD[choices.number(len(_ODD))]))
        elif kind == 1:
            del at[key]
        elif kind == 2 and isinstance(at, list):
            at.insert(choices.number(len(at) + 1), json.loads(json.dumps(at[key])))
        elif kind == 3 and isinstance(at, dict):
            at[names[choices.number(len(names))]] = at[key]
        else:
            other, name = places[choices.number(len(places))]
            at[key] = json.loads(json.dumps(other[name]))
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container with each of its keys."""
    for key in (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from _places(value[key])


@cache
def _names() -> frozenset[str]:
    """Return the fields that requests may have: what else the seeds lack."""
    from singletree.protocols.chat.request import ChatBody
    from singletree.protocols.messages.request import MessagesBody
    from singletree.protocols.responses.request import ResponsesBody

    bodies = (ChatBody, MessagesBody, ResponsesBody)
    own = {field.encode_name for body in bodies for field in msgspec.structs.fields(body)}
    return frozenset({*own, *(key for body in _BODIES for _, key in _places(body) if isinstance(key, str))})


_PROTOCOLS = (messages, chat, responses, compact)


_PLAIN = [bytes([at, 1]) + json.dumps(body).encode() for at, body in enumerate(_BODIES)]


@target(b"\x00\x00\x00", b"\x01\x00\x01", b"\x02\x00\x02", b"\x03\x00\x02\x01\x05\x00\x09", *_PLAIN)
def decoders(data: bytes) -> None:
    """A body is a request, or an error that names what is wrong."""
    choices = Choices(data)
    protocol = _PROTOCOLS[choices.number(4)]
    body = choices.rest() if choices.number(2) else json.dumps(_edited(choices)).encode()
    try:
        protocol.decode(body, {})
    except SingletreeError as error:
        _check(error)
        messages.encode_error(error)
        answers.encode_error(error)


_SOURCES = (CHATML, HERMES, XML, KIMI, PARTS, ALTERNATING)


@target(
    b"\x00\x00\x00", b"\x01\x01\x01", b"\x02\x02\x02\x02\x00\x05", b"\x03\x00\x01\x03\x00\x11\x02\x00\x07\x04"
)
def templates(data: bytes) -> None:
    """A prompt that goes on from a shorter one is the prompt that is rendered as a whole."""
    choices = Choices(data)
    stage = RenderPrompt(cached_template(_SOURCES[choices.number(len(_SOURCES))]), write_parts)
    kept = choices.number(8)
    at = choices.number(3)
    try:
        conversation = _PROTOCOLS[at].decode(json.dumps(_edited(choices)).encode(), {}).conversation
    except SingletreeError:
        return
    shorter = Conversation(conversation.turns[: kept + 1], conversation.tools)
    whole, begun = _rendered(stage, conversation, None), _rendered(stage, shorter, None)
    grown = _rendered(stage, conversation, None if isinstance(begun, str) else begun[1])
    assert grown[0] == whole[0] if isinstance(whole, tuple) else grown == whole


def _rendered(stage: RenderPrompt, conversation: Conversation, checkpoint: Any) -> Any:
    try:
        return stage.run(conversation, checkpoint)
    except SingletreeError as error:
        return error.message


@target(*(source.encode() for source in _SOURCES))
def template_sources(data: bytes) -> None:
    """A text is a chat template, or refused as none."""
    try:
        ChatTemplate(data.decode(errors="replace"))
    except SingletreeError as error:
        _check(error)


@target(
    b"\x00\x00\x01plan\x80\x81 text\x82",
    b"\x05\x00\x04\x80a\x81\x82b",
    b"\x10\x01\x02\x80\x81\x82\x83\x84\x85",
)
def parser(data: bytes) -> None:
    """A turn that comes in pieces is parsed as one that comes whole; bytes above 127 are markers of the family."""
    choices = Choices(data)
    table = families.table()
    family = table[choices.number(len(table))]
    is_open, at = choices.number(2), choices.number(256)
    known = fragments(family) or ["\n\n"]
    text = "".join(chr(byte) if byte < 128 else known[byte % len(known)] for byte in choices.rest()[:300])
    tail = family.reasoning[0] if family.reasoning and is_open else ""
    whole = turn(family, [text], TOOLS, tail)
    assert turn(family, [text[:at], text[at:]], TOOLS, tail) == whole
    assert turn(family, list(text), TOOLS, tail) == whole


@cache
def _capsules() -> Capsules:
    return Capsules([b"k" * 32], b"model", salt=b"s" * 16)


@cache
def _sealed() -> str:
    return _capsules().seal(Span(b"8 bytes.", 0, True, GenerationPrompt(), array("I", range(40))))


_CONTENT = [b"model", b"8 bytes.", 0, True, ["", "", "", "", 0.0], 2, b"\x00\x01"]


@target(b"\x00AAAA", b"\x01" + msgspec.msgpack.encode(_CONTENT), b"\x02\x00\x09\x01")
def capsules(data: bytes) -> None:
    """What a client carries is the server's own, of another server, or tampered with."""
    choices, known = Choices(data), _capsules()
    kind = choices.number(3)
    if kind == 0:
        carried = PREFIX + choices.rest().decode("latin-1")
    elif kind == 1:
        carried = known.seal_text(choices.rest(), PREFIX.encode())
    else:
        at = choices.number(len(_sealed()))
        carried = _sealed()[:at] + choices.rest().decode("latin-1") + _sealed()[at + 1 :]
    try:
        span = known.open(carried)
    except Tampered:
        return
    assert span is None or len(span.token_ids) <= 1_000_000


_STORED = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "block_size": 16}
_EVENTS: Sequence[Any] = [
    {**_STORED, "token_ids": [*range(32)]},
    {
        **_STORED,
        "block_hashes": [b"abcdefgh"],
        "parent_block_hash": 2,
        "token_ids": [*range(16)],
        "medium": "CPU",
    },
    {
        **_STORED,
        "token_ids": [*range(32)],
        "group_idx": 1,
        "kv_cache_spec_kind": "mamba",
        "extra_keys": [["salt"]],
    },
    {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"},
    ["BlockStored", [3], 2, [*range(16)], 16, None, "GPU", "lora", [[["picture", 3]]]],
    ["BlockRemoved", [3], "GPU"],
    {"type": "AllBlocksCleared"},
]


_SMALL: Sequence[Any] = (
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**64 - 1,
    -(2**63),
    1.5,
    "",
    "GPU",
    [],
    {},
    b"",
    b"12345678",
)
_BATCH = msgspec.msgpack.encode([1.0, _EVENTS[:1], 0])


@target(b"\x00\x01" + _BATCH, b"\x00\x00\x03\x00\x00\x01\x00\x02\x00", b"\x02\x00\x02\x03\x01\x04\x05")
def kv_events(data: bytes) -> None:
    """Messages of an engine, repeated or lost, change what is known of its cache, and nothing else."""
    choices = Choices(data)
    index = PrefixIndex()
    known = EventCache(index, 0, "m")
    stream = KvEventStream(known, "engine", can_replay=choices.number(4) > 1)
    if choices.number(2):
        stream.feed([b"", (0).to_bytes(8, "big"), choices.rest()])
    else:
        for _ in range(choices.number(12)):
            events = []
            for _ in range(choices.number(4)):
                event = msgspec.msgpack.decode(msgspec.msgpack.encode(_EVENTS[choices.number(len(_EVENTS))]))
                places = list(_places(event))
                if choices.number(2) and places:
                    at, key = places[choices.number(len(places))]
                    at[key] = _SMALL[choices.number(len(_SMALL))]
                events.append(event)
            number = choices.number(16) - 1
            frames = [b"", number.to_bytes(8, "big", signed=True), msgspec.msgpack.encode([0.0, events])]
            if stream.replay_from is not None and choices.number(2):
                stream.replayed(frames)
            else:
                stream.feed(frames)
    known.clear()
    assert (known.blocks, len(index)) == (0, 0)


_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|im_end|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.chat_template": CHATML,
}
_SENTENCES = {
    **{key: value for key, value in _METADATA.items() if not key.endswith((".pre", ".merges"))},
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "▁a", "<0x41>", "</s>"],
    "tokenizer.ggml.scores": [0.0, -1.0, -2.0, 0.0],
    "tokenizer.ggml.token_type": [2, 1, 6, 3],
}


@target(tiny_gguf(_METADATA), tiny_gguf(_SENTENCES), tiny_gguf({"a": [1, 2], "b": True, "c": 1.5}))
def gguf(data: bytes) -> None:
    """A file is read, or its error names what to do."""
    with tempfile.NamedTemporaryFile(dir=_memory(), suffix=".gguf") as file:
        file.write(data)
        file.flush()
        path = Path(file.name)
        for read in (lambda: read_metadata(path, longest_array=2), lambda: load_tokenizer(path).encode("ab")):
            try:
                read()
            except SingletreeError as error:
                _check(error)


@cache
def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
