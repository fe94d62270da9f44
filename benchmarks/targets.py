"""The targets of the benchmarks, as data: no figure behind a peer, and limits of memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.figures import DYNAMO, FAST_DYNAMO, Figure, Result


@dataclass(frozen=True, slots=True)
class Target:
    """One target.

    Attributes:
        title: what is measured, for readers.
        figures: pattern of the names of its figures.
        bound: the highest value that meets it: of the ratio to ``peer``, or of the figure itself.
        peer: what the figure is compared with; empty for none.
        where: where the time or memory goes.
    """

    title: str
    figures: str
    bound: float = 1.0
    peer: str = ""
    where: str = ""


_TOKEN = (
    "waking up for the engine's event and reading it, decoding its token into events of the turn, encoding and "
    "writing them; with one stream most of it is the system's; `make counts` has the calls"
)
_PROMPT = "comparing the body with the last one, copying text and tokens, writing the token ids as JSON for the engine"
_NEW = "encoding (a quarter), rendering, decoding (a fifth each), digests of turns, token ids as JSON (a tenth each)"
_REQUEST = (
    "decoding and checking the body, the template's tail, the session, the engine's HTTP request, metrics"
)
_STREAM = "buffers of two connections, tasks and generators"

TARGETS = (
    Target("a streamed token", "a token, *", 1.0, DYNAMO, _TOKEN),
    Target("a request of one token", "a request of one token, *", 1.0, DYNAMO, _REQUEST),
    *(
        Target(
            f"first token of {title} prompt, {what}",
            f"{what} to the first token, {kind}, *",
            1.0,
            peer,
            where,
        )
        for peer in (DYNAMO, FAST_DYNAMO)
        for kind, title in (("cold", "a new"), ("repeat", "a repeated"), ("grown", "a grown"))
        for what in ("CPU", "time")
        for where in (_NEW if kind == "cold" and peer == FAST_DYNAMO else _PROMPT,)
    ),
    Target("count_tokens of 100,000 known tokens", "count_tokens, known", 1.0, DYNAMO, _PROMPT),
    Target(
        "memory, idle with Qwen3's tokenizer", "memory, idle", 150, where="the tokenizer (60 MiB), imports"
    ),
    Target(
        "memory after sessions, share of what the flags allow",
        "memory after sessions",
        1.2,
        where="the stores of turns, sessions and prompts, and what the allocator keeps beside them",
    ),
    Target("start until ready", "start, seconds", 1.0, where="imports (0.45 s of CPU), probing the engine"),
    Target("memory of a stream", "streams, KB each", 60, where=_STREAM),
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

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None where that is not known."""
        return None if self.value is None else self.value <= self.target.bound


def verdicts(result: Result, targets: Sequence[Target] = TARGETS) -> Iterator[Verdict]:
    """Yield each figure that has a target, beside it. A target without figures yields nothing."""
    for target in targets:
        for name, figure in result.figures.items():
            if fnmatchcase(name, target.figures):
                own, other = figure.median(), figure.median(target.peer) if target.peer else 1.0
                yield Verdict(target, name, figure, None if own is None or not other else own / other)
