"""Finds the state in which a turn begins, from the tail of the rendered prompt (house rule H1)."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from singletree.parsing.family import Family, markers

_NEAR = (24, 48, 128)
"""In how many characters at the end of the tail a turn boundary is looked for, one after the other.

A template ends all its prompts in a few ways: of the first two sizes, what was found is remembered."""


def opens_in_reasoning(family: Family, prompt_tail: str, special_tokens: Collection[str] = ()) -> bool:
    """Return whether the first token already belongs to reasoning.

    Of ``prompt_tail`` only the text after the last turn boundary counts; where it is empty, ``Family.starts_open``
    decides. A special token that is not a marker of the family is a turn boundary.
    """
    if family.reasoning is None:
        return False
    if not prompt_tail:
        return family.starts_open
    known = frozenset(special_tokens)
    for size in _NEAR[:-1]:
        if size < len(prompt_tail):
            found = _state_near(family, known, prompt_tail[-size:])
            if found is not None:
                return found
    return _is_open(family, _after_boundary(prompt_tail, _NEAR[-1], _boundaries(family, known)))


@lru_cache(maxsize=1024)
def _state_near(family: Family, special_tokens: frozenset[str], near: str) -> bool | None:
    """Return whether a prompt that ends with ``near`` opens reasoning; None if more of it has to be seen."""
    tail = _behind_boundary(near, _boundaries(family, special_tokens))
    return None if tail is None else _is_open(family, tail)


def _is_open(family: Family, tail: str) -> bool:
    pairs = [pair for pair in (family.reasoning, *family.also_reasoning) if pair is not None]
    opened = max(tail.rfind(opener.strip()) for opener, _ in pairs)
    return opened > max(tail.rfind(closer.strip()) for _, closer in pairs)


def continues_message(family: Family, prompt_tail: str) -> bool:
    """Return whether the prompt ends with a message header (``Family.message_header``) that the model continues."""
    return bool(family.message_header) and (not prompt_tail or prompt_tail.endswith(family.message_header))


def _after_boundary(tail: str, size: int, boundaries: _Boundaries) -> str:
    while size < len(tail):
        found = _behind_boundary(tail[-size:], boundaries)
        if found is not None:
            return found
        size *= 8
    return tail[_last_end(tail, boundaries.texts) :]


def _behind_boundary(near: str, boundaries: _Boundaries) -> str | None:
    """Return what is behind the last boundary of a text that ends with ``near``; None if that may begin before."""
    cut = _last_end(near, boundaries.texts)
    return near[cut:] if cut and cut >= boundaries.longest_around else None


def _last_end(text: str, boundaries: Collection[str]) -> int:
    return max((at + len(b) for b in boundaries if (at := text.rfind(b)) >= 0), default=0)


class _Boundaries(NamedTuple):
    """The texts that end a turn, and the length of the longest one that has another in it; 0 if none has."""

    texts: tuple[str, ...]
    longest_around: int


@lru_cache(maxsize=256)
def _boundaries(family: Family, special_tokens: frozenset[str]) -> _Boundaries:
    own = "\n".join(markers(family))
    opens = [pair[0] for pair in (family.reasoning, *family.also_reasoning) if pair]
    texts = (
        *(e for e in family.dropped_markers if not any(e in o for o in opens)),
        *(t for t in special_tokens if t and t not in own),
    )
    around = (text for text in texts if any(other in text for other in texts if other != text))
    return _Boundaries(texts, max(map(len, around), default=0))
