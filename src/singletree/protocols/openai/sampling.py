"""Sampling fields that have the same name and meaning in all OpenAI protocols."""

from __future__ import annotations

import msgspec

from singletree.protocols import limits


class SharedSampling(msgspec.Struct, kw_only=True):
    """The fields, as sent in the body: OpenAI's own, and those that open-model servers add."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    cache_salt: limits.CacheSalt | None = None
