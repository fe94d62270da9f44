"""Has a chat template write turns that it is known what they say: to draft its family, and to try one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from singletree.conversation import Conversation, Part, Reasoning, Text, Tool, ToolCall, Turn
from singletree.errors import InvalidRequest
from singletree.parsing import drafting
from singletree.parsing.drafted_call import STRINGS
from singletree.parsing.drafting import IDS, NAMES, SAID, THOUGHT, TYPED, Turns
from singletree.parsing.family import SLOT, Family
from singletree.parsing.parser import parse
from singletree.prompts.template import ChatTemplate

_ASKED = "qasked"
_LONGEST_TAG = 40
_TELLING = 5
_TYPES = {str: "string", int: "integer", bool: "boolean", type(None): "null", dict: "object", list: "array"}
_NESTED = {"where": {"path": "a b/c", "lines": [1, 2]}, "deep": [{"x": {"y": "z"}}]}
_AWKWARD = {"code": 'if a < b:\n    print("é", c)\n', "note": "it's 100% {ok} [1]"}


@dataclass(frozen=True, slots=True)
class Written:
    """A turn as the template writes it.

    Attributes:
        case: what it shows.
        parts: what it says.
        tail: what the prompt holds behind the question; the question's end, where that is nothing.
        text: what the model would write.
    """

    case: str
    parts: tuple[Part, ...]
    tail: str
    text: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A turn that a template wrote, and what a family reads in it."""

    written: Written
    read: tuple[Part, ...]

    @property
    def agrees(self) -> bool:
        """Whether the family reads what was said; ids and outer white space do not matter."""
        return _compared(self.read) == _compared(self.written.parts)


class TemplateTurns:
    """The turns that ``template`` writes."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        reads = template.reads
        on = {name: values[0] for name, values in reads.switches.items()}
        self._arguments = {**on, **reads.history_switches}
        self._answers: dict[tuple[tuple[Part, ...], bool], str] = {}

    def turns(self) -> Turns:
        """The turns from which a family is drafted."""
        said, thought = Text(SAID), Reasoning(THOUGHT)
        one, two = _call(STRINGS), _call(STRINGS, 1)
        return Turns(
            opened=self._answer((), ask=True),
            said=self._answer((said,)),
            thought=self._answer((thought, said)),
            thought_call=self._answer((thought, one)),
            call=self._answer((one,)),
            said_call=self._answer((said, one)),
            calls=self._answer((one, two)),
            typed=self._answer((_call(TYPED),)),
        )

    def cases(self) -> list[Written]:
        """Turns to try a family with, as far as the template has a form for them."""
        turns, written = self.turns(), []
        header = drafting.header_of(turns)
        ends = (turns.said.rpartition(SAID)[2], drafting.end_of(turns))
        for case, parts in CASES.items():
            text = self._answer(parts)
            if not text or not _all_shown(text, parts):
                continue
            begun = turns.opened if turns.opened and text.startswith(turns.opened) else header
            tail = begun if text.startswith(begun) else ""
            said = text[len(tail) :]
            said = said.removesuffix(next((end for end in ends if end and said.endswith(end)), ""))
            written.append(Written(case, parts, tail or _ASKED, said))
        return written

    def _answer(self, parts: tuple[Part, ...], *, ask: bool = False) -> str:
        """The turn behind the question; empty where the template has no form for it."""
        if (parts, ask) not in self._answers:
            self._answers[parts, ask] = self._written(parts, ask=ask)
        return self._answers[parts, ask]

    def _written(self, parts: tuple[Part, ...], *, ask: bool) -> str:
        tools, asked = tools_of(parts), Turn("user", (Text(_ASKED),))
        question = self._render((asked,), tools)
        text = self._render((asked, Turn("assistant", parts)) if parts else (asked,), tools, ask=ask)
        cut = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(question, text, strict=False)))
        if _ASKED in text[cut:]:  # tools stand beside the last question, and so move
            return text.rpartition(_ASKED)[2]
        return text[_whole_tags(text, cut) :]

    def _render(self, turns: tuple[Turn, ...], tools: tuple[Tool, ...], *, ask: bool = False) -> str:
        try:
            return self._template.render(
                Conversation(turns, tools),
                draw=_own_form,
                template_arguments=self._arguments,
                add_generation_prompt=ask,
            )
        except InvalidRequest:
            return ""


def _whole_tags(text: str, cut: int) -> int:
    """``cut``, or the start of the tag that it would cut in two."""
    opened = text.rfind("<", 0, cut)
    return opened if opened > text.rfind(">", 0, cut) and ">" in text[cut : cut + _LONGEST_TAG] else cut


def _own_form(parts: tuple[Part, ...]) -> str:
    """Plain text as it is; of anything else the template must have a form of its own."""
    if all(isinstance(part, Text) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, Text))
    raise InvalidRequest("the template has no form of its own for this")


def _call(arguments: Mapping[str, Any], number: int = 0) -> ToolCall:
    return ToolCall(NAMES[number], json.dumps(arguments, ensure_ascii=False), IDS[number])


CASES: dict[str, tuple[Part, ...]] = {
    "text": (Text(SAID),),
    "reasoning and text": (Reasoning(THOUGHT), Text(SAID)),
    "single": (_call(STRINGS),),
    "reasoning and call": (Reasoning(THOUGHT), _call(STRINGS)),
    "text around": (Text(SAID), _call(STRINGS)),
    "parallel": (_call(STRINGS), _call(STRINGS, 1)),
    "empty arguments": (_call({}),),
    "types": (_call(TYPED),),
    "nested": (_call(_NESTED),),
    "awkward strings": (_call(_AWKWARD),),
}


def tools_of(parts: tuple[Part, ...]) -> tuple[Tool, ...]:
    """Tools for the calls among ``parts``, or for those that could be made, with the types of their arguments."""
    called = {p.name: json.loads(p.arguments) for p in parts if isinstance(p, ToolCall)}
    return tuple(Tool(name, "does something", _schema(called.get(name, STRINGS))) for name in NAMES)


def _schema(arguments: Mapping[str, Any]) -> dict[str, Any]:
    properties = {k: {"type": _TYPES[type(v)], "description": "a value"} for k, v in arguments.items()}
    return {"type": "object", "properties": properties, "required": []}


def _all_shown(text: str, parts: tuple[Part, ...]) -> bool:
    """Whether the template left nothing out."""
    words = [p.name if isinstance(p, ToolCall) else getattr(p, "text", "") for p in parts]
    return all(word in text for word in words)


def _compared(parts: tuple[Part, ...]) -> list[tuple[str, Any]]:
    compared: list[tuple[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            compared.append((part.name, _value(part.arguments) if part.complete else None))
        elif isinstance(part, Text | Reasoning) and part.text.strip():
            compared.append((type(part).__name__, part.text.strip()))
    return compared


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def drafted(template: ChatTemplate, name: str = "drafted") -> Family:
    """The family that the turns of ``template`` show, with what gives it away in the template.

    Raises:
        BadFamily: they show none that could be read.
    """
    family = drafting.draft(TemplateTurns(template).turns(), name)
    return replace(family, fingerprint=_fingerprint(family, template.source))


def _fingerprint(family: Family, source: str) -> tuple[str, ...]:
    """The first marker of a call that ``source`` spells out, and of a parameter or, where there are none, the last."""
    if not family.forms:
        return ()
    form = family.forms[0]
    of_calls = _spelled([*form.calls, *SLOT.split(form.call)[::2]], source)
    of_parameters = _spelled(SLOT.split(form.parameter)[::2], source)
    return tuple(dict.fromkeys([*of_calls[:1], *(of_parameters[:1] or of_calls[-1:])]))


def _spelled(texts: Iterable[str], source: str) -> list[str]:
    stripped = (text.strip() for text in texts)
    return [text for text in stripped if len(text) >= _TELLING and text in source]


def tried(family: Family, template: ChatTemplate) -> list[Trial]:
    """How ``family`` reads what ``template`` writes."""
    return [
        Trial(written, parse(family, written.text, tools_of(written.parts), prompt_tail=written.tail).parts)
        for written in TemplateTurns(template).cases()
    ]
