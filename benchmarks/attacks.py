"""Requests that one client could stop a server with: `benchmarks.hostile` sends each of them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

_CHAT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Attack:
    """What a hostile client sends.

    Attributes:
        path: of the route.
        name: what it does, in words.
        body: makes the body.
        encoding: the Content-Encoding of the body; empty for none.
        at_once: how many connections send it at the same time.
    """

    path: str
    name: str
    body: Callable[[], bytes]
    encoding: str = ""
    at_once: int = 1

    def request(self, headers: str = "") -> bytes:
        """Return the HTTP request, with further ``headers`` and their line ends. The connection is for it alone."""
        body = self.body()
        encoding = f"Content-Encoding: {self.encoding}\r\n" if self.encoding else ""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{encoding}"
            f"{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


_chat_attack = partial(Attack, _CHAT)


def _chat(content: Any = "[[gen:64:1:0]]", **fields: Any) -> bytes:
    return _json(messages=[{"role": "user", "content": content}], **fields)


def _json(**fields: Any) -> bytes:
    return json.dumps({"model": "qwen3", **fields}).encode()


def _stops(count: int, length: int) -> list[str]:
    """Return ``count`` stop strings of ``length`` characters, all different and none in the answer."""
    return [f"{number:07d}".rjust(length, "~") for number in range(count)]


def _gzip_of(beginning: bytes, unit: bytes, times: int, end: bytes) -> bytes:
    """Return what decompresses to ``beginning``, ``unit`` many times, and ``end``, without making all of it."""
    packer = zlib.compressobj(9, wbits=31)
    piece = unit * (_MIB // len(unit))
    whole, rest = divmod(times * len(unit), len(piece))
    parts = [packer.compress(beginning), *(packer.compress(piece) for _ in range(whole))]
    return b"".join([*parts, packer.compress(piece[:rest]), packer.compress(end), packer.flush()])


def _long_text(unit: bytes, size: int, path: str = _CHAT) -> bytes:
    """Return a packed request whose text is about ``size`` bytes of ``unit``, in the protocol of ``path``."""
    before, after = {
        _CHAT: (b'{"model":"qwen3","messages":[{"role":"user","content":"', b'"}]}'),
        _MESSAGES: (b'{"model":"qwen3","max_tokens":9,"messages":[{"role":"user","content":"', b'"}]}'),
        _RESPONSES: (b'{"model":"qwen3","input":"', b'"}'),
        "/v1/completions": (b'{"model":"qwen3","prompt":"', b'"}'),
        "/tokenize": (b'{"model":"qwen3","prompt":"', b'"}'),
    }[path]
    return _gzip_of(before, unit, size // len(unit), after)


def _packed_again(times: int) -> bytes:
    body = _chat("x" * 30 * _MIB)
    for _ in range(times):
        body = gzip.compress(body, 9)
    return body


def _tools(count: int, properties: int) -> list[dict[str, Any]]:
    fields = {f"field{number}": {"type": "string"} for number in range(properties)}
    schema = {"type": "object", "properties": fields}
    return [
        {"type": "function", "function": {"name": f"tool{number}", "parameters": schema}}
        for number in range(count)
    ]


STOP_STRINGS = (
    _chat_attack("stop: one of 60,000 characters", lambda: _chat(stop=_stops(1, 60_000))),
    _chat_attack("stop: 4,000 characters, n 64", lambda: _chat(stop=_stops(1, 4000), n=64)),
    _chat_attack("stop: 64 of 64 characters, n 64", lambda: _chat(stop=_stops(64, 64), n=64)),
    _chat_attack("stop: 100,000 strings", lambda: _chat("[[gen:1000:1:0]]", stop=_stops(100_000, 8))),
    _chat_attack("stop: a million strings", lambda: _chat(stop=_stops(1_000_000, 8))),
)
ENCODINGS = (
    _chat_attack("gzip, 40 times", lambda: _packed_again(40), "gzip" + ", gzip" * 39),
    _chat_attack("gzip, 3 times", lambda: _packed_again(3), "gzip, gzip, gzip"),
    _chat_attack("gzip of 64 MB of zeros", lambda: _gzip_of(b"", b"\0", 64_000_000, b""), "gzip"),
    _chat_attack("gzip of 1 GB of zeros", lambda: _gzip_of(b"", b"\0", 1_000_000_000, b""), "gzip"),
    _chat_attack("gzip of empty members", lambda: gzip.compress(b"") * 500_000, "gzip"),
)
LONG_TEXTS = (
    *(
        _chat_attack(f"30 MB of {name}", partial(_long_text, unit, 30_000_000), "gzip")
        for name, unit in {
            "one letter": b"a",
            "spaces": b" ",
            "words": b"lorem ipsum dolor sit amet, ",
            "digits": b"0123456789",
            "line breaks": b"\\n",
            "an accent": "\u0301".encode(),
            "emoji": "\U0001f469\u200d".encode(),
            "markers": b"<|im_start|>",
            "half markers": b"<|im_",
            "brackets": b"<",
        }.items()
    ),
    *(
        Attack(
            path, f"30 MB of words, {path}", partial(_long_text, b"lorem ipsum ", 30_000_000, path), "gzip"
        )
        for path in (_MESSAGES, _RESPONSES, "/v1/completions", "/tokenize")
    ),
    _chat_attack("5 MB of words", lambda: _long_text(b"lorem ipsum dolor ", 5_000_000), "gzip"),
    _chat_attack("5 MB of one letter", lambda: _long_text(b"a", 5_000_000), "gzip"),
    *(
        _chat_attack(f"{name}, plain", partial(_chat, text))
        for name, text in {
            "30 MB of one letter": "a" * 30_000_000,
            "4 MB of one letter": "a" * 4_100_000,
            "4 MB of spaces": " " * 4_100_000,
            "4 MB of words": "lorem ipsum " * 340_000,
            "4 MB of ideographs": "\u4e2d\u6587" * 650_000,
            "4 MB of markers": "<|im_start|>" * 340_000,
        }.items()
    ),
    _chat_attack("30 MB of words, plain, ten", lambda: _chat("lorem ipsum " * 2_500_000), at_once=10),
    _chat_attack("4 MB of words, plain, ten", lambda: _chat("lorem ipsum " * 340_000), at_once=10),
    _chat_attack("30 MB of one letter, ten", lambda: _long_text(b"a", 30_000_000), "gzip", 10),
    _chat_attack("30 MB of words, ten", lambda: _long_text(b"lorem ipsum ", 30_000_000), "gzip", 10),
    _chat_attack("1 MB of words, sixty", lambda: _long_text(b"lorem ipsum ", 1_000_000), "gzip", 60),
)
LARGE_VALUES = (
    _chat_attack(
        "12 MB of half surrogate pairs",
        lambda: _chat("REPLACED").replace(b"REPLACED", rb"\ud800" * 2_000_000),
    ),
    _chat_attack(
        "a million messages", lambda: _json(messages=[{"role": "user", "content": "x"}] * 1_000_000)
    ),
    _chat_attack("a million blocks", lambda: _chat([{"type": "text", "text": "x"}] * 1_000_000)),
    _chat_attack(
        "a grammar of 100,000 rules",
        lambda: _chat(
            guided_grammar="root ::= r0\n" + "".join(f'r{n} ::= "x" r{n + 1}\n' for n in range(100_000))
        ),
    ),
    _chat_attack("a regex of 1 MB", lambda: _chat(guided_regex="(a|b)?" * 170_000)),
    Attack(
        "/tokenize", "token strings of 0.6 MB", lambda: _json(prompt="a b " * 150_000, return_token_strs=True)
    ),
    Attack("/detokenize", "a million ids to text", lambda: _json(tokens=[7] * 1_000_000)),
    Attack("/v1/completions", "five million prompt ids", lambda: _json(prompt=[7] * 5_000_000)),
    _chat_attack(
        "a logit_bias of a million", lambda: _chat(logit_bias={str(number): 1 for number in range(1_000_000)})
    ),
    _chat_attack("100,000 tools", lambda: _chat(tools=_tools(100_000, 1))),
    _chat_attack("a tool of 100,000 properties", lambda: _chat(tools=_tools(1, 100_000))),
    _chat_attack(
        "100,000 unknown keys", lambda: _chat(**{f"key{number}": number for number in range(100_000)})
    ),
    _chat_attack(
        "a response format of 100,000 properties",
        lambda: _chat(
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "schema": {
                        "type": "object",
                        "properties": {f"p{n}": {"type": "string"} for n in range(100_000)},
                    },
                },
            }
        ),
    ),
)
_WORD = {"role": "user", "content": "x"}
_PDF = {"type": "application/pdf", "data": "JVBERi0xLjQKJQ=="}


def _raw(fields: bytes) -> bytes:
    return _chat()[:-1] + b"," + fields + b"}"


def _calls(count: int) -> list[dict[str, Any]]:
    pairs = (
        ({"type": "function_call", "call_id": f"c{n}", "name": f"u{n}", "arguments": "{}"}, n)
        for n in range(count)
    )
    return [
        item
        for call, n in pairs
        for item in (call, {"type": "function_call_output", "call_id": f"c{n}", "output": "x"})
    ]


AT_THE_LIMITS = (
    _chat_attack("30 MB of opened lists", lambda: _raw(b'"x":' + b"[" * 30 * _MIB)),
    _chat_attack("30 MB of empty lists", lambda: _raw(b'"x":[' + b"[]," * 10 * _MIB + b"0]")),
    _chat_attack("30 MB of empty texts", lambda: _raw(b'"x":[' + b'"",' * 10 * _MIB + b"0]")),
    _chat_attack(
        "240,000 keys",
        lambda: _raw(b'"documents":' + json.dumps({str(n): 0 for n in range(240_000)}).encode()),
    ),
    _chat_attack("1.9 million numbers", lambda: _raw(b'"documents":[' + b"0," * 1_900_000 + b"0]")),
    _chat_attack(
        "30 MB of escapes, one half a pair",
        lambda: _chat("REPLACED").replace(b"REPLACED", rb"\n" * 15_000_000 + rb"\ud800"),
    ),
    _chat_attack(
        "10,000 messages", lambda: _json(messages=[_WORD | {"content": f"x{n}"} for n in range(10_000)])
    ),
    Attack(_RESPONSES, "10,000 calls and results", lambda: _json(input=[*_calls(4999), _WORD])),
    _chat_attack("80,000 blocks", lambda: _chat([{"type": "text", "text": "x"}] * 80_000)),
    _chat_attack("2,000 tools, one required", lambda: _chat(tools=_tools(2000, 1), tool_choice="required")),
    _chat_attack("a tool of 12,000 properties", lambda: _chat(tools=_tools(1, 12_000))),
    Attack(
        _RESPONSES,
        "1,900 namespaces",
        lambda: _json(
            input=[*_calls(4000), _WORD],
            tools=[
                {
                    "type": "namespace",
                    "name": f"n{n}",
                    "tools": [{"type": "function", "name": "t", "parameters": {}}],
                }
                for n in range(1900)
            ],
        ),
    ),
    _chat_attack("a regex of 20,000 characters", lambda: _chat(guided_regex="[a-z]" * 3999)),
    _chat_attack(
        "a grammar of 5,000 rules",
        lambda: _chat(
            guided_grammar="root ::= r0\n"
            + "".join(f'r{n} ::= "x" r{n + 1}\n' for n in range(5000))
            + 'r5000 ::= "x"\n'
        ),
    ),
    Attack("/v1/completions", "1.9 million prompt ids", lambda: _json(prompt=[7] * 1_900_000)),
    Attack("/detokenize", "1.9 million ids to text", lambda: _json(tokens=[7] * 1_900_000)),
    _chat_attack("10,000 biases", lambda: _chat(logit_bias={str(n): 1 for n in range(10_000)})),
    Attack(
        _MESSAGES,
        "20,000 context edits",
        lambda: _json(
            max_tokens=9,
            messages=[_WORD],
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}] * 20_000},
        ),
    ),
    Attack(
        _MESSAGES,
        "5,000 damaged PDFs",
        lambda: _json(
            max_tokens=9,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "source": {"type": "base64", "media_type": _PDF["type"], "data": _PDF["data"]},
                        }
                    ]
                    * 5000,
                }
            ],
        ),
    ),
    Attack(
        "/v1/completions",
        "20 log probabilities of 8,000 tokens, n 128",
        lambda: _json(prompt=[7] * 8000, n=128, prompt_logprobs=20, max_tokens=4),
    ),
)
ATTACKS = (*STOP_STRINGS, *ENCODINGS, *LONG_TEXTS, *LARGE_VALUES, *AT_THE_LIMITS)
