"""In what state a turn begins: the tail of the rendered prompt says it (FORMATS.md, H1)."""

from __future__ import annotations

from collections.abc import Collection

from singletree.parsing.family import Family, markers


def opens_in_reasoning(family: Family, prompt_tail: str, special_tokens: Collection[str] = ()) -> bool:
    """Whether the first token already belongs to reasoning.

    Only what follows the last turn boundary counts: a special token that is no marker of the family is one.
    """
    if family.reasoning is None:
        return False
    if not prompt_tail:
        return family.starts_open
    tail = _after_boundary(prompt_tail, family, special_tokens)
    pairs = (family.reasoning, *family.also_reasoning)
    opened = max(tail.rfind(opener.strip()) for opener, _ in pairs)
    return opened > max(tail.rfind(closer.strip()) for _, closer in pairs)


def begun(family: Family, prompt_tail: str) -> bool:
    """Whether the prompt ends in the opener of a message (``Family.turn``) that the model goes on with."""
    return bool(family.turn) and (not prompt_tail or prompt_tail.endswith(family.turn))


def _after_boundary(tail: str, family: Family, special_tokens: Collection[str]) -> str:
    own = "\n".join(markers(family))
    opens = [pair[0] for pair in (family.reasoning, *family.also_reasoning) if pair]
    boundaries = [
        *(e for e in family.ends if not any(e in o for o in opens)),
        *(t for t in special_tokens if t and t not in own),
    ]
    cut = max((at + len(b) for b in boundaries if (at := tail.rfind(b)) >= 0), default=0)
    return tail[cut:]
