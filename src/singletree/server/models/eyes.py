"""Whether a served model gets the pictures of a conversation, in which form, and how many tokens they take."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from singletree.engines.engine import Chunk, Engine, EngineInfo, count_picture_tokens
from singletree.lru import LruCache
from singletree.pictures import PromptPicture
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.template.pictures import find_picture_token
from singletree.prompts.tokenizer.added_tokens import PICTURE_MARK
from singletree.prompts.tokenizer.tokenizer import Tokenizer

_COUNT_BYTES = 2**20
_MEDIA = re.compile("image|img|picture|vision|video|audio|sound|media", re.IGNORECASE)
INSTALL = "pip install 'singletree[pictures]'"


@dataclass(frozen=True, slots=True)
class Eyes:
    """How a model gets pictures.

    Attributes:
        placeholder_id: the token that stands for each picture in a prompt.
        mark: the text that stands for a picture in a message; empty where the template has a form for pictures.
        media_types: the formats that the engine decodes.
        reads_text: whether the engine looks for placeholders in the text of a prompt.
        token_counts: how many tokens each picture takes, by its key, as far as the engine has reported it.
    """

    placeholder_id: int
    mark: str
    media_types: frozenset[str]
    reads_text: bool = False
    token_counts: LruCache[str, int] = field(default_factory=lambda: LruCache(_COUNT_BYTES))


def find_eyes(engine: EngineInfo, template: ChatTemplate, tokenizer: Tokenizer) -> tuple[Eyes | None, str]:
    """Return how the model gets pictures, and an empty text; or None, and why it gets none."""
    support = engine.pictures
    if support is None:
        return None, engine.blindness or "the engine takes no pictures for this model"
    mark = PICTURE_MARK if support.place == "mark" else ""
    placeholder = tokenizer.picture_mark_id if mark else find_picture_token(template, tokenizer)
    if placeholder is None:
        return None, "the chat template prints no token for a picture"
    if importlib.util.find_spec("PIL") is None:
        return None, f"Pillow is not installed on the server, which checks pictures: {INSTALL}"
    return Eyes(placeholder, mark, support.media_types, support.reads_text), ""


def tokenizer_for(eyes: Eyes | None, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer for the prompts of a model with ``eyes``.

    If the engine reads text, no text of a client may read like a token that stands for a picture, a video or a sound:
    SGLang would never answer.
    """
    if eyes is None or not eyes.reads_text:
        return tokenizer
    return tokenizer.with_neutral([text for text in tokenizer.added_tokens if _MEDIA.search(text)])


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
