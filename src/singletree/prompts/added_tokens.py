"""Added tokens: where they stand in a text, and how to keep them out of text that a client wrote.

An added token is matched in the text before anything else is done to it: leftmost, and the longest of those
that start there (https://github.com/huggingface/tokenizers, added vocabulary). The stretches between two of
them are encoded independently, which makes a cache of segments exact.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial

GUARD = "\udfff"
"""The mark that breaks an added token's text. A lone surrogate: no UTF-8 carries one, so none is forged."""

REPLACEMENT = "\ufffd"

_SURROGATE = re.compile("[\ud800-\udfff]")
_WHITE_SPACE = r"[^\S\x1c-\x1f]"
"""White space as Unicode's White_Space property says; Python's own class has four separators more."""

_HTML_ELEMENT = (
    "table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|s|sub|sup|code|a|p|br|hr|ul|ol|li"
    "|div|span|pre|img"
)
_HTML_TAG = re.compile(rf"</?(?:{_HTML_ELEMENT})>")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token matched by its text before the model's own segmentation.

    Attributes:
        special: a control token: what a model may only say as this one token, never spelled out.
        lstrip: white space before it belongs to it.
        rstrip: white space after it belongs to it.
        single_word: it counts only where no word character touches it.
    """

    id: int
    text: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def is_guarded(token: AddedToken) -> bool:
    """Whether a client may not spell this token.

    Some vocabularies (Gemma) add runs of white space and HTML tags only to have them short. They structure no
    prompt, and breaking them would feed the model text it was not trained on.
    """
    return token.special or not (
        token.text.isspace() or set(token.text) == {"▁"} or _HTML_TAG.fullmatch(token.text)
    )


def well_formed(text: str) -> str:
    """``text`` with each lone surrogate, which no encoding can carry, as U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub(REPLACEMENT, text)


def strip_guards(text: str) -> str:
    """The readable text of a guarded one."""
    return text if text.isascii() else text.replace(GUARD, "")


class AddedTokens:
    """The added tokens of one vocabulary. ``ids`` maps text to token id."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self.tokens = tuple(token for token in tokens if token.text)
        self.ids = {token.text: token.id for token in self.tokens}
        self._split = re.compile(f"({_alternation(self.tokens)})")
        guarded = [token for token in self.tokens if is_guarded(token) and len(token.text) > 1]
        self._guarded = re.compile(_alternation([AddedToken(t.id, t.text) for t in guarded]))
        self._starts = {t.text[:n] for t in guarded for n in range(1, len(t.text))}
        self._ends = {t.text[n:] for t in guarded for n in range(1, len(t.text))}
        self._longest = max((len(t.text) for t in guarded), default=0)

    def split(self, text: str) -> list[str]:
        """``text`` cut at its added tokens: segment, token, segment … token, segment; some may be empty."""
        return self._split.split(text)

    def apart(self, ids: Collection[int]) -> list[AddedToken]:
        """Those of ``ids`` that nothing else can be read into: a text may be cut at each, wherever it stands."""
        plain = [
            t for t in self.tokens if t.id in ids and not (t.lstrip or t.rstrip or t.text != t.text.strip())
        ]
        if any(token.single_word for token in self.tokens):
            return []  # what touches such a token counts
        return [token for token in plain if not any(map(partial(_reaches_into, token.text), self.ids))]

    def id(self, piece: str) -> int:
        """The id of a token as ``split`` cut it out, white space that belongs to it included."""
        found = self.ids.get(piece)
        return self.ids[piece.strip()] if found is None else found

    def guard(self, text: str) -> str:
        """``text`` with marks in it such that no added token can be read in it or across its edges.

        A text that ends with the first half of a token could otherwise complete it with what a template
        writes next, so such an edge is marked as well.
        """
        text = self._guarded.sub(lambda match: GUARD.join(match[0]), well_formed(text))
        reach = range(1, min(self._longest, len(text) + 1))
        if any(text[-n:] in self._starts for n in reach):
            text += GUARD
        if any(text[:n] in self._ends for n in reach):
            text = GUARD + text
        return text


def _reaches_into(text: str, other: str) -> bool:
    """Whether ``other`` holds ``text`` or ends with its beginning."""
    if other == text:
        return False
    return text in other or any(other.endswith(text[:n]) for n in range(1, len(text)))


def _alternation(tokens: Iterable[AddedToken]) -> str:
    """A regular expression that matches the longest of ``tokens`` at a place."""
    trie: dict[str, object] = {}
    stripped_left: list[str] = []
    for token in sorted(tokens, key=lambda token: len(token.text), reverse=True):
        end = (r"(?!\w)" if token.single_word else "") + (f"{_WHITE_SPACE}*" if token.rstrip else "")
        if token.lstrip or token.single_word:
            begin = f"{_WHITE_SPACE}*" if token.lstrip else ""
            begin += r"(?<!\w)" if token.single_word else ""
            stripped_left.append(begin + re.escape(token.text) + end)
            continue
        node = trie
        for character in token.text:
            node = node.setdefault(character, {})  # type: ignore[assignment]
        node[""] = end
    alternatives = [*stripped_left, *([_trie_expression(trie)] if trie else [])]
    return "|".join(alternatives) or "(?!)"


def _trie_expression(node: dict[str, object]) -> str:
    """The expression of a trie: children keyed by character, and by "" what follows a whole token."""
    branches = [
        re.escape(character) + _trie_expression(child)
        for character, child in node.items()
        if isinstance(child, dict)
    ]
    if "" in node:
        branches.append(str(node[""]))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
