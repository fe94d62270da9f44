"""Drafts the declaration of a format that has none yet, from turns whose parts are known.

Something that writes turns in the format (a chat template) provides the same few turns each time, made of the words in
``WORDS``. The text between the words is the format. Text that two places share belongs to each of them; text that they
do not share belongs to their surroundings. A draft is a proposal: parse the same turns with it before you use it.
``source_of`` writes it as Python, and ``sample_of`` one of its turns as the TOML of a sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.drafting.drafted_call import (
    STRINGS,
    DraftedCall,
    atoms_of,
    find_call,
    shared_end,
    shared_start,
)
from singletree.parsing.family import Family, Form, Literals

THOUGHT, TEXT = "qthought", "qsaid"
TOOL_NAMES = ("qfirst", "qsecond")
IDS = ("callq0001", "callq0002")
TYPED = {"kone": 7, "ktwo": True, "kthree": None, "kfour": {"kin": "vin"}}
WORDS = (THOUGHT, TEXT, *TOOL_NAMES, *STRINGS, *STRINGS.values())

_NEXT = "\x1d"
_MARK = re.compile(r"[^\w\s]")
_TAG = re.compile(r"<[^<>\n]*>|\[/?[A-Z][A-Z_]*\]")
_WRAPPED = re.compile(r"(<[^<>]+>\s*)(.*\S.*)", re.DOTALL)
_UNWRAPPED = re.compile(r"(.*\S.*?)(\s*</[^<>]+>)", re.DOTALL)
_COUNTED_ID = re.compile(r"functions\.q\w+?:\d+")
_COUNTED = r"(?:functions\.)?(?P<name>[^\s:]+?)(?::\d+)?"


@dataclass(frozen=True, slots=True)
class Turns:
    """The same turns in one format, each from the end of the question to the end of the turn; "" for a missing one.

    Attributes:
        opened: the generation prompt.
        text: ``TEXT`` alone.
        thought: ``THOUGHT``, then ``TEXT``.
        thought_call: ``THOUGHT``, then a call of the first name with ``STRINGS``.
        call: that call alone.
        text_call: ``TEXT``, then that call.
        calls: that call, then one of the second name.
        typed: a call of the first name with ``TYPED``.
    """

    opened: str = ""
    text: str = ""
    thought: str = ""
    thought_call: str = ""
    call: str = ""
    text_call: str = ""
    calls: str = ""
    typed: str = ""


def draft_family(turns: Turns, name: str = "drafted") -> Family:
    """Return the family in which ``turns`` are written, as far as they show it.

    The family has no calls when none are found in the turns, and no reasoning when none is found.

    Raises:
        BadFamily: calls are found, but no marker of one.
    """
    header = turn_header_of(turns)
    again = _message_header(turns, header)
    if again:
        turns = _in_one(turns, header, again)
    reasoning = _reasoning(turns, header) or _opened_reasoning(turns, header)
    form, before, call_end = _form(turns, header, reasoning)
    text = _text(turns, header, reasoning, several=bool(again))
    end = turn_end_of(turns) if text else turns.text.rpartition(TEXT)[2]
    ends = dict.fromkeys(filter(None, (*_marks(end), *_marks(turn_end_of(turns)), *_marks(call_end))))
    # A marker that also closes reasoning must not stop an engine.
    inside = "\n".join((*(reasoning or ()), again))
    return Family(
        name=name,
        message_header=again,
        reasoning=reasoning and _before_next(reasoning),
        starts_open=reasoning is not None and turns.opened.rstrip().endswith(reasoning[0].strip()),
        text=text and _before_next(text),
        forms=(form,) if form is not None else (),
        before_calls=before,
        stop_markers=tuple(mark for mark in ends if mark not in inside),
        stray_markers=tuple(mark for mark in ends if mark in inside),
    )


def _message_header(turns: Turns, header: str) -> str:
    """Return the header of each message, when a turn is several: the end of ``header``, if it precedes every part."""
    gaps = [g for g in (_gap(turns.thought, THOUGHT, TEXT), _gap(turns.calls, *TOOL_NAMES)) if g]
    atoms = atoms_of(header)
    for at in range(len(atoms)):
        end = "".join(atoms[at:])
        if _MARK.search(end) and gaps and all(end in gap for gap in gaps):
            return end
    return ""


def _in_one(turns: Turns, header: str, again: str) -> Turns:
    cut = len(header)
    texts = [getattr(turns, field.name) for field in fields(turns)]
    return Turns(*(text[:cut] + text[cut:].replace(again, _NEXT) for text in texts))


def _before_next(pair: tuple[str, str]) -> tuple[str, str]:
    # Of the white space inside the markers only line breaks belong to the format (H10).
    return pair[0].rstrip(" \t"), pair[1].partition(_NEXT)[0].lstrip(" \t")


def turn_header_of(turns: Turns) -> str:
    """Return the text that every assistant turn begins with."""
    seen = [t for t in (turns.text, turns.thought, turns.thought_call, turns.call, turns.text_call) if t]
    leads = [re.split("|".join(WORDS), text)[0] for text in seen]
    return shared_start(*leads, *filter(None, [turns.opened])) if leads else ""


def turn_end_of(turns: Turns) -> str:
    """Return the text that every assistant turn ends with."""
    end = turns.text.rpartition(TEXT)[2]
    return shared_end(end, _after_call(turns.call)) if turns.call else end


def _reasoning(turns: Turns, header: str) -> tuple[str, str] | None:
    lead = (turns.thought_call if THOUGHT in turns.thought_call else turns.thought).partition(THOUGHT)[0]
    gaps = [_gap(turns.thought, THOUGHT, TEXT), _gap(turns.thought_call, THOUGHT, TOOL_NAMES[0])]
    shown = [gap for gap in gaps if gap.strip()]
    if not shown:
        return None
    closer = shared_start(*shown) if len(shown) > 1 else _first_tag(shown[0])
    opener = _after(lead, header)
    if not opener.strip():
        # The header opens it in every turn: take as many atoms as close it.
        atoms, count = atoms_of(lead.rstrip()), len(atoms_of(closer.strip()))
        opener = "".join(atoms[-count:]) + lead[len(lead.rstrip()) :]
    return (opener, closer) if opener.strip() and closer.strip() else None


def _opened_reasoning(turns: Turns, header: str) -> tuple[str, str] | None:
    """Return opener and closer of reasoning, when the prompt opens a tag that is not in the turns themselves."""
    opened = _after(turns.opened, header)
    tag = re.fullmatch(r"<(\w+)>(\s*)", opened)
    return (f"<{tag[1]}>{tag[2]}", f"{tag[2]}</{tag[1]}>{tag[2]}") if tag else None


def _text(
    turns: Turns, header: str, reasoning: tuple[str, str] | None, *, several: bool
) -> tuple[str, str] | None:
    lead = _after(turns.text.partition(TEXT)[0], header)
    if reasoning is not None and THOUGHT in turns.thought:
        behind = _gap(turns.thought, THOUGHT, TEXT)
        lead = behind.removeprefix(reasoning[1].partition(_NEXT)[0]).removeprefix(_NEXT)
    closer = turns.text.rpartition(TEXT)[2].removesuffix("" if several else turn_end_of(turns))
    within = reasoning is not None and lead.strip() in "".join(reasoning)
    return (lead, closer) if _TAG.search(lead) and closer.strip() and not within else None


def _form(turns: Turns, header: str, reasoning: tuple[str, str] | None) -> tuple[Form | None, str, str]:
    """Return the form, the text between visible text and calls, and the end of a turn that has only calls."""
    two = _slotted(turns.calls or turns.call)
    first = find_call(two, TOOL_NAMES[0], turns.typed)
    if first is None:
        return None, "", ""
    second = find_call(two, TOOL_NAMES[1], turns.typed, first.end) if turns.calls else None
    last = second or first
    opening = _opening(turns, header, reasoning, two[: first.start])
    opening = opening.lstrip() if _TAG.match(opening.lstrip()) else opening
    ending = two[last.end :].removesuffix(turn_end_of(turns)).rstrip(" ")
    between = two[first.end : second.start] if second is not None else ""
    opener, closer, joiner = _between_calls(opening, between, ending, alone=second is None)
    section = opening[: len(opening) - len(opener)], ending[len(closer) :]
    core, before = _counted(first, second), _before_calls(turns, opening)
    if section[0].strip():
        return _in_section(core, section, (opener, closer), joiner), before, ""
    return _on_its_own(core, (opener, closer), joiner), before, section[1]


def _between_calls(opening: str, between: str, ending: str, *, alone: bool) -> tuple[str, str, str]:
    """Return the opener of each call, its closer, and the text that is only between two calls."""
    if alone:
        return opening, ending, ""
    if _NEXT in between:
        before, _, behind = between.partition(_NEXT)
        return behind, before, ""
    opener, closer = shared_end(opening, between), shared_start(between, ending)
    closer = closer[: max(0, len(between) - len(opener))]
    return opener, closer, between[len(closer) : len(between) - len(opener)]


def _opening(turns: Turns, header: str, reasoning: tuple[str, str] | None, lead: str) -> str:
    if reasoning is not None and THOUGHT in turns.thought_call:
        shown = _slotted(turns.thought_call)
        core = find_call(shown, TOOL_NAMES[0], turns.typed)
        behind = shown[: core.start].partition(THOUGHT)[2] if core is not None else ""
        if _NEXT in behind:
            return behind.partition(_NEXT)[2]
        closer = reasoning[1].rstrip()
        if behind.startswith(closer):
            return behind.removeprefix(closer).removeprefix(reasoning[1][len(closer) :])
    return _after(lead, header)


def _before_calls(turns: Turns, opening: str) -> str:
    shown = _slotted(turns.text_call)
    core = find_call(shown, TOOL_NAMES[0], turns.typed) if TEXT in shown else None
    lead = shown[: core.start].partition(TEXT)[2].partition(_NEXT)[0] if core is not None else ""
    before = lead.removesuffix(opening) if lead.endswith(opening) else ""
    return "" if before.strip() else before


def _counted(first: DraftedCall, second: DraftedCall | None) -> DraftedCall:
    if second is None or first.pattern == second.pattern:
        return first
    ones, twos = atoms_of(first.pattern), atoms_of(second.pattern)
    if len(ones) != len(twos):
        return first
    slot = "{id}" if first.whole else "{index}"
    pattern = "".join(one if one == two else slot for one, two in zip(ones, twos, strict=True))
    return replace(first, pattern=pattern)


def _in_section(core: DraftedCall, section: tuple[str, str], around: tuple[str, str], joiner: str) -> Form:
    opener, closer = around
    if core.whole and not (opener + closer).strip():
        # A JSON object needs no marker of its own: white space around it belongs to the list.
        section, joiner = (section[0] + opener, closer + section[1]), closer + joiner + opener
        opener = closer = ""
    return _built(core, f"{opener}{core.pattern}{closer}", section, joiner)


def _on_its_own(core: DraftedCall, around: tuple[str, str], joiner: str) -> Form:
    opener, closer = around
    if core.whole:
        return _built(core, core.pattern, around, joiner, wraps_each=True)
    wrapped, unwrapped = _WRAPPED.fullmatch(opener), _UNWRAPPED.fullmatch(closer)
    if wrapped and unwrapped:
        pattern = f"{wrapped[2]}{core.pattern}{unwrapped[1]}"
        return _built(core, pattern, (wrapped[1], unwrapped[2]), joiner, wraps_each=True)
    return _built(core, f"{opener}{core.pattern}{closer}", ("", ""), joiner)


def _built(
    core: DraftedCall, pattern: str, pair: tuple[str, str], joiner: str, *, wraps_each: bool = False
) -> Form:
    # The header contains the name and the number of the call in one string.
    counted = "{id}" in pattern and "{name}" not in pattern
    return Form(
        call=pattern,
        calls=pair,
        wrap_each=wraps_each and bool(pair[0]),
        joiner=joiner,
        parameter=core.parameter,
        literals=core.literals,
        id=_COUNTED if counted else "",
        id_format="functions.{name}:{index}" if counted else "",
    )


def _slotted(text: str) -> str:
    text = _COUNTED_ID.sub("{id}", text)
    for id in IDS:
        text = text.replace(id, "{id}")
    return text


def _after(text: str, start: str) -> str:
    return text.partition(start)[2] if start and start in text else text


def _gap(text: str, one: str, other: str) -> str:
    before, found, _ = text.partition(one)[2].partition(other)
    return before if found else ""


def _first_tag(text: str) -> str:
    """Return ``text`` up to its first tag, with the tag and the white space after it; all of it without a tag."""
    found = re.compile(rf"(?:{_TAG.pattern})\s*").search(text)
    return text[: found.end()] if found else text


def _after_call(text: str) -> str:
    values = list(STRINGS.values())
    return text[text.rfind(values[-1]) + len(values[-1]) :] if values[-1] in text else ""


def _marks(end: str) -> list[str]:
    return _TAG.findall(end) or [end.strip()]


_WIDTH = 100


def source_of(family: Family) -> str:
    """Return a Python module that declares ``family``, with only the fields that differ from the defaults."""
    literals = any(form.literals for form in family.forms)
    imported = "Family" + (", Form" if family.forms else "") + (", Literals" if literals else "")
    name = re.sub(r"\W", "_", family.name).upper() or "FAMILY"
    return f"from singletree.parsing.family import {imported}\n\n{name} = {_written(family, 0)}\n"


def _written(value: Any, depth: int) -> str:
    if isinstance(value, Family | Form | Literals):
        set_fields = [field for field in fields(value) if getattr(value, field.name) != field.default]
        items = [f"{field.name}={_written(getattr(value, field.name), depth + 1)}" for field in set_fields]
        return _laid_out(f"{type(value).__name__}(", items, depth)
    if isinstance(value, tuple):
        items = [_written(item, depth + 1) for item in value]
        return _laid_out("(", [*items[:-1], f"{items[-1]},"] if len(items) == 1 else items, depth)
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    written = repr(text)
    return f'"{written[1:-1]}"' if written[0] == "'" and '"' not in text and "\\'" not in written else written


def _laid_out(opener: str, items: list[str], depth: int) -> str:
    line = opener + ", ".join(items).removesuffix(",)") + ")"
    if "\n" not in line and len(line) + 4 * depth <= _WIDTH and depth:
        return line
    indent = "    " * depth
    inside = "".join(f"\n    {indent}{item.removesuffix(',')}," for item in items)
    return f"{opener}{inside}\n{indent})"


def sample_of(case: str, text: str, tail: str, parts: Iterable[Part]) -> str:
    """Return one turn as an entry of a sample file; ``tail`` is the end of the prompt before it."""
    opened = f"tail = {_toml(tail)}\n" if tail else ""
    listed = "".join(f"  {{ {_part(part)} }},\n" for part in parts)
    return f"[[sample]]\ncase = {_toml(case)}\n{opened}text = {_toml(text)}\nparts = [\n{listed}]\n"


def _part(part: Part) -> str:
    if isinstance(part, ToolCall):
        return f"call = {_toml(part.name)}, arguments = {_toml(part.arguments)}"
    assert isinstance(part, Text | Reasoning)
    return f"{'text' if isinstance(part, Text) else 'reasoning'} = {_toml(part.text)}"


def _toml(text: str) -> str:
    """Return a TOML string; a literal one where possible, as it needs no escapes."""
    if "'" not in text and text.isprintable():
        return f"'{text}'"
    if "'''" not in text and not text.endswith("'") and text.replace("\n", "").isprintable():
        return f"'''\n{text}'''"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
