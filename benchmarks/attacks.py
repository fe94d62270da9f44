"""Requests that one client could stop a server with, each sent while a second client asks ``/health`` every 10 ms.

    python -m benchmarks.attacks                   # all attacks, a server for each
    python -m benchmarks.attacks stop gzip         # those with one of these words in their names

For each attack it prints how long ``/health`` took, the CPU seconds of the thread of the server's event loop, and by
how much its memory grew. The engine is another process. It fails if one attack misses the goal. Times mean something
only on an idle machine; CPU seconds of the loop's thread always do: while it works, it answers nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from benchmarks import peers, servers
from benchmarks.processor import children, wait_idle
from benchmarks.stream_reader import post, read_streams

P99_SECONDS, WORST_SECONDS, GROWTH_MIB = 0.05, 0.25, 256.0
_INTERVAL = 0.01
_HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_FIRST = b'{"model":"qwen3","messages":[{"role":"user","content":"%b [[gen:4:1:0]]"}]}' % (
    b"lorem ipsum " * 3000
)
"""Long enough for the server to load its faster encoder, which it does once."""
_PIECE = 2**16
_CHAT, _RESPONSES, _MESSAGES, _TEXT = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/completions",
)
_MIB = 2**20


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


def _long_text(unit: str, size: int, path: str, *, packed: bool) -> bytes:
    """Return a request whose text is about ``size`` bytes of ``unit``, in the protocol of ``path``."""
    bodies = {_CHAT: _chat("TEXT"), _MESSAGES: _chat("TEXT", max_tokens=9), _RESPONSES: _json(input="TEXT")}
    before, _, after = bodies.get(path, _json(prompt="TEXT")).partition(b"TEXT")
    # As JSON writes it: what is plain has escapes in place of letters that are not ASCII.
    written = unit.encode() if packed else json.dumps(unit)[1:-1].encode()
    times = size // len(written)
    return _gzip_of(written, times, before, after) if packed else before + written * times + after


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
    "ideographs": "\u4e2d\u6587",
    "markers": "<|im_start|>",
    "half markers": "<|im_",
    "brackets": "<",
}


def _long(name: str, megabytes: int, path: str = _CHAT, at_once: int = 1, *, packed: bool = True) -> Attack:
    make = partial(_long_text, _UNITS[name], megabytes * 1_000_000, path, packed=packed)
    title = f"{megabytes} MB of {name}{'' if path == _CHAT else f', {path}'}{'' if packed else ', plain'}"
    title += f", {at_once} at once" if at_once > 1 else ""
    return Attack(title, make, path, "gzip" if packed else "", at_once)


LONG_TEXTS = (
    *(_long(name, 30) for name in _UNITS),
    *(_long("words", 30, path) for path in (_MESSAGES, _RESPONSES, _TEXT, "/tokenize")),
    *(_long(name, 5) for name in ("words", "one letter")),
    *(_long(name, 30, at_once=10) for name in ("words", "one letter")),
    _long("words", 1, at_once=60),
    *(_long(name, 4, packed=False) for name in ("one letter", "spaces", "words", "ideographs", "markers")),
    _long("one letter", 30, packed=False),
    *(_long("words", megabytes, at_once=10, packed=False) for megabytes in (4, 30)),
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


class Effect(NamedTuple):
    """What an attack did.

    Attributes:
        statuses: of the answers, "-" for none.
        health: seconds that each ``/health`` took, the shortest first.
        loop: CPU seconds of the thread of the event loop.
        growth: MiB that the server took at most, beyond what it had before.
    """

    statuses: Sequence[str]
    health: Sequence[float]
    loop: float
    growth: float

    def share(self, part: float) -> float:
        """Return the time within which ``part`` of the answers of ``/health`` came."""
        return self.health[min(len(self.health) - 1, int(part * len(self.health)))]

    @property
    def misses(self) -> str:
        """Return which parts of the goal it misses, in words."""
        missed = {
            "p99": self.share(0.99) > P99_SECONDS,
            "max": self.health[-1] > WORST_SECONDS,
            "memory": self.growth > GROWTH_MIB,
        }
        return ", ".join(name for name, is_missed in missed.items() if is_missed)


class HealthWatch(Thread):
    """Asks ``/health`` every 10 ms until it is stopped. While one answer is late, the next ones are late, too."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._ended = Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        """Ask."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=600) as connection:
            while not self._ended.is_set():
                began = time.perf_counter()
                connection.sendall(_HEALTH)
                if not connection.recv(_PIECE).startswith(b"HTTP/1.1 200"):
                    raise SystemExit("/health failed")
                took = time.perf_counter() - began
                # Those that were due meanwhile would have waited for the rest of it.
                self.seconds.append(took)
                self.seconds.extend(took - _INTERVAL * n for n in range(1, int(took / _INTERVAL) + 1))
                self._ended.wait(max(0.0, _INTERVAL - took))

    def stop(self) -> list[float]:
        """Return what the answers took, in seconds, the shortest first."""
        self._ended.set()
        self.join()
        return sorted(self.seconds)


def try_attack(attack: Attack, patience: float = 120.0) -> Effect:
    """Start a server, send the attack, and return what it did."""
    request = attack.request()
    with servers.singletree_before_vllm() as server:
        read_streams(server.port, [post("/v1/chat/completions", _FIRST)], b"{")
        wait_idle(server.pid)
        watch = HealthWatch(server.port)
        watch.start()
        time.sleep(0.5)
        loop, before = _loop_seconds(server.pid), _memory(server.pid, "VmRSS")
        for each in before:
            Path(f"/proc/{each}/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew.
        with ThreadPoolExecutor(attack.at_once) as pool:
            answers = list(pool.map(lambda _: send(server.port, request, patience), range(attack.at_once)))
        time.sleep(0.5)
        peaks = _memory(server.pid, "VmHWM")
        growth = sum(max(0.0, peaks[each] - before.get(each, 0.0)) for each in peaks)
        return Effect(answers, watch.stop(), _loop_seconds(server.pid) - loop, growth)


def send(port: int, request: bytes, patience: float) -> str:
    """Send ``request``, and return the status of the answer; "-" for none."""
    answer = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=patience) as connection,
    ):
        with contextlib.suppress(ConnectionError):  # it may have answered before it read all
            connection.sendall(request)
        answer = connection.recv(_PIECE)
        while connection.recv(_PIECE):
            pass
    return answer[9:12].decode("ascii", "replace") or "-"


def _loop_seconds(pid: int) -> float:
    """Return the CPU seconds of the first thread of a process, which runs the event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def _memory(pid: int, name: str) -> dict[int, float]:
    """Return a figure of /proc/PID/status of a process and of its children, in MiB by process."""
    sizes = {}
    for each in (pid, *children(pid)):
        lines = Path(f"/proc/{each}/status").read_text(encoding="ascii").splitlines()
        sizes[each] = sum(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
    return sizes


def main() -> None:
    """Try the attacks, and print what each did."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("words", nargs="*", help="only attacks with one of these in their names")
    words = parser.parse_args().words
    peers.ensure_tokenizer()
    chosen = [each for each in ATTACKS if not words or any(word in each.name for word in words)]
    print(f"{'attack':<45}{'status':>9}{'p50 ms':>8}{'p99 ms':>9}{'max ms':>9}{'loop s':>8}{'MiB':>7}")
    missed = 0
    for attack in chosen:
        effect = try_attack(attack)
        missed += bool(effect.misses)
        p50, p99, worst = (1000 * effect.share(part) for part in (0.5, 0.99, 1.0))
        print(
            f"{attack.name:<45}{','.join(sorted({*effect.statuses})):>9}{p50:>8.1f}{p99:>9.1f}{worst:>9.1f}"
            f"{effect.loop:>8.2f}{effect.growth:>7.0f}  {effect.misses and 'misses: ' + effect.misses}",
            flush=True,
        )
    print(
        f"goal: p99 {1000 * P99_SECONDS:.0f} ms, max {1000 * WORST_SECONDS:.0f} ms, memory {GROWTH_MIB:.0f} MiB; "
        f"{missed} of {len(chosen)} attacks miss it"
    )
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
