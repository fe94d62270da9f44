"""Adapts sampling parameters to what the model's engine supports, with a warning for each that it does not."""

from __future__ import annotations

from dataclasses import replace

from singletree.conversation import Sampling
from singletree.engines.engine import Engine
from singletree.errors import InvalidRequest
from singletree.prompts.tokenizer.tokenizer import Tokenizer

BANNED = -100.0
"""The strongest bias against a token that OpenAI's API and every engine accept."""

_DEFAULT = Sampling()


def supported_sampling(
    sampling: Sampling, tokenizer: Tokenizer, engine: Engine
) -> tuple[Sampling, tuple[str, ...]]:
    """Return ``sampling`` without the fields that ``engine`` does not support, and a warning for each of them.

    A bad word that is one token is banned by a logit bias, which every engine supports.

    Raises:
        InvalidRequest: a token id is not in the vocabulary; ``param`` is its path.
    """
    if not (
        sampling.min_tokens or sampling.stop_token_ids or sampling.bad_words or sampling.allowed_token_ids
    ):
        return sampling, ()
    for field in ("stop_token_ids", "allowed_token_ids"):
        _check_ids(getattr(sampling, field), field, tokenizer)
    info = engine.info()
    sampling, left = _with_banned_words(sampling, tokenizer)
    warnings = []
    for field in ("min_tokens", "bad_words", "allowed_token_ids"):
        if getattr(sampling, field) and field not in info.optional_sampling:
            sampling = replace(sampling, **{field: getattr(_DEFAULT, field)})
            words = f" for {', '.join(left)}, of several tokens each" if field == "bad_words" else ""
            warnings.append(f"{field} is ignored{words}: the engine {info.name} does not support it")
    return sampling, tuple(warnings)


def _check_ids(ids: tuple[int, ...], field: str, tokenizer: Tokenizer) -> None:
    known = tokenizer.vocabulary_size
    for i, id in enumerate(ids):
        if id >= known:
            at = f"{field}.{i}"
            raise InvalidRequest(f"{at} is {id}; this model's ids go from 0 to {known - 1}", param=at)


def _with_banned_words(sampling: Sampling, tokenizer: Tokenizer) -> tuple[Sampling, list[str]]:
    """Ban the bad words that are one token; return the paths of the others, which stay in ``bad_words``."""
    if not sampling.bad_words:
        return sampling, []
    bias, left, words = dict(sampling.logit_bias or {}), [], []
    for i, word in enumerate(sampling.bad_words):
        # At the start of a word most vocabularies have other tokens.
        for spelling in dict.fromkeys((word, f" {word.lstrip()}")):
            ids = tokenizer.encode(spelling)
            if len(ids) == 1:
                bias[ids[0]] = BANNED
            elif word not in words:
                left.append(f"bad_words.{i}")
                words.append(word)
    return replace(sampling, logit_bias=bias or None, bad_words=tuple(words)), left
