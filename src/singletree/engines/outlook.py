"""What a conversation will do next, as far as the server knows. Engines read it where room is short."""

from __future__ import annotations

from collections.abc import Callable

OVERDUE_SECONDS = 600.0
"""A conversation that is later than this behind its expected time is no longer expected."""

SOON_SECONDS = 2.0
"""A conversation that ended without a call a moment ago counts as idle for so long: nothing else is known of it."""

ONCE = 16.0
"""A conversation of one turn counts as idle for so many times as long: most of those are never continued, such as
requests for a title, and sub-agents that their harness does not name."""


def _ignore() -> None:
    return None


class Outlook:
    """What one conversation will do next. It goes with the conversation from turn to turn.

    The server changes it at the end of a turn and when the next one begins; an engine keeps it with the state of the
    conversation, and reads it when it has to give a state up.

    Attributes:
        goes_on: whether it has had more than one turn.
        is_running: whether a turn of it runs, so that nobody knows yet what follows.
        returns_at: when its next request is expected, on the clock of ``time.monotonic``: calls of tools went out. None
            where nothing is expected.
        tools, since: the tools whose calls are out, and since when; for the server.
        is_over: whether nobody will continue it: its sub-agent ended, or its client has rewritten it.
        is_pinned: whether its harness asks to keep it.
        changed: called after a turn ended; set by the engine that holds the state.
    """

    __slots__ = ("changed", "goes_on", "is_over", "is_pinned", "is_running", "returns_at", "since", "tools")

    def __init__(self, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        self.is_running = True
        self.returns_at: float | None = None
        self.tools: tuple[str, ...] = ()
        self.since = 0.0
        self.is_over = False
        self.is_pinned = False
        self.changed: Callable[[], object] = _ignore

    def may_return_by(self, until: float) -> bool:
        """Return whether its next request may come before a time, so that its place is kept until then."""
        if self.is_running:
            return True
        due = self.returns_at
        return not self.is_over and (self.goes_on if due is None else due <= until)


Worth = tuple[int, float]
"""How much a state is needed; the least goes first."""


def worth(outlook: Outlook | None, used: float, now: float) -> Worth:
    """Return how much the state of a conversation is needed.

    First go those that are over, then those that wait for a person, the idlest first, then those whose calls are out,
    the one that comes back last first, and at last what a harness has pinned.

    Args:
        outlook: None where nothing is known: then what was used longest ago goes first.
        used: when the state was used last.
    """
    if outlook is None:
        return 1, used - now
    if outlook.is_over:
        return 0, used - now
    if outlook.is_pinned:
        return 3, used - now
    due = outlook.returns_at
    if due is not None and now - due < OVERDUE_SECONDS:
        return 2, -abs(due - now)
    return 1, (used - now - SOON_SECONDS) * (1.0 if outlook.goes_on else ONCE)
