"""Write the records of requests to a file, as lines of JSON."""

from __future__ import annotations

import logging
from array import array
from hashlib import blake2b
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec

from singletree.errors import BadConfiguration
from singletree.server.answers.record_queue import AnswerRecords

LOG = logging.getLogger(__name__)

BLOCK_TOKENS = 64
"""Tokens of a prompt for which a record has one hash."""

_FILES = 4
"""The limit of the size is that of so many files: the one that is written, and older ones."""


class RecordFile:
    """A file of records, one JSON object on each line; a ``RecordSink``. It has no texts.

    When the file is full, it is renamed to ``PATH.1``, and so on; the oldest file is deleted.

    Args:
        path: the file; records are appended.
        limit: largest size of all files together, in bytes.

    Raises:
        BadConfiguration: the file cannot be written.
    """

    def __init__(self, path: Path, limit: int) -> None:
        try:
            self._handler = RotatingFileHandler(
                path, maxBytes=max(1, limit // _FILES), backupCount=_FILES - 1, encoding="utf-8"
            )
        except OSError as error:
            raise BadConfiguration(
                f"--trace-path {path}: {error.strerror}; give a file that can be written"
            ) from None
        self._handler.handleError = _log_failure  # type: ignore[method-assign]

    def write(self, answer: AnswerRecords) -> None:
        """Write the records of an answer."""
        for record in answer.records:
            replay = record.get("request", {}).get("replay")
            if replay is not None:
                replay = {**replay, "input_sequence_hashes": sequence_hashes(replay["input_sequence_hashes"])}
                record = {**record, "request": {**record["request"], "replay": replay}}
            line = msgspec.json.encode(record).decode()
            self._handler.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


def _log_failure(record: logging.LogRecord) -> None:
    LOG.warning("a request record could not be written", exc_info=True)


def sequence_hashes(tokens: array[int], block: int = BLOCK_TOKENS) -> list[int]:
    """Return a hash for each block of ``tokens``; it covers all tokens up to the end of its block."""
    data, width, digest = memoryview(tokens).cast("B"), tokens.itemsize * block, b""
    hashes = []
    for start in range(0, len(data), width):
        digest = blake2b(digest + data[start : start + width], digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return hashes


def numbered_path(path: Path, name: str) -> Path:
    """Return the file of one of several processes: they cannot share one, because a full file is renamed.

    Args:
        name: of the process.
    """
    return path.with_name(f"{path.stem}-{name}{path.suffix}")
