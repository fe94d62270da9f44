"""Pictures for SGLang: the same over HTTP and in process.

Written from SGLang 0.5.23 (``srt/multimodal/processors/base_processor.py``) and from what it did. Most of its
processors look for placeholders in the text that they decode from the token ids. Text that only reads like one makes
them fail, or never answer. ``PictureSupport.reads_text`` keeps such text out of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from singletree.engines.engine import GenerationJob
from singletree.engines.remote.pictures import content_hash, data_url
from singletree.errors import EngineUnfit
from singletree.pictures import PromptPicture

FIRST_ANSWER_SECONDS = 300.0
"""How long a prompt with pictures may wait for its first token, in SGLang's own queue, too."""

SGLANG_BLINDNESS = (
    "SGLang runs this model without pictures; if the model sees them, start SGLang with --enable-multimodal"
)
"""Why a model gets no pictures."""


def sglang_pictures(pictures: Sequence[PromptPicture]) -> dict[str, Any]:
    """Return the fields of a request with ``pictures``.

    The hashes let a server with ``--mm-preprocess-cache-size-mb`` find what its processor made of a picture. SGLang
    compares them with the bytes. ``mm_hashes`` is not sent: SGLang would take it for the picture in its prefix cache.
    """
    return {
        "image_data": [data_url(picture) for picture in pictures],
        "mm_content_hashes": [content_hash(picture) for picture in pictures],
    }


def unread_pictures(job: GenerationJob, prompt_tokens: int, image_tokens: int | None) -> EngineUnfit | None:
    """Return the error if SGLang generates although it has not read the pictures of ``job``; None if it has.

    Args:
        prompt_tokens: how many tokens it read as the prompt.
        image_tokens: how many of them it counts as pictures; None if it counts none.
    """
    if image_tokens or prompt_tokens > len(job.prompt_token_ids):
        return None
    return EngineUnfit(
        f"SGLang read none of the {len(job.pictures)} pictures of the prompt: its processor for this model does not "
        f"know the placeholder (token {job.pictures[0].placeholder_id}); use a newer SGLang, or send no pictures"
    )
