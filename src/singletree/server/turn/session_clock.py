"""Keeps the time that a template prints: a session prints that of its first prompt, so that its prompts begin alike.

A template that prints the minute (Hunyuan A13B: the second) would cost the whole prefill in each turn; one that prints
the date would cost the prefill of every session at midnight. The time is updated once a day.
"""

from __future__ import annotations

from datetime import datetime

from singletree.prompts.history.canonicalization import SESSION_CLOCK
from singletree.prompts.replay.recall import Recalled
from singletree.server.models.catalog import ChatFormat

_KEPT_SECONDS = 86_400.0


class SessionClock:
    """A clock that stands still, for ``strftime_now`` in a template.

    Args:
        at: the time that it shows, in unix seconds.
        now: the present time, in unix seconds.

    Attributes:
        at: the time that it shows, in unix seconds.
        rules: the name of the rule, once the template printed something else than it would have for ``now``.
    """

    def __init__(self, at: float, now: float) -> None:
        self.at = at
        self.rules: tuple[str, ...] = ()
        self._now = datetime.fromtimestamp(now)

    def __call__(self, format: str) -> str:
        """Return the local time in ``format``, a format of ``strftime``."""
        text = datetime.fromtimestamp(self.at).strftime(format)
        if text != self._now.strftime(format):
            self.rules = (SESSION_CLOCK.name,)
        return text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SessionClock) and self.at == other.at

    def __hash__(self) -> int:
        return hash(self.at)


def make_session_clock(chat_format: ChatFormat, known: Recalled, now: float) -> SessionClock | None:
    """Return the clock for the prompt of ``known``; None if the template prints no time.

    It shows the time of the last remembered turn if the rule is on and that time is less than a day ago, else ``now``.

    Args:
        known: the conversation and its remembered turns.
        now: the present time, in unix seconds.
    """
    if not chat_format.template.capabilities.clock:
        return None
    last = max((number for number, turn in known.turns.items() if turn.opening.clock), default=None)
    printed = 0.0 if last is None else known.turns[last].opening.clock
    is_kept = SESSION_CLOCK.name not in chat_format.stability_off and 0 <= now - printed < _KEPT_SECONDS
    return SessionClock(printed if is_kept else now, now)
