"""The time that a template prints: throughout a session that of its first prompt, so that its head stays as it was.

A template that prints the minute (Hunyuan A13B: the second) would cost the whole prefill with each turn, one that
prints the date that of every session at midnight. The time goes on once a day.
"""

from __future__ import annotations

from datetime import datetime

from singletree.prompts.replay import Recalled
from singletree.prompts.stability import SESSION_CLOCK
from singletree.server.catalog import Speech

_KEPT_SECONDS = 86_400.0


class Clock:
    """Stands at ``at`` (unix seconds) and tells its local time, as ``strftime_now`` in a template.

    Attributes:
        rules: the name of the rule, once what was told is another time than ``now``.
    """

    def __init__(self, at: float, now: float) -> None:
        self.at = at
        self.rules: tuple[str, ...] = ()
        self._now = datetime.fromtimestamp(now)

    def __call__(self, format: str) -> str:
        """The local time in ``format``."""
        told = datetime.fromtimestamp(self.at).strftime(format)
        if told != self._now.strftime(format):
            self.rules = (SESSION_CLOCK.name,)
        return told

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Clock) and self.at == other.at

    def __hash__(self) -> int:
        return hash(self.at)


def clock_of(speech: Speech, known: Recalled, now: float) -> Clock | None:
    """The clock for a prompt with the turns that are ``known`` of it; None where the template prints no time."""
    if not speech.template.reads.clock:
        return None
    last = max((number for number, turn in known.turns.items() if turn.opening.clock), default=None)
    shown = 0.0 if last is None else known.turns[last].opening.clock
    is_kept = SESSION_CLOCK.name not in speech.stability_off and 0 <= now - shown < _KEPT_SECONDS
    return Clock(shown if is_kept else now, now)
