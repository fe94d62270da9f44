"""What an engine is: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from singletree.conversation import Sampling
from singletree.errors import ContextOverflow, InvalidRequest

StopKind = Literal["stop", "length", "cancelled"]
ConstraintKind = Literal["gbnf", "lark", "regex", "json_schema", "structural_tag"]

LogprobRow = Sequence[tuple[int, float]]
"""(token id, natural-log probability) of a token and of its alternatives, the token itself first; empty: not known."""


@dataclass(slots=True)
class Chunk:
    """One step of a generation. Treat it as immutable: an engine may give the same one twice.

    Attributes:
        token_ids: the new tokens; may be empty (a first chunk that only tells what was cached, the last one).
            The token that ended the turn is among them when the engine tells it.
        finish: set on the last chunk only: ``stop`` (an end token), ``length`` or ``cancelled``.
        cached_tokens: how many prompt tokens the engine had already, when it has told it by now.
        logprobs: a row for each new token, with no id twice; None when not asked for.
        prompt_logprobs: the same for each token of the prompt, whole and on one chunk, before or with the first
            tokens; its first token has none.
    """

    token_ids: Sequence[int]
    finish: StopKind | None = None
    cached_tokens: int | None = None
    logprobs: Sequence[LogprobRow] | None = None
    prompt_logprobs: Sequence[LogprobRow] | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine tells about itself: tokens for lengths, generations for slots.

    ``constraints`` are the kinds of ``Constraint`` that it takes, the ones it is best at first;
    ``tells_prompt_logprobs`` says whether ``Sampling.prompt_logprobs`` means anything to it; ``goes_on`` whether what
    it writes follows from its prompt alone, so that it goes on with a turn that another one began.
    """

    name: str
    context_window: int
    slots: int = 1
    details: Mapping[str, Any] | None = None
    constraints: tuple[ConstraintKind, ...] = ()
    tells_prompt_logprobs: bool = False
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the tokens must spell.

    Attributes:
        kind: ``gbnf`` (llama.cpp grammar), ``lark`` or ``regex`` or ``json_schema`` or ``structural_tag``.
        value: the grammar's text, or the schema or structural tag as a JSON value. In ``lark`` special tokens
            stand by name (``<|im_end|>``) or id (``<[2]>``), as llguidance writes them.
    """

    kind: ConstraintKind
    value: Any


def token_limit(prompt_tokens: int, max_tokens: int | None, window: int) -> int:
    """How many tokens may follow the prompt: ``max_tokens``, or less where the window ends.

    Raises ContextOverflow when there is room for none, InvalidRequest for an empty prompt.
    """
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens; give at least one")
    room = window - prompt_tokens
    if room < 1:
        raise ContextOverflow(prompt_tokens, window)
    return room if max_tokens is None else max(0, min(max_tokens, room))


class Engine(Protocol):
    """An inference engine. One instance serves many generations at once."""

    async def start(self) -> None:
        """Make it ready. Raises WeightsUnavailable, BadConfiguration or EngineFailed."""

    async def close(self) -> None:
        """Free everything. Safe to call twice; generations in flight end with EngineFailed."""

    def info(self) -> EngineInfo:
        """Name and limits; valid after ``start``."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        stop_token_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate. Closing the generator (``aclose``) frees the engine at once, as ``abort`` does.

        ``sampling.stop`` (strings) is not the engine's: the pipeline watches the text. ``priority``: lower
        goes first where requests wait. Exactly one chunk, the last, has ``finish``. Raises EngineFailed, at
        any time, and before the first chunk Overloaded, ContextOverflow when the engine finds the prompt too
        long, and InvalidRequest for a constraint that it cannot take.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End that generation with a last chunk ``cancelled``; unknown ids are ignored."""
