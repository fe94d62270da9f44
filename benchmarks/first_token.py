"""Time to the first token of a session whose server was killed: restored from disk, beside read anew.

    python -m benchmarks.first_token --killed N [N ...] [-- FLAGS of singletree serve]

A server is killed with SIGKILL after a turn of each session, with N tokens. Their next turns are timed on a server that
restores them (``--prefix-cache-path``), and on one that reads them anew.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.processor import machine
from engines.whole_server import Completion, complete, killed

_WRITTEN_SECONDS = 2.0
"""Files of a folder that has not grown for so long are complete."""


def measure_killed(serve: Sequence[str], sizes: Sequence[int], folder: Path) -> Iterator[str]:
    """Yield the times of the turn after ``kill -9``, restored and cold, of sessions whose token ids are made up.

    Answers may differ where two tokens are almost equally likely: a prompt that is read anew is read in other batches,
    and a restored one may lie at another place of the cache, so the engine rounds otherwise.
    """
    prompts: list[list[int]] = []
    saved, log = folder / "saved", folder / "log"
    with killed(["--prefix-cache-path", str(saved), *serve], log) as port:
        for tokens in sizes:
            numbers = random.Random(tokens)
            prompt = [numbers.randrange(1000, 40_000) for _ in range(tokens)]
            answer = complete(port, prompt, 32)
            prompts.append([*prompt, *answer.token_ids, *prompt[:64]])
        size = 0
        while not size or size != _size(saved):
            size = _size(saved)
            time.sleep(_WRITTEN_SECONDS)
        shutil.copytree(saved, folder / "kept")  # The next turn replaces what is saved.
        never_killed = [complete(port, prompt, 8) for prompt in prompts]
    with killed(["--prefix-cache-path", str(folder / "kept"), *serve], log) as port:
        restored = [complete(port, prompt, 8) for prompt in prompts]
    with killed(serve, log) as port:
        cold = [complete(port, prompt, 8) for prompt in prompts]
    for prompt, never, again, anew in zip(prompts, never_killed, restored, cold, strict=True):
        yield (
            f"{len(prompt)} tokens, first token: {never.first:.2f} s never killed ({never.cached} cached), "
            f"{again.first:.2f} s restored ({again.cached} cached, {_compared(again, never)}), "
            f"{anew.first:.2f} s cold ({anew.cached} cached, {_compared(anew, never)}): "
            f"{anew.first / again.first:.1f} times"
        )
    yield f"{size / 1e6:.0f} MB saved"


def _compared(one: Completion, other: Completion) -> str:
    return "same answer" if one.token_ids == other.token_ids else "another answer"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_token", description=__doc__)
    parser.add_argument(
        "--killed", type=int, nargs="+", metavar="N", required=True, help="tokens of prompts before"
    )
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="flags of singletree serve, after --")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        print(machine(), flush=True)
        for line in measure_killed(options.flags, options.killed, Path(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
