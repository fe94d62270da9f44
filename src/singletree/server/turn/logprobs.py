"""Events with the tokens of a response and of its prompt, for clients that ask for log-probabilities or token ids."""

from __future__ import annotations

import math
from collections.abc import Sequence

from singletree import request_limits
from singletree.conversation import Request
from singletree.engines.engine import Chunk, LogprobRow
from singletree.errors import InvalidRequest
from singletree.events import Event, PromptLogprobs, TextDelta, Token, TokenLogprobs, ToolCallBroken
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.models.model import Model
from singletree.server.turn.decoder import TurnDecoder


class LogprobReader:
    """Decodes a generation token by token, and puts each token before the events that it made certain.

    A token is sent when it is known what it belongs to: the tokens of a marker that may still be text, with its last.
    """

    def __init__(
        self, decoder: TurnDecoder, tokenizer: Tokenizer, prompt: Sequence[int], request: Request
    ) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._alternatives = request.sampling.logprobs or 0
        self._prompt_alternatives = request.sampling.prompt_logprobs or 0
        self._waiting: list[tuple[int, LogprobRow]] = []

    def feed(self, chunk: Chunk) -> list[Event]:
        events = [] if chunk.prompt_logprobs is None else self._read_prompt(chunk.prompt_logprobs)
        rows = chunk.logprobs or ()
        for at, id in enumerate(chunk.token_ids):
            self._waiting.append((id, rows[at] if at < len(rows) else ()))
            events += self._with_tokens(self._decoder.feed((id,)))
            if self._decoder.ended is not None:
                break
        return events

    def close(self) -> list[Event]:
        """Return the last events, and the tokens that belong to no event: those that ended the turn."""
        events = self._with_tokens(self._decoder.close())
        return [*events, *self._take(visible=False)] if self._waiting else events

    def _read_prompt(self, rows: Sequence[LogprobRow]) -> list[Event]:
        limit = self._prompt_alternatives
        return [
            PromptLogprobs(
                tuple(self._token(id, row, limit) for id, row in zip(self._prompt, rows, strict=False))
            )
        ]

    def _with_tokens(self, events: list[Event]) -> list[Event]:
        if not events:
            return events
        visible = any(isinstance(event, TextDelta | ToolCallBroken) for event in events)
        return [*self._take(visible=visible), *events]

    def _take(self, *, visible: bool) -> list[Event]:
        tokens = tuple(self._token(id, row, self._alternatives, visible) for id, row in self._waiting)
        self._waiting.clear()
        return [TokenLogprobs(tokens)] if tokens else []

    def _token(self, id: int, row: LogprobRow, limit: int, visible: bool = True) -> Token:
        # An engine may report more alternatives than requested, and the token itself besides the most likely ones.
        likely = sorted(row, key=lambda pair: -pair[1])[:limit]
        others = tuple(self._with_text(other, logprob) for other, logprob in likely)
        return self._with_text(id, row[0][1] if row else None, others, visible)

    def _with_text(
        self, id: int, logprob: float | None, others: tuple[Token, ...] = (), visible: bool = True
    ) -> Token:
        utf8 = self._tokenizer.token_bytes(id)
        known = None if logprob is None or math.isnan(logprob) else logprob
        return Token(id, utf8.decode("utf-8", "replace"), utf8, known, others, visible)


def make_logprob_reader(
    model: Model, request: Request, decoder: TurnDecoder, prompt: Sequence[int]
) -> LogprobReader | None:
    """Return a reader for the tokens of a response or its prompt; None if ``request`` does not ask for them.

    Raises:
        InvalidRequest: the engine does not report log-probabilities of the prompt, or they are too many.
    """
    sampling = request.sampling
    if sampling.prompt_logprobs is not None and not model.engine.info().returns_prompt_logprobs:
        raise InvalidRequest(
            f"the engine {model.engine.info().name} does not report log-probabilities of the prompt; "
            "send neither prompt_logprobs nor echo with logprobs",
            param="prompt_logprobs",
        )
    if sampling.prompt_logprobs is not None:
        reported = len(prompt) * (1 + sampling.prompt_logprobs) * request.choices
        what = "log-probabilities of its prompt to report"
        request_limits.check("prompt_logprobs", reported, what=what, param="prompt_logprobs")
    asked = (sampling.logprobs, sampling.prompt_logprobs)
    if asked == (None, None) and not request.options.return_token_ids:
        return None
    return LogprobReader(decoder, model.tokenizer, prompt, request)
