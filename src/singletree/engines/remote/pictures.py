"""Pictures beside token ids, for the servers that take both in one request."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from singletree.engines.engine import GenerationJob
from singletree.errors import InvalidRequest
from singletree.pictures import PromptPicture


def pictures_of(job: GenerationJob) -> Sequence[PromptPicture]:
    """Return the pictures of a job, after a check that each has one placeholder and each placeholder a picture.

    A server cannot be trusted with a wrong count: SGLang never answers, and vLLM accepts it in silence.

    Raises:
        InvalidRequest: the counts differ, or a placeholder is elsewhere.
    """
    pictures = job.pictures
    if not pictures:
        return ()
    prompt = job.prompt_token_ids
    placeholders = {picture.placeholder_id for picture in pictures}
    found = [at for at, token_id in enumerate(prompt) if token_id in placeholders]
    if found != [picture.position for picture in pictures]:
        raise InvalidRequest(
            f"the prompt has {len(found)} placeholders for {len(pictures)} pictures, or has them elsewhere; the chat "
            "template must print one placeholder for each picture"
        )
    return pictures


def data_url(picture: PromptPicture) -> str:
    """Return the picture as a data URL."""
    return f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"
