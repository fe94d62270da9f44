"""Sampling fields that have the same name and meaning in all OpenAI protocols."""

from __future__ import annotations

import msgspec

from singletree.conversation import Sampling
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


_NUMBERS = tuple(
    name for name in SharedSampling.__struct_fields__ if name not in ("stop", "ignore_eos", "cache_salt")
)


def shared_sampling_of(body: SharedSampling) -> Sampling:
    """Return the sampling parameters that these fields of ``body`` set."""
    given = {name: getattr(body, name) for name in _NUMBERS}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Sampling(**given, stop=tuple(s for s in stop if s), ignore_eos=bool(body.ignore_eos))
