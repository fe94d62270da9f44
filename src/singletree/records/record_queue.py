"""Hand the records of requests to a thread that writes and exports them: no request waits for a disk or a collector.

``RecordFile`` writes them as lines of JSON; ``span_export`` has the other sink.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Protocol

import msgspec

from singletree.conversation import Tool, Turn
from singletree.errors import BadConfiguration
from singletree.events import Event
from singletree.private_files import open_private
from singletree.server.sparse_log import OncePerMinute
from singletree.server.telemetry import DROPPED_RECORDS

LOG = logging.getLogger(__name__)

RequestRecord = dict[str, Any]


_WAITING = 1024
"""How many answers may wait; the records of more are dropped and counted."""
_CLOSING_SECONDS = 5.0
BLOCK_TOKENS = 64
"""Tokens of a prompt for which a record has one hash."""
_FILES = 4
"""Number of files that share the limit: the current one and rotated ones."""


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
    """Gives all records to each of ``sinks``, in a thread of its own."""

    def __init__(self, *sinks: RecordSink) -> None:
        self._sinks = sinks
        self._waiting: queue.Queue[AnswerRecords | None] = queue.Queue(_WAITING)
        self._warned = False
        self._failures = OncePerMinute()
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
                    if (more := self._failures.take()) is not None:
                        LOG.exception("a record of a request could not be written%s", more)
        for sink in self._sinks:
            sink.close()


class RecordFile:
    """A file of records, one JSON object on each line; a ``RecordSink``. It has no texts.

    When the file is full, it is renamed to ``PATH.1``, and so on; the oldest file is deleted.

    Args:
        limit: largest size of all files together, in bytes.

    Raises:
        BadConfiguration: the file cannot be written.
    """

    def __init__(self, path: Path, limit: int) -> None:
        try:
            self._handler = _PrivateFile(
                path, maxBytes=max(1, limit // _FILES), backupCount=_FILES - 1, encoding="utf-8"
            )
        except OSError as error:
            raise BadConfiguration(
                f"--trace-path {path}: {error.strerror}; give a file that can be written"
            ) from None

    def write(self, answer: AnswerRecords) -> None:
        for record in answer.records:
            replay = record.get("request", {}).get("replay")
            if replay is not None:
                replay = {**replay, "input_sequence_hashes": sequence_hashes(replay["input_sequence_hashes"])}
                record = {**record, "request": {**record["request"], "replay": replay}}
            line = msgspec.json.encode(record).decode()
            self._handler.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        self._handler.close()


class _PrivateFile(RotatingFileHandler):
    """A file for its owner only, which is renamed when it is full. A failure is logged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failures = OncePerMinute()

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=open_private)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if (more := self._failures.take()) is not None:
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            LOG.warning(
                "--trace-path %s: records of requests are lost: %s%s", self.baseFilename, reason, more
            )


def sequence_hashes(tokens: array[int]) -> list[int]:
    """Return a hash for each block of ``BLOCK_TOKENS`` tokens; it covers all tokens up to the end of its block."""
    data, width, digest = memoryview(tokens).cast("B"), tokens.itemsize * BLOCK_TOKENS, b""
    hashes = []
    for start in range(0, len(data), width):
        digest = blake2b(digest + data[start : start + width], digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return hashes
