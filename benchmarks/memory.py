"""Memory: of an idle server with Qwen3's tokenizer, and after many sessions of 50,000 tokens.

    python -m benchmarks.memory [--sessions N] [--tokens N]

What a server keeps of sessions is bounded by flags. The bound that is printed is their sum beside what the idle server
takes. The engine is in another process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from benchmarks import peers, prompt_cost, servers
from benchmarks.overhead import filler
from benchmarks.processor import resident_bytes, wait_idle
from benchmarks.stream_reader import read_streams
from benchmarks.tool_session import Sessions, grown
from benchmarks.wire_protocols import PROTOCOLS
from singletree.prompts.tokenizer.tokenizer import CACHE_BYTES
from singletree.server.models import catalog

SESSIONS, TOKENS = 1000, 50_000
_MIB = 2**20
_BOUNDS = {"--turn-memory": 64 * _MIB, "--session-memory": 32 * _MIB}
_FIXED = CACHE_BYTES + catalog._PROMPT_BYTES
"""The caches of the tokenizer and of prompts, which no flag sets."""

_ANSWER = 4
_DIFFERENT = 40  # sessions that are made; the others differ from them in their first words


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB: of the idle server, after a number of sessions, and what the flags allow."""

    idle: float
    after: dict[int, float]
    allowed: float

    @property
    def last(self) -> float:
        """After all sessions."""
        return self.after[max(self.after)]


def bodies(tokenizer: Tokenizer, count: int, tokens: int) -> Iterator[list[bytes]]:
    """Yield the two requests of each session, the second one step later. All differ from their first words on."""
    sessions = Sessions(tokenizer, tokens)
    made = [sessions.session(number, prompt_cost.MARKER) for number in range(min(count, _DIFFERENT))]
    protocols = PROTOCOLS
    for number in range(count):
        base = made[number % len(made)]
        protocol = protocols[number % len(protocols)]
        session = type(base)(f"Session {number}. {base.system}", base.tools, base.question, base.steps)
        longer = grown(session, f"Result {number}. {prompt_cost.MARKER}", "next")
        yield [protocol.request(each, _ANSWER) for each in (session, longer)]


def measure(played: Sequence[int], tokenizer: Tokenizer, count: int, tokens: int) -> Memory:
    """Send ``count`` sessions of ``tokens`` tokens, two turns each, and look at the memory now and then."""
    flags = [word for name, size in _BOUNDS.items() for word in (name, f"{size // _MIB}MiB")]
    with servers.singletree_before_vllm(played, flags) as server:
        wait_idle(server.pid)  # The tokenizer is loaded behind the start.
        idle = resident_bytes(server.pid) / _MIB
        after: dict[int, float] = {}
        marks = {count * share // 10 for share in (1, 2, 5, 8, 10)}
        for number, requests in enumerate(bodies(tokenizer, count, tokens), 1):
            for request in requests:
                read_streams(server.port, [request], b"data: ")
            if number in marks:
                after[number] = resident_bytes(server.pid) / _MIB
        return Memory(idle, after, idle + (sum(_BOUNDS.values()) + _FIXED) / _MIB)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a session")
    options = parser.parse_args()
    if not peers.has_tokenizer():
        peers.install_tokenizer()
    tokenizer = Tokenizer.from_file(str(peers.QWEN3 / "tokenizer.json"))
    found = measure(filler(), tokenizer, options.sessions, options.tokens)
    print(f"idle {found.idle:.0f} MiB")
    for number, size in found.after.items():
        print(f"after {number} sessions {size:.0f} MiB")
    print(
        f"idle and what the flags allow {found.allowed:.0f} MiB: {found.last / found.allowed:.2f} of it are used"
    )


if __name__ == "__main__":
    main()
