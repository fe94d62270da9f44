"""Converts a checkpoint's own ``response_template`` to a family.

In Transformers (5.13 and later) ``tokenizer_config.json`` can describe how to parse a turn: fields, each with an
opener, a closer (literals or regular expressions) and the type of its content
(https://huggingface.co/docs/transformers/main/en/chat_response_parsing). It describes how to parse a turn, not how to
write one, and its patterns are more general than a family's. No family is made from a template when it is not certain
that both describe the same format.

The older ``response_schema`` (5.0 to 5.12) is one regular expression over the whole turn and is not supported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from singletree.drafting.template_turns import try_family
from singletree.errors import BadFamily
from singletree.parsing.family import Family, Form, Literals
from singletree.prompts.template.chat_template import ChatTemplate

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_PIECE = re.compile(
    r"\(\?P<(?P<group>\w+)>(?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)"  # a named group
    r"|(?P<space>\\s[*+]?|\\n[?*+]?)"
    r"|\\(?P<escaped>[^\w])"
    r"|(?P<open>\(\?:)|(?P<close>\)\??)|(?P<end>\$|\\Z)|(?P<either>\|)"
    r"|(?P<plain>[^\\()\[\]{}.*+?^$|])"
)


class UnsupportedTemplate(BadFamily):
    """A response template contains something that no family can express; the message names it."""


def family_of(template: object) -> Family:
    """Return the family that ``template`` describes.

    Raises:
        UnsupportedTemplate: it is not a response template, or one whose fields no family can express.
    """
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not fields or not isinstance(fields, Mapping):
        raise UnsupportedTemplate("it has no fields")
    if not all(isinstance(field, Mapping) for field in fields.values()):
        raise UnsupportedTemplate("it has no fields")
    try:
        return _family(fields)
    except (TypeError, AttributeError, LookupError) as error:  # a checkpoint's file may hold anything
        raise UnsupportedTemplate(f"a value in it is of the wrong type: {error}") from error


def _family(fields: Mapping[str, Mapping[str, Any]]) -> Family:
    unknown = set(fields) - {*_REASONING_FIELDS, "content", "tool_calls"}
    if unknown:
        raise UnsupportedTemplate(f"its field {sorted(map(str, unknown))[0]!r} is unknown")
    reasoning = next((fields[field] for field in _REASONING_FIELDS if field in fields), None)
    content, calls = fields.get("content"), fields.get("tool_calls")
    text, ends = _content(content) if content is not None else (None, ())
    return Family(
        name="response_template",
        reasoning=_reasoning(reasoning) if reasoning is not None else None,
        starts_open=reasoning is not None and _is_open(reasoning),
        text=text,
        forms=(_form(calls, ends),) if calls is not None else (),
        # Where text has markers, the one that closes it may close other parts of a turn too.
        stop_markers=ends if text is None else (),
        stray_markers=() if text is None else ends,
        source="the checkpoint's response_template",
    )


def _content(field: Mapping[str, Any]) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    """Return opener and closer of text, and the markers that end it; without an opener they end the turn."""
    closers = tuple(_sides(field, "close", "content"))
    if "open" not in field and "open_pattern" not in field:
        return None, closers
    return (_side(field, "open", "content"), closers[0] if closers else ""), closers


def _reasoning(field: Mapping[str, Any]) -> tuple[str, str]:
    closer = _side(field, "close", "reasoning").rstrip("\n")
    opener = closer.replace("</", "<") if _is_open(field) else _side(field, "open", "reasoning")
    if not opener.strip() or not closer.strip() or opener == closer:
        raise UnsupportedTemplate("its reasoning has no opener or no closer")
    return opener, closer


def _is_open(field: Mapping[str, Any]) -> bool:
    """Return whether the prompt has opened the field: its open pattern is only a look-ahead for the closer."""
    return re.match(r"\(\?=\[\\s\\S\]\*\??<", str(field.get("open_pattern", ""))) is not None


def _form(field: Mapping[str, Any], ends: tuple[str, ...]) -> Form:
    opener, closer = _side(field, "open", "tool_calls"), _side(field, "close", "tool_calls")
    for end in ends:
        closer = closer.removesuffix(end)
    content, options = field.get("content", "text"), field.get("content_args") or {}
    function = _function(field.get("transform"))
    is_named = function == {"name": "{name}", "arguments": "{content}"}
    if content == "xml-inline" and is_named:
        parameter = _parameter(str(options.get("tag_pattern", "")))
        return Form(f"{opener}{{params}}{_unclosed(opener, closer)}{closer}", parameter=parameter)
    if content != "json":
        raise UnsupportedTemplate(f"its calls have content of the type {content!r}")
    literals = _literals(options)
    if is_named:
        body = "{args}" if literals is None else "{{literals}}"
        return Form(f"{opener}{body}{closer}", literals=literals)
    if literals is None and "{name}" not in opener:
        return Form(_object(function), (opener, closer), wrap_each=bool(field.get("repeats")))
    raise UnsupportedTemplate("its calls have a structure that is not supported")


def _unclosed(opener: str, closer: str) -> str:
    """Return the closer of the tag that names the call; a response template only describes the parameters in it."""
    tag = re.search(r"<([\w:]+)[ =][^<>]*\{name\}[^<>]*>", opener)
    return f"\n</{tag[1]}>\n" if tag and f"</{tag[1]}>" not in closer else ""


def _object(function: object) -> str:
    keys = ["name", "arguments"]
    if isinstance(function, Mapping):
        keys = [str(function.get(key, "")).removeprefix("{content.").rstrip("}") for key in keys]
    elif function != "{content}":
        keys = []
    if not keys or not all(re.fullmatch(r"\w+", key) for key in keys):
        raise UnsupportedTemplate("its calls have a structure that is not supported")
    return f'{{"{keys[0]}": "{{name}}", "{keys[1]}": {{args}}}}'


def _function(transform: object) -> object:
    """Return what the template converts a call to: ``{content}`` when the JSON object is the call itself."""
    if transform is None:
        return "{content}"
    return transform.get("function") if isinstance(transform, Mapping) else None


def _literals(options: Mapping[str, Any]) -> Literals | None:
    """Return the notation of arguments whose keys and strings differ from JSON; None for JSON."""
    delimiters = options.get("string_delims") or []
    if not delimiters and not options.get("unquoted_keys"):
        return None
    if len(delimiters) != 1 or delimiters[0][0] != delimiters[0][1] or not options.get("unquoted_keys"):
        raise UnsupportedTemplate("its arguments are a variant of JSON that is not supported")
    quote, words = str(delimiters[0][0]), ("true", "false", "null")
    return Literals(":", ",", quote, verbatim=True, bare_keys=True, bare_words=True, words=words)


def _parameter(pattern: str) -> str:
    pieces = list(_pieces(pattern, "parameters"))
    slotted = _joined(pieces)
    is_plain = {"open", "close", "either"}.isdisjoint(kind for kind, _ in pieces)
    if not is_plain or "{key}" not in slotted or "{value}" not in slotted:
        raise UnsupportedTemplate(f"the pattern {pattern!r} of its parameters cannot be written with slots")
    return slotted


def _side(field: Mapping[str, Any], side: str, what: str) -> str:
    return next(iter(_sides(field, side, what)), "")


def _sides(field: Mapping[str, Any], side: str, what: str) -> Iterator[str]:
    """Yield the openers or closers of a field with slots; the first one is rendered."""
    literal, pattern = field.get(side), field.get(f"{side}_pattern")
    if isinstance(literal, str):
        yield literal
    elif isinstance(literal, list):
        yield from (each for each in literal if isinstance(each, str))
    elif isinstance(pattern, str):
        yield from filter(None, (alternative.rstrip("\n") for alternative in _alternatives(pattern, what)))


def _alternatives(pattern: str, what: str) -> list[str]:
    """Return the alternatives of a pattern, each with slots: ``a|b`` and ``(?:a|b)c``."""
    pieces = list(_pieces(pattern, what))
    kinds = [kind for kind, _ in pieces]
    if "open" not in kinds:
        return [_joined(each) for each in _split(pieces)]
    start, stop = kinds.index("open"), kinds.index("close") if "close" in kinds else len(pieces)
    behind, *others = _split(pieces[stop + 1 :])
    inside = _split(pieces[start + 1 : stop])
    return [*(_joined([*pieces[:start], *each, *behind]) for each in inside), *map(_joined, others)]


def _split(pieces: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    ways: list[list[tuple[str, str]]] = [[]]
    for piece in pieces:
        if piece[0] == "either":
            ways.append([])
        else:
            ways[-1].append(piece)
    return ways


def _joined(pieces: list[tuple[str, str]]) -> str:
    text = "".join(_REPLACEMENTS.get(kind, text) for kind, text in pieces)
    return re.sub(r"\n+", "\n", text)


_REPLACEMENTS = {"space": "\n", "end": ""}


def _pieces(pattern: str, what: str) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a pattern. Raise UnsupportedTemplate for anything that slots cannot express."""
    at = 0
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        if found is None or found.lastgroup is None:
            raise UnsupportedTemplate(f"the pattern {pattern!r} of its {what} cannot be written with slots")
        kind, text = found.lastgroup, found[found.lastgroup]
        if kind == "group" and text not in ("name", "key", "value"):
            raise UnsupportedTemplate(
                f"the group {text!r} in the pattern {pattern!r} of its {what} is unknown"
            )
        yield kind, "{" + text + "}" if kind == "group" else text
        at = found.end()


def family_of_template(template: ChatTemplate, response_template: object) -> Family:
    """Return the family that ``response_template`` describes.

    Raises:
        BadFamily: it cannot be read, or misreads turns that ``template`` writes.
    """
    family = family_of(response_template)
    trials = [] if template.is_default else try_family(family, template)
    wrong = [trial.rendered.case for trial in trials if not trial.agrees]
    if wrong:
        raise BadFamily(f"it misreads turns that the chat template writes ({', '.join(wrong)})")
    return family
