"""Tokens that llama.cpp reads for one main agent and four sub-agents on two slots.

    python -m benchmarks.slots [--quick] [--slots N] [--cache-mib N] [--model MODEL]

The main agent takes some turns, starts its sub-agents, waits for all of them and goes on. The sub-agents run in
parallel and have the same instructions. A turn is a prompt, an answer of a few tokens and the result of a tool, with
which the next prompt goes on. Three servers run the same script: llama.cpp alone without a cache in memory, llama.cpp
alone with its own one (``--cache-ram``), and the embedded engine, which places the requests itself.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import aiohttp

from benchmarks.processor import machine
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.engines.llamacpp.engine import LlamaCppEngine
from singletree.engines.llamacpp.machine import usable_cores
from singletree.engines.llamacpp.process import LlamaProcess
from singletree.engines.llamacpp.wire import StreamReader, encode_llamacpp_request
from singletree.engines.weights.resolve import DEFAULT_MODEL, resolve
from singletree.prompts.tokenizer.tokenizer import load_tokenizer

_WINDOW = 4096
_ANSWER = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
_SUBAGENTS = 4

Ask = Callable[[GenerationJob], AsyncIterator[tuple[Sequence[int], int | None]]]
"""Sends a request; yields new tokens, and how many tokens of the prompt were cached where that is known."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the agents do.

    Attributes:
        tokens: a long text, from which prompts are cut.
        preamble: length of the instructions of the main agent, and of those that all sub-agents share.
        result: length of a tool's result.
        turns: how many turns a sub-agent takes; the main agent takes two before and two after.
        tool_seconds: how long a tool runs.
    """

    tokens: Sequence[int]
    preamble: int
    result: int
    turns: int
    tool_seconds: float

    def piece(self, number: int, length: int) -> Sequence[int]:
        """Return a piece of the text that no other number has at its beginning."""
        start = 37 * number
        return [number + 300, *self.tokens[start : start + length - 1]]


@dataclass(slots=True)
class Figures:
    """What was measured: tokens of all prompts, those that were read, and seconds to the main agent's first words."""

    prompts: int = 0
    read: int = 0
    waits: list[float] = field(default_factory=list)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slots", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter prompts and fewer turns")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--cache-mib", type=int, default=2048, help="memory for states outside the slots")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args()
    model = resolve(options.model).path
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
    tokens = load_tokenizer(model).encode(text)
    script = Script(tokens, 600, 60, 2, 0.1) if options.quick else Script(tokens, 1200, 150, 4, 0.5)
    print(f"{machine()}; {model.name}; {options.slots} slots, 1 main agent, {_SUBAGENTS} sub-agents")
    print(f"{'':40}{'prompts':>9}{'read':>9}{'':>6}{'seconds':>9}{'main waits':>12}")
    asyncio.run(_measure(model, script, options.slots, options.threads, options.cache_mib))


async def _measure(model: Path, script: Script, slots: int, threads: int, cache: int) -> None:
    await _run("llama.cpp alone, no cache in memory", _alone(model, slots, threads, 0), script)
    await _run(f"llama.cpp alone, {cache} MiB", _alone(model, slots, threads, cache), script)
    await _run(f"singletree, {cache} MiB", _embedded(model, slots, threads, cache), script)


async def _run(name: str, server: AbstractAsyncContextManager[Ask], script: Script) -> None:
    figures = Figures()
    async with server as ask:
        began = perf_counter()
        prompt = await _agent(ask, script, figures, 0, list(script.piece(0, script.preamble)), 2)
        instructions = script.piece(1, script.preamble)
        await asyncio.gather(
            *(
                _agent(ask, script, figures, at, [*instructions, *script.piece(at + 1, 40)], script.turns)
                for at in range(1, _SUBAGENTS + 1)
            )
        )
        await _agent(ask, script, figures, 0, prompt, 2)
        seconds = perf_counter() - began
    share = figures.read / figures.prompts
    print(
        f"{name:40}{figures.prompts:9}{figures.read:9}{share:6.0%}{seconds:9.1f}{sum(figures.waits):12.1f}",
        flush=True,
    )


async def _agent(
    ask: Ask, script: Script, figures: Figures, agent: int, prompt: list[int], turns: int
) -> list[int]:
    """Let an agent take its turns, and return its next prompt; agent 0 is the main one."""
    for turn in range(turns):
        session, began, first = f"agent {agent}", perf_counter(), 0.0
        job = GenerationJob(prompt, _ANSWER, f"{session} {turn}", session=session, is_subagent=agent > 0)
        answer: list[int] = []
        async for ids, cached in ask(job):
            if cached is not None:
                figures.prompts += len(prompt)
                figures.read += len(prompt) - cached
            if ids and not first:
                first = perf_counter() - began
            answer += ids
        if not agent:
            figures.waits.append(first)
        await asyncio.sleep(script.tool_seconds)
        prompt = [*prompt, *answer, *script.piece(20 + agent * 20 + len(prompt) % 20, script.result)]
    return prompt


@asynccontextmanager
async def _embedded(model: Path, slots: int, threads: int, cache: int) -> AsyncIterator[Ask]:
    engine = LlamaCppEngine(model, slots=slots, threads=threads, context_window=_WINDOW, cache_ram_mib=cache)
    await engine.start()

    async def ask(job: GenerationJob) -> AsyncIterator[tuple[Sequence[int], int | None]]:
        async for chunk in engine.generate(job):
            yield chunk.token_ids, chunk.cached_tokens

    try:
        yield ask
    finally:
        await engine.close()


@asynccontextmanager
async def _alone(model: Path, slots: int, threads: int, cache: int) -> AsyncIterator[Ask]:
    settings = {
        "path": str(model),
        "slots": slots,
        "kv_tokens": slots * _WINDOW,
        "threads": threads,
        "batch_tokens": 256,
        "cache_ram_mib": cache,
        "cache_idle_slots": cache > 0,
        "verbosity": 1,
        "mmproj": None,
        "media_marker": "",
        "parking_root": None,
    }
    process = await LlamaProcess.spawn(settings, verbose=False)
    connector = aiohttp.UnixConnector(process.socket, limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)

    async def ask(job: GenerationJob) -> AsyncIterator[tuple[Sequence[int], int | None]]:
        limit = job.sampling.max_tokens or 0
        body, reader = encode_llamacpp_request(job, limit=limit), StreamReader(limit, (), logprobs=False)
        async with session.post("http://llama.cpp/completion", data=body) as answer:
            async for data in answer.content.iter_any():
                if chunk := reader.take(reader.feed(data)):
                    yield chunk.token_ids, chunk.cached_tokens

    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            yield ask
    finally:
        await process.stop()


if __name__ == "__main__":
    main()
