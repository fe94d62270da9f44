"""How much work the hot paths are, in counts that are the same on every machine: calls, bytecode instructions, memory.

    python -m benchmarks.counts [--check] [--write]

Counted are a streamed token and a request of one token, from the engine's bytes to the client's, on the three APIs;
prompts of 50,000 tokens that are new, repeated and grown; and the parser. Of a request of one token also the ways
from one area to another. ``counts.json`` beside this file has the
counts of the last release. ``--check`` fails if a count is higher by more than its tolerance; ``--write`` renews the
file. Calls differ by a hundredth between versions of Python; instructions are compared on the version that wrote the
file only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.counting_work import AreaCrossings, Work, WorkCounter, peak_memory
from benchmarks.tool_session import PROTOCOLS, Protocol, Session, grown, opening, tools
from server.in_memory_server import InMemoryServer
from singletree import families
from singletree.conversation import Tool, ToolCall
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser
from singletree.parsing.render_turn import render_turn
from singletree.testing import byte_model

PATH = Path(__file__).with_name("counts.json")
TOLERANCES: Mapping[str, float] = {"calls": 0.02, "instructions": 0.03, "peak": 0.1, "crossings": 0}
"""By how much a count may grow, as a share. Patch versions of Python and of libraries differ by less."""

SLACK: Mapping[str, int] = {"calls": 1, "instructions": 10, "peak": 4096, "crossings": 0}
"""By how much it may grow in any case."""

_NOISE = 0.002
"""Up to which share a difference is not reported: peaks differ by some bytes from run to run."""

_SHORT, _LONG = 8, 72
_STEPS = 25
_PROMPT_CHARACTERS = 50_000  # The tokenizer has a token for each byte.
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKEN = byte_model.byte_tokenizer().encode_array("a").tolist()
_FAMILIES = ("qwen3", "qwen3_coder", "kimi_k2", "gpt_oss")
_TOOL = Tool("write", "Write a file.", {"type": "object", "properties": {"content": {"type": "string"}}})
_SEED = "0"

Counts = dict[str, Work]


def version() -> str:
    """Return the version of Python as far as counts depend on it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


async def measure() -> Counts:
    """Count everything."""
    counts: Counts = {}
    counter = WorkCounter()
    for dialect, protocols in (("vllm-completions", PROTOCOLS), ("vllm-generate", PROTOCOLS[:1])):
        server = InMemoryServer(dialect)
        await server.start()
        for protocol in protocols:
            title = f"{protocol.name}, {dialect}"
            async for name, work in _stream_work(server, protocol, counter):
                counts[f"{name}, {title}"] = work
            if dialect == "vllm-completions":
                async for name, work in _prompt_work(server, protocol, counter):
                    counts[f"{name}, {title}"] = work
        await server.close()
    counts |= _parser_work(counter)
    return counts


async def _stream_work(
    server: InMemoryServer, protocol: Protocol, counter: WorkCounter
) -> AsyncIterator[tuple[str, Work]]:
    async def ask(tokens: int, body: dict[str, Any]) -> None:
        answer = await server.ask(protocol.path, body, [TOKEN] * tokens)
        if answer.count(b"\ndata: ") + answer.startswith(b"data: ") < tokens:
            raise RuntimeError(f"{protocol.name} did not stream {tokens} tokens: {answer[-500:]!r}")

    # Bodies are written before the counting begins: the project's own code writes them.
    bodies = {tokens: request_body(protocol, opening(""), tokens) for tokens in (1, _SHORT, _LONG)}
    await ask(_SHORT, bodies[_SHORT])
    found = []
    for tokens, body in bodies.items():
        with counter.counting() as work:
            await ask(tokens, body)
        found.append(work)
    one, short, long = found
    with AreaCrossings().collecting() as crossed:
        await ask(1, bodies[1])
    one.crossings = len(crossed.ways)
    yield "a request of one token", one
    yield "a token", long.less(short, _LONG - _SHORT)


async def _prompt_work(
    server: InMemoryServer, protocol: Protocol, counter: WorkCounter
) -> AsyncIterator[tuple[str, Work]]:
    number = 100 * [each.name for each in PROTOCOLS].index(protocol.name)

    async def ask(body: dict[str, Any]) -> None:
        await server.ask(protocol.path, body, [TOKEN])

    await ask(request_body(protocol, _session(number), 1))
    for kind, changed in (("new", 1), ("repeated", 1), ("grown", 2)):
        # Twice, each time with another conversation: counting instructions takes memory of its own.
        counted, measured = (_session(number + way) for way in (1, 2))
        if changed == 2:
            counted, measured = (grown(each, _text(9, 2000), "later") for each in (counted, measured))
        body = request_body(protocol, counted, 1)
        with counter.counting() as work:
            await ask(body)
        with peak_memory() as memory:
            await ask(request_body(protocol, measured, 1))
        work.peak = memory.peak
        yield f"a {kind} prompt of 50,000 tokens", work


def request_body(protocol: Protocol, session: Session, tokens: int) -> dict[str, Any]:
    """Return the body of a streamed request for an answer of ``tokens`` tokens."""
    return {protocol.limit: tokens, **dict(protocol.more), **protocol.body(session)}


def _session(number: int) -> Session:
    """A conversation of about 50,000 tokens; another number, another text."""
    session = Session(_text(number, 500), tools(number), f"Mend test {number}.", ())
    each = (_PROMPT_CHARACTERS - 12_000) // _STEPS
    for at in range(_STEPS):
        session = grown(session, _text(number * _STEPS + at, each), f"{number}_{at}")
    return session


def _text(number: int, length: int) -> str:
    """Lines like those of a program, the same in every run."""
    lines: list[str] = []
    size = 0
    while size < length:
        at = number * 7919 + len(lines) * 31
        word = "".join(_LETTERS[(at // 26**power) % 26] for power in range(4))
        lines.append(f"    {word}_{at} = find({word!r}, [{at}, {at % 97}])  # {number}")
        size += len(lines[-1]) + 1
    return "\n".join(lines)[:length]


def _parser_work(counter: WorkCounter) -> Counts:
    """A token of text, and one of a call's argument."""
    counts: Counts = {}
    for name in _FAMILIES:
        for kind in ("text", "argument"):
            found = []
            for tokens in (_SHORT, _LONG, _SHORT, _LONG):  # The first two fill caches.
                pieces = _pieces(families.get(name), kind, tokens)
                with counter.counting() as work:
                    parser = Parser(families.get(name), (_TOOL,))
                    for piece in pieces:
                        parser.feed(piece)
                    parser.close()
                found.append(work)
            counts[f"the parser, a token of {kind}, {name}"] = found[3].less(found[2], _LONG - _SHORT)
    return counts


def _pieces(family: Family, kind: str, tokens: int) -> list[str]:
    words = [f"{_LETTERS[at % 26] * 3} " for at in range(tokens)]
    if kind == "text":
        return words
    text = "".join(words)
    whole = render_turn(family, [ToolCall(_TOOL.name, json.dumps({"content": text}))])
    before, _, after = whole.partition(text)
    return [before, *words, after]


def compare(now: Counts, then: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, bool]]:
    """Yield a line for each count that differs from the last release's, and whether it grew by too much.

    Args:
        then: the last release's counts, and of each the figures that can be compared.
    """
    for name in sorted(then.keys() - now.keys()):
        yield f"{name}: no longer counted", True
    for name, work in now.items():
        if name not in then:
            yield f"{name}: the last release has no count of it", True
            continue
        for what, before in then[name].items():
            value = getattr(work, what)
            if abs(value - before) > _NOISE * before:
                share = f" ({value / before - 1:+.1%})" if before else ""
                grew = value > before * (1 + TOLERANCES[what]) + SLACK[what]
                yield f"{name}: {before:,} -> {value:,} {what}{share}{' TOO MUCH' if grew else ''}", grew


def read() -> dict[str, dict[str, int]]:
    """Return the counts of the last release that hold for this version of Python."""
    known = json.loads(PATH.read_text(encoding="utf-8"))
    left_out = set() if known["python"] == version() else {"instructions"}
    return {
        name: {what: value for what, value in figures.items() if what not in left_out}
        for name, figures in known["counts"].items()
    }


def write(now: Counts) -> None:
    """Put the counts into the file."""
    known = {"python": version(), "counts": {name: asdict(work) for name, work in now.items()}}
    PATH.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Count, and print what differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counts", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="fail if a count grew by more than its tolerance"
    )
    parser.add_argument("--write", action="store_true", help=f"renew {PATH.name}")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != _SEED:  # The order of sets of texts follows from it.
        command = [sys.executable, "-m", "benchmarks.counts", *sys.argv[1:]]
        raise SystemExit(subprocess.call(command, env={**os.environ, "PYTHONHASHSEED": _SEED}))
    now = asyncio.run(measure())
    if options.write:
        write(now)
    lines = list(compare(now, read()))
    for line, _ in lines:
        print(line)
    if not lines:
        print("no count differs from the last release's")
    raise SystemExit(int(options.check and any(grew for _, grew in lines)))


if __name__ == "__main__":
    main()
