"""Scripts for the scripted engine: their files and options, and the markers in prompts that choose them."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from singletree.errors import BadConfiguration, InvalidRequest

EncodeText = Callable[[str], Sequence[int]]
DecodeTokens = Callable[[Sequence[int]], str]

_OPTIONS_LINE = "#opts "
_NAME = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
# [[script:NAME]] or [[script:FIRST,SECOND]], [[gen:COUNT:CHUNK:DELAY]], [[echo:TEXT]] or [[echo@DELAY:TEXT]]
_MARKER = re.compile(
    rf"\[\[(?:script:(?P<names>{_NAME}(?:,{_NAME})*)"
    r"|gen:(?P<count>\d{1,7})(?::(?P<chunk>\d{1,6}))?(?::(?P<delay>\d{1,4}(?:\.\d{1,6})?))?"
    r"|echo(?:@(?P<pace>\d{1,4}(?:\.\d{1,6})?))?:(?P<echo>.*?))\]\]",
    re.DOTALL,
)
_FIRST_WINDOW = 192  # tokens at the end of a prompt that are searched for a marker first

# What chat templates write before a turn of the assistant. For each format: the opening text, and a text that must not
# follow it (empty for none). The format whose opening is the last in the prompt is the format of the prompt.
ASSISTANT_OPENINGS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("<|im_start|>assistant", ""),),
    (("<|start_header_id|>assistant<|end_header_id|>", ""),),
    (("<start_of_turn>model", ""),),
    (("<|im_assistant|>assistant<|im_middle|>", ""),),
    (("<|assistant|>", ""),),
    (("<|start_of_role|>assistant<|end_of_role|>", ""),),
    (("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", ""),),
    # In these formats no header follows a tool's result.
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
    """The output of one generation, its pace and its faults.

    Attributes:
        text: the output as text; not used when ``token_ids`` is given.
        delay: seconds between chunks; None for the engine's.
        chunk: tokens in a chunk; None for the engine's.
        prefill: seconds before the first token.
        stall_after: after so many tokens the output pauses for ``stall`` seconds.
        stall: length of that pause, in seconds.
        fail_after: after so many tokens the engine fails; 0 fails before the first chunk.
        cut_after: after so many tokens the generation ends with ``length``.
        stop_after: after so many tokens the generation ends with ``stop``.
        overloaded: whether the request is refused with Overloaded.
        faults: how often the four faults above happen before the script is played without them; None for always.
        end: whether the end token follows.
        tokens: the output as token ids, set by ``ScriptBook``.
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

    def without_faults(self) -> Script:
        return replace(self, fail_after=None, cut_after=None, stop_after=None, overloaded=False)


_OPTIONS = {f.name: str(f.type) for f in fields(Script) if f.name not in ("text", "token_ids", "tokens")}
_OPTION_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "float": ("a number not below 0", lambda value: type(value) in (int, float) and value >= 0),
    "int": ("a whole number not below 0", lambda value: type(value) is int and value >= 0),
}


def parse_script(source: str, name: str) -> Script:
    """Parse the text of a script file: the output, after an optional first line ``#opts {"delay": 0.01, …}``.

    The options are the attributes of ``Script`` after ``token_ids``. Raises BadConfiguration for bad options.
    """
    if not source.startswith(_OPTIONS_LINE):
        return Script(source)
    line, _, text = source.partition("\n")
    try:
        options = json.loads(line[len(_OPTIONS_LINE) :])
    except ValueError as error:
        raise BadConfiguration(f"script {name!r}: its options are not valid JSON: {error}") from error
    return Script(text, **_checked(options, name))


def _checked(options: Any, name: str) -> dict[str, Any]:
    known = ", ".join(_OPTIONS)
    if not isinstance(options, dict):
        raise BadConfiguration(f"script {name!r}: its options must be an object with any of {known}")
    for option, value in options.items():
        if option not in _OPTIONS:
            raise BadConfiguration(f"script {name!r}: unknown option {option!r}; known: {known}")
        expected, is_valid = _OPTION_TYPES[_OPTIONS[option].removesuffix(" | None")]
        if not is_valid(value):
            raise BadConfiguration(f"script {name!r}: {option} must be {expected}, not {value!r}")
    return options


class ScriptBook:
    """All scripts by name, from a folder or a mapping, encoded once.

    The scripts of a folder are ``NAME.txt`` (the format of ``parse_script``) and ``NAME.json`` (a list of token ids);
    they are read when they are first played. The values of a mapping are such text, token ids, or ``Script``.
    """

    def __init__(
        self, scripts: Path | Mapping[str, str | Sequence[int] | Script] | None, encode: EncodeText
    ) -> None:
        self._folder = scripts if isinstance(scripts, Path) else None
        self._encode = encode
        self._ready: dict[str, Script] = {}
        if self._folder is not None and not self._folder.is_dir():
            raise BadConfiguration(f"no folder of scripts at {self._folder}: check the path")
        if isinstance(scripts, Mapping):
            self._ready = {name: self._prepared(name, source) for name, source in scripts.items()}

    def get(self, name: str) -> Script:
        """Return the script of that name.

        Raises InvalidRequest with the known names for an unknown one, BadConfiguration for a malformed file.
        """
        script = self._ready.get(name)
        if script is None:
            script = self._ready[name] = self._read(name)
        return script

    def encoded(self, script: Script) -> Script:
        tokens = script.token_ids if script.token_ids is not None else tuple(self._encode(script.text))
        return replace(script, tokens=tokens)

    def _prepared(self, name: str, source: str | Sequence[int] | Script) -> Script:
        if isinstance(source, str):
            source = parse_script(source, name)
        elif not isinstance(source, Script):
            source = Script(token_ids=tuple(source))
        return self.encoded(source)

    def _read(self, name: str) -> Script:
        if self._folder is not None:
            text, ids = self._folder / f"{name}.txt", self._folder / f"{name}.json"
            if text.is_file():
                # Read as bytes, so that line ends do not change.
                return self._prepared(name, text.read_bytes().decode())
            if ids.is_file():
                return self._prepared(name, _token_ids(ids))
        known = ", ".join(sorted(self._names())) or "none"
        raise InvalidRequest(f"unknown script {name!r}; known: {known}")

    def _names(self) -> set[str]:
        if self._folder is None:
            return set(self._ready)
        return {path.stem for path in self._folder.iterdir() if path.suffix in (".txt", ".json")}


def _token_ids(path: Path) -> tuple[int, ...]:
    try:
        ids = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadConfiguration(f"script {path.name!r} is not valid JSON: {error}") from error
    if not isinstance(ids, list) or not all(type(id) is int for id in ids):
        raise BadConfiguration(f"script {path.name!r} is not a list of token ids")
    return tuple(ids)


class ScriptChooser:
    """Choose a script for a prompt, by the last marker in it.

    ``[[script:a,b,c]]`` plays a on the turn after the marker, then b, then c, then the default. The number of the turn
    comes from the prompt alone: it is the number of openings of assistant turns after the marker. They are counted
    in token ids, so that the same characters in a file that the harness read do not count.
    """

    def __init__(self, book: ScriptBook, default: Script, encode: EncodeText, decode: DecodeTokens) -> None:
        self._book = book
        self._default = book.encoded(default)
        self._decode = decode
        self._formats = [
            [
                (tuple(encode(opening)), tuple(encode(not_before)) if not_before else ())
                for opening, not_before in openings
            ]
            for openings in ASSISTANT_OPENINGS
        ]
        self._filler = tuple(encode(_FILLER))

    def choose(self, prompt: Sequence[int]) -> tuple[str, Script]:
        """Return the script and its name. Raises InvalidRequest for an unknown name."""
        marker = self._marker(prompt)
        if marker is None:
            return "", self._default
        if names := marker["names"]:
            turns = names.split(",")
            turn = self._turns_since(prompt) if len(turns) > 1 else 0
            return (turns[turn], self._book.get(turns[turn])) if turn < len(turns) else ("", self._default)
        if marker["echo"] is not None:
            pace = float(marker["pace"]) if marker["pace"] else None
            return "echo", self._book.encoded(Script(marker["echo"], delay=pace))
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
        """Return the last marker, or None.

        Prompts are long and markers are near their end, so windows that grow backwards are searched.
        """
        window = _FIRST_WINDOW
        while True:
            text = self._decode(prompt[-window:])
            found = deque(_MARKER.finditer(text), maxlen=1)
            if found or window >= len(prompt):
                return found.pop() if found else None
            window *= 4

    def _turns_since(self, prompt: Sequence[int]) -> int:
        """Return how many assistant turns followed the last marker, without the one to be generated."""
        ids = tuple(prompt)
        tail = ids[-_OPENING_WITHIN:]
        openings = max(self._formats, key=lambda openings: max(_positions(tail, openings), default=-1))
        starts = _positions(ids, openings)
        heads = _positions(ids, [((openings[0][0][0],), ())])
        if len(heads) > len(starts):
            # Other roles begin with it, too: some servers write a turn as several messages.
            following = {head for last, head in pairwise(heads) if last in starts}
            starts = [at for at in starts if at not in following]
        # The marker is in the text after an early start, and not in the text after a late one.
        before = bisect_right(starts, False, key=lambda at: not _MARKER.search(self._decode(ids[at:])))
        return max(0, len(starts) - before - 1)


def _positions(
    ids: tuple[int, ...], openings: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[int]:
    found = []
    for opening, not_before in openings:
        at = -1
        while (at := _index(ids, opening[0], at + 1)) >= 0:
            end = at + len(opening)
            if ids[at:end] == opening and not (not_before and ids[end : end + len(not_before)] == not_before):
                found.append(at)
    return sorted(found)


def _index(ids: tuple[int, ...], token: int, begin: int) -> int:
    try:
        return ids.index(token, begin)
    except ValueError:
        return -1
