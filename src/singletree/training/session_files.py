"""Writes the files of sessions, one call after the other, in one thread for all of them.

Processes may write the same file: each line is appended under a lock, after the lines of the others have been read.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, chain, starmap
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from singletree.conversation import Reasoning, Text, ToolCall, ToolResult, Turn
from singletree.errors import BadConfiguration
from singletree.prefixes import common_text_prefix
from singletree.private_files import FOLDER_MODE, open_private
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.protocols.wire import encodable
from singletree.server.sparse_log import OncePerMinute
from singletree.training.records import (
    SCHEMA,
    AnyLine,
    CallEnd,
    CallStart,
    LineReader,
    SessionComplete,
    SessionIncomplete,
    SessionStart,
    encode_line,
    pack,
    unpack_tokens,
)

try:
    import fcntl
except ImportError:  # Windows, where a server is one process
    fcntl = None  # type: ignore[assignment]

LOG = logging.getLogger(__name__)
_FAILURES = OncePerMinute()
_WIDTH = array("I").itemsize
_KNOWN = 32
"""How many calls of a session a prompt is compared with: the last ones of so many conversations."""

FindSecrets = Callable[[str], Iterable[tuple[int, int]]]
"""Returns where in a text begins and ends what must not be kept, in characters."""

_FILL = "*"
_NO_CHARACTER = re.compile("[\ud800-\udfff]")
_TEXTS = ("text", "name", "arguments")
"""Fields of a captured part that have texts of the client or the model."""


def load_hook(name: str) -> FindSecrets:
    """Return the function ``MODULE:FUNCTION``. Raises BadConfiguration where it is not there."""
    module, _, function = name.partition(":")
    try:
        found: FindSecrets = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadConfiguration(
            f"--capture-redact {name}: {error}; give MODULE:FUNCTION of a module in PYTHONPATH"
        ) from None
    return found


@dataclass(frozen=True, slots=True)
class Redactor:
    """Replaces what ``find`` finds in the texts and tokens of one model; their lengths stay as they are."""

    find: FindSecrets
    tokenizer: Tokenizer

    def turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Return a turn (``session_files.turn_json``) without what was found in each of its texts."""
        parts = [
            {name: self._text(value) if name in _TEXTS else value for name, value in part.items()}
            for part in turn["parts"]
        ]
        return {**turn, "parts": parts}

    def tokens(self, token_ids: array[int]) -> tuple[array[int], list[tuple[int, int]]]:
        """Return the tokens without those that have a part of what was found, and the ranges of these."""
        pieces = [*map(self.tokenizer.token_bytes, token_ids)]
        text = b"".join(pieces).decode("utf-8", "surrogateescape")
        kept, ranges = array("I", token_ids), []
        if places := self._places(_NO_CHARACTER.sub("\ufffd", text)):
            at = [0, *accumulate(len(each.encode("utf-8", "surrogateescape")) for each in text)]
            ends = [*accumulate(map(len, pieces))]
            fill = array("I", self.tokenizer.encode(_FILL)[-1:])
            for start, end in places:
                first, last = bisect_right(ends, at[start]), bisect_left(ends, at[end]) + 1
                ranges.append((first, last))
                kept[first:last] = fill * (last - first)
        return kept, ranges

    def _text(self, text: str) -> str:
        for start, end in self._places(text):
            text = text[:start] + _FILL * (end - start) + text[end:]
        return text

    def _places(self, text: str) -> list[tuple[int, int]]:
        try:
            found = [(int(start), int(end)) for start, end in self.find(text)]
        except Exception as error:  # Its message may have what must not be kept.
            raise RuntimeError(f"the function of --capture-redact failed ({type(error).__name__})") from None
        if any(not 0 <= start <= end <= len(text) for start, end in found):
            raise RuntimeError("the function of --capture-redact returned places that are not in the text")
        return [(start, end) for start, end in found if start < end]


@dataclass(frozen=True, slots=True)
class _Known:
    """The tokens of a call so far, as bytes, their CRC-32, and how many turns they are, if that is known."""

    tokens: bytes
    crc: int
    turns: int | None

    def more(self, tokens: bytes, turns: int | None) -> _Known:
        return _Known(self.tokens + tokens, crc32(tokens, self.crc), turns)


class SessionFile:
    """The file of one session, and the last tokens of its conversations.

    Attributes:
        failure: why a line is missing of which the file does not yet say so; empty otherwise.

    Args:
        path: the file, which need not be there.
        session: the name of the session.
    """

    def __init__(self, path: Path, session: str) -> None:
        self._path = path
        self._session = session
        self.failure = ""
        self._inode = 0
        self._forget()

    def _forget(self) -> None:
        self._reader = LineReader()
        self._size = 0
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._open: set[str] = set()
        self._calls = 0

    @property
    def size(self) -> int:
        """Return about how much memory it takes."""
        return sum(len(known.tokens) for known in self._known.values()) + 200 * self._reader.number

    def create(self, metadata: dict[str, Any]) -> None:
        """Write the first line, unless there is one. Raises OSError."""

        def first() -> AnyLine | None:
            if self._reader.sums:
                return None
            return SessionStart(at=time.time(), schema=SCHEMA, session=self._session, metadata=metadata)

        self._append(first)

    def begin(
        self,
        line: CallStart,
        prompt: array[int],
        turns: Sequence[Turn] | None,
        redactor: Redactor | None = None,
    ) -> None:
        """Write the beginning of a call with this prompt: ``line`` with what is known here filled in.

        A failure is kept: the session is incomplete then.
        """

        def start() -> AnyLine:
            tokens = prompt
            if redactor is not None:
                tokens, ranges = redactor.tokens(prompt)
                line.redacted = len({*chain.from_iterable(starmap(range, ranges))})
            self._fill(line, tokens.tobytes(), turns)
            if redactor is not None and line.turns is not None:
                line.turns = [*map(redactor.turn, line.turns)]
            return line

        self._try_append(start)

    def finish(self, call: str, make: Callable[[], CallEnd]) -> None:
        """Write the end of a call, which ``make`` returns, like ``begin``."""

        def end() -> AnyLine:
            line = make()
            if call in self._open:
                return line
            return SessionIncomplete(at=line.at, why=f"the beginning of the call {call} was not written")

        self._try_append(end)

    def complete(self, line: SessionComplete) -> None:
        """Write the end of the session. Raises OSError."""

        def counted() -> SessionComplete:
            line.calls = self._calls
            return line

        self._append(counted)

    def _fill(self, line: CallStart, prompt: bytes, turns: Sequence[Turn] | None) -> None:
        base, keep, whole = "", 0, None
        for call, known in reversed(self._known.items()):
            if len(known.tokens) <= keep:
                continue
            same = common_text_prefix(known.tokens, prompt) // _WIDTH * _WIDTH
            if same > keep:
                base, keep, whole = call, same, known if same == len(known.tokens) else None
        new = prompt[keep:]
        line.base, line.keep, line.length = base, keep // _WIDTH, len(prompt) // _WIDTH
        line.crc = crc32(prompt) if whole is None else crc32(new, whole.crc)
        line.tokens = pack(array("I", new))
        if turns is not None:
            count = (whole.turns if whole is not None and base not in self._open else None) or 0
            line.follows = 0 < count <= len(turns) and turns[count - 1].role == "assistant"
            behind = turns[whole.turns :] if whole is not None and line.follows else turns
            line.turns = [turn_json(turn) for turn in behind]

    def _try_append(self, make: Callable[[], AnyLine]) -> None:
        try:
            self._append(make)
        except Exception as error:
            # The answer goes on: what is missing is known, and what is known to be missing is not trained on.
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            self.failure = self.failure or f"a line could not be written: {reason}"
            self._forget()
            if (more := _FAILURES.take()) is not None:
                LOG.warning("--capture: %s: %s%s", self._path, self.failure, more)

    def _append(self, make: Callable[[], AnyLine | None]) -> None:
        with open(self._path, "ab", buffering=0, opener=_open_to_read) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up(file.fileno())
            lines: list[AnyLine] = []
            if (line := make()) is None:
                return
            if not self._reader.sums and not isinstance(line, SessionStart):
                lines.append(SessionStart(at=line.at, schema=SCHEMA, session=self._session))
            if self._reader.rest or self._reader.torn or self.failure:
                why = self.failure or "a line was not written to its end"
                lines.append(SessionIncomplete(at=line.at, why=why))
            data, after = b"\n" if self._reader.rest else b"", self._reader.last
            for each in [*lines, line]:
                each.after = after
                encoded, after = encode_line(each)
                data += encoded
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.failure = ""
            self._take(data)

    def _catch_up(self, file: int) -> None:
        state = os.fstat(file)
        if state.st_ino != self._inode or state.st_size < self._size:
            self._forget()
            self._inode = state.st_ino
        try:
            while self._size < state.st_size:
                self._take(os.pread(file, state.st_size - self._size, self._size))
        except BadConfiguration:  # a file of another schema, which is refused again the next time
            self._forget()
            raise

    def _take(self, data: bytes) -> None:
        self._size += len(data)
        for line in self._reader.feed(data):
            if isinstance(line, CallStart):
                self._calls += 1
                self._open.add(line.call)
                base = self._known.get(line.base)
                if base is not None or not line.base:
                    kept = b"" if base is None else base.tokens[: line.keep * _WIDTH]
                    turns = None if line.turns is None else len(line.turns)
                    if turns is not None and line.follows and base is not None:
                        turns = None if base.turns is None else base.turns + turns
                    tokens = kept + unpack_tokens(line.tokens).tobytes()
                    self._know(line.call, _Known(tokens, line.crc, turns))
                    if base is not None and len(kept) == len(base.tokens) and line.base not in self._open:
                        del self._known[line.base]  # It is in the new one.
            elif isinstance(line, CallEnd):
                self._open.discard(line.call)
                if (known := self._known.get(line.call)) is not None:
                    turns = None if line.turn is None or known.turns is None else known.turns + 1
                    self._know(line.call, known.more(unpack_tokens(line.tokens).tobytes(), turns))

    def _know(self, call: str, known: _Known) -> None:
        self._known[call] = known
        self._known.move_to_end(call)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)


def _open_to_read(path: str, flags: int) -> int:
    return open_private(path, flags & ~os.O_WRONLY | os.O_RDWR)


def make_folder(folder: Path) -> None:
    """Make a folder for sessions, for its owner only. Raises OSError."""
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def turn_json(turn: Turn) -> dict[str, Any]:
    """Return the texts of a turn as a JSON value; of other parts their kind alone."""
    parts: list[dict[str, Any]] = []
    for part in turn.parts:
        if isinstance(part, Text):
            parts.append({"type": "text", "text": encodable(part.text)})
        elif isinstance(part, Reasoning):
            parts.append({"type": "reasoning", "text": encodable(part.text)})
        elif isinstance(part, ToolCall):
            written = encodable(part.arguments)
            parts.append({"type": "call", "id": part.id, "name": encodable(part.name), "arguments": written})
        elif isinstance(part, ToolResult):
            text = "".join(each.text for each in part.parts if isinstance(each, Text))
            parts.append({"type": "result", "id": part.call_id, "text": encodable(text)})
        else:
            parts.append({"type": type(part).__name__.lower()})
    return {"role": turn.role, "parts": parts}


def read_first_line(path: Path) -> SessionStart | None:
    """Return the first line of a session's file; None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            (line,) = LineReader().feed(file.readline())
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    return line if isinstance(line, SessionStart) else None
