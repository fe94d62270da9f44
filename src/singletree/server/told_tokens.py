"""The tokens of an answer, and of its prompt, beside its events: for clients that ask for log-probabilities or ids."""

from __future__ import annotations

import math
from collections.abc import Sequence

from singletree.conversation import Request
from singletree.engines.engine import Chunk, LogprobRow
from singletree.errors import InvalidRequest
from singletree.events import Event, PromptRead, TextDelta, Token, TokensRead, ToolCallBroken
from singletree.prompts.tokenizer import Tokenizer
from singletree.server.catalog import Model
from singletree.server.reading import Reader


class TokenTeller:
    """Reads a generation token by token, and tells each with the events that it made certain.

    A token is told once it is known what it was for: of a marker that may yet turn out to be text, with its last.

    Args:
        prompt: its token ids.
        request: says how many likely tokens in its place go with each.
    """

    def __init__(self, reader: Reader, tokenizer: Tokenizer, prompt: Sequence[int], request: Request) -> None:
        self._reader = reader
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._alternatives = request.sampling.logprobs or 0
        self._prompt_alternatives = request.sampling.prompt_logprobs or 0
        self._waiting: list[tuple[int, LogprobRow]] = []

    def feed(self, chunk: Chunk) -> list[Event]:
        """The events of ``chunk``, behind each token's own."""
        events = [] if chunk.prompt_logprobs is None else self._read_prompt(chunk.prompt_logprobs)
        rows = chunk.logprobs or ()
        for at, id in enumerate(chunk.token_ids):
            self._waiting.append((id, rows[at] if at < len(rows) else ()))
            events += self._told(self._reader.feed((id,)))
            if self._reader.ended is not None:
                break
        return events

    def close(self) -> list[Event]:
        """The last events, and the tokens that were for nothing else: those that ended the turn."""
        events = self._told(self._reader.close())
        return [*events, *self._take(visible=False)] if self._waiting else events

    def _read_prompt(self, rows: Sequence[LogprobRow]) -> list[Event]:
        most = self._prompt_alternatives
        return [
            PromptRead(tuple(self._token(id, row, most) for id, row in zip(self._prompt, rows, strict=False)))
        ]

    def _told(self, events: list[Event]) -> list[Event]:
        if not events:
            return events
        visible = any(isinstance(event, TextDelta | ToolCallBroken) for event in events)
        return [*self._take(visible=visible), *events]

    def _take(self, *, visible: bool) -> list[Event]:
        tokens = tuple(self._token(id, row, self._alternatives, visible) for id, row in self._waiting)
        self._waiting.clear()
        return [TokensRead(tokens)] if tokens else []

    def _token(self, id: int, row: LogprobRow, most: int, visible: bool = True) -> Token:
        # An engine may tell more than was asked for, and the token itself beside the most likely ones.
        likely = sorted(row, key=lambda pair: -pair[1])[:most]
        others = tuple(self._spelled(other, logprob) for other, logprob in likely)
        return self._spelled(id, row[0][1] if row else None, others, visible)

    def _spelled(
        self, id: int, logprob: float | None, others: tuple[Token, ...] = (), visible: bool = True
    ) -> Token:
        utf8 = self._tokenizer.spelled(id)
        known = None if logprob is None or math.isnan(logprob) else logprob
        return Token(id, utf8.decode("utf-8", "replace"), utf8, known, others, visible)


def token_teller(model: Model, request: Request, reader: Reader, prompt: Sequence[int]) -> TokenTeller | None:
    """One for an answer whose tokens, or those of its prompt, ``request`` asks for; None for all others.

    Raises:
        InvalidRequest: the engine does not tell those of the prompt.
    """
    sampling = request.sampling
    engine = model.engine.info()
    if sampling.prompt_logprobs is not None and not engine.tells_prompt_logprobs:
        told = f"the engine {engine.name} tells no log-probabilities of the prompt"
        raise InvalidRequest(
            f"{told}; send neither prompt_logprobs nor echo with logprobs", param="prompt_logprobs"
        )
    asked = (sampling.logprobs, sampling.prompt_logprobs)
    if asked == (None, None) and not request.extra.get("return_token_ids"):
        return None
    return TokenTeller(reader, model.tokenizer, prompt, request)
