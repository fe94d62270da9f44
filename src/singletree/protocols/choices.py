"""Several answers to one request, in the two of OpenAI's APIs that have them (``n``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from singletree.conversation import Request, Turn
from singletree.errors import SingletreeError
from singletree.events import Event, Finished, OfChoice, Usage
from singletree.protocols.logprobs import tokens_of


class Choice(NamedTuple):
    """One of the answers, when it is over."""

    request: Request
    turn: Turn
    finished: Finished


def best(choices: Sequence[Choice], kept: int, drawn: int) -> list[Choice]:
    """The ``kept`` likeliest of each ``drawn`` that follow one another, the likeliest first; all when all are kept."""
    if kept == drawn:
        return list(choices)
    groups = (choices[at : at + drawn] for at in range(0, len(choices), drawn))
    return [choice for group in groups for choice in sorted(group, key=_likelihood, reverse=True)[:kept]]


def _likelihood(choice: Choice) -> float:
    """The mean log-probability of its tokens, by which OpenAI ranks."""
    known = [token.logprob for token in tokens_of(choice.turn) if token.logprob is not None]
    return sum(known) / len(known) if known else float("-inf")


class ChoiceEncoder(Protocol):
    """Events to the bytes of one choice in a stream that it may share."""

    def start(self) -> bytes:
        """What is sent at once."""
        ...

    def feed(self, event: Event) -> bytes:
        """What an event says."""
        ...

    def end(self, finished: Finished) -> bytes:
        """The end of the choice."""
        ...

    def tail(self, usage: Usage) -> bytes:
        """The end of the stream, after that of every choice."""
        ...

    def close(self, finished: Finished) -> bytes:
        """The end of the only choice, and of the stream."""
        ...

    def keep_alive(self) -> bytes:
        """A sign of life."""
        ...

    def fail(self, error: SingletreeError) -> bytes:
        """The end of the stream by an error."""
        ...

    def side_event(self, name: str, said: Mapping[str, Any]) -> bytes:
        """See ``server.protocol.Encoder``."""
        ...


class ChoicesEncoder:
    """Events to one stream in which the choices take turns, as they come.

    Args:
        choices: the encoders of each, of which the first one's is that of the whole too.
    """

    def __init__(self, choices: Sequence[ChoiceEncoder]) -> None:
        self._choices = choices
        self._stream = choices[0]

    def start(self) -> bytes:
        """See Encoder."""
        return b"".join(choice.start() for choice in self._choices)

    def feed(self, event: Event) -> bytes:
        """What an event of a choice says; others are of none and say nothing."""
        if not isinstance(event, OfChoice):
            return b""
        choice, said = self._choices[event.index], event.said
        return choice.end(said) if isinstance(said, Finished) else choice.feed(said)

    def keep_alive(self) -> bytes:
        """See Encoder."""
        return self._stream.keep_alive()

    def close(self, finished: Finished) -> bytes:
        """The end of the stream, with the usage of all choices."""
        return self._stream.tail(finished.usage)

    def fail(self, error: SingletreeError) -> bytes:
        """See Encoder."""
        return self._stream.fail(error)

    def side_event(self, name: str, said: Mapping[str, Any]) -> bytes:
        """See Encoder."""
        return self._stream.side_event(name, said)
