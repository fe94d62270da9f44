"""What SGLang calls the sampling and the constraint of a job: the same over HTTP and in process.

Written from SGLang 0.5.23 (``srt/sampling/sampling_params.py``, ``srt/managers/io_struct.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import ConstraintKind, GenerationJob, StopKind

SGLANG_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""The fields of ``Sampling`` that have the same name in SGLang. Fields that are None are omitted."""

SGLANG_FINISHES: Mapping[str, StopKind] = {"stop": "stop", "length": "length", "abort": "cancelled"}
"""SGLang's finish reasons of a generation that did not fail."""

SGLANG_CONSTRAINTS = ABILITIES["sglang"].constraints
"""Kinds of constraint, the best supported first, and SGLang's field for each; all take text."""

SGLANG_BACKENDS: Mapping[str, tuple[ConstraintKind, ...]] = {
    "none": (),
    "outlines": ("json_schema", "regex"),
    "llguidance": ("json_schema", "regex", "gbnf"),
}
"""The kinds that a grammar backend supports, where it supports fewer than XGrammar: llguidance takes structural tags of
an earlier form only."""

_SEED_RANGE = 1 << 63


def sglang_sampling(job: GenerationJob, *, max_tokens: int) -> dict[str, Any]:
    """Return SGLang's ``sampling_params`` for ``job``.

    Args:
        job: the generation.
        max_tokens: replaces the one of ``job.sampling``; without it SGLang would stop after 128 tokens.
    """
    sampling = job.sampling
    params: dict[str, Any] = {"max_new_tokens": max_tokens}
    params.update((name, value) for name in SGLANG_SAMPLING if (value := getattr(sampling, name)) is not None)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed % _SEED_RANGE
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    if sampling.min_tokens:
        params["min_new_tokens"] = sampling.min_tokens
    if job.stop_token_ids:
        params["stop_token_ids"] = list(job.stop_token_ids)
    if job.constraint is not None:
        value = job.constraint.value
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        params[SGLANG_CONSTRAINTS[job.constraint.kind]] = text
    return params


def sglang_request(job: GenerationJob, *, max_tokens: int) -> dict[str, Any]:
    """Return the fields of a request of SGLang for ``job``, without its id, its prompt and its priority."""
    sampling = job.sampling
    fields: dict[str, Any] = {"sampling_params": sglang_sampling(job, max_tokens=max_tokens), "stream": True}
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        fields["return_logprob"] = True
        fields["top_logprobs_num"] = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
    if sampling.prompt_logprobs is not None:
        fields["logprob_start_len"] = 0
    return fields
