"""Pictures beside token ids, for the servers that take both in one request."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from singletree.conversation import Sampling
from singletree.engines.engine import Engine, GenerationJob
from singletree.errors import EngineFailed, EngineUnfit, InvalidRequest
from singletree.lru import LruCache
from singletree.pictures import PromptPicture

COUNT_ID = "singletree-count"
"""The request id of the token that is generated to count what a picture takes."""
_COUNT_BYTES = 2**20
_SENT_BYTES = 2**20  # of keys
_ENTRY_BYTES = 128


def pictures_of(job: GenerationJob) -> Sequence[PromptPicture]:
    """Return the pictures of a job, after a check that each has one placeholder and each placeholder a picture.

    A server cannot be trusted with a wrong count: SGLang never answers, and vLLM accepts it in silence.

    Raises:
        InvalidRequest: the counts differ, or a placeholder is elsewhere, or log-probabilities of the prompt are asked
            for.
    """
    pictures = job.pictures
    if not pictures:
        return ()
    if job.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "there are no log-probabilities of a prompt with pictures; ask for one of the two"
        )
    prompt = job.prompt_token_ids
    placeholders = {picture.placeholder_id for picture in pictures}
    found = [at for at, token_id in enumerate(prompt) if token_id in placeholders]
    if found != [picture.position for picture in pictures]:
        raise InvalidRequest(
            f"the prompt has {len(found)} placeholders for {len(pictures)} pictures, or has them elsewhere; the chat "
            "template must print one placeholder for each picture"
        )
    return pictures


class SentPictures:
    """The pictures whose bytes an engine has, as far as is known: it may have dropped some meanwhile."""

    def __init__(self) -> None:
        self._keys: LruCache[str, bool] = LruCache(_SENT_BYTES)

    def __contains__(self, picture: PromptPicture) -> bool:
        return bool(self._keys.get(picture.key))

    def note(self, pictures: Sequence[PromptPicture]) -> None:
        for picture in pictures:
            self._keys.put(picture.key, True, len(picture.key))

    def forget(self, pictures: Sequence[PromptPicture]) -> bool:
        """Note that the engine lacks one of ``pictures``; return whether any of them was thought to be there."""
        forgotten = [self._keys.pop(picture.key) for picture in pictures]
        return any(forgotten)


class PictureCounts:
    """How many tokens each picture takes, learned from answers that have only the length of the whole prompt."""

    def __init__(self) -> None:
        self._counts: LruCache[str, int] = LruCache(_COUNT_BYTES)

    def uncounted(self, job: GenerationJob) -> Sequence[PromptPicture]:
        """Return the pictures of ``job`` to count first: none where at most one length is unknown."""
        unknown = {picture.key: picture for picture in job.pictures if self._counts.get(picture.key) is None}
        return tuple(unknown.values()) if len(unknown) > 1 else ()

    def learn(self, job: GenerationJob, read_tokens: int) -> Sequence[int] | None:
        """Return the length of each picture of a prompt of which the engine read ``read_tokens``.

        None where they cannot be told apart, or are not what the engine reported before.
        """
        keys = [picture.key for picture in job.pictures]
        known = {key: self._counts.get(key) for key in keys}
        unknown = [key for key in keys if known[key] is None]
        rest = read_tokens - (len(job.prompt_token_ids) - len(keys)) - sum(known[key] or 0 for key in keys)
        if len(set(unknown)) == 1 and rest > 0 and rest % len(unknown) == 0:
            known[unknown[0]] = rest // len(unknown)
            self._counts.put(unknown[0], rest // len(unknown), _ENTRY_BYTES)
        elif unknown or rest:
            return None
        return [known[key] or 0 for key in keys]


def content_hash(picture: PromptPicture) -> str:
    """Return the hash of the bytes that an engine gets.

    They are not always those that ``picture.key`` is the hash of, since a picture may be converted.
    """
    return f"sha256:{hashlib.sha256(picture.data).hexdigest()}"


def data_url(picture: PromptPicture) -> str:
    """Return the picture as a data URL."""
    return f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"


async def count_by_generating(engine: Engine, title: str, picture: PromptPicture) -> int:
    """Generate one token behind the picture: the answer has the length of the whole prompt.

    The engine keeps what its processor made of the picture for later prompts. Raises EngineUnfit if it takes none.
    """
    if engine.info().pictures is None:
        raise EngineUnfit(f"the engine takes no pictures: {engine.info().blindness}")
    prompt, alone = picture.alone()
    job = GenerationJob(prompt, Sampling(max_tokens=1), COUNT_ID, pictures=(alone,))
    counts = [chunk.picture_tokens[0] async for chunk in engine.generate(job) if chunk.picture_tokens]
    if not counts:
        raise EngineFailed(f"{title} reported no length of a picture; try again")
    return counts[0]


def silence(title: str, seconds: float) -> EngineFailed:
    """Return the error for a prompt with pictures whose answer has not begun after ``seconds``."""
    return EngineFailed(
        f"{title} did not begin to answer a prompt with pictures within {seconds:g} s; it may be overloaded, or may "
        "have lost the request: its log has the cause"
    )
