"""How long the first prompt of each harness is, and how long an engine takes to read it."""

from __future__ import annotations

import logging
from contextlib import aclosing, suppress
from dataclasses import dataclass

from singletree.conversation import Sampling
from singletree.engines.engine import Engine, GenerationJob
from singletree.errors import SingletreeError

_LOG = logging.getLogger(__name__)

_MEASURED_PROMPT = (*range(3, 99),)
"""Long enough for the speed of a batch, and read in a second or two. It begins like no real prompt."""

_LAST = 2**62


@dataclass(frozen=True, slots=True)
class Preamble:
    """The instructions and tools with which every session of a harness begins.

    Attributes:
        title: the name of the harness.
        tokens: about how many tokens they take in the first prompt of a session, at four characters a token; with a
            tokenizer of your model it is some more or less.
    """

    title: str
    tokens: int


PREAMBLES: dict[str, Preamble] = {
    "claude": Preamble("Claude Code", 12_000),
    "cline": Preamble("Cline", 5_300),
    "codex": Preamble("Codex", 5_000),
    "copilot": Preamble("GitHub Copilot CLI", 11_400),
    "kimi": Preamble("Kimi Code", 21_000),
    "openclaw": Preamble("OpenClaw", 6_600),
    "opencode": Preamble("OpenCode", 7_400),
    "pi": Preamble("pi", 1_400),
    "qwen": Preamble("qwen-code", 19_000),
}
"""The preamble of each harness, by the name of its executable."""


def describe_first_turns(tokens_per_second: float, window: int) -> str:
    """Return how long a first turn takes, as a sentence; of the harnesses whose preamble fits the window.

    The speed is that at the beginning of a prompt: later tokens take longer, since each looks at all before it.
    """
    fitting = sorted(
        (each for each in PREAMBLES.values() if each.tokens < window), key=lambda each: each.tokens
    )
    times = [f"{each.title} {describe_duration(each.tokens / tokens_per_second)}" for each in fitting]
    rate = f"{tokens_per_second:.0f}" if tokens_per_second >= 1 else f"{tokens_per_second:.1f}"
    speed = f"prompts are read at about {rate} tokens/s here"
    if not times:
        return f"{speed}; no harness's first prompt fits the window of {window} tokens"
    return f"{speed}, slower towards the end of a long one; a first turn takes at least: {', '.join(times)}"


async def log_first_turns(engine: Engine, model: str) -> None:
    """Let an engine that has just started read a short prompt, and log how long a first turn of each harness takes.

    A request that comes first goes first. Nothing is logged if the engine measures no speed.
    """
    job = GenerationJob(_MEASURED_PROMPT, Sampling(max_tokens=1), "reading-speed", priority=_LAST)
    with suppress(SingletreeError):
        async with aclosing(engine.generate(job)) as chunks:
            async for _ in chunks:
                pass
    info = engine.info()
    speed = (info.details or {}).get("prompt_tokens_per_second")
    if speed:
        _LOG.info("%s: %s", model, describe_first_turns(speed, info.context_window))


def describe_duration(seconds: float) -> str:
    """Return ``seconds`` as seconds or minutes, for a sentence."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"
