"""What the scripted engine can be told to say: scripts, their options, and the markers that choose them."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from singletree.errors import BadConfiguration, InvalidRequest

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]

_OPTIONS_LINE = "#opts "
_NAME = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
# [[script:NAME]] or [[script:FIRST,SECOND]], [[gen:COUNT:CHUNK:DELAY]], [[echo:TEXT]]
_MARKER = re.compile(
    rf"\[\[(?:script:(?P<names>{_NAME}(?:,{_NAME})*)"
    r"|gen:(?P<count>\d{1,7})(?::(?P<chunk>\d{1,6}))?(?::(?P<delay>\d{1,4}(?:\.\d{1,6})?))?"
    r"|echo:(?P<echo>.*?))\]\]",
    re.DOTALL,
)
_FIRST_WINDOW = 192  # tokens at the end of a prompt in which a marker is looked for first

# How chat templates hand over to the assistant: for each format what stands before its words, and what must
# not follow if it is to count. The format whose opening stands last in the prompt is the prompt's.
ASSISTANT_OPENINGS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("<|im_start|>assistant", ""),),
    (("<|start_header_id|>assistant<|end_header_id|>", ""),),
    (("<start_of_turn>model", ""),),
    (("<|im_assistant|>assistant<|im_middle|>", ""),),
    (("<|assistant|>", ""),),
    (("<|start_of_role|>assistant<|end_of_role|>", ""),),
    (("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", ""),),
    # These go on after a tool's result without a header.
    (("<｜Assistant｜>", ""), ("<｜tool▁output▁end｜>", "<｜tool▁output▁begin｜>")),
    (("[/INST]", ""), ("[/TOOL_RESULTS]", "[TOOL_RESULTS]")),
)
_OPENING_WITHIN = 64  # tokens at the end of a prompt that may follow the opening (<think> …)

_FILLER = (
    "Rain fell on the harbour all morning, and the ferries waited with their lamps lit while gulls walked "
    "along the wet rails as if they had tickets. "
)


@dataclass(frozen=True, slots=True)
class Script:
    """What one generation says, and how.

    Attributes:
        text: what it says; ``token_ids`` instead when given.
        token_ids: the tokens it says.
        delay: seconds between chunks; None for the engine's.
        chunk: tokens a chunk; None for the engine's.
        prefill: seconds before the first token.
        stall_after: tokens after which it says nothing for ``stall`` seconds.
        stall: seconds.
        fail_after: tokens after which the engine fails; 0 fails before the first chunk.
        cut_after: tokens after which it ends as if by length.
        stop_after: tokens after which it ends as if the model had no more to say.
        overloaded: refuse the request.
        faults: how often the four above happen before the script is played whole; None for always.
        end: whether the end token follows.
    """

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    delay: float | None = None
    chunk: int | None = None
    prefill: float = 0.0
    stall_after: int | None = None
    stall: float = 0.0
    fail_after: int | None = None
    cut_after: int | None = None
    stop_after: int | None = None
    overloaded: bool = False
    faults: int | None = None
    end: bool = True
    tokens: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def whole(self) -> Script:
        """The script when nothing goes wrong."""
        return replace(self, fail_after=None, cut_after=None, stop_after=None, overloaded=False)


_OPTIONS = {f.name: str(f.type) for f in fields(Script) if f.name not in ("text", "token_ids", "tokens")}
_WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "float": ("a number not below 0", lambda value: type(value) in (int, float) and value >= 0),
    "int": ("a whole number not below 0", lambda value: type(value) is int and value >= 0),
}


def parse_script(source: str, name: str) -> Script:
    """A script from a file's text: what to say, after an optional first line ``#opts {"delay": 0.01, …}``.

    The options are the attributes of ``Script`` after ``token_ids``. Raises BadConfiguration.
    """
    if not source.startswith(_OPTIONS_LINE):
        return Script(source)
    line, _, text = source.partition("\n")
    try:
        options = json.loads(line[len(_OPTIONS_LINE) :])
    except ValueError as error:
        raise BadConfiguration(f"script {name!r}: its options are no JSON: {error}") from error
    return Script(text, **_checked(options, name))


def _checked(options: Any, name: str) -> dict[str, Any]:
    known = ", ".join(_OPTIONS)
    if not isinstance(options, dict):
        raise BadConfiguration(f"script {name!r}: options are an object with any of {known}")
    for option, value in options.items():
        if option not in _OPTIONS:
            raise BadConfiguration(f"script {name!r}: unknown option {option!r}; known: {known}")
        wanted, fits = _WANTED[_OPTIONS[option].removesuffix(" | None")]
        if not fits(value):
            raise BadConfiguration(f"script {name!r}: {option} must be {wanted}, not {value!r}")
    return options


class ScriptBook:
    """All scripts by name, from a folder or a mapping, encoded once.

    A folder's scripts are ``NAME.txt`` (see ``parse_script``) and ``NAME.json`` (a list of token ids); they
    are read when they are first played. A mapping's values are such text, token ids, or ``Script``.
    """

    def __init__(
        self, scripts: Path | Mapping[str, str | Sequence[int] | Script] | None, encode: Encode
    ) -> None:
        self._folder = scripts if isinstance(scripts, Path) else None
        self._encode = encode
        self._ready: dict[str, Script] = {}
        if self._folder is not None and not self._folder.is_dir():
            raise BadConfiguration(f"there is no folder of scripts at {self._folder}")
        if isinstance(scripts, Mapping):
            self._ready = {name: self._made(name, source) for name, source in scripts.items()}

    def get(self, name: str) -> Script:
        """The script of that name. Raises InvalidRequest, which lists the names, or BadConfiguration."""
        script = self._ready.get(name)
        if script is None:
            script = self._ready[name] = self._read(name)
        return script

    def encoded(self, script: Script) -> Script:
        """The script with its tokens."""
        tokens = script.token_ids if script.token_ids is not None else tuple(self._encode(script.text))
        return replace(script, tokens=tokens)

    def _made(self, name: str, source: str | Sequence[int] | Script) -> Script:
        if isinstance(source, str):
            source = parse_script(source, name)
        elif not isinstance(source, Script):
            source = Script(token_ids=tuple(source))
        return self.encoded(source)

    def _read(self, name: str) -> Script:
        if self._folder is not None:
            text, ids = self._folder / f"{name}.txt", self._folder / f"{name}.json"
            if text.is_file():
                # Bytes, lest line ends change.
                return self._made(name, text.read_bytes().decode())
            if ids.is_file():
                return self._made(name, _token_ids(ids))
        known = ", ".join(sorted(self._names())) or "none"
        raise InvalidRequest(f"there is no script {name!r}; known: {known}")

    def _names(self) -> set[str]:
        if self._folder is None:
            return set(self._ready)
        return {path.stem for path in self._folder.iterdir() if path.suffix in (".txt", ".json")}


def _token_ids(path: Path) -> tuple[int, ...]:
    try:
        ids = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadConfiguration(f"script {path.name!r} is no JSON: {error}") from error
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise BadConfiguration(f"script {path.name!r} is no list of token ids")
    return tuple(ids)


class Chooser:
    """Chooses a script for a prompt: the last marker in it decides.

    ``[[script:a,b,c]]`` plays a on the turn after the marker, then b, then c, then the default. Which turn it
    is, the prompt alone tells: by how often it hands over to the assistant after the marker. That is read
    from token ids, so that the same characters in a file that the harness read do not count.
    """

    def __init__(self, book: ScriptBook, default: Script, encode: Encode, decode: Decode) -> None:
        self._book = book
        self._default = book.encoded(default)
        self._decode = decode
        self._formats = [
            [(tuple(encode(opening)), tuple(encode(but)) if but else ()) for opening, but in openings]
            for openings in ASSISTANT_OPENINGS
        ]
        self._filler = tuple(encode(_FILLER))

    def choose(self, prompt: Sequence[int]) -> tuple[str, Script]:
        """The script and its name. Raises InvalidRequest for a name that is not known."""
        marker = self._marker(prompt)
        if marker is None:
            return "", self._default
        if names := marker["names"]:
            turns = names.split(",")
            turn = self._turns_since(prompt) if len(turns) > 1 else 0
            return (turns[turn], self._book.get(turns[turn])) if turn < len(turns) else ("", self._default)
        if marker["echo"] is not None:
            return "echo", self._book.encoded(Script(marker["echo"]))
        return marker[0].strip("[]"), self._fill(marker)

    def _fill(self, marker: re.Match[str]) -> Script:
        count = int(marker["count"])
        filler = self._filler * (count // len(self._filler) + 1)
        return Script(
            tokens=filler[:count],
            chunk=int(marker["chunk"]) if marker["chunk"] else None,
            delay=float(marker["delay"]) if marker["delay"] else None,
        )

    def _marker(self, prompt: Sequence[int]) -> re.Match[str] | None:
        """The last marker. Prompts are long and markers near their end, hence windows that grow backwards."""
        window = _FIRST_WINDOW
        while True:
            text = self._decode(prompt[-window:])
            found = deque(_MARKER.finditer(text), maxlen=1)
            if found or window >= len(prompt):
                return found.pop() if found else None
            window *= 4

    def _turns_since(self, prompt: Sequence[int]) -> int:
        """How many turns the assistant has had since the last marker, the coming one not counted."""
        ids = tuple(prompt)
        tail = ids[-_OPENING_WITHIN:]
        openings = max(self._formats, key=lambda openings: max(_positions(tail, openings), default=-1))
        starts = _positions(ids, openings)
        # The marker is in what follows an early start, and not in what follows a late one.
        before = bisect_right(starts, False, key=lambda at: not _MARKER.search(self._decode(ids[at:])))
        return max(0, len(starts) - before - 1)


def _positions(
    ids: tuple[int, ...], openings: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[int]:
    """Where the openings stand, in order."""
    found = []
    for opening, but in openings:
        at = -1
        while (at := _index(ids, opening[0], at + 1)) >= 0:
            end = at + len(opening)
            if ids[at:end] == opening and not (but and ids[end : end + len(but)] == but):
                found.append(at)
    return sorted(found)


def _index(ids: tuple[int, ...], token: int, begin: int) -> int:
    try:
        return ids.index(token, begin)
    except ValueError:
        return -1
