"""Response headers that report how a prompt continues its session. They contain no text of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from singletree.server.sessions.break_causes import Break
from singletree.server.sessions.sessions import Step

EXPLAIN_HEADER = "x-singletree-explain"

_YES = ("1", "true", "on", "yes")
_HEADER_BYTES = 256


def wants_report(headers: Mapping[str, str]) -> bool:
    """Tell whether a request asks for the report headers; header names in lower case."""
    return headers.get(EXPLAIN_HEADER, "").strip().lower() in _YES


def report_headers(step: Step, cached: Callable[[], int | None]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers that report how the prompt of ``step`` continues the session.

    Args:
        cached: returns the number of prompt tokens in the engine's cache, or None; called when the headers are sent.
    """
    values: dict[str, object] = {
        "session": step.session,
        "course": step.course,
        "prompt-tokens": step.prompt_tokens,
        "matched-tokens": step.matched,
        "new-tokens": step.new,
        "cached-tokens": cached(),
        "lost-tokens": step.lost,
        "break": None if step.broken is None else f"{step.broken.cause.name}; {break_location(step.broken)}",
    }
    for name, value in values.items():
        if value is not None:
            yield f"x-singletree-{name}".encode(), _printable(str(value))


def _printable(text: str) -> bytes:
    return ascii(text)[1:-1].encode()[:_HEADER_BYTES]


def break_location(broken: Break) -> str:
    """Return a description of the message that ``broken`` is in."""
    if broken.message is None:
        return broken.role or "head"
    return f"message {broken.message} ({broken.role})"
