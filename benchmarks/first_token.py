"""Time to the first token of a session whose server was killed: restored from disk, beside read anew.

    python -m benchmarks.first_token --killed N [-- FLAGS of singletree serve]

A server is killed with SIGKILL after a turn with N tokens. The next turn is timed on a server that restores the session
(``--prefix-cache-path``), and on one that reads it anew.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.processor import machine
from clients.served import running
from engines.real_vllm import free_port
from engines.whole_server import Stream


def measure_killed(serve: Sequence[str], tokens: int, folder: Path) -> str:
    """Return the times of the turn after ``kill -9``, restored and cold. The token ids of the prompt are made up.

    The answers of a restored session and of one that was never killed are the same. One whose prompt is read anew may
    differ: llama.cpp reads it in other batches, and rounds otherwise.
    """
    numbers = random.Random(tokens)
    prompt = [numbers.randrange(1000, 40_000) for _ in range(tokens)]
    saved, log = folder / "saved", folder / "log"

    with _killed([*serve, "--prefix-cache-path", str(saved)], log) as port:
        before = log.read_text()
        answer = _complete(port, prompt, 32)
        while "saved" not in log.read_text()[len(before) :]:
            time.sleep(0.1)
        shutil.copytree(saved, folder / "kept")  # The next turn replaces what is saved.
        prompt += [*answer.token_ids, *prompt[:64]]
        never_killed = _complete(port, prompt, 8)
    with _killed([*serve, "--prefix-cache-path", str(folder / "kept")], log) as port:
        restored = _complete(port, prompt, 8)
    with _killed(serve, log) as port:
        cold = _complete(port, prompt, 8)
    same = "same answer" if restored.token_ids == never_killed.token_ids else "ANOTHER ANSWER"
    return (
        f"{len(prompt)} tokens, first token: {never_killed.first:.2f} s never killed, {restored.first:.2f} s restored "
        f"({restored.cached} cached, {same}), {cold.first:.2f} s cold ({cold.cached} cached): "
        f"{cold.first / restored.first:.0f} times; "
        f"{sum(path.stat().st_size for path in (folder / 'kept').iterdir()) / 1e6:.0f} MB saved"
    )


@contextmanager
def _killed(serve: Sequence[str], log: Path) -> Iterator[int]:
    """A server on the port, killed at the end of the block."""
    port = free_port()
    with running([*serve, "--no-store"], port, log) as process:
        yield port
        process.kill()
        process.wait()


class _Completion(NamedTuple):
    first: float
    cached: int
    token_ids: list[int]


def _complete(port: int, prompt: Sequence[int], count: int) -> _Completion:
    body = {
        **{"model": "any", "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True},
        **{"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True},
    }
    began, first, cached = time.monotonic(), 0.0, 0
    token_ids: list[int] = []
    with Stream(f"http://127.0.0.1:{port}", "/v1/completions", body) as stream:
        for event in stream.events():
            for choice in event["choices"]:
                token_ids += choice.get("token_ids") or []
                first = first or (time.monotonic() - began if token_ids else 0.0)
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return _Completion(first, cached, token_ids)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_token", description=__doc__)
    parser.add_argument("--killed", type=int, metavar="N", required=True, help="tokens of the prompt before")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="flags of singletree serve, after --")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        print(machine(), measure_killed(options.flags, options.killed, Path(folder)), sep="\n")


if __name__ == "__main__":
    main()
