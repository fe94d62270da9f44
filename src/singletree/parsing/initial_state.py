"""Finds the state in which a turn begins, from the tail of the rendered prompt (house rule H1)."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from singletree.parsing.family import Family, markers

_NEAR = 128
"""In how many characters at the end of the tail a turn boundary is looked for first."""


def opens_in_reasoning(family: Family, prompt_tail: str, special_tokens: Collection[str] = ()) -> bool:
    """Return whether the first token already belongs to reasoning.

    Args:
        family: the format of the turn.
        prompt_tail: the end of the rendered prompt; empty when not known, and then ``Family.starts_open`` decides. Only
            the text after the last turn boundary counts.
        special_tokens: texts of the vocabulary's special tokens. One that is not a marker of the family is a turn
            boundary.
    """
    if family.reasoning is None:
        return False
    if not prompt_tail:
        return family.starts_open
    tail = _after_boundary(prompt_tail, family, special_tokens)
    pairs = (family.reasoning, *family.also_reasoning)
    opened = max(tail.rfind(opener.strip()) for opener, _ in pairs)
    return opened > max(tail.rfind(closer.strip()) for _, closer in pairs)


def continues_message(family: Family, prompt_tail: str) -> bool:
    """Return whether the prompt ends with a message header (``Family.message_header``) that the model continues."""
    return bool(family.message_header) and (not prompt_tail or prompt_tail.endswith(family.message_header))


def _after_boundary(tail: str, family: Family, special_tokens: Collection[str]) -> str:
    boundaries = _boundaries(family, frozenset(special_tokens))
    longest = max(map(len, boundaries), default=0)
    size = _NEAR
    while size < len(tail):
        near = tail[-size:]
        cut = _last_end(near, boundaries)
        if cut >= longest:  # One that begins before ``near`` ends before this one.
            return near[cut:]
        size *= 8
    return tail[_last_end(tail, boundaries) :]


def _last_end(text: str, boundaries: Collection[str]) -> int:
    return max((at + len(b) for b in boundaries if (at := text.rfind(b)) >= 0), default=0)


@lru_cache(maxsize=256)
def _boundaries(family: Family, special_tokens: frozenset[str]) -> tuple[str, ...]:
    own = "\n".join(markers(family))
    opens = [pair[0] for pair in (family.reasoning, *family.also_reasoning) if pair]
    return (
        *(e for e in family.dropped_markers if not any(e in o for o in opens)),
        *(t for t in special_tokens if t and t not in own),
    )
