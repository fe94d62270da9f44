"""Compiles a family into the tables that the parser uses.

Markers that are special tokens of the vocabulary are replaced by codes: lone surrogates, which no decoded text
contains. The patterns here and the text in the parser both have the codes. So a marker matches as a token, and the same
characters in prose stay prose.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from importlib import import_module

from singletree.parsing import patterns
from singletree.parsing.arguments import MakeReader, coercion
from singletree.parsing.family import SLOT, Family, Form, markers
from singletree.parsing.patterns import SPACE, Either, Element, Exact, Match, Pattern, Scalar, TextSearch

_FIRST_CODE = 0xDC80
_CLOSING_TAG = re.compile(r"\s*</[^<>]*>")


class Action(Enum):
    """The effect of a marker at its place."""

    OPEN_REASONING = "reasoning begins"
    CLOSE_REASONING = "reasoning ends"
    LEAVE_REASONING = "reasoning ends before this marker, which is then read as text"
    OPEN_CALL = "a call may begin"
    OPEN_TEXT = "text begins: white space before the marker belongs to the format, after it to the text"
    SWALLOW = "a stray marker of the format, dropped from the output"
    CLOSE_CALL = "a stray closer of calls, dropped from the output unless its opener was taken for text"


@dataclass(frozen=True)
class Marker:
    """One literal in a region, and its effect.

    Attributes:
        breaks_before, breaks_after: number of line breaks before and after it that belong to the format.
        whole: pattern of the whole markup that it begins, for markup with a slot in it.
        unmarked: whether it counts only at the start of the region or of a line, or directly after ``behind``.
    """

    text: str
    action: Action
    breaks_before: int = 0
    breaks_after: int = 0
    whole: Pattern | None = None
    unmarked: bool = False
    behind: re.Pattern[str] | None = None


@dataclass(frozen=True)
class Region(TextSearch):
    """The markers that have an effect in prose: in visible text or in reasoning. Group N finds marker N - 1."""

    markers: tuple[Marker, ...]
    has_unmarked: bool


Entries = tuple[tuple[Pattern, bool], ...]
"""Patterns of the beginning of a call, and whether the whole call is then one object with a name not known yet."""


@dataclass(frozen=True)
class CallPatterns:
    """The patterns of one form. ``entries`` start at the opener, ``following`` after a call in the same pair."""

    form: Form
    entries: Entries
    following: Entries
    closer: Pattern | None
    pair_closers: tuple[Pattern, ...]
    id: re.Pattern[str] | None
    reader: MakeReader

    def may_close(self, held: str) -> bool:
        """Return whether ``held``, after a call, is a cut closer and not the beginning of text."""
        closers = (*([self.closer] if self.closer else ()), *self.pair_closers)
        return any(c.match(held)[0] is not Match.NONE for c in closers)

    @property
    def block_closers(self) -> tuple[Pattern, ...]:
        if self.form.unmarked:
            return ()
        return self.pair_closers or (() if self.closer is None or self.form.is_json else (self.closer,))


@dataclass(frozen=True)
class CompiledFamily:
    """All tables of one family for one vocabulary.

    Attributes:
        codes: special token -> its code.
        code: pattern of a code; None without codes.
        message_header: ``Family.message_header``, with codes.
        swallowed: texts of the stop markers.
        block_closers: patterns that close a block of calls.
    """

    family: Family
    text: Region
    reasoning: Region
    forms: tuple[CallPatterns, ...]
    codes: Mapping[str, str] = field(default_factory=dict)
    code: re.Pattern[str] | None = None
    message_header: str = ""
    swallowed: frozenset[str] = frozenset()
    block_closers: tuple[Pattern, ...] = ()

    def decode(self, text: str, *, in_json: bool = False) -> str:
        """Return ``text`` with codes replaced by their special tokens; ``in_json`` escapes them for a JSON string."""
        if self.code is None:
            return text
        back = {v: coercion.quoted(k)[1:-1] if in_json else k for k, v in self.codes.items()}
        return self.code.sub(lambda m: back[m.group()], text)


def compile_family(family: Family, special_tokens: Collection[str] = ()) -> CompiledFamily:
    """Return the tables for ``family``; ``special_tokens`` are the texts of the vocabulary's special tokens."""
    return _compiled(family, frozenset(special_tokens))


@lru_cache(maxsize=256)
def _compiled(family: Family, special_tokens: frozenset[str]) -> CompiledFamily:
    literals = markers(family)
    used = sorted(t for t in special_tokens if t and any(t in m for m in literals))
    codes = {token: chr(_FIRST_CODE + i) for i, token in enumerate(used)}
    coded = _Coded(codes)
    header = coded(family.message_header)
    forms = tuple(_call_patterns(form, coded, header) for form in (*family.forms, *_doubled(family.forms)))
    openers = _openers(family, coded)
    return CompiledFamily(
        family=family,
        text=_text_region(family, openers, coded),
        reasoning=_reasoning_region(family, openers, coded),
        forms=forms,
        codes=codes,
        code=re.compile("[" + "".join(codes.values()) + "]") if codes else None,
        message_header=header,
        block_closers=tuple(closer for form in forms for closer in form.block_closers),
        swallowed=frozenset(m.text for end in family.dropped_markers for m in _ends(coded(end))),
    )


def _doubled(forms: Sequence[Form]) -> list[Form]:
    """Return the JSON forms as templates show them whose author doubled the braces of the example by mistake.

    Models that were told so write the call's own braces twice; its arguments are as ever. Only between markers: without
    them such text may be anything.
    """
    return [replace(form, call="{" + form.call + "}") for form in forms if form.is_json and not form.unmarked]


class _Coded:
    """Replaces special tokens by codes; the longest token first, as a tokenizer does."""

    def __init__(self, codes: Mapping[str, str]) -> None:
        tokens = sorted(codes, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._codes = codes

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda m: self._codes[m.group()], text) if self._pattern else text


def _begun(header: str, text: str) -> list[str]:
    """Return ``text`` after a message's header. ``text`` alone is included, unless it could be prose then."""
    return [header + text, text] if header and text and not _is_prose(text) else [header + text]


def _is_prose(marker: str) -> bool:
    """Return whether a marker consists of words, so that it may also occur in prose."""
    return marker.lstrip()[:1].isalnum()


def _openers(family: Family, coded: _Coded) -> list[Marker]:
    found: list[Marker] = []
    breaks = family.before_calls.count("\n")
    for form in family.forms:
        literals = [coded(form.opener)]
        if form.optional and form.calls[0]:
            literals.append(coded(SLOT.split(form.call)[0]))
        literals += [tag[1] for literal in literals if (tag := _TAG_AND_WORD.match(literal))]
        for text in (t for literal in literals for t in _begun(coded(family.message_header), literal)):
            marked = text.strip().partition("\n")[0].rstrip("[ ") or text.strip()
            if form.is_json and form.unmarked and not form.calls[0]:
                marked = "{"  # the white space in it is free
            behind = re.compile(rf"(?:{form.behind})\Z") if form.behind else None
            found.append(Marker(marked, Action.OPEN_CALL, breaks, unmarked=form.unmarked, behind=behind))
    return [m for m in found if m.text]


_TAG_AND_WORD = re.compile(r"\s*(<[^<>]*>|[\udc80-\udcff])\w")
"""An opener whose word may be missing. The tag alone opens nothing, and must not lose its closer."""


def _ends(text: str) -> list[Marker]:
    """Return markers for a text that ends a turn. Line breaks around it belong to the format, if there are any."""
    begins = len(text) - len(text.lstrip("\n"))
    return [Marker(each, Action.SWALLOW, begins) for each in dict.fromkeys((text[begins:], text.strip("\n")))]


def _closers(family: Family, coded: _Coded) -> list[str]:
    """Return closers of calls that may be left over.

    Families with message headers have none: their messages end by stop markers, and other closers may be text.
    """
    found = []
    for form in () if family.message_header else family.forms:
        if form.calls[1]:
            closer = coded(form.calls[1]).strip()
            found.append(closer.removeprefix("]").strip() if form.calls[0].rstrip().endswith("[") else closer)
        if not form.is_json:
            _, body, tail = _split_call(form)
            found += [coded(t).strip("` \n") for t in _split_tail(tail, body)[body == "literals" :]]
    return list(dict.fromkeys(c for c in found if any(map(str.isalnum, c))))


def _pairs(family: Family, coded: _Coded) -> list[tuple[str, str]]:
    header = coded(family.message_header)
    pairs = (*([family.reasoning] if family.reasoning else ()), *family.also_reasoning)
    return [(begun, coded(closer)) for opener, closer in pairs for begun in _begun(header, coded(opener))]


def _text_openers(family: Family, coded: _Coded) -> list[str]:
    header, openers = coded(family.message_header), [*(family.text or ())[:1], *family.also_text]
    return [begun for text in openers if text for begun in _begun(header, coded(text))]


def _swallowed(family: Family, coded: _Coded) -> list[Marker]:
    texts = [*map(coded, family.dropped_markers), coded(family.text[1]) if family.text else ""]
    return [*(m for t in texts if t for m in _ends(t)), *(_hidden(coded(t)) for t in family.hidden_markup)]


def _hidden(text: str) -> Marker:
    parts = SLOT.split(text)
    elements: list[Element] = []
    for i, part in enumerate(parts):
        elements += [patterns.slot(part)] if i % 2 else patterns.literal(part)
    return Marker(parts[0], Action.SWALLOW, whole=Pattern(elements) if len(parts) > 1 else None)


def _text_region(family: Family, openers: list[Marker], coded: _Coded) -> Region:
    found = list(openers)
    for opener, closer in _pairs(family, coded):
        marked = _marked(opener)
        breaks = _breaks_after(opener) - marked.endswith("\n")
        words = _is_prose(marked)
        found.append(Marker(marked, Action.OPEN_REASONING, int(words), breaks, unmarked=words))
        if not _is_prose(closer):
            found.append(Marker(closer.strip(), Action.SWALLOW, 0, _breaks_after(closer)))
    found += [Marker(t, Action.OPEN_TEXT) for t in _text_openers(family, coded)]
    found += [Marker(c, Action.CLOSE_CALL) for c in _closers(family, coded)]
    return _region([*found, *_swallowed(family, coded)])


def _reasoning_region(family: Family, openers: list[Marker], coded: _Coded) -> Region:
    found: list[Marker] = []
    before = 0
    for opener, closer in _pairs(family, coded):
        before = len(closer) - len(closer.lstrip("\n"))
        found.append(Marker(closer.strip(), Action.CLOSE_REASONING, before, _breaks_after(closer)))
        found.append(Marker(_marked(opener), Action.SWALLOW))
    found += [Marker(o.text, o.action, before) for o in openers if not o.unmarked]
    leaves = [*_text_openers(family, coded), *map(coded, family.also_ends_reasoning)]
    found += [Marker(m.strip(), Action.LEAVE_REASONING, before) for m in leaves]
    return _region([*found, *_swallowed(family, coded)] if found else [])


def _marked(opener: str) -> str:
    """Return an opener without the white space around it. The line break that ends a word belongs to it."""
    marked = opener.strip()
    return marked + "\n" if marked[-1:].isalnum() else marked


def _breaks_after(text: str) -> int:
    return len(text) - len(text.rstrip("\n"))


def _region(found: list[Marker]) -> Region:
    unique = {m.text: m for m in reversed(found)}
    ordered = tuple(sorted(unique.values(), key=lambda m: len(m.text), reverse=True))
    texts = [("\n" * n) + m.text for m in ordered for n in range(m.breaks_before + 1)]
    ways = "|".join(rf"(\n{{0,{m.breaks_before}}}{re.escape(m.text)})" for m in ordered)
    unmarked = any(m.unmarked for m in ordered)
    # What breaks a span of prose, too, is a code, or a backtick of Markdown.
    return Region.of(texts, ways or r"(?!)", "`\udc80-\udcff", markers=ordered, has_unmarked=unmarked)


def _call_patterns(form: Form, coded: _Coded, header: str) -> CallPatterns:
    head, body, tail = _split_call(form)
    end, tail = _split_tail(tail, body) if body != "args" else ("", tail)
    pair = (coded(form.calls[0]), coded(form.calls[1]))
    closers = (pair[1], *map(coded, form.also_close))
    start = _header(form, head, body, coded, closers)
    openers = [_around(pair[0])]
    if header:
        openers.insert(0, [*patterns.literal(header), *openers[0]])
    entries = [(Pattern([*opener, *start]), False) for opener in openers]
    mark = form.joiner.strip()
    reads_joiner = mark in _PUNCTUATION and not form.wrap_each
    joiner: list[Element] = [SPACE, *(patterns.literal(mark) if reads_joiner else ()), SPACE]
    following = [(Pattern([*joiner, *start]), False)]
    if form.is_json and not form.unmarked and not form.call.startswith("{{"):
        whole = patterns.ends_before_object()
        entries += [(Pattern([*opener, *whole]), True) for opener in openers]
        following.append((Pattern([*joiner, *whole]), True))
    if form.optional and pair[0]:
        headers = dict.fromkeys((header, ""))
        entries += [(Pattern([*patterns.literal(begun), *start]), False) for begun in headers]
    closer = _rest_of_object(tail.count("}")) if form.is_json else None
    if tail.strip() and not form.is_json:
        closer = Pattern([SPACE, *patterns.literal(coded(tail).strip())])
    # Parameters without a closing tag of their own run up to the pair's closer, which ends the call and the pair.
    ends_with_pair = body == "params" and not end.strip()
    pair_closers = tuple(Pattern([SPACE, *_around(c)]) for c in closers if c and not ends_with_pair)
    notation = import_module(f"singletree.parsing.arguments.{_NOTATIONS[body]}")
    goes_on = bool(pair[0] or mark in _PUNCTUATION)
    return CallPatterns(
        form=form,
        entries=tuple(entries),
        following=tuple(following) if goes_on and not ends_with_pair else (),
        closer=closer,
        pair_closers=pair_closers,
        id=re.compile(form.id) if form.id else None,
        reader=notation.compile_arguments(form, end, closers, pair_closers, coded),
    )


_NOTATIONS = {"args": "json_arguments", "params": "tag_parameters", "literals": "literal_arguments"}
"""The modules that read arguments, by what stands for them in ``Form.call``. A family loads those that it needs."""


def _split_call(form: Form) -> tuple[str, str, str]:
    body = next(b for b in _NOTATIONS if "{" + b + "}" in form.call)
    head, _, tail = form.call.partition("{" + body + "}")
    return head, body, tail


def _split_tail(tail: str, body: str) -> tuple[str, str]:
    """Split into the text that completes the call (a closing tag, a bracket) and the text after it."""
    if body == "literals":
        return tail[:1], tail[1:]
    found = _CLOSING_TAG.match(tail)
    return (tail[: found.end()], tail[found.end() :]) if found else (tail, "")


def _around(text: str) -> list[Element]:
    """Return the elements of a pair's opener or closer; white space is free beside its brackets and line breaks."""
    elements: list[Element] = []
    for i, part in enumerate(SLOT.split(text)):
        if i % 2:
            elements.append(patterns.slot("any"))
            continue
        for piece in re.split(r"([\[\]])|\n *", part):
            if piece in ("[", "]"):
                elements += [SPACE, *patterns.literal(piece), SPACE]
            else:
                elements += patterns.literal(piece) if piece else [SPACE]
    return [*elements, SPACE] if elements else []


_PUNCTUATION = (",", ";")
_NAMED = ("name", "id")
"""Slots beside which a model may write white space. It is never part of a name or an id."""


def _header(form: Form, head: str, body: str, coded: _Coded, closers: tuple[str, ...]) -> list[Element]:
    elements: list[Element] = []
    seen: set[str] = set()
    for i, part in enumerate(SLOT.split(head)):
        if i % 2:
            slot = patterns.slot(part, quoted=form.is_json, again=part in seen)
            elements += [SPACE, slot, SPACE] if part in _NAMED and not form.is_json else [slot]
            seen.add(part)
        elif form.is_json:
            elements += _json_literal(coded(part), in_string=i > 0)
        else:
            elements += patterns.literal(coded(part))
    if body == "literals":
        return elements
    elements.append(SPACE)
    tail = _split_call(form)[2]
    if body == "args":
        # Of a tool without parameters, models write no arguments between the two markers, instead of an empty object.
        is_marked = not form.is_json and SLOT.split(head)[-1].strip()
        return [*elements, *patterns.ends_before_object(coded(tail).strip() if is_marked else "")]
    openers = dict.fromkeys(
        coded(SLOT.split(each)[0]).strip() for each in (form.parameter, *form.also_parameter)
    )
    end = coded(_split_tail(tail, "params")[0]).strip()
    ends = (end, *(c.strip() for c in closers if form.pair_ends or not end))
    return [*elements, *patterns.ends_before(*openers, *ends)]


_JSON_TOKEN = re.compile(r'"[^"]+"|[{}\[\],:"]|\s+|[^"{}\[\],:\s]+')
_ARGUMENTS_KEY = ('"arguments"', '"parameters"')


def _json_literal(text: str, *, in_string: bool) -> list[Element]:
    """Return JSON punctuation and keys as elements, with free white space between them."""
    elements: list[Element] = [Exact('"')] if in_string and text.startswith('"') else []
    for token in _JSON_TOKEN.findall(text[len(elements) :]):
        if token.isspace():
            continue
        if elements and elements[-1] != SPACE:
            elements.append(SPACE)
        elements.append(Either(_ARGUMENTS_KEY) if token in _ARGUMENTS_KEY else Exact(token))
    return elements


def _rest_of_object(braces: int) -> Pattern:
    """Return the pattern behind the arguments of a call object: further plain members, and closing ``braces``."""
    value = Scalar(words=r"[-+.\w]")
    member: list[Element] = [Exact(","), SPACE, Scalar(), SPACE, Exact(":"), SPACE, value]
    return Pattern(member, until="}", behind=[SPACE, Exact("}")] * (braces - 1))
