"""Find the assistant's turns in the tokens of a prompt, and parse them.

Tokens are packed, ``WIDTH`` bytes each; positions are counted in tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import groupby

from singletree.conversation import Tool, Turn
from singletree.engines.engine import FIRST_PICTURE_NUMBER
from singletree.parsing.parser import parse
from singletree.server.models.catalog import ChatFormat
from singletree.server.sessions.divergence import WIDTH

OPENING = 16
"""Approximate number of tokens at the end of a prompt that open the generated turn."""

PICTURE = "[picture]"
_LONGEST_TURN = 65_536
"""Most tokens of an earlier turn that are decoded to compare it."""


def turn_header(chat_format: ChatFormat) -> bytes:
    """Return the tokens that begin every turn of the assistant; empty where the template has no single header."""
    return chat_format.derived(_turn_header)


def _turn_header(chat_format: ChatFormat) -> bytes:
    if chat_format.layout is None or len(chat_format.layout.headers) != 1:
        return b""
    # White space at the end of the header may form one token with the following text.
    return array("I", chat_format.tokenizer.encode(chat_format.layout.headers[0].rstrip())).tobytes()


def turn_start(tokens: bytes, place: int, chat_format: ChatFormat) -> int:
    """Return the position behind the header of the assistant's turn that contains the token ``place``; 0 if unknown."""
    header = turn_header(chat_format)
    if chat_format.family.message_header:
        return max(turn_starts(tokens, place, chat_format), default=0)
    at = tokens.rfind(header, 0, place * WIDTH) if header else -1
    while at > 0 and at % WIDTH:  # the match spans parts of two tokens
        at = tokens.rfind(header, 0, at + len(header) - 1)
    return 0 if at < 0 else (at + len(header)) // WIDTH


def turn_starts(tokens: bytes, place: int, chat_format: ChatFormat) -> list[int]:
    """Return the positions behind the headers of the assistant's turns that begin before the token ``place``.

    Where a turn consists of several messages, each has the header; only that of the first begins the turn.
    """
    header = turn_header(chat_format)
    starts: list[int] = []
    last, at = 0, tokens.find(header, 0, place * WIDTH) if header else -1
    while at >= 0:
        behind = at + len(header)
        if at % WIDTH == 0:
            between = chat_format.tokenizer.decode(ids_between(tokens, last, behind // WIDTH))
            if not starts or _end_of_turn(between, chat_format)[1]:
                starts.append(behind // WIDTH)
            last = behind // WIDTH
        at = tokens.find(header, at + 1, place * WIDTH)
    return starts


def turn_at(tokens: bytes, start: int, tools: Sequence[Tool], chat_format: ChatFormat) -> Turn:
    """Parse the turn in ``tokens`` that begins at the token ``start``.

    Args:
        tools: the tools that the turn could call.
        chat_format: the model's family, tokenizer and turn delimiters.
    """
    decode = chat_format.tokenizer.decode
    text = decode(ids_between(tokens, start, start + _LONGEST_TURN))
    end, ender = _end_of_turn(text, chat_format)
    # Where each message of a turn has an end, that of the last one can also close a call.
    family = chat_format.family
    closers = {closer for form in family.forms for closer in (form.calls[1], *form.also_close)}
    text = text[:end] + (ender if family.message_header and ender in closers else "")
    opened = decode(ids_between(tokens, max(0, start - OPENING), start))
    return parse(family, text, tools, opened)


def rest_of_turn(text: str, chat_format: ChatFormat) -> str:
    """Return ``text``, which begins inside a turn, up to the end of that turn."""
    return text[: _end_of_turn(text, chat_format)[0]]


def _end_of_turn(text: str, chat_format: ChatFormat) -> tuple[int, str]:
    """Return where the turn at the start of ``text`` ends, and what ends it; empty where it does not end.

    Where a turn consists of several messages, the end of one is not the end of the turn if the next one follows.
    """
    enders, header, at = chat_format.derived(_turn_enders), chat_format.family.message_header, 0
    while True:
        found = [(place, ender) for ender in enders if (place := text.find(ender, at)) >= 0]
        end, ender = min(found, default=(len(text), ""))
        at = end + len(ender)
        if not (ender and header and text.startswith(header, at)):
            return end, ender


def _turn_enders(chat_format: ChatFormat) -> frozenset[str]:
    """Return the texts that end a turn: those that the template prints, and those of the model's stop tokens."""
    layout, tokenizer = chat_format.layout, chat_format.tokenizer
    stops = map(tokenizer.decode, ([id] for id in tokenizer.stop_token_ids))
    return frozenset([*(layout.ends if layout else ()), *stops]) - {""}


def excerpt(tokens: bytes, start: int, end: int, chat_format: ChatFormat) -> str:
    """Return the text of the tokens from ``start`` up to ``end``, with ``PICTURE`` for each picture."""
    ids, decode = ids_between(tokens, start, end), chat_format.tokenizer.decode
    if not ids or max(ids) < FIRST_PICTURE_NUMBER:
        return decode(ids)
    runs = groupby(ids, key=lambda id: id >= FIRST_PICTURE_NUMBER)
    return "".join(PICTURE * len(list(run)) if is_picture else decode(run) for is_picture, run in runs)


def ids_between(tokens: bytes, start: int, end: int) -> array[int]:
    """Return the token ids from ``start`` up to ``end``."""
    return array("I", tokens[start * WIDTH : end * WIDTH])
