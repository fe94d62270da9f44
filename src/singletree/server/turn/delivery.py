"""Takes tokens from the engine to the encoder in one call, with no switch of tasks between."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from singletree.server.turn.complete_calls import CompleteCalls
from singletree.server.turn.generation import DeliverEvents, Generation


class TokenDelivery:
    """Decodes the tokens that an engine delivers (``GenerationJob.deliver``), and delivers their events.

    Args:
        generation: the turn.
        calls: holds calls back; None where they are sent live.
        deliver: takes the events.

    Attributes:
        error: what the last call raised: the engine must not get it. To be raised when the engine yields.
        spare: takes the tokens behind the end of the turn, when it is set; they are not decoded.
    """

    __slots__ = ("_calls", "_decode", "_decoder", "_deliver", "_token_ids", "error", "spare")

    def __init__(self, generation: Generation, calls: CompleteCalls | None, deliver: DeliverEvents) -> None:
        self._token_ids = generation.token_ids
        self._decoder = generation.decoder
        self._decode = generation.decoder.feed
        self._calls = calls
        self._deliver = deliver
        self.error: Exception | None = None
        self.spare: array[int] | None = None

    def take(self, token_ids: Sequence[int]) -> bool:
        """Take the next tokens; return whether more may come so. Never raises."""
        if self.spare is not None:
            self.spare.extend(token_ids)
            return False
        try:
            self._token_ids.extend(token_ids)
            decoder, events = self._decoder, self._decode(token_ids)
            if decoder.has_calls and self._calls is not None:
                events = self._calls.feed(events)
            return (not events or self._deliver(events)) and decoder.ended is None
        except Exception as error:
            self.error = error
            return False
