"""How a model family writes a turn: the declaration.

A family is data. Its pictures show a turn as the model writes it, with slots:

``{name}``    the tool's name
``{id}``      the id that the format itself carries
``{args}``    the arguments as one JSON object
``{params}``  the arguments as a run of parameters, each drawn by ``parameter`` with ``{key}`` and ``{value}``
              (and ``{string}`` where the wire says ``true`` or ``false`` for "this is a string", ``{type}`` where
              it names the JSON type)
``{literals}``  the arguments as a run of ``key=value`` in a programming language's literals (``Literals``)
``{index}``   the number of the call in its turn, counted from one; nobody reads it
``{sources}``  what a citation names: numbers and their punctuation
``{any}``     a word of the format that may be anything, or missing; only read, never drawn

A line break in a picture stands for any white space or none; a picture that starts with ``{`` is a JSON object, whose
white space and key order are free. One declaration serves parsing, drawing, constraining and testing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from singletree.errors import BadFamily

SLOT = re.compile(r"\{(name|id|args|params|literals|key|value|string|type|index|any|sources)\}")
_BODIES = ("args", "params", "literals")


@dataclass(frozen=True)
class Literals:
    """How a family spells arguments as literals of a programming language.

    Attributes:
        assign: what stands between a key and its value; also inside nested objects when ``bare_keys``.
        separator: what stands between arguments, and between items.
        quote: what opens and closes a string as it is drawn.
        verbatim: whether nothing is escaped inside ``quote``.
        bare_keys: whether keys of nested objects stand without quotes.
        bare_words: whether a word that is no literal is a string.
        words: how true, false and null are drawn.
    """

    assign: str = "="
    separator: str = ", "
    quote: str = '"'
    verbatim: bool = False
    bare_keys: bool = False
    bare_words: bool = False
    words: tuple[str, str, str] = ("True", "False", "None")


@dataclass(frozen=True)
class Form:
    """One way of writing tool calls.

    Attributes:
        call: picture of one call; ends in ``{args}``, ``{params}`` or ``{literals}`` and what closes it.
        calls: what stands around calls; each call has its own pair when ``each`` is set, else all share one.
        each: see ``calls``.
        also_close: what closes the pair as well.
        joiner: what stands between calls (between pairs when ``each``).
        parameter: picture of one parameter, for ``{params}``; ``also_parameter`` is read as well, and tried first.
        optional: openers that the model may leave out; the call then starts at the call's own first literal
            (qwen3_coder without ``<tool_call>``, DeepSeek without ``calls▁begin``).
        bare: nothing marks a call: it is one only at the start of the text or of a line, and only when the name is
            that of a tool of the request (FORMATS.md, H8).
        literals: how ``{literals}`` are spelled.
        escapes: (character, spelling) pairs of names and keys that stand in an attribute.
        nested: values that are objects or arrays are elements inside the parameter's own (``elements``).
        id: pattern that takes the name out of ``{id}``, for formats whose header is one string (Kimi).
        id_picture: how such an id is drawn, with ``{name}`` and ``{index}`` (counted over the conversation).
    """

    call: str
    calls: tuple[str, str] = ("", "")
    also_close: tuple[str, ...] = ()
    each: bool = False
    joiner: str = ""
    parameter: str = ""
    also_parameter: str = ""
    optional: bool = False
    bare: bool = False
    literals: Literals | None = None
    escapes: tuple[tuple[str, str], ...] = ()
    nested: bool = False
    id: str = ""
    id_picture: str = ""

    def __post_init__(self) -> None:
        slots = SLOT.findall(self.call)
        bodies = [s for s in slots if s in _BODIES]
        if len(bodies) != 1:
            raise BadFamily(f"call {self.call!r} needs exactly one of {_BODIES} as a slot, it has {bodies}")
        if (bodies == ["params"]) != bool(self.parameter):
            raise BadFamily(f"call {self.call!r}: {{params}} and a parameter picture go together")
        if (bodies == ["literals"]) != bool(self.literals):
            raise BadFamily(f"call {self.call!r}: {{literals}} and the way they are spelled go together")
        if "name" not in slots and "?P<name>" not in self.id:
            raise BadFamily(f"call {self.call!r} has no {{name}}, and no id pattern gives one")

    @property
    def is_json(self) -> bool:
        """Whether a call is one JSON object."""
        return self.call.startswith("{") and SLOT.match(self.call) is None

    def between(self, turn: str) -> str:
        """What stands between calls in a family whose messages begin with ``turn``."""
        shares_a_pair = bool(self.calls[0]) and not self.each
        return self.joiner if self.joiner or shares_a_pair else turn

    @property
    def opener(self) -> str:
        """The literal that a call starts with, the pair's opener first; empty where a slot comes first."""
        return SLOT.split(self.calls[0] or self.call)[0]


@dataclass(frozen=True)
class Family:
    """A model family: its reasoning half, its tool half, and how it is found.

    Attributes:
        name: canonical name; ``aliases`` are the names other servers use for the same format.
        tool_aliases, reasoning_aliases: names that elsewhere mean this family's one half only.
        turn: what each message of the turn begins with, for families whose turn is several messages; the prompt
            holds the first, so the model's own text goes on behind it.
        reasoning: opener and closer of reasoning. One line break at the inner side of each, and those after the
            closer, are the format's and not the thought's.
        also_reasoning: other spellings of the same pair.
        starts_open: state at the first token when no prompt tail is known: True for models whose template opens
            the reasoning itself.
        also_ends_reasoning: markers that end open reasoning without its closer, besides the call openers.
        text: what stands around visible text, in families that mark it; ``also_text`` are other openers of it.
        forms: how calls are written; the first is the one drawn, the others are read as well.
        no_tools: names by which the format says that no tool is called; such a call is shown to nobody, unless the
            request has a tool of that name.
        asides: pictures of markup inside what is said that is shown to nobody (citations).
        before_calls: what stands between visible text and the first call; the format's, not the text's.
        ends: markers that end a turn, or that close what needs no closing; swallowed when the engine shows them.
        fingerprint: strings that occur together in the chat templates of this family and give it away.
        also_fingerprint: another such set, for templates that never show a call.
        not_in_template: strings that must not occur in them.
        variant: a piece of the markers that differs by checkpoint, and a pattern whose group finds it in a chat
            template (``respelled``).
        models: checkpoints it was drawn from, for the table of families.
        source: where the format is documented.
    """

    name: str = ""
    aliases: tuple[str, ...] = ()
    tool_aliases: tuple[str, ...] = ()
    reasoning_aliases: tuple[str, ...] = ()
    turn: str = ""
    reasoning: tuple[str, str] | None = None
    also_reasoning: tuple[tuple[str, str], ...] = ()
    starts_open: bool = False
    also_ends_reasoning: tuple[str, ...] = ()
    text: tuple[str, str] | None = None
    also_text: tuple[str, ...] = ()
    forms: tuple[Form, ...] = ()
    no_tools: tuple[str, ...] = ()
    asides: tuple[str, ...] = ()
    before_calls: str = ""
    ends: tuple[str, ...] = ()
    fingerprint: tuple[str, ...] = ()
    also_fingerprint: tuple[str, ...] = ()
    not_in_template: tuple[str, ...] = ()
    variant: tuple[str, str] | None = None
    models: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if self.reasoning is not None and not all(m.strip() for m in self.reasoning):
            raise BadFamily(
                f"family {self.name!r}: reasoning needs an opener and a closer, it has {self.reasoning}"
            )
        if self.also_ends_reasoning and self.reasoning is None:
            raise BadFamily(f"family {self.name!r}: also_ends_reasoning without reasoning")
        for form in self.forms:
            if not (self.turn + form.opener).strip():
                raise BadFamily(
                    f"call {form.call!r} starts with a slot and nothing stands around it: no marker opens it"
                )

    def without_calls(self) -> Family:
        """The same family for a request that must not make calls: their markup is text."""
        return replace(self, forms=())

    @property
    def kind(self) -> Literal["reasoning", "tools", "both", "text"]:
        """Which halves it has."""
        if self.reasoning and self.forms:
            return "both"
        return "reasoning" if self.reasoning else "tools" if self.forms else "text"


def pair(reasoning: Family | None, tools: Family | None) -> Family:
    """The reasoning half of one family and the tool half of another as one family, read in one pass."""
    thinks, calls = reasoning or Family(), tools or Family()
    if thinks == calls:
        return thinks
    return Family(
        name="+".join(f.name for f in (thinks, calls) if f.name),
        reasoning=thinks.reasoning,
        also_reasoning=thinks.also_reasoning,
        starts_open=thinks.starts_open,
        also_ends_reasoning=thinks.also_ends_reasoning,
        turn=calls.turn or thinks.turn,
        text=calls.text or thinks.text,
        also_text=calls.also_text or thinks.also_text,
        forms=calls.forms,
        no_tools=calls.no_tools,
        asides=tuple(dict.fromkeys((*thinks.asides, *calls.asides))),
        before_calls=calls.before_calls,
        ends=tuple(dict.fromkeys((*thinks.ends, *calls.ends))),
        models=tuple(dict.fromkeys((*thinks.models, *calls.models))),
        source=" ".join(dict.fromkeys(f.source for f in (thinks, calls) if f.source)),
    )


def respelled(family: Family, template: str) -> Family:
    """The family as the checkpoint of a chat template spells it: what holds the piece that the template names first."""
    found = re.search(family.variant[1], template) if family.variant else None
    if family.variant is None or found is None:
        return family
    old, new = family.variant[0], found[1]
    forms = [_with_piece(form, old, new) for form in family.forms]
    pairs = [
        (o.replace(old, new), c.replace(old, new))
        for o, c in (family.reasoning or ("", ""), *family.also_reasoning)
    ]
    forms.sort(key=lambda form: new not in form.call)
    pairs.sort(key=lambda pair: new not in pair[0])
    ends = tuple(end.replace(old, new) for end in family.ends)
    return replace(family, forms=tuple(forms), reasoning=pairs[0], also_reasoning=tuple(pairs[1:]), ends=ends)


def _with_piece(form: Form, old: str, new: str) -> Form:
    spelled = {name: getattr(form, name).replace(old, new) for name in ("call", "parameter")}
    return replace(form, **spelled, calls=(form.calls[0].replace(old, new), form.calls[1].replace(old, new)))


@dataclass(frozen=True)
class Found:
    """Which family a chat template belongs to, and why; ``known`` is False when it is a guess at plain text."""

    family: Family
    why: str
    known: bool


def markers(family: Family) -> Sequence[str]:
    """Every literal of the family's pictures, for telling which of them are single special tokens."""
    pictures: list[str] = [family.turn, *(family.reasoning or ()), *(family.text or ()), *family.ends]
    pictures += [
        *family.also_ends_reasoning,
        *family.also_text,
        *family.asides,
        *(m for pair in family.also_reasoning for m in pair),
    ]
    for form in family.forms:
        pictures += [*form.calls, *form.also_close, form.call, form.parameter, form.also_parameter]
        pictures += [form.literals.quote] if form.literals else []
    return [
        p for picture in pictures for p in SLOT.split(picture) if p and SLOT.fullmatch("{" + p + "}") is None
    ]
