"""What it takes to count the tokens of a request (``/v1/messages/count_tokens``): of a long session that was never
sent, of the same one again, one step later, and 25 small ones at once, as Claude Code's ``/context`` asks. Singletree
beside Dynamo, where it is installed (``python -m benchmarks.peers``), in the same run.

    python -m benchmarks.counting [--quick] [--write]

``--write`` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tokenizers import Tokenizer

from benchmarks import documents, peers, servers, tool_session
from benchmarks.overhead import filler
from benchmarks.processor import Watch, machine, wait_idle
from benchmarks.servers import MODEL, Server
from benchmarks.stream_reader import post, read_streams
from benchmarks.tool_session import Session

NAME = "counting"
_TOKENS = 100_000
_AT_ONCE = 25
_MARK = b'"input_tokens":'
_HEADERS = "anthropic-version: 2023-06-01\r\n"


@dataclass(frozen=True, slots=True)
class Count:
    """Requests that were counted together: ms from the first byte sent to the last answer read, CPU ms of the
    server, the tokens that it told for the first of them, and how many cores everything else kept busy meanwhile.
    """

    kind: str
    wall: float
    cpu: float
    tokens: int
    others: float


def request(body: dict[str, object]) -> bytes:
    """A request to count ``body``."""
    data = json.dumps({"model": MODEL, **body}).encode()
    return post("/v1/messages/count_tokens", data, _HEADERS)


def long_session(tokenizer: Tokenizer, number: int) -> Session:
    """A session of about 100,000 tokens; another ``number``, another text."""
    session = tool_session.Sessions(tokenizer, _TOKENS // 2).session(number, "")
    source, at = tool_session.library(), number * 7919
    told = 0
    while told < _TOKENS // 2:
        result = source[at : at + 8000]
        at += len(result)
        told += len(tokenizer.encode(result, add_special_tokens=False)) + 70
        session = tool_session.grown(session, result, f"{number}_{at}")
    return session


def counts(server: Server, session: Session, again: int) -> Iterable[Count]:
    """One session in all the ways."""
    longer = tool_session.grown(session, tool_session.library()[:8000], "last")
    whole = request(tool_session.body_of_messages(session))
    yield _ask(server, "cold", [whole])
    wait_idle(server.pid)  # singletree makes its tokenizer faster behind the first long prompt.
    for _ in range(again):
        yield _ask(server, "known", [whole])
    yield _ask(server, "a step later", [request(tool_session.body_of_messages(longer))])
    of_messages = tool_session.body_of_messages(session)
    parts = [
        request({"messages": [{"role": "user", "content": "x"}], "tools": [tool]})
        for tool in (of_messages["tools"] * 2)[:_AT_ONCE]
    ]
    for _ in range(again):
        yield _ask(server, f"{_AT_ONCE} tools at once", parts)


def _ask(server: Server, kind: str, requests: Sequence[bytes]) -> Count:
    watch = Watch((server.pid,))
    answers = read_streams(server.port, requests, _MARK)
    spent = watch.stop()
    told = b"".join(answers[0].tail).rpartition(_MARK)[2].split(b"}")[0].split(b",")[0]
    return Count(kind, spent.wall * 1e3, spent.cpu[0] * 1e3, int(told), spent.others / spent.wall)


def report(measured: dict[str, list[Count]]) -> str:
    """The table."""
    own = next(iter(measured))
    kinds = list(dict.fromkeys(count.kind for count in measured[own]))
    head = ["", *(f"{name}: {what}" for name in measured for what in ("ms", "CPU ms", "tokens"))]
    rows = [[kind, *_cells(measured.values(), kind)] for kind in kinds]
    busy = statistics.median(count.others for told in measured.values() for count in told)
    return (
        f"{documents.today()}; {machine()}. Medians; everything else on the machine kept {busy:.2f} cores busy "
        f"meanwhile.\n\n{documents.table(head, rows)}"
    )


def _cells(all_counts: Iterable[list[Count]], kind: str) -> Iterable[str]:
    for told in all_counts:
        of_kind = [count for count in told if count.kind == kind]
        yield f"{_median(of_kind, lambda count: count.wall):.1f}"
        yield f"{_median(of_kind, lambda count: count.cpu):.1f}"
        yield f"{of_kind[0].tokens:,}"


def _median(of_kind: Sequence[Count], of: Callable[[Count], float]) -> float:
    return statistics.median(map(of, of_kind))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counting", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    options = parser.parse_args()
    if not peers.has_tokenizer():
        peers.install_tokenizer()
    tokenizer = Tokenizer.from_file(str(peers.QWEN3 / "tokenizer.json"))
    measured: dict[str, list[Count]] = {}
    with ExitStack() as stack:
        running = [stack.enter_context(servers.singletree())]
        if peers.has_dynamo():
            running.append(stack.enter_context(servers.dynamo("Dynamo", filler())))
        for number in range(1 if options.quick else 3):
            session = long_session(tokenizer, number + 1)
            for server in running:
                told = counts(server, session, 5 if options.quick else 20)
                measured.setdefault(server.name, []).extend(told)
    text = report(measured)
    print(text)
    if options.write:
        documents.replace(NAME, text)


if __name__ == "__main__":
    main()
