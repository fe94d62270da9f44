"""Many slow streams in one process: 5,000 at one token a second each, and 2,000 that are opened at once.

    python -m benchmarks.streams [--streams N] [--at-once N] [--seconds N]

Prints the memory of a stream, the time to the first token (median and 99 %), and the CPU that a stream takes a second.
The engine is in another process. The client and the engine share the machine with the server.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from benchmarks import peers, servers, tool_session
from benchmarks.overhead import filler
from benchmarks.processor import Watch, resident_bytes
from benchmarks.servers import Server
from benchmarks.stream_reader import Answer, WrongAnswer, read_streams
from benchmarks.token_cost import Load, token_cost
from benchmarks.wire_protocols import PROTOCOLS, marker

STREAMS, AT_ONCE, SECONDS = 5000, 2000, 12
FLAGS = ("--slots", "8192")
_BATCH = 250  # opened together
_BATCHES_A_SECOND = 2


@dataclass(frozen=True, slots=True)
class Many:
    """What many streams cost: KB of memory and CPU ms a second for each, seconds to the first token."""

    kilobytes: float
    cpu: float
    first_median: float
    first_99: float


def measure(server: Server, streams: int, seconds: int, batch: int) -> Many:
    """Open ``streams``, ``batch`` of them at once, and read them all to their end.

    Args:
        seconds: how many tokens each stream has, one a second.
    """
    protocol = PROTOCOLS[0]
    token_cost(server, protocol, Load(8, 8, 0.01), (0.0,) * len(server.pids), 0.5)
    pause = batch / (_BATCH * _BATCHES_A_SECOND) if batch < streams else 0.0
    ramp = pause * (streams / batch - 1)
    tokens = int(seconds + ramp) if pause else seconds
    request = protocol.request(tool_session.opening(marker(tokens, 1.0)), tokens)
    before = resident_bytes(server.pid)
    answers: list[Answer] = []
    failures: list[Exception] = []

    def read(count: int) -> None:
        try:
            answers.extend(read_streams(server.port, [request] * count, protocol.mark))
        except (WrongAnswer, OSError) as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(batch,)) for _ in range(streams // batch)]
    watch = Watch(server.pids)
    for thread in threads:
        thread.start()
        time.sleep(pause)
    peak = before
    while any(thread.is_alive() for thread in threads):
        with suppress(OSError):
            peak = max(peak, resident_bytes(server.pid))
        time.sleep(0.25)
    spent = watch.stop()
    if len(answers) < len(threads) * batch:
        raise RuntimeError(
            f"of {streams} streams {len(answers)} came to their end: {str(failures[0])[-300:]}"
        )
    firsts = sorted(answer.first for answer in answers)
    return Many(
        (peak - before) / streams / 1000,
        spent.cpu[0] / spent.wall / streams * 1e3,
        statistics.median(firsts),
        firsts[int(len(firsts) * 0.99) - 1],
    )


def measure_both(played: Sequence[int], streams: int, at_once: int, seconds: int) -> tuple[Many, Many]:
    """Return what streams cost that open one after the other, and what those cost that open at once."""
    with servers.singletree_before_vllm(played, FLAGS) as server:
        together = measure(server, at_once, seconds, at_once)
    with servers.singletree_before_vllm(played, FLAGS) as server:
        return measure(server, streams, seconds, min(_BATCH, streams)), together


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="for which all streams are open")
    options = parser.parse_args()
    if not peers.has_tokenizer():
        peers.install_tokenizer()
    both = measure_both(filler(), options.streams, options.at_once, options.seconds)
    for title, many in zip((f"{options.streams} streams", f"{options.at_once} at once"), both, strict=True):
        print(
            f"{title}: {many.kilobytes:.1f} KB and {many.cpu:.3f} CPU ms a second each; first token after "
            f"{many.first_median:.2f} s (median), {many.first_99:.2f} s (99 %)"
        )


if __name__ == "__main__":
    main()
