"""The limits of a request: how much of each thing one client may ask for at once.

Each limit is a field of `RequestLimits` with its default, and ``--limit NAME=NUMBER`` changes it. The limits belong to
the process, because what they protect does: its event loop and its memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from singletree.errors import BadConfiguration, InvalidRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits by name."""

    stop_strings: int = 64
    """Stop strings of a request."""

    stop_characters: int = 4096
    """Characters of all stop strings of a request together."""

    compression_ratio: int = 100
    """How many times as large as the compressed body the body may be, if it is larger than 1 MiB."""

    bytes_in_preparation: int = 64 * 2**20
    """Bytes of the bodies of all requests that are prepared at the same time, of all that wait for it, and of all that
    arrive. A request waits at most 30 s; others are refused as overloaded."""

    characters_per_token: int = 16
    """Characters of a prompt's texts for each token of the model's window; a longer prompt is refused as too
    long without being tokenized."""

    json_values: int = 2_000_000
    """JSON values of a body: numbers, texts, lists, objects. Characters inside a text do not count."""

    json_fields: int = 250_000
    """Objects and lists of a body, and fields of its objects."""

    messages: int = 10_000
    """Messages of a request, or items of an input."""

    tools: int = 2_000
    """Tools of a request."""

    schema_fields: int = 50_000
    """Fields of all JSON schemas of a request together: those of its tools, and that of its response format."""

    grammar_characters: int = 100_000
    """Characters of a grammar, or of all choices, that constrains the answer."""

    pattern_characters: int = 20_000
    """Characters of a regular expression, also of one in a JSON schema."""

    logit_biases: int = 10_000
    """Tokens in ``logit_bias``."""

    bad_word_characters: int = 20_000
    """Characters of all ``bad_words`` together."""

    prompt_logprobs: int = 1_000_000
    """Log probabilities of a prompt: its tokens, times the alternatives of each and itself, times the answers."""

    pictures: int = 1_000
    """Pictures and documents of a request."""

    pdf_documents: int = 100
    """PDF documents of a request: each is read by a process of its own."""

    context_edits: int = 20
    """Edits in ``context_management``."""


_current = RequestLimits()


def current() -> RequestLimits:
    """Return the limits of this process."""
    return _current


def parse_limits(given: Iterable[str]) -> RequestLimits:
    """Return the defaults, but for ``given``, such as ``("stop_strings=1000",)``.

    Raises:
        BadConfiguration: a name is unknown, or a number is not a positive whole number.
    """
    names = {field.name for field in dataclasses.fields(RequestLimits)}
    changed: dict[str, int] = {}
    for each in given:
        name, _, number = each.partition("=")
        name = name.strip().replace("-", "_")
        if name not in names:
            raise BadConfiguration(
                f"--limit {each}: no limit has this name; there are {', '.join(sorted(names))}"
            )
        if not number.strip().isdecimal() or int(number) < 1:
            raise BadConfiguration(f"--limit {each}: give a whole number from 1 on, such as {name}=1000")
        changed[name] = int(number)
    return RequestLimits(**changed)


def plain_number(value: float) -> str:
    """Return ``value`` for a message: a whole number with all its digits, never with an exponent."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def configure(limits: RequestLimits) -> None:
    """Set the limits of this process."""
    global _current
    _current = limits


def check(name: str, number: int, *, what: str, param: str) -> None:
    """Check that ``number`` is within the limit ``name``.

    Args:
        name: The name of a field of `RequestLimits`.
        number: How much the request asks for.
        what: Words for it, such as ``"stop strings"``.
        param: The field of the request.

    Raises:
        InvalidRequest: it is more; the message has number, limit and the flag that changes the limit.
    """
    limit: int = getattr(_current, name)
    if number > limit:
        message = (
            f"{param} has {number} {what}; send at most {limit} "
            f"(the operator of this server can set --limit {name}={number})"
        )
        raise InvalidRequest(message, param=param)
