"""The declaration of a model family: how its models write a turn.

A family is data. Its patterns are pieces of a turn as the model writes it, with slots:

``{name}``    the tool's name
``{id}``      the call's id, in formats that have one
``{args}``    the arguments as one JSON object
``{params}``  the arguments as a run of parameters, each in the form of ``parameter`` with ``{key}`` and ``{value}``
              (and ``{string}`` where the format writes ``true`` or ``false`` for "this is a string", ``{type}`` where
              it writes the JSON type)
``{literals}``  the arguments as a run of ``key=value`` in a programming language's literals (``Literals``)
``{index}``   the number of the call in its turn, counted from one; it is ignored when read
``{sources}``  the sources of a citation: numbers and their punctuation
``{any}``     a word of the format that may be anything, or missing; only parsed, never rendered

A line break in a pattern stands for any white space or none. A pattern that starts with ``{`` is a JSON object, whose
white space and key order are free. One declaration serves parsing, rendering, constraining and testing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from singletree.conversation import ThinkingVariables
from singletree.errors import BadFamily

SLOT = re.compile(r"\{(name|id|args|params|literals|key|value|string|type|index|any|sources)\}")
_BODIES = ("args", "params", "literals")
ITEM = "item"
"""The name of the elements of an array, where a value is made of elements."""


@dataclass(frozen=True)
class Literals:
    """A family's notation for arguments as literals of a programming language.

    Attributes:
        assign: text between a key and its value; also inside nested objects when ``bare_keys``.
        separator: text between arguments, and between items.
        quote: text that opens and closes a string when rendered.
        verbatim: whether nothing is escaped inside ``quote``.
        bare_keys: whether keys of nested objects are written without quotes.
        bare_words: whether a word that is not a literal is a string.
        words: how true, false and null are rendered.
        nested_quotes: whether a string may contain its own quote without an escape. A quote does not end the string
            when the text after it cannot follow a string. After such a quote, the string ends only where the whole call
            and its pair end, or where another parameter of the tool begins.
    """

    assign: str = "="
    separator: str = ", "
    quote: str = '"'
    verbatim: bool = False
    bare_keys: bool = False
    bare_words: bool = False
    words: tuple[str, str, str] = ("True", "False", "None")
    nested_quotes: bool = False


@dataclass(frozen=True)
class Form:
    """One way of writing tool calls.

    Attributes:
        call: pattern of one call; ends in ``{args}``, ``{params}`` or ``{literals}`` and the text that closes it.
        calls: the pair of texts around calls. All calls of a turn share one pair, unless ``wrap_each`` is set.
        wrap_each: whether each call has its own pair ``calls``.
        also_close: other texts that close the pair.
        joiner: text between calls (between pairs when ``wrap_each``).
        parameter: pattern of one parameter, for ``{params}``.
        also_parameter: other patterns of a parameter that are parsed too, and tried before it, in order.
        next_closes: whether a value whose closing tag is missing ends where the next parameter opens: at the start of a
            line, and only if the tool's schema has a property of that name which was not given yet. Anything else is
            data.
        pair_ends: whether the pair's closer also ends a call whose own closing tag is missing. In a value it is data.
        optional: whether the model may leave out the opener of the pair; the call then starts at its own first literal
            (qwen3_coder without ``<tool_call>``, DeepSeek without ``calls▁begin``).
        unmarked: whether calls have no marker. Such a call counts only at the start of the text or of a line, and only
            when its name is that of a tool of the request (house rule H8).
        behind: regular expression of text that an ``unmarked`` call may also follow in mid-line, unless it is code in
            Markdown.
        literals: notation of ``{literals}``.
        escapes: (character, escape) pairs for names and keys that are written in an attribute.
        nested: whether objects and arrays are written as elements inside the parameter's own element.
        id: regular expression that takes the name out of ``{id}``, where the header is one string (Kimi).
        id_format: pattern of an id, with ``{name}`` and ``{index}`` (counted over the conversation).
    """

    call: str
    calls: tuple[str, str] = ("", "")
    also_close: tuple[str, ...] = ()
    wrap_each: bool = False
    joiner: str = ""
    parameter: str = ""
    also_parameter: tuple[str, ...] = ()
    next_closes: bool = False
    pair_ends: bool = False
    optional: bool = False
    unmarked: bool = False
    behind: str = ""
    literals: Literals | None = None
    escapes: tuple[tuple[str, str], ...] = ()
    nested: bool = False
    id: str = ""
    id_format: str = ""

    def __post_init__(self) -> None:
        slots = SLOT.findall(self.call)
        bodies = [s for s in slots if s in _BODIES]
        if len(bodies) != 1:
            raise BadFamily(f"call {self.call!r} needs exactly one of {_BODIES} as a slot, it has {bodies}")
        if (bodies == ["params"]) != bool(self.parameter):
            raise BadFamily(f"call {self.call!r}: {{params}} and a parameter pattern go together")
        if (bodies == ["literals"]) != bool(self.literals):
            raise BadFamily(f"call {self.call!r}: {{literals}} and a Literals value go together")
        if "name" not in slots and "?P<name>" not in self.id:
            raise BadFamily(f"call {self.call!r} has no {{name}}, and no id pattern with a group 'name'")

    @property
    def is_json(self) -> bool:
        """Return whether a call is one JSON object."""
        return self.call.startswith("{") and SLOT.match(self.call) is None

    def escaped(self, text: str) -> str:
        """Return a name or key as it is written in an attribute."""
        for character, escape in reversed(self.escapes):
            text = text.replace(character, escape)
        return text

    def unescaped(self, text: str) -> str:
        """Return a name or key that was written in an attribute."""
        for character, escape in self.escapes:
            text = text.replace(escape, character)
        return text

    def between(self, header: str) -> str:
        """Return the text between calls in a family whose messages begin with ``header``."""
        return self.joiner if self.joiner or (self.calls[0] and not self.wrap_each) else header

    @property
    def opener(self) -> str:
        """Return the literal that a call starts with (the pair's opener, if any); empty where a slot comes first."""
        return SLOT.split(self.calls[0] or self.call)[0]


@dataclass(frozen=True)
class Family:
    """A model family: how it writes reasoning, how it writes tool calls, and how its chat templates are recognised.

    Attributes:
        name: canonical name.
        aliases: names that other servers use for the same format.
        tool_aliases, reasoning_aliases: names that elsewhere mean only the tool half or the reasoning half.
        message_header: text that each message of a turn begins with, for families whose turn is several messages. The
            prompt holds the header of the first message, and the model's text continues after it.
        reasoning: opener and closer of reasoning. One line break at the inner side of each, and those after the
            closer, belong to the format and not to the reasoning.
        also_reasoning: other forms of the same pair.
        starts_open: whether a turn begins inside reasoning when no prompt tail is known: True for models whose template
            opens the reasoning itself.
        also_ends_reasoning: markers that end open reasoning without its closer, in addition to the call openers.
        text: opener and closer of visible text, in families that mark it.
        also_text: other openers of visible text.
        forms: how calls are written. The first form is rendered; all are parsed.
        no_tools: tool names by which the format states that no tool is called. Such a call is never shown to a client,
            unless the request has a tool of that name.
        hidden_markup: patterns of markup inside text and reasoning that is never shown to a client (citations).
        before_calls: text between visible text and the first call; it belongs to the format, not to the text.
        stop_markers: markers that end a turn. They are dropped from the output. Those that are special tokens of the
            checkpoint's vocabulary also stop the engine, whether or not the checkpoint names them as its ends.
        stray_markers: other markers of the format that are dropped from the output, such as closers out of their place.
        thinking_variables: variables that control reasoning in the family's chat templates alone. Those that any
            template may read need no declaration (``prompts/template/capabilities.py``).
        fingerprint: strings that all occur in a chat template of this family.
        also_fingerprint: another such set, for templates that never show a call.
        not_in_template: strings that occur in no chat template of this family.
        variant: a piece of the markers that differs by checkpoint, and a regular expression whose group finds it in a
            chat template.
        models: checkpoints that the declaration was made from, for the table of families.
        source: where the format is documented.

    Example:
        >>> from singletree import Family, Form, parse
        >>> own = Family(reasoning=("<r>", "</r>"), forms=(Form("<c>{name}{args}</c>"),))
        >>> parse(own, '<r>why</r>so<c>ls{}</c>').tool_calls[0].name
        'ls'
    """

    name: str = ""
    aliases: tuple[str, ...] = ()
    tool_aliases: tuple[str, ...] = ()
    reasoning_aliases: tuple[str, ...] = ()
    message_header: str = ""
    reasoning: tuple[str, str] | None = None
    also_reasoning: tuple[tuple[str, str], ...] = ()
    starts_open: bool = False
    also_ends_reasoning: tuple[str, ...] = ()
    text: tuple[str, str] | None = None
    also_text: tuple[str, ...] = ()
    forms: tuple[Form, ...] = ()
    no_tools: tuple[str, ...] = ()
    hidden_markup: tuple[str, ...] = ()
    before_calls: str = ""
    stop_markers: tuple[str, ...] = ()
    stray_markers: tuple[str, ...] = ()
    thinking_variables: ThinkingVariables = ThinkingVariables()  # noqa: RUF009 (frozen)
    fingerprint: tuple[str, ...] = ()
    also_fingerprint: tuple[str, ...] = ()
    not_in_template: tuple[str, ...] = ()
    variant: tuple[str, str] | None = None
    models: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        who = f"family {self.name!r}"
        if self.reasoning is not None and not all(m.strip() for m in self.reasoning):
            raise BadFamily(f"{who}: reasoning needs an opener and a closer, it has {self.reasoning}")
        if self.also_ends_reasoning and self.reasoning is None:
            raise BadFamily(f"{who}: also_ends_reasoning without reasoning")
        for form in self.forms:
            if not (self.message_header + form.opener).strip():
                what = f"call {form.call!r} starts with a slot, and no marker comes before it"
                raise BadFamily(f"{what}; set calls or message_header")

    def __hash__(self) -> int:
        # Every request looks its tables up by the family; a hash of all fields would take longer than the look-up.
        # These differ between the families of one process.
        return hash((self.name, self.reasoning, self.forms[0].call if self.forms else None))

    @lru_cache(maxsize=256)  # noqa: B019 (families live as long as the process)
    def without_calls(self) -> Family:
        """Return the family without its calls: their markup is then text. For a request that must not make calls."""
        return replace(self, forms=())

    @property
    def dropped_markers(self) -> tuple[str, ...]:
        """Return the markers that belong to no part of a turn, and are dropped from the output."""
        return (*self.stop_markers, *self.stray_markers)

    @property
    def call_id_format(self) -> str:
        """Return the pattern of the ids by which the model knows its calls; empty if any id is good.

        It is that of the form which takes the name out of the id: there the id is a part of the call itself.
        """
        return next((form.id_format for form in self.forms if form.id and form.id_format), "")

    @property
    def kind(self) -> Literal["reasoning", "tools", "both", "text"]:
        """Return which halves the family has."""
        if self.reasoning and self.forms:
            return "both"
        return "reasoning" if self.reasoning else "tools" if self.forms else "text"


def combine_halves(reasoning: Family | None, tools: Family | None) -> Family:
    """Return one family from the reasoning half of ``reasoning`` and the tool half of ``tools``, parsed in one pass."""
    thinks, calls = reasoning or Family(), tools or Family()
    if thinks == calls:
        return thinks
    return Family(
        name="+".join(f.name for f in (thinks, calls) if f.name),
        reasoning=thinks.reasoning,
        also_reasoning=thinks.also_reasoning,
        starts_open=thinks.starts_open,
        also_ends_reasoning=thinks.also_ends_reasoning,
        message_header=calls.message_header or thinks.message_header,
        text=calls.text or thinks.text,
        also_text=calls.also_text or thinks.also_text,
        forms=calls.forms,
        no_tools=calls.no_tools,
        hidden_markup=tuple(dict.fromkeys((*thinks.hidden_markup, *calls.hidden_markup))),
        before_calls=calls.before_calls,
        stop_markers=tuple(dict.fromkeys((*thinks.stop_markers, *calls.stop_markers))),
        stray_markers=tuple(dict.fromkeys((*thinks.stray_markers, *calls.stray_markers))),
        thinking_variables=thinks.thinking_variables,
        models=tuple(dict.fromkeys((*thinks.models, *calls.models))),
        source=" ".join(dict.fromkeys(f.source for f in (thinks, calls) if f.source)),
    )


def with_variant(family: Family, template: str) -> Family:
    """Return ``family`` with the markers of the checkpoint that ``template`` (a chat template) belongs to.

    Forms and pairs with the checkpoint's own variant of the markers come first. Without a ``variant`` in the family, or
    when the template does not contain it, the family is returned unchanged.
    """
    found = re.search(family.variant[1], template) if family.variant else None
    if family.variant is None or found is None:
        return family
    old, new = family.variant[0], found[1]

    def own(*markers: str) -> Any:
        return tuple(marker.replace(old, new) for marker in markers)

    forms = [
        replace(form, call=own(form.call)[0], parameter=own(form.parameter)[0], calls=own(*form.calls))
        for form in family.forms
    ]
    pairs = [own(*pair) for pair in (family.reasoning or ("", ""), *family.also_reasoning)]
    forms.sort(key=lambda form: new not in form.call)
    pairs.sort(key=lambda pair: new not in pair[0])
    return replace(
        family,
        forms=tuple(forms),
        reasoning=pairs[0],
        also_reasoning=tuple(pairs[1:]),
        stop_markers=own(*family.stop_markers),
        stray_markers=own(*family.stray_markers),
    )


@dataclass(frozen=True)
class DetectedFamily:
    """The family that a chat template belongs to, and the reason; ``known`` is False when plain text was assumed."""

    family: Family
    why: str
    known: bool


def markers(family: Family) -> Sequence[str]:
    """Return every literal of the family's patterns, to find those that are single special tokens."""
    patterns = [
        family.message_header,
        *(family.reasoning or ()),
        *(family.text or ()),
        *family.dropped_markers,
    ]
    patterns += [*family.also_ends_reasoning, *family.also_text, *family.hidden_markup]
    patterns += [marker for pair in family.also_reasoning for marker in pair]
    for form in family.forms:
        patterns += [*form.calls, *form.also_close, form.call, form.parameter, *form.also_parameter]
        patterns += [form.literals.quote] if form.literals else []
    literals = (literal for pattern in patterns for literal in SLOT.split(pattern)[::2])
    return [literal for literal in literals if literal]
