"""Matches added tokens in a text, and keeps them out of text that a client wrote.

An added token is matched in the text before anything else is done to it: leftmost, and the longest of those
that start there (https://github.com/huggingface/tokenizers, added vocabulary). The segments between two of
them are encoded independently, which makes a cache of segments exact.

There are two guards. In text of a client, no added token is matched at all. In text that a client sends back as the
assistant's, only the ordinary tokens of the model's own format (``<think>``) are: the client can have written it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from functools import partial

import msgspec

GUARD = "\udfff"
"""The mark that breaks the text of an added token. It is a lone surrogate: UTF-8 has none, so no client can send it."""

_NO_TOKEN = GUARD * 2
"""Stands before a token of one character. Two marks, since a single one can be the edge of the text before it."""

PICTURE_MARK = "\udffc\udffc"
"""Stands for a picture in a prompt whose engine puts pictures in their places itself. No client can send it."""

REPLACEMENT = "\ufffd"
"""Replaces characters that cannot be encoded."""

NEUTRAL = "\u2060"
"""WORD JOINER, which is not displayed: it breaks text that reads like an added token, for engines that read text."""

_SHORT = 64
_SURROGATE = re.compile("[\ud800-\udfff]")
_WHITE_SPACE = r"[^\S\x1c-\x1f]"
"""Unicode's White_Space property; Python's own class has four separators more."""

_HTML_ELEMENT = (
    "table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup|code|a|p|br|hr|ul|ol|li"
    "|div|span|pre|img"
)
_HTML_TAG = re.compile(rf"</?(?:{_HTML_ELEMENT})>")


class AddedToken(msgspec.Struct, frozen=True):
    """A token matched by its text before the model's own segmentation, as ``tokenizer.json`` has it.

    A model generates a ``special`` one only as this one token. White space before it or after it belongs to it with
    ``lstrip`` or ``rstrip``; a ``single_word`` is matched only where no word character touches it.
    """

    id: int
    text: str = msgspec.field(name="content")
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def is_guarded(token: AddedToken) -> bool:
    """Return whether text of a client must not be encoded as this token.

    Some vocabularies (Gemma) add runs of white space and HTML tags only to encode them in one token. They do not
    structure a prompt, and if they were broken, the model would see text it was not trained on.
    """
    return token.special or not (
        token.text.isspace() or set(token.text) == {"▁"} or _HTML_TAG.fullmatch(token.text)
    )


def replace_surrogates(text: str) -> str:
    """Return ``text`` with U+FFFD for each lone surrogate, which no encoding can represent."""
    try:
        text.isascii() or text.encode()  # several times as fast as to look for one
    except UnicodeEncodeError:
        return _SURROGATE.sub(REPLACEMENT, text)
    return text


def strip_guards(text: str) -> str:
    """Return ``text`` without guards."""
    return text if text.isascii() else text.replace(GUARD, "")


class TokenGuard:
    """Breaks ``tokens`` in a text, so that they are not matched; those in ``neutral`` for a model as well."""

    def __init__(self, tokens: Iterable[AddedToken], neutral: Collection[str] = ()) -> None:
        self._neutral = neutral
        guarded = [AddedToken(token.id, token.text) for token in tokens if token.text]
        longer = [token for token in guarded if len(token.text) > 1]
        single = (token.text for token in guarded if len(token.text) == 1)
        # White space has no other tokens, and templates trim it.
        self._single = [character for character in single if not character.isspace()]
        self._guarded = re.compile(_alternation(longer))
        self._starts = {t.text[:n] for t in longer for n in range(1, len(t.text))}
        self._ends = {t.text[n:] for t in longer for n in range(1, len(t.text))}
        self._first_characters = {t.text[0] for t in longer}
        self._last_characters = {t.text[-1] for t in longer}
        self._edges = {*self._first_characters, *self._last_characters, *self._single}
        self._longest = max((len(t.text) for t in longer), default=0)

    def __call__(self, text: str) -> str:
        """Return ``text`` with marks, such that none of the tokens is matched in it or across its edges.

        If a text ends with the first half of a token, the template could complete the token with the text that it
        writes next. So such an edge is marked as well.
        """
        if len(text) < _SHORT and text.isascii() and self._edges.isdisjoint(text):
            return text  # as most names and ids
        text = self._guarded.sub(self._broken, replace_surrogates(text))
        for character in self._single:
            text = text.replace(character, _NO_TOKEN + character)
        # Most edges have no character with which a part of a token could begin or end.
        may_begin = not self._first_characters.isdisjoint(text[-self._longest :])
        may_end = not self._last_characters.isdisjoint(text[: self._longest])
        reach = range(1, min(self._longest, len(text) + 1))
        if may_begin and any(text[-n:] in self._starts for n in reach):
            text += GUARD
        if may_end and any(text[:n] in self._ends for n in reach):
            text = GUARD + text
        return text

    def _broken(self, match: re.Match[str]) -> str:
        text = match[0]
        return GUARD.join(f"{text[:1]}{NEUTRAL}{text[1:]}" if text in self._neutral else text)


class AddedTokens:
    """The added tokens of one vocabulary; ``guard`` is the guard for text of a client.

    Those with ``structural`` ids structure a prompt although they are not marked as special: they end a turn, or the
    checkpoint names them. ``neutral`` ones are broken by ``NEUTRAL``.
    """

    def __init__(
        self, tokens: Iterable[AddedToken], structural: Collection[int] = (), neutral: Collection[str] = ()
    ) -> None:
        self.tokens = tuple(token for token in tokens if token.text)
        self.ids = {token.text: token.id for token in self.tokens}
        self._split = re.compile(f"({_alternation(self.tokens)})")
        self._structural = frozenset(structural)
        self._neutral = neutral
        self.guard = TokenGuard(self._all_but(()), neutral)
        self._guards: dict[frozenset[str], TokenGuard] = {}

    def guard_except(self, allowed: Collection[str]) -> TokenGuard:
        """Return the guard in which the ``allowed`` texts of tokens match: those of a family, so there are few."""
        key = frozenset(allowed)
        if key not in self._guards:
            self._guards[key] = TokenGuard(self._all_but(key), self._neutral)
        return self._guards[key]

    def _all_but(self, allowed: Collection[str]) -> Iterator[AddedToken]:
        for token in self.tokens:
            is_ordinary = not token.special and token.id not in self._structural
            if is_ordinary and (token.text in allowed or len(token.text) == 1 or not is_guarded(token)):
                continue
            yield token

    def split(self, text: str) -> list[str]:
        """Cut ``text`` at its added tokens: segment, token, segment … token, segment; segments can be empty."""
        return self._split.split(text)

    def unambiguous(self, ids: Collection[int]) -> list[AddedToken]:
        """Return those of ``ids`` that no other token can overlap: a text can be cut at any occurrence of them."""
        plain = [
            t for t in self.tokens if t.id in ids and not (t.lstrip or t.rstrip or t.text != t.text.strip())
        ]
        if any(token.single_word for token in self.tokens):
            return []  # whether such a token is matched depends on the text beside it
        return [token for token in plain if not any(map(partial(_overlaps, token.text), self.ids))]

    def id(self, piece: str) -> int:
        """Return the id of a token as ``split`` cut it out, which can include white space around it."""
        found = self.ids.get(piece)
        return self.ids[piece.strip()] if found is None else found


def _overlaps(text: str, other: str) -> bool:
    if other == text:
        return False
    return text in other or any(other.endswith(text[:n]) for n in range(1, len(text)))


def _alternation(tokens: Iterable[AddedToken]) -> str:
    trie: dict[str, object] = {}
    stripped_left: list[str] = []
    single: list[str] = []
    for token in sorted(tokens, key=lambda token: len(token.text), reverse=True):
        end = (r"(?!\w)" if token.single_word else "") + (f"{_WHITE_SPACE}*" if token.rstrip else "")
        if token.lstrip or token.single_word:
            begin = f"{_WHITE_SPACE}*" if token.lstrip else ""
            begin += r"(?<!\w)" if token.single_word else ""
            stripped_left.append(begin + re.escape(token.text) + end)
            continue
        if len(token.text) == 1:
            single.append(f"(?<!{_NO_TOKEN}){re.escape(token.text)}{end}")
            continue
        node = trie
        for character in token.text:
            node = node.setdefault(character, {})  # type: ignore[assignment]
        node[""] = end
    alternatives = [*stripped_left, *([_trie_expression(trie)] if trie else []), *single]
    return "|".join(alternatives) or "(?!)"


def _trie_expression(node: dict[str, object]) -> str:
    """Return the regular expression of a trie: children by character; "" has the expression after a whole token."""
    branches = [
        re.escape(character) + _trie_expression(child)
        for character, child in node.items()
        if isinstance(child, dict)
    ]
    if "" in node:
        branches.append(str(node[""]))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
