"""Finds a call in a text that is known to contain it, and makes its pattern."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from singletree.parsing.family import Literals
from singletree.prefixes import common_prefix

STRINGS = {"kone": "vone", "ktwo": "vtwo"}
"""The arguments of the call that is searched for."""

_ATOM = re.compile(r"<[^<>\n]*>|<[^<>\n]*\Z|\[/?[A-Z][A-Z_]*\]|\{\w+\}|\w+|\s|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DraftedCall:
    """A call found in a text from ``start`` to ``end``, and ``pattern`` (``call``) and other fields of its ``Form``.

    ``whole``: whether it is a JSON object that contains both name and arguments.
    """

    start: int
    end: int
    pattern: str
    whole: bool = False
    parameter: str = ""
    literals: Literals | None = None


def find_call(text: str, name: str, typed: str, start: int = 0) -> DraftedCall | None:
    """Return the next call of ``name`` with ``STRINGS``; None when no pattern can describe how it is written.

    Args:
        text: a turn with calls, in which ``{id}`` stands for their ids.
        typed: a turn in which ``kone`` is 7, ``ktwo`` true and ``kfour`` an object: it shows how these are written.
    """
    if name not in text[start:]:
        name = "{id}"
    at = text.find(name, start)
    if at < 0:
        return None
    arguments = _json_arguments(text, start)
    if arguments is None:
        return _literals(text, name, at, typed) or _parameters(text, name, at, typed)
    whole = _json_call(text, name, at, arguments, start)
    if whole is not None or arguments[0] < at:
        return whole
    return DraftedCall(at, arguments[1], _named(text[at : arguments[0]], name) + "{args}")


def _named(text: str, name: str) -> str:
    return text if name == "{id}" else text.replace(name, "{name}")


def _json_arguments(text: str, start: int) -> tuple[int, int] | None:
    for found in re.compile(r"\{").finditer(text, start):
        value, end = _decoded(text, found.start())
        if value == STRINGS:
            return found.start(), end
    return None


def _json_call(text: str, name: str, at: int, arguments: tuple[int, int], start: int) -> DraftedCall | None:
    for found in re.compile(r"\{").finditer(text, start, min(at, arguments[0])):
        begin = found.start()
        value, end = _decoded(text, begin)
        if isinstance(value, dict) and end >= arguments[1]:
            around = text[begin : arguments[0]] + "\0" + text[arguments[1] : end]
            return DraftedCall(begin, end, _named(around, name).replace("\0", "{args}"), whole=True)
    return None


def _decoded(text: str, at: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _places(text: str, at: int, words: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the places of each key and value after ``at``, in order; an empty list when one is missing."""
    places = []
    for word in (word for pair in words.items() for word in pair):
        found = text.find(word, at)
        if found < 0:
            return []
        at = found + len(word)
        places.append((found, at))
    return places


def _literals(text: str, name: str, at: int, typed: str) -> DraftedCall | None:
    """Return the call, if its arguments are ``key=value`` in some language's literals."""
    places = _places(text, at, STRINGS)
    if not places:
        return None
    assigned, parted = text[places[0][1] : places[1][0]], text[places[1][1] : places[2][0]]
    quote = next((assigned[i:] for i in range(len(assigned)) if parted.startswith(assigned[i:])), "")
    assign, separator = assigned.removesuffix(quote), parted.removeprefix(quote)
    if not quote or "," not in separator or "<" in assign + separator:
        return None
    pattern = _named(text[at : places[0][0]], name) + "{literals}"
    end = places[-1][1] + len(quote)
    return DraftedCall(at, end, pattern, literals=_notation(assign, separator, quote, typed))


def _notation(assign: str, separator: str, quote: str, typed: str) -> Literals:
    in_json = "True" not in typed and "true" in typed
    words = ("true", "false", "null") if in_json else ("True", "False", "None")
    bare = re.search(r"(?<![\"'\w>])kin\b", typed) is not None
    tagged = len(quote) > 1
    return Literals(assign, separator, quote, tagged, bare_keys=bare, bare_words=tagged, words=words)


def _parameters(text: str, name: str, at: int, typed: str) -> DraftedCall | None:
    places = _places(text, at, STRINGS)
    if not places:
        return None
    keys = list(STRINGS)
    lead = text[at + len(name) : places[0][0]]
    into = text[places[0][1] : places[1][0]]
    between = text[places[1][1] : places[2][0]].replace(keys[0], "{key}")
    after = text[places[3][1] :].replace(keys[1], "{key}")
    closer = shared_start(between, after)
    opener = shared_end(lead, between)
    opener = opener[max(0, len(opener) + len(closer) - len(between)) :]
    if not opener or not closer.strip():
        return None
    # Text that is only between two parameters is rendered after each one. It is white space, which does no harm.
    gap = between[len(closer) : len(between) - len(opener)]
    pattern = f"{opener}{{key}}{_typed(into, typed)}{{value}}{closer}{gap}"
    end = places[3][1] + len(closer.replace("{key}", keys[1]))
    name_and_lead = _named(name, name) + lead[: len(lead) - len(opener)].replace(name, "{name}")
    return DraftedCall(at, end, name_and_lead + "{params}", parameter=pattern)


def _typed(into: str, typed: str) -> str:
    """Return the text between key and value, with a slot in place of the value's type."""
    found = re.search(r"kone(.*?)7", typed, re.DOTALL)
    number = found[1] if found else into
    if number != into and into.replace("true", "false") == number:
        return into.replace("true", "{string}")
    if number != into and into.replace("string", "number") == number:
        return into.replace("string", "{type}")
    return into


def atoms_of(text: str) -> list[str]:
    """Return ``text`` as a list of atoms: tags, words, and single characters."""
    return _ATOM.findall(text)


def shared_start(*texts: str) -> str:
    """Return the longest common start of all texts that cuts no tag and no word."""
    return "".join(_shared([atoms_of(text) for text in texts]))


def shared_end(*texts: str) -> str:
    """Return the longest common end of all texts that cuts no tag and no word."""
    return "".join(reversed(_shared([atoms_of(text)[::-1] for text in texts])))


def _shared(lists: Sequence[list[str]]) -> list[str]:
    return lists[0][: min(common_prefix(lists[0], each) for each in lists)]
