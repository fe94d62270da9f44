"""Convert contents to the form that a template or a model knows: text, pictures, tool definitions, ids of calls.

``Placeholders`` stand for texts that no template may trim, split or read: they are filled in after rendering. A
placeholder is a number between two characters U+DFFE, which no text from outside can hold.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Any, Literal

from singletree.conversation import (
    Document,
    Image,
    Part,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolReference,
    ToolResult,
    Turn,
)
from singletree.prompts.template.capabilities import MessageDict, TemplateCapabilities

NO_IMAGES = "[image: this model cannot see images]"


def parts_of(content: Any) -> list[MessageDict]:
    """Return ``content`` as a list of content parts."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def with_error(result: ToolResult) -> tuple[Part, ...]:
    """Return the parts of a result, after "Error: " if it is an error whose first words do not show that."""
    text = "".join(part_text(part) for part in result.parts)
    if not result.is_error or "error" in text[:40].lower():
        return result.parts
    return (Text("Error: "), *result.parts)


def part_text(part: Part) -> str:
    """Return ``part`` as text; for a picture or a document that is not text, a note about what it is."""
    if isinstance(part, Text | Reasoning):
        return part.text
    if isinstance(part, Image):
        return NO_IMAGES
    if isinstance(part, Document):
        return _document_words(part)
    if isinstance(part, ToolReference):
        return f"[tool: {part.name}]"
    if isinstance(part, ToolCall):
        return part.arguments
    return "".join(part_text(inner) for inner in part.parts)


def _document_words(document: Document) -> str:
    name = f" {document.title}" if document.title else ""
    kind = document.media_type or document.url or "unknown type"
    if document.media_type.startswith("text/") and document.data:
        try:
            text = base64.b64decode("".join(document.data.split()), validate=True).decode("utf-8", "replace")
        except (binascii.Error, ValueError):
            return f"[document{name}: unreadable base64]"
        return f"[document{name}]\n{text}\n[end of document{name}]"
    return f"[document{name}: this model cannot read {kind}]"


MessageContent = str | list[MessageDict]
PictureForm = Mapping[str, Any] | str | None
"""What stands for a picture in a message: a content part of the template, a mark in the text, or, for None, a note."""

_FOLLOWS = "[image: shown in the next message]"


class GuardedTexts(dict[str, str]):
    """Guards each text of a client once: names and ids of calls come again."""

    def __init__(self, guard: Callable[[str], str]) -> None:
        self._guard = guard

    def __missing__(self, text: str) -> str:
        self[text] = guarded = self._guard(text)
        return guarded


class PictureWriter:
    """Converts contents, with pictures in ``form``; a later user message shows those that a tool result cannot hold."""

    def __init__(self, form: PictureForm, guard: Callable[[str], str], *, in_results: bool) -> None:
        self._form = form
        self._guard = guard
        self._in_results = in_results or not isinstance(form, Mapping)
        self._later: list[Image] = []

    def text(self, parts: Iterable[Part]) -> str:
        """Return ``parts`` as text, guarded as a whole: two blocks could hold half a token each."""
        if not isinstance(self._form, str):
            return self._guard("".join(map(part_text, parts)))
        return self._form.join(self._between_pictures(parts))

    def content(self, parts: Sequence[Part]) -> MessageContent:
        if not isinstance(self._form, Mapping) or not any(isinstance(part, Image) for part in parts):
            return self.text(parts)
        content: list[MessageDict] = []
        for number, text in enumerate(self._between_pictures(parts)):
            content += [dict(self._form), *parts_of(text)] if number else parts_of(text)
        return content

    def _between_pictures(self, parts: Iterable[Part]) -> list[str]:
        """Return the texts before, between and after the pictures, each guarded as a whole."""
        runs: list[list[str]] = [[]]
        for part in parts:
            if isinstance(part, Image):
                runs.append([])
            else:
                runs[-1].append(part_text(part))
        return [self._guard("".join(run)) for run in runs]

    def result_content(self, parts: Sequence[Part]) -> MessageContent:
        """Return the content of a tool result; pictures that it cannot hold wait for ``take_later``."""
        if self._in_results:
            return self.content(parts)
        self._later += [part for part in parts if isinstance(part, Image)]
        return self.text(Text(_FOLLOWS) if isinstance(part, Image) else part for part in parts)

    def take_later(self) -> MessageContent:
        later, self._later = self._later, []
        return self.content(later) if later else ""


RequiredDescriptions = Literal["none", "tool", "parameter"]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_FREE_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a custom tool, which takes one string; a model that knows only functions writes this argument."""


def tool_definition(tool: Tool, *, described: RequiredDescriptions = "none") -> dict[str, Any]:
    """Return the definition of ``tool``, with keys in the client's order and the descriptions that a template needs."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None or described != "none":
        function["description"] = tool.description or ""
    absent = _FREE_FORM if tool.kind == "custom" else _NO_PARAMETERS
    parameters = absent if tool.parameters is None else tool.parameters
    function["parameters"] = _described(parameters) if described == "parameter" else parameters
    return {"type": "function", "function": function}


def _described(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return parameters
    described = {
        name: {**schema, "description": schema.get("description", "")}
        if isinstance(schema, Mapping)
        else schema
        for name, schema in properties.items()
    }
    return {**parameters, "properties": described}


def by_calls(turn: Turn) -> list[Turn]:
    """Return the turn in pieces with one call each, at their end; what is behind the last one is in its piece, too."""
    ends = [i + 1 for i, part in enumerate(turn.parts) if isinstance(part, ToolCall)][:-1]
    return [replace(turn, parts=turn.parts[a:b]) for a, b in pairwise([0, *ends, len(turn.parts)])]


def joined_assistants(turns: Sequence[Turn]) -> list[Turn]:
    """Return ``turns`` with turns of the assistant in a row as one."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role == "assistant":
            joined[-1] = Turn("assistant", joined[-1].parts + turn.parts)
        else:
            joined.append(turn)
    return joined


def last_answer(turns: Sequence[Turn]) -> int:
    """Return the index at which the last run of assistant turns begins; 0 if there is none after the first turn."""
    roles = [turn.role for turn in turns]
    starts = (i for i in range(len(roles) - 1, 0, -1) if roles[i - 1] != "assistant" == roles[i])
    return next(starts, 0)


_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NUMBER = re.compile(r"(?<!\d)\d{1,9}\Z")
_NINE = re.compile(r"[0-9A-Za-z]{9}")


def _nine_characters(call: ToolCall, index: int) -> str:
    """Return an id of nine characters. Mistral's templates refuse others; a call must keep its id in later prompts."""
    if _NINE.fullmatch(call.id):
        return call.id
    number = int.from_bytes(sha256(call.id.encode("utf-8", "replace") or str(index).encode()).digest()[:8])
    characters = []
    for _ in range(9):
        number, letter = divmod(number, len(_LETTERS))
        characters.append(_LETTERS[letter])
    return "".join(characters)


@lru_cache(maxsize=256)
def _own_ids(id_format: str, name: str) -> re.Pattern[str]:
    """Match ids in the form of ``id_format``. The text before the name may be missing: the model forgets it."""
    before, _, after = map(re.escape, id_format.partition("{name}"))
    counted = after.replace(re.escape("{index}"), r"\d+")
    return re.compile(f"(?:{before})?{re.escape(name)}{counted}")


class TemplateCallIds:
    """The calls of a conversation, in order: assigns their ids, and finds the call that a result answers."""

    def __init__(self, capabilities: TemplateCapabilities) -> None:
        self._is_nine = capabilities.call_ids == "nine"
        self._id_format = "" if self._is_nine else capabilities.call_id_format
        self._count = 0
        self._known: dict[str, tuple[str, str]] = {}
        self._unanswered: deque[tuple[str, str]] = deque()

    def copy(self) -> TemplateCallIds:
        other = TemplateCallIds.__new__(TemplateCallIds)
        other._is_nine, other._id_format, other._count = self._is_nine, self._id_format, self._count
        other._known, other._unanswered = self._known.copy(), self._unanswered.copy()
        return other

    def call(self, call: ToolCall) -> str:
        """Return the id by which the model knows ``call``. Call this once for each call, in order."""
        known = replace(call, id=call.written_id) if call.written_id else call
        renamed = self._rename(known)
        number = _NUMBER.search(renamed) if self._id_format else None
        # Behind calls that were cut from the history, the numbers go on from those that are left.
        self._count = max(self._count, int(number[0]) if number else 0) + 1
        self._known[call.id] = entry = (renamed, call.name)
        self._unanswered.append(entry)
        return renamed

    def result(self, call_id: str) -> tuple[str, str]:
        """Return (id, tool name) of the call that a result with ``call_id`` answers.

        An unknown id answers the oldest call without a result; if there is none, the result keeps an id of its own.
        """
        entry = self._known.get(call_id)
        if entry is None and self._unanswered:
            entry = self._unanswered[0]
        if entry is None:
            return self._rename(ToolCall("tool", "", call_id)), "tool"
        if entry in self._unanswered:
            self._unanswered.remove(entry)
        return entry

    def _rename(self, call: ToolCall) -> str:
        """A model that knows its calls by ids of a form makes worse calls with others (vllm-project/vllm#29596)."""
        if self._is_nine:
            return _nine_characters(call, self._count)
        if not self._id_format or _own_ids(self._id_format, call.name).fullmatch(call.id):
            return call.id
        return self._id_format.replace("{name}", call.name).replace("{index}", str(self._count))


DELIMITER = "\udffe"
"""The character before and after the number in a placeholder. No template trims or splits at it."""

_PLACEHOLDERS = re.compile(f"{DELIMITER}([0-9]+){DELIMITER}")


@dataclass(slots=True)
class Placeholders:
    """The texts of a conversation that replace placeholders in the rendered prompt.

    A text with later reasoning of a turn has a second form without it. A marker (a placeholder that is replaced by
    nothing) is put into reasoning that the template gets of the same turn. If the template prints the marker, it keeps
    the turn's reasoning, and the form with reasoning is filled in; otherwise the form without.

    Attributes:
        texts: the texts, by number.
        leads: for each text what the template may print before it, which is removed then.
        without_reasoning: by the number of a text, the number of its marker and the form without reasoning.
        unprobed: by the number of a text, the number of its marker, if the template gets no reasoning of the turn.
        kept: markers that the template printed in a probe render.
        results: by the number of a call's name, the name, and those at its further places: they may be of its results.
        cuts: by the number of a text, the number of the placeholder up to which the rendered text after it is cut out,
            and the text after that placeholder that is cut out too.
    """

    texts: list[str] = field(default_factory=list)
    leads: list[str] = field(default_factory=list)
    without_reasoning: dict[int, tuple[int, str]] = field(default_factory=dict)
    unprobed: dict[int, int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    results: dict[int, tuple[str, ...]] = field(default_factory=dict)
    cuts: dict[int, tuple[int, str]] = field(default_factory=dict)

    def add_text(self, text: str, lead: str = "") -> str:
        """Add ``text`` and return its placeholder. A ``lead`` that the template prints before it is removed."""
        self.texts.append(text)
        self.leads.append(lead)
        return placeholder_of(len(self.texts) - 1)

    def add_marker(self) -> int:
        self.add_text("")
        return len(self.texts) - 1

    def add_name(self, name: str, before: str = "", lead: str = "") -> str:
        """Return a placeholder for a call's name, with ``before`` in front of the ``lead`` that the template prints."""
        placeholder = self.add_text(before + lead + name, lead) if before else self.add_text(name)
        self.results[len(self.texts) - 1] = (name,)
        return placeholder

    def name_result(self, call: str, name: str) -> None:
        """The next result behind ``call``, the name in the message or its placeholder, is that of the tool ``name``."""
        for number in placeholder_numbers(call) & self.results.keys():
            self.results[number] += (name,)

    def add_alternatives(self, text: str, without_reasoning: str, marker: int | None, lead: str = "") -> str:
        """Return a placeholder for ``text``, or for ``without_reasoning`` if the template does not print the marker."""
        known = self.add_marker() if marker is None else marker
        placeholder = self.add_text(text, lead)
        number = len(self.texts) - 1
        self.without_reasoning[number] = known, without_reasoning
        if marker is None:
            self.unprobed[number] = known
        return placeholder

    def cut_after_last(self, closers: str) -> str:
        """Return a new placeholder: what is printed between the last text and it is cut out, and so are ``closers``."""
        number = len(self.texts) - 1
        end = self.add_marker()
        self.cuts[number] = end, closers
        return placeholder_of(end)

    def copy(self) -> Placeholders:
        copied = Placeholders([*self.texts], [*self.leads], {**self.without_reasoning}, {**self.unprobed})
        copied.results, copied.cuts = {**self.results}, {**self.cuts}
        return copied

    def fill(self, rendered: str) -> str:
        if not self.texts:
            return rendered
        kept = self.kept | placeholder_numbers(rendered) if self.without_reasoning else self.kept
        pieces: list[str] = []
        names = {n: iter((self.texts[n], *self.results[n][1:])) for n in self.results} if self.results else {}
        at = 0
        for match in _PLACEHOLDERS.finditer(rendered):
            number = int(match[1])
            if match.start() < at:
                continue  # it is inside text that is cut out
            marker, without_reasoning = self.without_reasoning.get(number, (None, ""))
            text = self.texts[number] if marker is None or marker in kept else without_reasoning
            if number in names:
                text = next(names[number], self.results[number][0])
            pieces += [rendered[at : match.start()].removesuffix(self.leads[number]), text]
            at = self._end_of_cut(number, rendered, match.end())
        return "".join([*pieces, rendered[at:]]) if pieces else rendered

    def _end_of_cut(self, number: int, rendered: str, at: int) -> int:
        if number not in self.cuts:
            return at
        end, closers = self.cuts[number]
        found = rendered.find(placeholder_of(end), at)
        if found < 0:
            return at
        found += len(placeholder_of(end))
        return found + len(closers) if rendered.startswith(closers, found) else found

    def end_of_last(self, rendered: str) -> int:
        """Return the offset in ``rendered`` after the last text's placeholder; 0 if the template did not print it."""
        placeholder = placeholder_of(len(self.texts) - 1)
        return rendered.rfind(placeholder) + len(placeholder) if placeholder in rendered else 0


def placeholder_of(number: int) -> str:
    """Return the placeholder of the text with this number."""
    return f"{DELIMITER}{number}{DELIMITER}"


def placeholder_numbers(text: str) -> frozenset[int]:
    """Return the numbers of the placeholders in ``text``."""
    return frozenset(int(match[1]) for match in _PLACEHOLDERS.finditer(text))


def with_marker(text: str, marker: int) -> str:
    """Put the placeholder of ``marker`` into ``text``, after its first character that is not white space."""
    at = len(text) - len(text.lstrip()) + 1
    return text[:at] + placeholder_of(marker) + text[at:]
