"""A declaration for a format that nobody has declared yet, drafted from turns whose parts are known.

Whoever can write turns in the format (a chat template does) gives the same few turns each time, made of the words in
``WORDS``. What stands between the words is the format: what two places share belongs to each of them, what they do
not share belongs to what stands around. A draft is a proposal: read the same turns with it before it is believed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from singletree.parsing.drafted_call import (
    STRINGS,
    DraftedCall,
    atoms_of,
    find_call,
    shared_end,
    shared_start,
)
from singletree.parsing.family import Family, Form

THOUGHT, SAID = "qthought", "qsaid"
NAMES = ("qfirst", "qsecond")
IDS = ("callq0001", "callq0002")
TYPED = {"kone": 7, "ktwo": True, "kthree": None, "kfour": {"kin": "vin"}}
WORDS = (THOUGHT, SAID, *NAMES, *STRINGS, *STRINGS.values())

_NEXT = "\x1d"
_MARK = re.compile(r"[^\w\s]")
_TAG = re.compile(r"<[^<>\n]*>|\[/?[A-Z][A-Z_]*\]")
_WRAPPED = re.compile(r"(<[^<>]+>\s*)(.*\S.*)", re.DOTALL)
_UNWRAPPED = re.compile(r"(.*\S.*?)(\s*</[^<>]+>)", re.DOTALL)
_COUNTED_ID = re.compile(r"functions\.q\w+?:\d+")
_COUNTED = r"(?:functions\.)?(?P<name>[^\s:]+?)(?::\d+)?"


@dataclass(frozen=True, slots=True)
class Turns:
    """The same turns in one format, each from the end of the question to the end of the turn; "" where there is none.

    Attributes:
        opened: what asks for an answer.
        said: ``SAID`` alone.
        thought: ``THOUGHT``, then ``SAID``.
        thought_call: ``THOUGHT``, then a call of the first name with ``STRINGS``.
        call: that call alone.
        said_call: ``SAID``, then that call.
        calls: that call, then one of the second name.
        typed: a call of the first name with ``TYPED``.
    """

    opened: str = ""
    said: str = ""
    thought: str = ""
    thought_call: str = ""
    call: str = ""
    said_call: str = ""
    calls: str = ""
    typed: str = ""


def draft(turns: Turns, name: str = "drafted") -> Family:
    """The family in which ``turns`` are written, as far as they show it.

    Where no calls are found, it has none; so for reasoning.

    Raises:
        BadFamily: calls are found, but nothing that marks one.
    """
    header = header_of(turns)
    again = _again(turns, header)
    if again:
        turns = _in_one(turns, header, again)
    reasoning = _reasoning(turns, header) or _opened_reasoning(turns, header)
    form, before, call_end = _form(turns, header, reasoning)
    text = _text(turns, header, reasoning, several=bool(again))
    said_end = end_of(turns) if text else turns.said.rpartition(SAID)[2]
    return Family(
        name=name,
        turn=again,
        reasoning=reasoning and _before_next(reasoning),
        starts_open=reasoning is not None and turns.opened.rstrip().endswith(reasoning[0].strip()),
        text=text and _before_next(text),
        forms=(form,) if form is not None else (),
        before_calls=before,
        ends=tuple(
            dict.fromkeys(filter(None, (*_marks(said_end), *_marks(end_of(turns)), *_marks(call_end))))
        ),
    )


def _again(turns: Turns, header: str) -> str:
    """What each message of a turn begins with, where a turn is several: the end of the header, before every part."""
    gaps = [g for g in (_gap(turns.thought, THOUGHT, SAID), _gap(turns.calls, *NAMES)) if g]
    atoms = atoms_of(header)
    for at in range(len(atoms)):
        end = "".join(atoms[at:])
        if _MARK.search(end) and gaps and all(end in gap for gap in gaps):
            return end
    return ""


def _in_one(turns: Turns, header: str, again: str) -> Turns:
    """``turns`` with ``_NEXT`` for what begins each message but the first."""
    texts = {f.name: getattr(turns, f.name) for f in fields(turns)}
    return Turns(
        **{
            name: text[: len(header)] + text[len(header) :].replace(again, _NEXT)
            for name, text in texts.items()
        }
    )


def _before_next(pair: tuple[str, str]) -> tuple[str, str]:
    return pair[0], pair[1].partition(_NEXT)[0]


def header_of(turns: Turns) -> str:
    """What an assistant's turn begins with, whatever it says."""
    seen = [t for t in (turns.said, turns.thought, turns.thought_call, turns.call, turns.said_call) if t]
    leads = [re.split("|".join(WORDS), text)[0] for text in seen]
    return shared_start(*leads, *filter(None, [turns.opened])) if leads else ""


def end_of(turns: Turns) -> str:
    """What an assistant's turn ends with, whatever it says."""
    said = turns.said.rpartition(SAID)[2]
    return shared_end(said, _after_call(turns.call)) if turns.call else said


def _reasoning(turns: Turns, header: str) -> tuple[str, str] | None:
    """Opener and closer, from turns that show a thought."""
    lead = (turns.thought_call if THOUGHT in turns.thought_call else turns.thought).partition(THOUGHT)[0]
    gaps = [_gap(turns.thought, THOUGHT, SAID), _gap(turns.thought_call, THOUGHT, NAMES[0])]
    shown = [gap for gap in gaps if gap.strip()]
    if not shown:
        return None
    closer = shared_start(*shown) if len(shown) > 1 else _first_tag(shown[0])
    opener = _after(lead, header)
    if not opener.strip():
        # The header opens it in every turn: as many atoms as close it.
        atoms, count = atoms_of(lead.rstrip()), len(atoms_of(closer.strip()))
        opener = "".join(atoms[-count:]) + lead[len(lead.rstrip()) :]
    return (opener, closer) if opener.strip() and closer.strip() else None


def _opened_reasoning(turns: Turns, header: str) -> tuple[str, str] | None:
    """Opener and closer, where the prompt opens a tag that is no part of the turns themselves."""
    opened = _after(turns.opened, header)
    tag = re.fullmatch(r"<(\w+)>(\s*)", opened)
    return (f"<{tag[1]}>{tag[2]}", f"{tag[2]}</{tag[1]}>{tag[2]}") if tag else None


def _text(
    turns: Turns, header: str, reasoning: tuple[str, str] | None, *, several: bool
) -> tuple[str, str] | None:
    """What stands around text."""
    lead = _after(turns.said.partition(SAID)[0], header)
    if reasoning is not None and THOUGHT in turns.thought:
        lead = (
            _gap(turns.thought, THOUGHT, SAID)
            .removeprefix(reasoning[1].partition(_NEXT)[0])
            .removeprefix(_NEXT)
        )
    closer = turns.said.rpartition(SAID)[2].removesuffix("" if several else end_of(turns))
    within = reasoning is not None and lead.strip() in "".join(reasoning)
    return (lead, closer) if _TAG.search(lead) and closer.strip() and not within else None


def _form(turns: Turns, header: str, reasoning: tuple[str, str] | None) -> tuple[Form | None, str, str]:
    """The form, what stands between text and calls, and what ends a turn of calls only."""
    two = _slotted(turns.calls or turns.call)
    first = find_call(two, NAMES[0], turns.typed)
    second = find_call(two, NAMES[1], turns.typed, first.end) if first is not None and turns.calls else None
    if first is None:
        return None, "", ""
    last = second or first
    opening = _opening(turns, header, reasoning, two[: first.start])
    opening = opening.lstrip() if _TAG.match(opening.lstrip()) else opening
    ending = two[last.end :].removesuffix(end_of(turns)).rstrip(" ")
    between = two[first.end : second.start] if second is not None else ""
    opener, closer, joiner = _between_calls(opening, between, ending, alone=second is None)
    section = opening[: len(opening) - len(opener)], ending[len(closer) :]
    if section[0].strip():
        form = _in_section(_counted(first, second), section, (opener, closer), joiner)
        return form, _before_calls(turns, opening), ""
    form = _on_its_own(_counted(first, second), (opener, closer), joiner)
    return form, _before_calls(turns, opening), section[1]


def _between_calls(opening: str, between: str, ending: str, *, alone: bool) -> tuple[str, str, str]:
    """What opens each call, what closes it, and what only stands between two."""
    if alone:
        return opening, ending, ""
    if _NEXT in between:
        before, _, behind = between.partition(_NEXT)
        return behind, before, ""
    opener, closer = shared_end(opening, between), shared_start(between, ending)
    closer = closer[: max(0, len(between) - len(opener))]
    return opener, closer, between[len(closer) : len(between) - len(opener)]


def _opening(turns: Turns, header: str, reasoning: tuple[str, str] | None, lead: str) -> str:
    """What stands before the first call of a turn that says nothing else."""
    if reasoning is not None and THOUGHT in turns.thought_call:
        shown = _slotted(turns.thought_call)
        core = find_call(shown, NAMES[0], turns.typed)
        behind = shown[: core.start].partition(THOUGHT)[2] if core is not None else ""
        if _NEXT in behind:
            return behind.partition(_NEXT)[2]
        closer = reasoning[1].rstrip()
        if behind.startswith(closer):
            return behind.removeprefix(closer).removeprefix(reasoning[1][len(closer) :])
    return _after(lead, header)


def _before_calls(turns: Turns, opening: str) -> str:
    shown = _slotted(turns.said_call)
    core = find_call(shown, NAMES[0], turns.typed) if SAID in shown else None
    lead = shown[: core.start].partition(SAID)[2].partition(_NEXT)[0] if core is not None else ""
    before = lead.removesuffix(opening) if lead.endswith(opening) else ""
    return "" if before.strip() else before


def _counted(first: DraftedCall, second: DraftedCall | None) -> DraftedCall:
    """``first`` with a slot for what counts the calls."""
    if second is None or first.picture == second.picture:
        return first
    ones, twos = atoms_of(first.picture), atoms_of(second.picture)
    if len(ones) != len(twos):
        return first
    slot = "{id}" if first.whole else "{index}"
    picture = "".join(one if one == two else slot for one, two in zip(ones, twos, strict=True))
    return replace(first, picture=picture)


def _in_section(core: DraftedCall, section: tuple[str, str], around: tuple[str, str], joiner: str) -> Form:
    """Calls that share one pair of markers."""
    opener, closer = around
    if core.whole and not (opener + closer).strip():
        # A JSON object stands by itself: white space around it is the list's.
        section, joiner = (section[0] + opener, closer + section[1]), closer + joiner + opener
        opener = closer = ""
    return _built(core, f"{opener}{core.picture}{closer}", section, joiner)


def _on_its_own(core: DraftedCall, around: tuple[str, str], joiner: str) -> Form:
    """Calls with a pair of markers each, or none."""
    opener, closer = around
    if core.whole:
        return _built(core, core.picture, around, joiner, each=True)
    wrapped, unwrapped = _WRAPPED.fullmatch(opener), _UNWRAPPED.fullmatch(closer)
    if wrapped and unwrapped:
        picture = f"{wrapped[2]}{core.picture}{unwrapped[1]}"
        return _built(core, picture, (wrapped[1], unwrapped[2]), joiner, each=True)
    return _built(core, f"{opener}{core.picture}{closer}", ("", ""), joiner)


def _built(
    core: DraftedCall, picture: str, pair: tuple[str, str], joiner: str, *, each: bool = False
) -> Form:
    # A header that holds the name and the number of the call in one.
    counted = "{id}" in picture and "{name}" not in picture
    return Form(
        call=picture,
        calls=pair,
        each=each and bool(pair[0]),
        joiner=joiner,
        parameter=core.parameter,
        literals=core.literals,
        id=_COUNTED if counted else "",
        id_picture="functions.{name}:{index}" if counted else "",
    )


def _slotted(text: str) -> str:
    """``text`` with slots for the ids of its calls."""
    text = _COUNTED_ID.sub("{id}", text)
    for id in IDS:
        text = text.replace(id, "{id}")
    return text


def _after(text: str, start: str) -> str:
    return text.partition(start)[2] if start and start in text else text


def _gap(text: str, one: str, other: str) -> str:
    """What stands between two words; empty where one is missing."""
    before, found, _ = text.partition(one)[2].partition(other)
    return before if found else ""


def _first_tag(text: str) -> str:
    """``text`` up to and with its first tag and the white space behind it; all where there is none."""
    found = re.compile(rf"(?:{_TAG.pattern})\s*").search(text)
    return text[: found.end()] if found else text


def _after_call(text: str) -> str:
    values = list(STRINGS.values())
    return text[text.rfind(values[-1]) + len(values[-1]) :] if values[-1] in text else ""


def _marks(end: str) -> list[str]:
    return _TAG.findall(end) or [end.strip()]
