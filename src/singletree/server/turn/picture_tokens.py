"""How many tokens an engine reads for the pictures of a prompt.

A prompt has one placeholder for each picture, as the conversation has one picture. What the engine expands it to is
remembered here, beside the prompt: it is never a part of the token ids, since an engine would expand it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from singletree.engines.engine import Chunk, Engine, count_picture_tokens
from singletree.pictures import PromptPicture
from singletree.server.models.eyes import Eyes

_ENTRY_BYTES = 64


def learn_counts(
    eyes: Eyes | None, prompt_tokens: int, pictures: Sequence[PromptPicture], chunk: Chunk
) -> None:
    """Remember what ``chunk`` reports about the ``pictures`` of a prompt with ``prompt_tokens`` token ids."""
    if eyes is None or chunk.prompt_tokens is None:
        return
    counts = eyes.token_counts
    if chunk.picture_tokens is not None:
        for picture, count in zip(pictures, chunk.picture_tokens, strict=False):
            counts.put(picture.key, count, _ENTRY_BYTES)
        return
    # An engine that reports only the whole: what the known pictures do not take is the one unknown picture's.
    unknown = [picture.key for picture in pictures if counts.get(picture.key) is None]
    if unknown and len(set(unknown)) == 1:
        known = sum(counts.get(picture.key) or 0 for picture in pictures)
        rest = chunk.prompt_tokens - (prompt_tokens - len(pictures)) - known
        if rest > 0 and rest % len(unknown) == 0:
            counts.put(unknown[0], rest // len(unknown), _ENTRY_BYTES)


async def exact_length(
    eyes: Eyes | None, engine: Engine, prompt_tokens: int, pictures: Sequence[PromptPicture]
) -> int:
    """Return the length of a prompt as the engine reads it. The engine counts the pictures that are not known yet.

    Raises:
        SingletreeError: as ``Engine.generate``.
    """
    if eyes is None:
        return prompt_tokens
    total = prompt_tokens - len(pictures)
    for picture in pictures:
        count = eyes.token_counts.get(picture.key)
        if count is None:
            count = await count_picture_tokens(engine, picture)
            eyes.token_counts.put(picture.key, count, _ENTRY_BYTES)
        total += count
    return total


def known_length(eyes: Eyes | None, prompt_tokens: int, pictures: Sequence[PromptPicture]) -> int:
    """Return the length of a prompt, as far as its pictures are known; an unknown one counts as one token."""
    if eyes is None or not pictures:
        return prompt_tokens
    return prompt_tokens + sum((eyes.token_counts.get(picture.key) or 1) - 1 for picture in pictures)


def without_expansion(eyes: Eyes | None, pictures: Sequence[PromptPicture], tokens: int) -> int:
    """Return how many token ids of a prompt the first ``tokens`` that the engine read are.

    A picture that is only partly among them does not count.
    """
    added = 0
    for picture in pictures if eyes is not None else ():
        assert eyes is not None
        count = eyes.token_counts.get(picture.key) or 1
        if tokens < picture.position + added + count:
            return min(tokens - added, picture.position)
        added += count - 1
    return tokens - added
