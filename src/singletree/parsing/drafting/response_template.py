"""Converts a checkpoint's own ``response_template`` to a family.

In Transformers (5.13 and later) ``tokenizer_config.json`` can describe how to parse a turn: fields, each with an
opener, a closer (literals or regular expressions) and the type of its content
(https://huggingface.co/docs/transformers/main/en/chat_response_parsing). It describes how to parse a turn, not how to
write one, and its patterns are more general than pictures. No family is made from a template when it is not certain
that both describe the same format.

The older ``response_schema`` (5.0 to 5.12) is one regular expression over the whole turn and is not supported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from singletree.errors import BadFamily
from singletree.parsing.family import Family, Form, Literals

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_PIECE = re.compile(
    r"\(\?P<(?P<group>\w+)>(?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)"  # a named group
    r"|(?P<space>\\s[*+]?|\\n[?*+]?)"
    r"|\\(?P<escaped>[^\w])"
    r"|(?P<open>\(\?:)|(?P<close>\)\??)|(?P<end>\$|\\Z)|(?P<either>\|)"
    r"|(?P<plain>[^\\()\[\]{}.*+?^$|])"
)
_NAME, _KEY, _VALUE = "name", "key", "value"


class UnsupportedTemplate(BadFamily):
    """A response template contains something that no family can express; the message names it."""


def family_of(template: object, name: str = "response_template") -> Family:
    """Return the family that ``template`` describes, with the given name.

    Raises:
        UnsupportedTemplate: it is not a response template, or one whose fields no picture can express.
    """
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if (
        not isinstance(fields, Mapping)
        or not fields
        or not all(isinstance(f, Mapping) for f in fields.values())
    ):
        raise UnsupportedTemplate("it has no fields")
    try:
        return _family(fields, name)
    except (TypeError, AttributeError, LookupError) as error:  # a checkpoint's file may hold anything
        raise UnsupportedTemplate(f"a value in it is of the wrong type: {error}") from error


def _family(fields: Mapping[str, Mapping[str, Any]], name: str) -> Family:
    unknown = set(fields) - {*_REASONING_FIELDS, "content", "tool_calls"}
    if unknown:
        raise UnsupportedTemplate(f"its field {sorted(map(str, unknown))[0]!r} is unknown")
    reasoning = next((fields[field] for field in _REASONING_FIELDS if field in fields), None)
    content, calls = fields.get("content"), fields.get("tool_calls")
    text, ends = _content(content) if content is not None else (None, ())
    return Family(
        name=name,
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
    if content == "xml-inline" and function == {"name": "{name}", "arguments": "{content}"}:
        parameter = _parameter(str(options.get("tag_pattern", "")))
        return Form(f"{opener}{{params}}{_unclosed(opener, closer)}{closer}", parameter=parameter)
    if content != "json":
        raise UnsupportedTemplate(f"its calls have content of the type {content!r}")
    literals = _literals(options)
    if function == {"name": "{name}", "arguments": "{content}"}:
        if literals is not None:
            return Form(f"{opener}{{{{literals}}}}{closer}", literals=literals)
        return Form(f"{opener}{{args}}{closer}")
    if literals is None and "{name}" not in opener:
        return Form(_object(function), (opener, closer), wrap_each=bool(field.get("repeats")))
    raise UnsupportedTemplate("its calls have a structure that is not supported")


def _unclosed(opener: str, closer: str) -> str:
    """Return the closer of the tag that names the call; a response template only describes the parameters in it."""
    tag = re.search(r"<([\w:]+)[ =][^<>]*\{name\}[^<>]*>", opener)
    return f"\n</{tag[1]}>\n" if tag and f"</{tag[1]}>" not in closer else ""


def _object(function: object) -> str:
    """Return the picture of a call that is one JSON object."""
    keys = ("name", "arguments")
    if isinstance(function, Mapping):
        keys = tuple(str(function.get(key, "")).removeprefix("{content.").rstrip("}") for key in keys)  # type: ignore[assignment]
        if not all(re.fullmatch(r"\w+", key) for key in keys):
            raise UnsupportedTemplate("its calls have a structure that is not supported")
    elif function != "{content}":
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
    return Literals(
        ":",
        ",",
        str(delimiters[0][0]),
        verbatim=True,
        bare_keys=True,
        bare_words=True,
        words=("true", "false", "null"),
    )


def _parameter(pattern: str) -> str:
    """Return the picture of a parameter, from the regular expression of one."""
    picture = "".join(_picture_of(pattern, "parameters"))
    if "{key}" not in picture or "{value}" not in picture:
        raise UnsupportedTemplate(f"the pattern {pattern!r} of its parameters cannot be written as a picture")
    return picture


def _side(field: Mapping[str, Any], side: str, what: str) -> str:
    return next(iter(_sides(field, side, what)), "")


def _sides(field: Mapping[str, Any], side: str, what: str) -> Iterator[str]:
    """Yield the openers or closers of a field as pictures; the first one is rendered."""
    literal, pattern = field.get(side), field.get(f"{side}_pattern")
    if isinstance(literal, str):
        yield literal
    elif isinstance(literal, list):
        yield from (each for each in literal if isinstance(each, str))
    elif isinstance(pattern, str):
        yield from filter(None, (alternative.rstrip("\n") for alternative in _alternatives(pattern, what)))


def _alternatives(pattern: str, what: str) -> list[str]:
    """Return the alternatives of a pattern, each as a picture: ``a|b`` and ``(?:a|b)c``."""
    pieces = list(_pieces(pattern, what))
    if ("open", "(?:") in [(kind, text) for kind, text in pieces if kind == "open"]:
        start = next(i for i, piece in enumerate(pieces) if piece[0] == "open")
        stop = next((i for i, piece in enumerate(pieces) if piece[0] == "close"), len(pieces))
        head, inner, tail = pieces[:start], pieces[start + 1 : stop], pieces[stop + 1 :]
        behind = _split(tail)
        return [_joined([*head, *each, *behind[0]]) for each in _split(inner)] + [
            _joined(b) for b in behind[1:]
        ]
    return [_joined(each) for each in _split(pieces)]


def _split(pieces: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    ways: list[list[tuple[str, str]]] = [[]]
    for piece in pieces:
        if piece[0] == "either":
            ways.append([])
        else:
            ways[-1].append(piece)
    return ways


def _picture_of(pattern: str, what: str) -> Iterator[str]:
    pieces = list(_pieces(pattern, what))
    if any(kind in ("open", "close", "either") for kind, _ in pieces):
        raise UnsupportedTemplate(f"the pattern {pattern!r} of its {what} cannot be written as a picture")
    yield _joined(pieces)


def _joined(pieces: list[tuple[str, str]]) -> str:
    text = "".join(_REPLACEMENTS.get(kind, text) for kind, text in pieces)
    return re.sub(r"\n+", "\n", text)


_REPLACEMENTS = {"space": "\n", "end": ""}


def _pieces(pattern: str, what: str) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a pattern. Raise UnsupportedTemplate for anything that a picture cannot express."""
    at = 0
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        if found is None or found.lastgroup is None:
            raise UnsupportedTemplate(f"the pattern {pattern!r} of its {what} cannot be written as a picture")
        kind, text = found.lastgroup, found[found.lastgroup]
        if kind == "group":
            text = _slot(text, pattern, what)
        yield kind, text
        at = found.end()


def _slot(group: str, pattern: str, what: str) -> str:
    if group not in (_NAME, _KEY, _VALUE):
        raise UnsupportedTemplate(f"the group {group!r} in the pattern {pattern!r} of its {what} is unknown")
    return "{" + group + "}"
