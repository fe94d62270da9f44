"""The targets of the benchmarks, as data: what may be how high, and where the time goes where it is higher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.figures import DYNAMO, DYNAMO_AND_VLLM, FAST_DYNAMO, OWN, VLLM, VLLM_PARSERS, Figure, Result


@dataclass(frozen=True, slots=True)
class Target:
    """One target.

    Attributes:
        title: what is measured, for readers.
        figures: pattern of the names of its figures.
        bound: the highest value that meets it: of the ratio to ``peer``, or of the figure itself.
        peer: what the figure is compared with; empty for none.
        where: where the time or memory goes.
        above: whether ``bound`` is the lowest value that meets it.
    """

    title: str
    figures: str
    bound: float
    peer: str = ""
    where: str = ""
    above: bool = False


_TOKEN = (
    "waking up for the engine's event and reading it, decoding its token into events of the turn, encoding and "
    "writing them; with one stream most of it is the system's; `make counts` has the calls"
)
_PROMPT = "comparing the body with the last one, copying text and tokens, writing the token ids as JSON for the engine"
_REQUEST = (
    "decoding and checking the body, the template's tail, the session, the engine's HTTP request, metrics"
)

TARGETS = (
    Target("a streamed token, 1 stream", "a token, *, 1 streams", 0.8, DYNAMO, _TOKEN),
    Target("a streamed token, 16 streams", "a token, *, 16 streams", 0.5, DYNAMO, _TOKEN),
    Target("a streamed token, 64 streams", "a token, *, 64 streams", 0.5, DYNAMO, _TOKEN),
    Target(
        "a streamed token with vLLM in process",
        "vLLM in process, a token, *",
        0.25,
        DYNAMO_AND_VLLM,
        "vLLM's own code that reads its engine's messages; the task of each stream; encoding and writing events",
    ),
    Target("a request of one token", "a request of one token, *", 0.5, DYNAMO, _REQUEST),
    Target(
        "requests a second of a core",
        "requests a second, *",
        10,
        VLLM,
        _REQUEST,
        above=True,
    ),
    Target("first token of a new prompt, CPU", "CPU to the first token, cold, *", 0.25, DYNAMO, _PROMPT),
    Target("first token of a new prompt, time", "time to the first token, cold, *", 0.25, DYNAMO, _PROMPT),
    Target(
        "first token of a new prompt, CPU, a fast tokenizer on both sides",
        "CPU to the first token, cold, *",
        1.0,
        FAST_DYNAMO,
        _PROMPT,
    ),
    Target(
        "first token of a repeated prompt, CPU", "CPU to the first token, repeat, *", 0.5, DYNAMO, _PROMPT
    ),
    Target(
        "first token of a repeated prompt, time", "time to the first token, repeat, *", 0.5, DYNAMO, _PROMPT
    ),
    Target("first token of a grown prompt, CPU", "CPU to the first token, grown, *", 0.5, DYNAMO, _PROMPT),
    Target("first token of a grown prompt, time", "time to the first token, grown, *", 0.5, DYNAMO, _PROMPT),
    Target("slope of a turn's CPU with the conversation", "slope of a turn, *", 0.3, DYNAMO, _PROMPT),
    Target("count_tokens of 100,000 known tokens", "count_tokens, known", 1.0, DYNAMO, _PROMPT),
    Target("the parser, a token", "the parser, *", 2.0, where="the parser's own steps"),
    Target("a parsed token", "the parser, *", 1 / 3, VLLM_PARSERS, "the parser's own steps"),
    Target(
        "memory, idle with Qwen3's tokenizer", "memory, idle", 150, where="the tokenizer (60 MiB), imports"
    ),
    Target(
        "memory after sessions, share of what the flags allow",
        "memory after sessions",
        1.2,
        where="see `python -m benchmarks.memory`",
    ),
    Target("start until ready", "start, seconds", 1.0, where="imports (0.45 s of CPU), probing the engine"),
    Target(
        "memory of a stream", "streams, KB each", 60, where="buffers of two connections, tasks and generators"
    ),
    Target("99 % of first tokens, 5,000 streams", "streams, 99 % of first tokens", 1.0, where=_REQUEST),
    Target(
        "99 % of first tokens, 2,000 opened at once", "at once, 99 % of first tokens", 1.0, where=_REQUEST
    ),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure beside its target; ``value`` is None where the peer was not measured."""

    target: Target
    name: str
    figure: Figure
    value: float | None
    spread: tuple[float, float]

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where that is not known."""
        if self.value is None:
            return None
        return self.value >= self.target.bound if self.target.above else self.value <= self.target.bound


def verdicts(result: Result, targets: Sequence[Target] = TARGETS) -> Iterator[Verdict]:
    """Yield each figure that has a target, beside it. A target without figures yields nothing."""
    for target in targets:
        for name, figure in result.figures.items():
            if fnmatchcase(name, target.figures):
                values = figure.ratios(target.peer) if target.peer else figure.values.get(OWN, [])
                spread = (min(values), max(values)) if values else (0.0, 0.0)
                yield Verdict(target, name, figure, _value(figure, target, values), spread)


def _value(figure: Figure, target: Target, values: Sequence[float]) -> float | None:
    if not values:
        return None
    own, other = figure.median(), figure.median(target.peer) if target.peer else 1.0
    return own / other if own is not None and other else None
