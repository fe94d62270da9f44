"""Finds the state in which a turn begins, from the tail of the rendered prompt (house rule H1)."""

from __future__ import annotations

from collections.abc import Collection

from singletree.parsing.family import Family, markers


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
    own = "\n".join(markers(family))
    opens = [pair[0] for pair in (family.reasoning, *family.also_reasoning) if pair]
    boundaries = [
        *(e for e in family.dropped_markers if not any(e in o for o in opens)),
        *(t for t in special_tokens if t and t not in own),
    ]
    cut = max((at + len(b) for b in boundaries if (at := tail.rfind(b)) >= 0), default=0)
    return tail[cut:]
