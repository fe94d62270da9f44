"""Time to the first token of a long first prompt, before and after a restart of the embedded llama.cpp.

    python -m benchmarks.restart [--quick] [--tokens N] [--model MODEL]

An engine reads a preamble, with an empty cache on disk, and is stopped. Then three engines start in turn and are asked
another question after the same preamble: one without --prefix-cache-path, one with it, and the same one once more.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.processor import machine
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.engines.llamacpp.engine import LlamaCppEngine
from singletree.engines.weights.resolve import DEFAULT_MODEL, resolve
from singletree.prompts.tokenizer.tokenizer import load_tokenizer

_TOKENS = 6000
_QUICK = 1200
_ANSWER = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__)
    parser.add_argument("--tokens", type=int, default=_TOKENS, help="of the preamble")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK} tokens")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args()
    model = resolve(options.model).path
    encode = load_tokenizer(model).encode
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))
    )
    preamble = encode(source)[: _QUICK if options.quick else options.tokens]
    questions = [encode(f"\nQuestion {at}: what does this program do?") for at in range(3)]
    print(f"{machine()}; {model.name}; a preamble of {len(preamble)} tokens")
    print(f"{'':34}{'start':>9}{'first token':>13}{'from cache':>12}")
    asyncio.run(_measure(model, preamble, questions))


async def _measure(model: Path, preamble: Sequence[int], questions: Sequence[Sequence[int]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder)
        await _run("nothing saved", model, path, preamble, questions[0])
        size = sum(file.stat().st_size for file in path.iterdir()) / 2**20  # noqa: ASYNC240
        await _run("restarted, no --prefix-cache-path", model, None, preamble, questions[1])
        await _run("restarted", model, path, preamble, questions[1])
        await _run("restarted again", model, path, preamble, questions[2])
    print(f"on disk: {size:.0f} MiB")


async def _run(
    name: str, model: Path, folder: Path | None, preamble: Sequence[int], question: Sequence[int]
) -> None:
    engine = LlamaCppEngine(model, prefix_cache_path=folder)
    began = perf_counter()
    await engine.start()
    started = perf_counter()
    first, cached = 0.0, 0
    try:
        async for chunk in engine.generate(GenerationJob([*preamble, *question], _ANSWER, name)):
            cached = chunk.cached_tokens or cached
            first = first or (perf_counter() if chunk.token_ids else 0.0)
    finally:
        await engine.close()
    print(f"{name:34}{started - began:7.2f} s{first - started:11.2f} s{cached:12}", flush=True)


if __name__ == "__main__":
    main()
