"""Hand the records of requests to a thread that writes and exports them: no request waits for a disk or a collector."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import Counter

from singletree.conversation import Tool, Turn
from singletree.events import Event

LOG = logging.getLogger(__name__)

RequestRecord = dict[str, Any]

DROPPED_RECORDS = Counter(
    "singletree_request_records_dropped",
    "Records of requests and tools that were dropped because they could not be written fast enough.",
    registry=None,
)
"""The metric of all queues of this process."""

_WAITING = 1024
"""How many answers may wait; the records of more are dropped and counted."""
_CLOSING_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class AnswerRecords:
    """What is recorded of one answer. Only a sink that was asked for texts may read anything but ``records``.

    Attributes:
        records: those of the tools that ran before the request, and that of the request.
        turns, tools: the conversation that was answered, after edits and canonicalization.
        events: those of the answer.
        run: the client's own name of the agent's run; empty for the agent that the user talks to.
    """

    records: Sequence[RequestRecord]
    turns: Sequence[Turn] = ()
    tools: Sequence[Tool] = ()
    events: Sequence[Event] = ()
    run: str = ""


class RecordSink(Protocol):
    """Takes records. Both methods are called from one thread, one after the other."""

    def write(self, answer: AnswerRecords) -> None:
        """Take the records of an answer, without changing them."""

    def close(self) -> None:
        """Write what waits; ``write`` is not called again."""


class RecordQueue:
    """Gives records to ``sinks`` in a thread of its own.

    Args:
        sinks: take the records, each all of them.
    """

    def __init__(self, *sinks: RecordSink) -> None:
        self._sinks = sinks
        self._waiting: queue.Queue[AnswerRecords | None] = queue.Queue(_WAITING)
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="request records", daemon=True)
        self._thread.start()

    def put(self, answer: AnswerRecords) -> None:
        """Give ``answer`` to the sinks soon; drop it if too many wait. Never waits."""
        try:
            self._waiting.put_nowait(answer)
        except queue.Full:
            if not self._warned:
                self._warned = True
                LOG.warning("records of requests are not written fast enough: some are dropped")
            DROPPED_RECORDS.inc(len(answer.records))

    def close(self) -> None:
        """Give what waits to the sinks, and close them; after some seconds, stop waiting for them."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSING_SECONDS)
        self._thread.join(_CLOSING_SECONDS)

    def _run(self) -> None:
        while (answer := self._waiting.get()) is not None:
            for sink in self._sinks:
                try:
                    sink.write(answer)
                except Exception:
                    # One record that a sink cannot take must not end the records of the server.
                    LOG.exception("a record of a request could not be written")
        for sink in self._sinks:
            sink.close()
