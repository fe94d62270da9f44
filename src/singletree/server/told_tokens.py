"""The tokens of an answer beside its events, for clients that ask for their log-probabilities or their ids."""

from __future__ import annotations

import math
from collections.abc import Sequence

from singletree.conversation import Request
from singletree.engines.engine import Chunk
from singletree.events import Event, TextDelta, Token, TokensRead, ToolCallBroken
from singletree.prompts.tokenizer import Tokenizer
from singletree.server.reading import Reader

Row = Sequence[tuple[int, float]]
"""(token id, log-probability) of a token and of its alternatives, the token itself first; empty: nothing is known."""


class TokenTeller:
    """Reads a generation token by token, and tells each with the events that it made certain.

    A token is told once it is known what it was for: of a marker that may yet turn out to be text, with its last.

    Args:
        alternatives: how many likely tokens in its place go with each.
    """

    def __init__(self, reader: Reader, tokenizer: Tokenizer, alternatives: int) -> None:
        self._reader = reader
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._waiting: list[tuple[int, Row]] = []

    def feed(self, chunk: Chunk) -> list[Event]:
        """The events of ``chunk``, behind each token's own."""
        events: list[Event] = []
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

    def _told(self, events: list[Event]) -> list[Event]:
        if not events:
            return events
        visible = any(isinstance(event, TextDelta | ToolCallBroken) for event in events)
        return [*self._take(visible=visible), *events]

    def _take(self, *, visible: bool) -> list[Event]:
        tokens = tuple(self._token(id, row, visible) for id, row in self._waiting)
        self._waiting.clear()
        return [TokensRead(tokens)] if tokens else []

    def _token(self, id: int, row: Row, visible: bool) -> Token:
        # An engine may tell more than was asked for, and the token itself beside the most likely ones.
        likely = sorted(row, key=lambda pair: -pair[1])[: self._alternatives]
        others = tuple(self._spelled(other, logprob) for other, logprob in likely)
        return self._spelled(id, row[0][1] if row else None, others, visible)

    def _spelled(
        self, id: int, logprob: float | None, others: tuple[Token, ...] = (), visible: bool = True
    ) -> Token:
        utf8 = self._tokenizer.spelled(id)
        known = None if logprob is None or math.isnan(logprob) else logprob
        return Token(id, utf8.decode("utf-8", "replace"), utf8, known, others, visible)


def token_teller(request: Request, reader: Reader, tokenizer: Tokenizer) -> TokenTeller | None:
    """One for an answer whose tokens ``request`` asks for, None for all others."""
    alternatives = request.sampling.logprobs
    if alternatives is None and not request.extra.get("return_token_ids"):
        return None
    return TokenTeller(reader, tokenizer, alternatives or 0)
