"""The file of a session: lines of JSON that are only appended, each with its checksum and that of a line before it.

``docs/training.md`` describes the fields. A call is two lines, one before the engine is asked and one before its answer
ends, so a call whose answer was lost is known. A prompt is written as what is new against an earlier call.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from zlib import compress, decompress
from zlib import error as CompressionError

import msgspec

from singletree.errors import BadConfiguration

SCHEMA = "singletree.session.v1"
_DIGEST_BYTES = 8
_SUM = b',"sum":"'
_TAIL = len(_SUM) + 2 * _DIGEST_BYTES + len(b'"}')
CUT_REASONS = ("cancelled", "error")
"""Values of ``CallEnd.finish`` of an answer of which the client may have seen any part."""


class SessionLine(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind"):
    """One line, written at the unix time ``at``; ``after`` is the checksum of the last line that its writer knew."""

    at: float
    after: str = ""


class SessionStart(SessionLine, kw_only=True, omit_defaults=True, tag="session"):
    """The first line."""

    schema: str
    session: str
    metadata: dict[str, Any] = {}


class CallStart(SessionLine, kw_only=True, omit_defaults=True, tag="call"):
    """A prompt, before the engine is asked: the first ``keep`` tokens of the call ``base``, and ``tokens``.

    ``turns`` are the texts of the conversation, if they are kept; where ``follows``, those behind the turn of ``base``.
    ``redacted`` is how many of the prompt's tokens were replaced.
    """

    call: str
    base: str = ""
    keep: int = 0
    tokens: str = ""
    length: int
    crc: int
    model: str
    route: str
    sampling: dict[str, Any] = {}
    constrained: bool = False
    logprobs: str = ""
    recovered: bool = False
    agent: str = ""
    is_subagent: bool = False
    pictures: list[str] = []
    turns: list[dict[str, Any]] | None = None
    follows: bool = False
    redacted: int = 0


class CallEnd(SessionLine, kw_only=True, omit_defaults=True, tag="end"):
    """What was generated for a call: ``tokens``, of which the first ``content`` are the turn and the others end it.

    ``redacted`` are the first and last of those that were replaced.
    """

    call: str
    finish: str
    tokens: str = ""
    content: int = 0
    logprobs: str = ""
    weights: list[tuple[str | int | None, int, int]] = []
    experts: str = ""
    cached: int | None = None
    calls: int = 0
    turn: dict[str, Any] | None = None
    redacted: list[tuple[int, int]] = []


class SessionComplete(SessionLine, kw_only=True, omit_defaults=True, tag="complete"):
    """The end of a session of so many ``calls``; ``terminal`` made the scored answer, if the client named it."""

    calls: int
    reward: float | None = None
    terminal: str = ""
    metadata: dict[str, Any] = {}


class SessionIncomplete(SessionLine, kw_only=True, omit_defaults=True, tag="incomplete"):
    """Something may be missing."""

    why: str


AnyLine = SessionStart | CallStart | CallEnd | SessionComplete | SessionIncomplete

_decode: Callable[[bytes], AnyLine] = msgspec.json.Decoder(AnyLine).decode


def pack(values: array[Any]) -> str:
    """Return an array of 32-bit values as text: little-endian, compressed, in base64."""
    return b64encode(compress(values.tobytes(), 1)).decode()


def unpack_tokens(text: str) -> array[int]:
    """Return the token ids that ``pack`` wrote; none for an empty text. Raises ValueError for other text."""
    return array("I", _unpack(text))


def unpack_logprobs(text: str) -> array[float]:
    """Return the log-probabilities that ``pack`` wrote, like ``unpack_tokens``."""
    return array("f", _unpack(text))


def _unpack(text: str) -> bytes:
    try:
        return decompress(b64decode(text, validate=True)) if text else b""
    except CompressionError as error:
        raise ValueError(str(error)) from None


def encode_line(line: AnyLine) -> tuple[bytes, str]:
    """Return ``line`` as bytes, and its checksum."""
    data = msgspec.json.encode(line)
    digest = _checksum(data)
    return data[:-1] + _SUM + digest.encode() + b'"}\n', digest


def _checksum(data: bytes) -> str:
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(slots=True)
class LineReader:
    """Reads the lines of a file, as far as they are there.

    Attributes:
        sums: the checksums of the lines so far; ``last`` is the last of them.
        torn: the numbers of lines that were not written to their ends; with a failed write, the writer adds a line
            ``incomplete`` after it.
        problems: what no writer writes.
        rest: the beginning of a line that has no end yet.
    """

    sums: set[str] = field(default_factory=set)
    last: str = ""
    number: int = 0
    torn: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    rest: bytes = b""

    def feed(self, data: bytes) -> list[AnyLine]:
        """Return the lines that are complete with ``data``; those that cannot be read are left out."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        found = []
        for text in whole:
            self.number += 1
            if text and (line := self._read(text)) is not None:
                found.append(line)
        return found

    def _read(self, text: bytes) -> AnyLine | None:
        data, digest = text[:-_TAIL] + b"}", text[-_TAIL:]
        given = digest[len(_SUM) : -2].decode(errors="replace")
        if digest != _SUM + given.encode() + b'"}' or _checksum(data) != given:
            self.torn.append(self.number)
            return None
        try:
            line = _decode(data)
        except msgspec.DecodeError as error:
            self.problems.append(f"line {self.number} is not of this schema: {error}")
            return None
        if line.after not in self.sums and (line.after or self.sums):
            self.problems.append(f"line {self.number} follows a line that is missing")
        if not self.sums and not isinstance(line, SessionStart):
            self.problems.append(f"line {self.number}: the first line of the session is missing")
        if isinstance(line, SessionStart) and line.schema != SCHEMA:
            raise BadConfiguration(f"the file has the schema {line.schema}; this version reads {SCHEMA}")
        if isinstance(line, SessionIncomplete):
            self.torn.clear()
        self.sums.add(given)
        self.last = given
        return line
