"""What vLLM calls the sampling and the constraint of a job: the same over HTTP and in process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from singletree.engines.abilities import ABILITIES
from singletree.engines.engine import Constraint, ConstraintKind, GenerationJob, StopKind

# Fields of Sampling that have the same name in vLLM. They are omitted when None, so that the defaults of the model's
# own generation_config.json apply.
_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
)
# The same, but omitted also when they are empty, zero or False: then they have no effect.
_OPTIONAL = ("ignore_eos", "min_tokens", "bad_words", "allowed_token_ids")
_read_same, _read_optional = attrgetter(*_SAME_NAME), attrgetter(*_OPTIONAL)

SAMPLING_FIELDS = frozenset((*_SAME_NAME, *_OPTIONAL, "max_tokens", "logit_bias"))
"""The fields of ``Sampling`` that vLLM may name in a refusal."""

OPTIONAL_SAMPLING = ABILITIES["vllm-completions"].optional_sampling
"""The value of ``EngineInfo.optional_sampling``."""

FINISHES: Mapping[str, StopKind] = {
    "stop": "stop",
    "repetition": "stop",
    "length": "length",
    "abort": "cancelled",
}
"""vLLM's finish reasons of a generation that did not fail."""


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _as_given(value: Any) -> Any:
    return value if isinstance(value, str | dict) else _as_text(value)


# A structural tag is accepted only as JSON text; vLLM distinguishes Lark and GBNF by itself.
_CONVERSIONS: Mapping[ConstraintKind, Callable[[Any], Any]] = {"json_schema": _as_given}
_CONSTRAINT_FIELDS = ABILITIES["vllm-completions"].constraints

CONSTRAINT_KINDS = tuple(_CONSTRAINT_FIELDS)
"""The kinds of constraint that vLLM supports with XGrammar, the best supported first."""


def sampling_fields(job: GenerationJob, *, max_tokens: int) -> dict[str, Any]:
    """Return the fields of vLLM's sampling for ``job``, without the log-probabilities of the prompt.

    Args:
        job: the generation.
        max_tokens: replaces the one of ``job.sampling``; without it vLLM would stop after 16 tokens.
    """
    sampling = job.sampling
    same = zip(_SAME_NAME, _read_same(sampling), strict=True)
    fields: dict[str, Any] = {name: value for name, value in same if value is not None}
    fields["max_tokens"] = max_tokens
    if sampling.logit_bias:
        fields["logit_bias"] = dict(sampling.logit_bias)
    optional = _read_optional(sampling)
    if any(optional):
        fields |= {name: value for name, value in zip(_OPTIONAL, optional, strict=True) if value}
    if job.stop_token_ids:
        fields["stop_token_ids"] = list(job.stop_token_ids)
    if job.constraint is not None:
        fields["structured_outputs"] = structured_outputs(job.constraint)
    return fields


def structured_outputs(constraint: Constraint) -> dict[str, Any]:
    """Return vLLM's ``structured_outputs`` for ``constraint``."""
    convert: Callable[[Any], Any] = _CONVERSIONS.get(constraint.kind, _as_text)
    return {_CONSTRAINT_FIELDS[constraint.kind]: convert(constraint.value)}
