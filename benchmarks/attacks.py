"""Requests that one client could stop a server with: `benchmarks.hostile` sends each of them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.stream_reader import post

_CHAT, _RESPONSES, _MESSAGES, _TEXT = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/completions",
)
_MIB = 2**20
_WORDS = "lorem ipsum "


@dataclass(frozen=True, slots=True)
class Attack:
    """What a hostile client sends.

    Attributes:
        name: what it does, in words.
        body: makes the body.
        path: of the route.
        encoding: the Content-Encoding of the body; empty for none.
        at_once: how many connections send it at the same time.
    """

    name: str
    body: Callable[[], bytes]
    path: str = _CHAT
    encoding: str = ""
    at_once: int = 1

    def request(self, headers: str = "") -> bytes:
        """Return the HTTP request, with further ``headers`` and their line ends. The connection is for it alone."""
        encoding = f"Content-Encoding: {self.encoding}\r\n" if self.encoding else ""
        return post(self.path, self.body(), f"{encoding}{headers}")


def _chat(content: Any = "[[gen:64:1:0]]", **fields: Any) -> bytes:
    return _json(messages=[{"role": "user", "content": content}], **fields)


def _json(**fields: Any) -> bytes:
    return json.dumps({"model": "qwen3", **fields}).encode()


def _raw(fields: bytes) -> bytes:
    return _chat()[:-1] + b"," + fields + b"}"


def _stops(count: int, length: int) -> list[str]:
    """Return ``count`` stop strings of ``length`` characters, all different and none in the answer."""
    return [f"{number:07d}".rjust(length, "~") for number in range(count)]


def _gzip_of(unit: bytes, times: int, beginning: bytes = b"", end: bytes = b"") -> bytes:
    """Return what decompresses to ``beginning``, ``unit`` many times, and ``end``, without making all of it."""
    packer = zlib.compressobj(9, wbits=31)
    piece = unit * (_MIB // len(unit))
    whole, rest = divmod(times * len(unit), len(piece))
    parts = [packer.compress(beginning), *(packer.compress(piece) for _ in range(whole))]
    return b"".join([*parts, packer.compress(piece[:rest]), packer.compress(end), packer.flush()])


def _long_text(unit: str | bytes, size: int, path: str = _CHAT) -> bytes:
    """Return a packed request whose text is about ``size`` bytes of ``unit``, in the protocol of ``path``."""
    bodies = {
        _CHAT: _chat("TEXT"),
        _MESSAGES: _chat("TEXT", max_tokens=9),
        _RESPONSES: _json(input="TEXT"),
    }
    before, _, after = bodies.get(path, _json(prompt="TEXT")).partition(b"TEXT")
    unit = unit if isinstance(unit, bytes) else unit.encode()
    return _gzip_of(unit, size // len(unit), before, after)


def _packed_again(times: int) -> bytes:
    body = _chat("x" * 30 * _MIB)
    for _ in range(times):
        body = gzip.compress(body, 9)
    return body


def _schema(properties: int) -> dict[str, Any]:
    fields = {f"field{number}": {"type": "string"} for number in range(properties)}
    return {"type": "object", "properties": fields}


def _tools(count: int, properties: int) -> list[dict[str, Any]]:
    functions = ({"name": f"tool{n}", "parameters": _schema(properties)} for n in range(count))
    return [{"type": "function", "function": function} for function in functions]


def _grammar(rules: int, end: str = "") -> str:
    return "root ::= r0\n" + "".join(f'r{n} ::= "x" r{n + 1}\n' for n in range(rules)) + end


def _calls(count: int) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for n in range(count):
        items.append({"type": "function_call", "call_id": f"c{n}", "name": f"u{n}", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"c{n}", "output": "x"})
    return [*items, _WORD]


def _namespaces(count: int) -> list[dict[str, Any]]:
    tool = {"type": "function", "name": "t", "parameters": {}}
    return [{"type": "namespace", "name": f"n{n}", "tools": [tool]} for n in range(count)]


_WORD = {"role": "user", "content": "x"}
_BLOCK = {"type": "text", "text": "x"}
_EDIT = {"type": "clear_tool_uses_20250919"}
_SOURCE = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQKJQ=="}
_PDF = {"type": "document", "source": _SOURCE}

STOP_STRINGS = (
    Attack("stop: one of 60,000 characters", lambda: _chat(stop=_stops(1, 60_000))),
    Attack("stop: 4,000 characters, n 64", lambda: _chat(stop=_stops(1, 4000), n=64)),
    Attack("stop: 64 of 64 characters, n 64", lambda: _chat(stop=_stops(64, 64), n=64)),
    Attack("stop: 100,000 strings", lambda: _chat("[[gen:1000:1:0]]", stop=_stops(100_000, 8))),
    Attack("stop: a million strings", lambda: _chat(stop=_stops(1_000_000, 8))),
)
ENCODINGS = (
    Attack("gzip, 40 times", lambda: _packed_again(40), encoding="gzip" + ", gzip" * 39),
    Attack("gzip, 3 times", lambda: _packed_again(3), encoding="gzip, gzip, gzip"),
    Attack("gzip of 64 MB of zeros", lambda: _gzip_of(b"\0", 64_000_000), encoding="gzip"),
    Attack("gzip of 1 GB of zeros", lambda: _gzip_of(b"\0", 1_000_000_000), encoding="gzip"),
    Attack("gzip of empty members", lambda: gzip.compress(b"") * 500_000, encoding="gzip"),
)
_UNITS = {
    "one letter": "a",
    "spaces": " ",
    "words": "lorem ipsum dolor sit amet, ",
    "digits": "0123456789",
    "line breaks": "\\n",
    "an accent": "\u0301",
    "emoji": "\U0001f469\u200d",
    "markers": "<|im_start|>",
    "half markers": "<|im_",
    "brackets": "<",
}
_PACKED = {
    **{f"30 MB of {name}": (unit, 30_000_000, _CHAT, 1) for name, unit in _UNITS.items()},
    **{
        f"30 MB of words, {path}": (_WORDS, 30_000_000, path, 1)
        for path in (_MESSAGES, _RESPONSES, _TEXT, "/tokenize")
    },
    "5 MB of words": ("lorem ipsum dolor ", 5_000_000, _CHAT, 1),
    "5 MB of one letter": ("a", 5_000_000, _CHAT, 1),
    "30 MB of one letter, ten": ("a", 30_000_000, _CHAT, 10),
    "30 MB of words, ten": (_WORDS, 30_000_000, _CHAT, 10),
    "1 MB of words, sixty": (_WORDS, 1_000_000, _CHAT, 60),
}
_PLAIN = {
    "30 MB of one letter, plain": ("a", 30_000_000, 1),
    "4 MB of one letter, plain": ("a", 4_100_000, 1),
    "4 MB of spaces, plain": (" ", 4_100_000, 1),
    "4 MB of words, plain": (_WORDS, 340_000, 1),
    "4 MB of ideographs, plain": ("\u4e2d\u6587", 650_000, 1),
    "4 MB of markers, plain": ("<|im_start|>", 340_000, 1),
    "30 MB of words, plain, ten": (_WORDS, 2_500_000, 10),
    "4 MB of words, plain, ten": (_WORDS, 340_000, 10),
}


def _plain(unit: str, times: int) -> bytes:
    return _chat(unit * times)


LONG_TEXTS = (
    *(
        Attack(name, partial(_long_text, unit, size, path), path, "gzip", at_once)
        for name, (unit, size, path, at_once) in _PACKED.items()
    ),
    *(
        Attack(name, partial(_plain, unit, times), at_once=at_once)
        for name, (unit, times, at_once) in _PLAIN.items()
    ),
)
LARGE_VALUES = (
    Attack("12 MB of half surrogate pairs", lambda: _chat("X").replace(b"X", rb"\ud800" * 2_000_000)),
    Attack("a million messages", lambda: _json(messages=[_WORD] * 1_000_000)),
    Attack("a million blocks", lambda: _chat([_BLOCK] * 1_000_000)),
    Attack("a grammar of 100,000 rules", lambda: _chat(guided_grammar=_grammar(100_000))),
    Attack("a regex of 1 MB", lambda: _chat(guided_regex="(a|b)?" * 170_000)),
    Attack(
        "token strings of 0.6 MB", lambda: _json(prompt="a b " * 150_000, return_token_strs=True), "/tokenize"
    ),
    Attack("a million ids to text", lambda: _json(tokens=[7] * 1_000_000), "/detokenize"),
    Attack("five million prompt ids", lambda: _json(prompt=[7] * 5_000_000), _TEXT),
    Attack("a logit_bias of a million", lambda: _chat(logit_bias={str(n): 1 for n in range(1_000_000)})),
    Attack("100,000 tools", lambda: _chat(tools=_tools(100_000, 1))),
    Attack("a tool of 100,000 properties", lambda: _chat(tools=_tools(1, 100_000))),
    Attack("100,000 unknown keys", lambda: _chat(**{f"key{n}": n for n in range(100_000)})),
    Attack(
        "a response format of 100,000 properties",
        lambda: _chat(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(100_000)}}
        ),
    ),
)
AT_THE_LIMITS = (
    Attack("30 MB of opened lists", lambda: _raw(b'"x":' + b"[" * 30 * _MIB)),
    Attack("30 MB of empty lists", lambda: _raw(b'"x":[' + b"[]," * 10 * _MIB + b"0]")),
    Attack("30 MB of empty texts", lambda: _raw(b'"x":[' + b'"",' * 10 * _MIB + b"0]")),
    Attack("240,000 keys", lambda: _chat(documents={str(n): 0 for n in range(240_000)})),
    Attack("1.9 million numbers", lambda: _raw(b'"documents":[' + b"0," * 1_900_000 + b"0]")),
    Attack(
        "30 MB of escapes, one half a pair",
        lambda: _chat("X").replace(b"X", rb"\n" * 15_000_000 + rb"\ud800"),
    ),
    Attack("10,000 messages", lambda: _json(messages=[_WORD | {"content": f"x{n}"} for n in range(10_000)])),
    Attack("10,000 calls and results", lambda: _json(input=_calls(4999)), _RESPONSES),
    Attack("80,000 blocks", lambda: _chat([_BLOCK] * 80_000)),
    Attack("2,000 tools, one required", lambda: _chat(tools=_tools(2000, 1), tool_choice="required")),
    Attack("a tool of 12,000 properties", lambda: _chat(tools=_tools(1, 12_000))),
    Attack("1,900 namespaces", lambda: _json(input=_calls(4000), tools=_namespaces(1900)), _RESPONSES),
    Attack("a regex of 20,000 characters", lambda: _chat(guided_regex="[a-z]" * 3999)),
    Attack("a grammar of 5,000 rules", lambda: _chat(guided_grammar=_grammar(5000, 'r5000 ::= "x"\n'))),
    Attack("1.9 million prompt ids", lambda: _json(prompt=[7] * 1_900_000), _TEXT),
    Attack("1.9 million ids to text", lambda: _json(tokens=[7] * 1_900_000), "/detokenize"),
    Attack("10,000 biases", lambda: _chat(logit_bias={str(n): 1 for n in range(10_000)})),
    Attack(
        "20,000 context edits",
        lambda: _json(max_tokens=9, messages=[_WORD], context_management={"edits": [_EDIT] * 20_000}),
        _MESSAGES,
    ),
    Attack("5,000 damaged PDFs", lambda: _chat([_PDF] * 5000, max_tokens=9), _MESSAGES),
    Attack(
        "20 log probabilities of 8,000 tokens, n 128",
        lambda: _json(prompt=[7] * 8000, n=128, prompt_logprobs=20, max_tokens=4),
        _TEXT,
    ),
)
ATTACKS = (*STOP_STRINGS, *ENCODINGS, *LONG_TEXTS, *LARGE_VALUES, *AT_THE_LIMITS)
