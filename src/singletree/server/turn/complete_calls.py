"""Sends a tool call to the client only when it is complete.

pi 0.73 and qwen-code 0.24 parse arguments with a parser that completes partial JSON, and run the call, however the
response ended. Only an error at the end of the stream stops pi from running a call that it has seen. So a call is held
back until it is complete, and one that never becomes complete is sent as the text that the model wrote. A client that
runs only complete calls may ask to get the arguments while they are generated.
"""

from __future__ import annotations

import time

from singletree.events import (
    ArgumentsDelta,
    Event,
    Markup,
    TextDelta,
    ToolCallBroken,
    ToolCallEnd,
    ToolCallStart,
)

__all__ = ["CompleteCalls"]

HEADER = "x-singletree-live-arguments"


class CompleteCalls:
    """Holds back the events of each call until the call is complete; all other events pass at once.

    The event that completes a call releases its start, its arguments in one piece, and its end. A broken call is
    released as text, so no ``ToolCallBroken`` comes out. The ``raw`` spans keep their order within text and calls.

    Args:
        completed: takes the time at which each call became complete, on the clock of ``time.perf_counter``.
    """

    def __init__(self, completed: list[float] | None = None) -> None:
        self._completed = completed
        self._start: ToolCallStart | None = None
        self._json: list[str] = []
        self._raw: list[str] = []

    def feed(self, events: list[Event]) -> list[Event]:
        """Return the events that may be sent now, of ``events`` and of those that were held back before."""
        if self._start is None:
            for event in events:
                if type(event) is ToolCallStart:
                    break
            else:
                return events
        passed: list[Event] = []
        for event in events:
            if isinstance(event, ToolCallStart):
                self._start, self._json, self._raw = event, [], []
                # The call ends an open span of reasoning, although the call itself is not sent yet.
                passed.append(Markup(""))
            elif self._start is None:
                passed.append(event)
            elif isinstance(event, ArgumentsDelta):
                self._json.append(event.json)
                self._raw.append(event.raw)
            elif isinstance(event, Markup):
                self._raw.append(event.raw)
            elif isinstance(event, ToolCallEnd):
                passed += self._complete(self._start, event)
            elif isinstance(event, ToolCallBroken):
                passed.append(self._as_text(self._start, event))
            else:
                passed.append(event)
        return passed

    def _complete(self, start: ToolCallStart, end: ToolCallEnd) -> list[Event]:
        arguments = ArgumentsDelta(start.index, "".join(self._json), "".join(self._raw))
        self._start = None
        if self._completed is not None:
            self._completed.append(time.perf_counter())
        return [start, arguments, end]

    def _as_text(self, start: ToolCallStart, broken: ToolCallBroken) -> TextDelta:
        raw = "".join([start.raw, *self._raw, broken.raw])
        self._start = None
        return TextDelta(raw, raw)
