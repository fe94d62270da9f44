"""A family, compiled: the tables that the parser runs on.

Markers that are special tokens of the vocabulary are replaced by codes (lone surrogates, which no decoded text can
hold), in the patterns here and in the pieces there, so that they match by token while the same characters in prose
stay prose.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from singletree.parsing import picture, schema
from singletree.parsing.family import SLOT, Family, Form, markers
from singletree.parsing.parameters import ParameterPatterns, parameter_patterns
from singletree.parsing.picture import Pattern, Verdict

_FIRST_CODE = 0xDC80
_CLOSING_TAG = re.compile(r"\s*</[^<>]*>")


class Action(Enum):
    """What a marker does where it stands."""

    OPEN_REASONING = "reasoning begins"
    CLOSE_REASONING = "reasoning ends"
    LEAVE_REASONING = "reasoning ends before this marker, which is then read as text"
    OPEN_CALL = "a call may begin"
    SWALLOW = "a stray marker of the format, shown to nobody"
    CLOSE_CALL = "a stray closer of calls: shown to nobody, unless its opener was taken for text"


@dataclass(frozen=True)
class Marker:
    """One literal in a region: what it does, and how many line breaks before it are the format's."""

    text: str
    action: Action
    breaks_before: int = 0
    breaks_after: int = 0
    whole: Pattern | None = None
    """What it is the beginning of, for markup with a slot in it."""
    bare: bool = False
    """Whether it counts only at the start of the region or of a line."""


@dataclass(frozen=True)
class Region:
    """Prose (visible text or reasoning) and the markers that matter in it."""

    markers: tuple[Marker, ...]
    trigger: re.Pattern[str]
    pattern: re.Pattern[str]
    longest: int
    prefixes: frozenset[str]
    has_bare: bool

    def held(self, text: str, position: int) -> int:
        """Where the text begins that could still become a marker; the length of ``text`` when none could."""
        length = len(text)
        for start in range(max(position, length - self.longest), length):
            if text[start:] in self.prefixes:
                return start
        return length


Entries = tuple[tuple[Pattern, bool], ...]
"""What a call may begin with, and whether the whole call is then one object whose name is not known yet."""


@dataclass(frozen=True)
class CallPatterns:
    """One form of calls. ``entries`` start at the opener, ``following`` at what comes after a call in the same pair."""

    form: Form
    entries: Entries
    following: Entries
    closer: Pattern | None
    pair_closers: tuple[Pattern, ...]
    id: re.Pattern[str] | None
    end: str
    quote: str
    parameters: ParameterPatterns | None

    def may_close(self, held: str) -> bool:
        """Whether ``held``, behind a call, is a cut closer rather than something that the model began to say."""
        closers = (*([self.closer] if self.closer else ()), *self.pair_closers)
        return any(c.match(held)[0] is not Verdict.NO for c in closers)


@dataclass(frozen=True)
class Grammar:
    """All tables of one family under one vocabulary."""

    family: Family
    text: Region
    reasoning: Region
    forms: tuple[CallPatterns, ...]
    codes: Mapping[str, str] = field(default_factory=dict)
    code: re.Pattern[str] | None = None
    turn: str = ""
    swallowed: frozenset[str] = frozenset()

    def spell(self, text: str, *, in_json: bool = False) -> str:
        """``text`` with codes replaced by what they stand for; ``in_json`` inside a JSON string."""
        if self.code is None:
            return text
        back = {v: schema.quoted(k)[1:-1] if in_json else k for k, v in self.codes.items()}
        return self.code.sub(lambda m: back[m.group()], text)


def compile_family(family: Family, special_tokens: Collection[str] = ()) -> Grammar:
    """The tables for ``family`` where ``special_tokens`` are the texts of the vocabulary's special tokens."""
    literals = markers(family)
    used = sorted(t for t in special_tokens if t and any(t in m for m in literals))
    return _compiled(family, tuple(used))


@lru_cache(maxsize=256)
def _compiled(family: Family, special: tuple[str, ...]) -> Grammar:
    codes = {token: chr(_FIRST_CODE + i) for i, token in enumerate(special)}
    coded = _Coded(codes)
    forms = tuple(_call_patterns(form, coded, coded(family.turn)) for form in family.forms)
    openers = _openers(family, coded)
    return Grammar(
        family=family,
        text=_text_region(family, openers, coded),
        reasoning=_reasoning_region(family, openers, coded),
        forms=forms,
        codes=codes,
        code=re.compile("[" + "".join(codes.values()) + "]") if codes else None,
        turn=coded(family.turn),
        swallowed=frozenset(map(coded, family.ends)),
    )


class _Coded:
    """Puts codes for special tokens into a picture; the longest token first, as a tokenizer does."""

    def __init__(self, codes: Mapping[str, str]) -> None:
        tokens = sorted(codes, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._codes = codes

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda m: self._codes[m.group()], text) if self._pattern else text


def _begun(turn: str, text: str) -> list[str]:
    """``text`` where a message of the turn begins. It stands alone as well, unless it could be prose then."""
    return [turn + text, text] if turn and text and not _is_prose(text) else [turn + text]


def _is_prose(marker: str) -> bool:
    """Whether a marker is made of words, so that it may occur in what the model says as well."""
    return marker.lstrip()[:1].isalnum()


def _openers(family: Family, coded: _Coded) -> list[Marker]:
    found: list[Marker] = []
    breaks = family.before_calls.count("\n")
    for form in family.forms:
        literals = [coded(form.opener)]
        if form.optional and form.calls[0]:
            literals.append(coded(SLOT.split(form.call)[0]))
        for text in (t for literal in literals for t in _begun(coded(family.turn), literal)):
            marked = text.strip().rstrip("[ \n") or text.strip()
            found.append(Marker(marked, Action.OPEN_CALL, breaks, bare=form.bare))
    return [m for m in found if m.text]


def _closers(family: Family, coded: _Coded) -> list[str]:
    """What may be left over of calls. Messages of a turn close by ``Family.ends``; the rest may stand in their text."""
    found = []
    for form in () if family.turn else family.forms:
        if form.calls[1]:
            closer = coded(form.calls[1]).strip()
            found.append(closer.removeprefix("]").strip() if form.calls[0].rstrip().endswith("[") else closer)
        if not form.is_json:
            _, body, tail = _split_call(form)
            found += [coded(t).strip("` \n") for t in _split_tail(tail, body)[body == "literals" :]]
    return list(dict.fromkeys(c for c in found if any(map(str.isalnum, c))))


def _pairs(family: Family, coded: _Coded) -> list[tuple[str, str]]:
    """Openers and closers of reasoning, in every spelling."""
    pairs = [
        (coded(o), coded(c))
        for o, c in (*((family.reasoning,) if family.reasoning else ()), *family.also_reasoning)
    ]
    return [(begun, closer) for opener, closer in pairs for begun in _begun(coded(family.turn), opener)]


def _text_openers(family: Family, coded: _Coded) -> list[str]:
    openers = [*(family.text[:1] if family.text else ()), *family.also_text]
    return [begun for text in openers if text for begun in _begun(coded(family.turn), coded(text))]


def _swallowed(family: Family, coded: _Coded) -> list[Marker]:
    texts = [*map(coded, family.ends), coded(family.text[1]) if family.text else ""]
    return [*(Marker(t, Action.SWALLOW) for t in texts if t), *(_aside(coded(t)) for t in family.asides)]


def _aside(text: str) -> Marker:
    parts = SLOT.split(text)
    elements = [e for i, p in enumerate(parts) for e in ([picture.slot(p)] if i % 2 else picture.literal(p))]
    return Marker(parts[0], Action.SWALLOW, whole=Pattern(elements) if len(parts) > 1 else None)


def _text_region(family: Family, openers: list[Marker], coded: _Coded) -> Region:
    found = list(openers)
    for opener, closer in _pairs(family, coded):
        marked = _marked(opener)
        breaks = _breaks_after(opener) - marked.endswith("\n")
        words = _is_prose(marked)
        found.append(Marker(marked, Action.OPEN_REASONING, int(words), breaks, bare=words))
        if not _is_prose(closer):
            found.append(Marker(closer.strip(), Action.SWALLOW, 0, _breaks_after(closer)))
    found += [Marker(t, Action.SWALLOW) for t in _text_openers(family, coded)]
    found += [Marker(c, Action.CLOSE_CALL) for c in _closers(family, coded)]
    return _region([*found, *_swallowed(family, coded)])


def _reasoning_region(family: Family, openers: list[Marker], coded: _Coded) -> Region:
    found: list[Marker] = []
    before = 0
    for opener, closer in _pairs(family, coded):
        before = len(closer) - len(closer.lstrip("\n"))
        found.append(Marker(closer.strip(), Action.CLOSE_REASONING, before, _breaks_after(closer)))
        found.append(Marker(_marked(opener), Action.SWALLOW))
    found += [Marker(o.text, o.action, before) for o in openers if not o.bare]
    leaves = [*_text_openers(family, coded), *map(coded, family.also_ends_reasoning)]
    found += [Marker(m.strip(), Action.LEAVE_REASONING, before) for m in leaves]
    return _region([*found, *_swallowed(family, coded)] if found else [])


def _marked(opener: str) -> str:
    """An opener without the white space around it; the line break that ends a word belongs to it."""
    marked = opener.strip()
    return marked + "\n" if marked[-1:].isalnum() else marked


def _breaks_after(picture_text: str) -> int:
    return len(picture_text) - len(picture_text.rstrip("\n"))


def _region(found: list[Marker]) -> Region:
    unique = {m.text: m for m in reversed(found)}
    ordered = sorted(unique.values(), key=lambda m: len(m.text), reverse=True)
    spelled = [("\n" * n) + m.text for m in ordered for n in range(m.breaks_before + 1)]
    firsts = "".join(sorted({s[0] for s in spelled}))
    ways = [rf"(\n{{0,{m.breaks_before}}}{re.escape(m.text)})" for m in ordered]
    return Region(
        markers=tuple(ordered),
        trigger=re.compile("[" + re.escape(firsts) + "]") if firsts else re.compile(r"(?!)"),
        pattern=re.compile("|".join(ways)) if ways else re.compile(r"(?!)"),
        longest=max(map(len, spelled), default=1) - 1,
        prefixes=frozenset(s[:n] for s in spelled for n in range(1, len(s))),
        has_bare=any(m.bare for m in ordered),
    )


def _call_patterns(form: Form, coded: _Coded, turn: str) -> CallPatterns:
    json_shaped = form.is_json
    head, body, tail = _split_call(form)
    end, tail = _split_tail(tail, body) if body != "args" else ("", tail)
    pair = (coded(form.calls[0]), coded(form.calls[1]))
    closers = (pair[1], *map(coded, form.also_close))
    header = _header(form, head, body, coded, closers)
    openers = [_around(pair[0])]
    if turn:
        openers = [[*picture.literal(turn), *openers[0]], openers[0]]
    entries = [(Pattern([*opener, *header]), False) for opener in openers]
    joiner = _joiner(form)
    following = [(Pattern([*joiner, *header]), False)]
    if json_shaped and not form.bare:
        whole = [picture.ahead(open_object=True)]
        entries += [(Pattern([*opener, *whole]), True) for opener in openers]
        following.append((Pattern([*joiner, *whole]), True))
    if form.optional and pair[0]:
        entries += [
            (Pattern([*picture.literal(begun), *header]), False) for begun in dict.fromkeys((turn, ""))
        ]
    closer: Pattern | None = picture.RestOfObject() if json_shaped else None
    if tail.strip() and not json_shaped:
        closer = Pattern([picture.space(), *picture.literal(coded(tail).strip())])
    # Parameters without a closing tag of their own run up to the pair's closer, which ends the call and the pair.
    ends_with_pair = body == "params" and not end.strip()
    goes_on = bool(pair[0] or form.joiner.strip() in _PUNCTUATION)
    return CallPatterns(
        form=form,
        entries=tuple(entries),
        following=tuple(following) if goes_on and not ends_with_pair else (),
        closer=closer,
        pair_closers=tuple(
            Pattern([picture.space(), *_around(c)]) for c in closers if c and not ends_with_pair
        ),
        id=re.compile(form.id) if form.id else None,
        end=end,
        quote=coded(form.literals.quote) if form.literals else "",
        parameters=parameter_patterns(form, coded(end), closers, coded) if body == "params" else None,
    )


def _split_call(form: Form) -> tuple[str, str, str]:
    body = next(b for b in ("args", "params", "literals") if "{" + b + "}" in form.call)
    head, _, tail = form.call.partition("{" + body + "}")
    return head, body, tail


def _split_tail(tail: str, body: str) -> tuple[str, str]:
    """What completes the call (a closing tag, a bracket), and what the format writes after it."""
    if body == "literals":
        return tail[:1], tail[1:]
    found = _CLOSING_TAG.match(tail)
    return (tail[: found.end()], tail[found.end() :]) if found else (tail, "")


def _around(text: str) -> list[picture._Element]:
    """A pair's opener or closer: white space is free beside its brackets and line breaks."""
    elements: list[picture._Element] = []
    for i, part in enumerate(SLOT.split(text)):
        if i % 2:
            elements.append(picture.slot("any"))
            continue
        for piece in re.split(r"([\[\]])|\n *", part):
            if piece in ("[", "]"):
                elements += [picture.space(), *picture.literal(piece), picture.space()]
            else:
                elements += picture.literal(piece) if piece else [picture.space()]
    return [*elements, picture.space()] if elements else []


_PUNCTUATION = (",", ";")


def _joiner(form: Form) -> list[picture._Element]:
    mark = form.joiner.strip()
    read = mark in _PUNCTUATION and not form.each
    return [picture.space(), *(picture.literal(mark) if read else ()), picture.space()]


def _header(
    form: Form, head: str, body: str, coded: _Coded, closers: tuple[str, ...]
) -> list[picture._Element]:
    elements: list[picture._Element] = []
    seen: set[str] = set()
    for i, part in enumerate(SLOT.split(head)):
        if i % 2:
            elements.append(picture.slot(part, quoted=form.is_json, again=part in seen))
            seen.add(part)
        elif form.is_json:
            elements += picture.json_literal(coded(part), in_string=i > 0)
        else:
            elements += picture.literal(coded(part))
    if body == "literals":
        return elements
    elements.append(picture.space())
    if body == "args":
        return [*elements, picture.ahead(open_object=True)]
    opener = coded(SLOT.split(form.parameter)[0]).strip()
    end = coded(_split_tail(_split_call(form)[2], "params")[0]).strip()
    return [*elements, picture.ahead(opener, *([end] if end else (c.strip() for c in closers)))]
