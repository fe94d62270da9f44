"""Renders turns with known parts by a chat template, to draft the template's family from them, or to test a family; and
compares the calls that the template tells the model to write with those that the family reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from singletree.conversation import Conversation, Part, Reasoning, Text, Tool, ToolCall, Turn
from singletree.drafting import draft
from singletree.drafting.draft import IDS, TEXT, THOUGHT, TOOL_NAMES, TYPED, Turns
from singletree.drafting.drafted_call import STRINGS
from singletree.errors import InvalidRequest, SingletreeError
from singletree.parsing.family import SLOT, Family, Form
from singletree.parsing.parser import parse
from singletree.prefixes import common_text_prefix
from singletree.prompts.template.chat_template import ChatTemplate

_ASKED = "qasked"
_TOOL = Tool("qtool", "does something", {"type": "object", "properties": {"qkey": {"type": "string"}}})
_LONGEST_EXAMPLE = 2_000
_NAME = re.compile(r"[^\W\d_]")
_MAX_TAG = 40
_MIN_MARKER = 5
_TYPES = {str: "string", int: "integer", bool: "boolean", type(None): "null", dict: "object", list: "array"}
_NESTED = {"where": {"path": "a b/c", "lines": [1, 2]}, "deep": [{"x": {"y": "z"}}]}
_AWKWARD = {"code": 'if a < b:\n    print("é", c)\n', "note": "it's 100% {ok} [1]"}


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A turn as the template renders it.

    Attributes:
        case: the name of the case, a key of ``CASES``.
        tail: the prompt behind the question; the end of the question if nothing follows it.
        text: what the model would generate.
    """

    case: str
    parts: tuple[Part, ...]
    tail: str
    text: str


@dataclass(frozen=True, slots=True)
class Trial:
    """A turn that a template rendered, and the parts that a family parses from it."""

    rendered: RenderedTurn
    read: tuple[Part, ...]

    @property
    def agrees(self) -> bool:
        """Whether the family parsed the parts that were rendered; ids and outer white space are not compared."""
        return _compared(self.read) == _compared(self.rendered.parts)


class TemplateTurns:
    """Renders turns with ``template``."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        reads = template.capabilities
        on = {name: values[0] for name, values in reads.switches.items()}
        self._arguments = {**on, **reads.history_switches}
        self._answers: dict[tuple[tuple[Part, ...], bool], str] = {}

    def turns(self) -> Turns:
        """Return the turns from which a family is drafted."""
        text, thought = Text(TEXT), Reasoning(THOUGHT)
        one, two = _call(STRINGS), _call(STRINGS, 1)
        return Turns(
            opened=self._answer((), ask=True),
            text=self._answer((text,)),
            thought=self._answer((thought, text)),
            thought_call=self._answer((thought, one)),
            call=self._answer((one,)),
            text_call=self._answer((text, one)),
            calls=self._answer((one, two)),
            typed=self._answer((_call(TYPED),)),
        )

    def cases(self) -> list[RenderedTurn]:
        """Return turns to test a family with, those of ``CASES`` that the template can render."""
        turns, rendered = self.turns(), []
        header = draft.turn_header_of(turns)
        ends = (turns.text.rpartition(TEXT)[2], draft.turn_end_of(turns))
        for case, parts in CASES.items():
            text = self._answer(parts)
            if not text or not _all_shown(text, parts):
                continue
            begun = turns.opened if turns.opened and text.startswith(turns.opened) else header
            tail = begun if text.startswith(begun) else ""
            generated = text[len(tail) :]
            end = next((end for end in ends if end and generated.endswith(end)), "")
            rendered.append(RenderedTurn(case, parts, tail or _ASKED, generated.removesuffix(end)))
        return rendered

    def _answer(self, parts: tuple[Part, ...], *, ask: bool = False) -> str:
        """Return the text behind the question; empty if the template cannot render these parts."""
        if (parts, ask) not in self._answers:
            self._answers[parts, ask] = self._rendered_answer(parts, ask=ask)
        return self._answers[parts, ask]

    def _rendered_answer(self, parts: tuple[Part, ...], *, ask: bool) -> str:
        tools, asked = tools_of(parts), Turn("user", (Text(_ASKED),))
        question = self._render((asked,), tools)
        text = self._render((asked, Turn("assistant", parts)) if parts else (asked,), tools, ask=ask)
        cut = common_text_prefix(question, text)
        if _ASKED in text[cut:]:  # The template writes tools beside the last question, so they move.
            return text.rpartition(_ASKED)[2]
        return text[_whole_tags(text, cut) :]

    def _render(self, turns: tuple[Turn, ...], tools: tuple[Tool, ...], *, ask: bool = False) -> str:
        with suppress(InvalidRequest):
            return self._template.render(
                Conversation(turns, tools),
                render_parts=_own_form,
                template_arguments=self._arguments,
                add_generation_prompt=ask,
            )
        return ""


def _whole_tags(text: str, cut: int) -> int:
    """Return ``cut``, or the start of the tag that it would cut in two."""
    opened = text.rfind("<", 0, cut)
    return opened if opened > text.rfind(">", 0, cut) and ">" in text[cut : cut + _MAX_TAG] else cut


def _own_form(parts: tuple[Part, ...]) -> str:
    """Return plain text unchanged; raise InvalidRequest for other parts, which the template must render itself."""
    if all(isinstance(part, Text) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, Text))
    raise InvalidRequest("the template has no form of its own for this")


def _call(arguments: Mapping[str, Any], number: int = 0) -> ToolCall:
    return ToolCall(TOOL_NAMES[number], json.dumps(arguments, ensure_ascii=False), IDS[number])


CASES: dict[str, tuple[Part, ...]] = {
    "text": (Text(TEXT),),
    "reasoning and text": (Reasoning(THOUGHT), Text(TEXT)),
    "single": (_call(STRINGS),),
    "reasoning and call": (Reasoning(THOUGHT), _call(STRINGS)),
    "text around": (Text(TEXT), _call(STRINGS)),
    "parallel": (_call(STRINGS), _call(STRINGS, 1)),
    "empty arguments": (_call({}),),
    "types": (_call(TYPED),),
    "nested": (_call(_NESTED),),
    "awkward strings": (_call(_AWKWARD),),
}


def tools_of(parts: tuple[Part, ...]) -> tuple[Tool, ...]:
    """Return the tools of all cases, with a schema of the arguments in ``parts``, or of example arguments."""
    called = {p.name: json.loads(p.arguments) for p in parts if isinstance(p, ToolCall)}
    return tuple(Tool(name, "does something", _schema(called.get(name, STRINGS))) for name in TOOL_NAMES)


def _schema(arguments: Mapping[str, Any]) -> dict[str, Any]:
    properties = {k: {"type": _TYPES[type(v)], "description": "a value"} for k, v in arguments.items()}
    return {"type": "object", "properties": properties, "required": []}


def _all_shown(text: str, parts: tuple[Part, ...]) -> bool:
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


def draft_from_template(template: ChatTemplate, name: str = "drafted") -> Family:
    """Draft a family from the turns of ``template``, with the fingerprint by which its templates are recognised.

    Raises:
        BadFamily: no family can be drafted from them.
    """
    family = draft.draft_family(TemplateTurns(template).turns(), name)
    return replace(family, fingerprint=_fingerprint(family, template.source))


def _fingerprint(family: Family, source: str) -> tuple[str, ...]:
    """Return the first call marker that is literally in ``source``, and the first parameter marker, else the last."""
    if not family.forms:
        return ()
    form = family.forms[0]
    of_calls = _literal_in([*form.calls, *SLOT.split(form.call)[::2]], source)
    of_parameters = _literal_in(SLOT.split(form.parameter)[::2], source)
    return tuple(dict.fromkeys([*of_calls[:1], *(of_parameters[:1] or of_calls[-1:])]))


def _literal_in(texts: Iterable[str], source: str) -> list[str]:
    stripped = (text.strip() for text in texts)
    return [text for text in stripped if len(text) >= _MIN_MARKER and text in source]


def try_family(family: Family, template: ChatTemplate) -> list[Trial]:
    """Parse the turns that ``template`` renders with ``family``."""
    return [
        Trial(turn, parse(family, turn.text, tools_of(turn.parts), prompt_tail=turn.tail).parts)
        for turn in TemplateTurns(template).cases()
    ]


@dataclass(frozen=True, slots=True)
class InstructedCall:
    """A call in the instructions of a chat template; ``fits``: whether it has the shape of a call of the family."""

    text: str
    fits: bool


def find_instructed_calls(template: ChatTemplate, family: Family) -> list[InstructedCall]:
    """Return the calls between the family's markers that ``template`` prints beside the tools, before any turn.

    What stands for a name and arguments there (``<function-name>``) is not compared: only the marks around it.
    """
    instructions = _render_instructions(template)
    found: dict[str, bool] = {}
    for form in family.forms:
        opener, closer = (marker.strip() for marker in form.calls)
        if not (opener and closer) or not _NAME.search(opener):
            continue  # Without a marker of its own, an example cannot be told from other text.
        for shown in instructions.split(opener)[1:]:
            if len(closer) > 1:
                body, end, _ = shown.partition(closer)
            else:  # A bracket may stand inside the call as well.
                body, end, _ = shown.partition("\n")[0].rpartition(closer)
            if end and len(body) < _LONGEST_EXAMPLE and _TOOL.name not in body and _is_example(form, body):
                text = f"{opener}{body}{closer}"
                found[text] = found.get(text, False) or _has_shape(form, body)
    return [InstructedCall(text, fits) for text, fits in found.items()]


def _is_example(form: Form, body: str) -> bool:
    """Return whether ``body`` is meant as a call, and is no prose between two markers that are only mentioned."""
    return re.search(r"[{\[]\s*[{\"]", body) is not None or any(
        mark in body for mark in _marks(form.call + form.parameter) if len(mark) > 1
    )


def _has_shape(form: Form, body: str) -> bool:
    """Return whether ``body`` has the marks of ``form`` in order; for JSON, whether it is objects with its keys."""
    if not form.is_json:
        at = 0
        for mark in _marks(form.call):
            at = body.find(mark, at)
            if at < 0:
                return False
            at += len(mark)
        return True
    # Values may be shown with quotes or without, the keys in any order, and dots for further calls.
    text = "".join(body.split()).rstrip(".,")
    keys = re.findall(r'"(\w+)":', "".join(form.call.split()))
    is_object = re.match(r'\{"\w', text) is not None and text.endswith("}")
    return is_object and all(f'"{key}"' in text for key in keys)


def _marks(pattern: str) -> list[str]:
    """Return the texts between the slots of ``pattern``, without the white space around them."""
    return [mark.strip() for mark in SLOT.split(pattern)[::2]]


def _render_instructions(template: ChatTemplate) -> str:
    """Return what stands before the question in a prompt with one tool; empty if the template cannot print it."""
    conversation = Conversation((Turn("user", (Text(_ASKED),)),), (_TOOL,))
    with suppress(SingletreeError):
        return template.render(conversation, render_parts=_own_form).partition(_ASKED)[0]
    return ""
