"""Whether a served model gets the pictures of a conversation, and in which form."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field

from singletree.engines.engine import EngineInfo
from singletree.lru import LruCache
from singletree.prompts.template.chat_template import ChatTemplate
from singletree.prompts.template.picture_token import find_picture_token
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
    """Return how the model gets pictures, and an empty text; or None, and why it gets none.

    Args:
        engine: what the engine declares.
    """
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
