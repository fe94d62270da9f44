"""Pictures for vLLM: what is the same over HTTP and in process, and how prompts with pictures are made in process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from singletree.engines.engine import GenerationJob
from singletree.engines.remote.pictures import SentPictures, pictures_of
from singletree.errors import InvalidRequest, SingletreeError
from singletree.pictures import PromptPicture

UNKNOWN_PICTURE = "Cache miss for"
"""How vLLM refuses a picture that it does not have and whose bytes were not sent."""

PicturePrompt = Callable[[list[int], Sequence[tuple[str, bytes | None]], str | None], Any]
"""Makes a prompt of vLLM, not expanded yet, from token ids, pictures and the salt of its cache, None for none.

A picture is its id and its bytes; without bytes vLLM has to know the id. Blocks while it decodes the pictures.
"""

_MAX_MESSAGE_LENGTH = 400


def picture_uuid(picture: PromptPicture) -> str:
    """Return the id that takes the place of the bytes in the key of vLLM's prefix cache: so it has to be their hash."""
    return f"sha256:{picture.key}"


class PictureInputs:
    """Makes the inputs of one ``AsyncLLM`` from prompts with pictures.

    A picture is decoded once: while vLLM has it, its id is enough.

    Args:
        llm: vLLM.
        make_prompt: makes its prompts.
    """

    def __init__(self, llm: Any, make_prompt: PicturePrompt) -> None:
        self._llm = llm
        self._make_prompt = make_prompt
        self._sent = SentPictures()

    async def render(self, job: GenerationJob, token_ids: list[int]) -> tuple[Any, Sequence[int]]:
        """Return the engine input with the pictures expanded, and the length of each.

        Raises:
            InvalidRequest: the pictures do not fit the placeholders, or vLLM refuses them.
        """
        pictures = pictures_of(job)
        try:
            found = await self._expand(token_ids, pictures, job.cache_salt)
        except ValueError as error:
            if UNKNOWN_PICTURE not in str(error) or not self._sent.forget(pictures):
                raise _refusal(error) from error
            found = await self._expand(token_ids, pictures, job.cache_salt)
        self._sent.note(pictures)
        return found, _lengths(found)

    def forget(self, pictures: Sequence[PromptPicture]) -> None:
        """Note that vLLM lacks one of ``pictures``."""
        self._sent.forget(pictures)

    async def count(self, picture: PromptPicture) -> int:
        """Return how many tokens vLLM's processor makes of the picture. Raises InvalidRequest if it refuses it."""
        token_ids, alone = picture.alone()
        try:
            return _lengths(await self._expand(token_ids, (alone,), counts_only=True))[0]
        except SingletreeError:
            raise
        except Exception as error:
            raise _refusal(error) from error

    async def _expand(
        self,
        token_ids: list[int],
        pictures: Sequence[PromptPicture],
        cache_salt: str = "",
        *,
        counts_only: bool = False,
    ) -> Any:
        given = [
            (picture_uuid(each), None if each in self._sent and not counts_only else each.data)
            for each in pictures
        ]
        prompt = await asyncio.to_thread(self._make_prompt, token_ids, given, cache_salt or None)
        # What is only counted never reaches vLLM's other process, so the cache that both share must not have it.
        (engine_input,) = await self._llm.renderer.render_cmpl_async([prompt], skip_mm_cache=counts_only)
        return engine_input


def _lengths(engine_input: Any) -> list[int]:
    return [place.length for place in engine_input["mm_placeholders"]["image"]]


def _refusal(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the engine refused the pictures: {str(error)[:_MAX_MESSAGE_LENGTH]}")
