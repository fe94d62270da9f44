"""What each engine can do, as data: the engines read it, and ``docs/engines.md`` prints it.

And grammars for llguidance, which llama.cpp has built in and which follows a turn that goes on on another engine.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from singletree.engines.engine import Constraint, ConstraintKind, EngineInfo, LogprobKind, PictureSupport
from singletree.errors import InvalidRequest

ALL_SAMPLING = frozenset({"min_tokens", "bad_words", "allowed_token_ids"})
"""Every field of ``EngineInfo.optional_sampling``."""


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """What one engine can do through one interface.

    Attributes:
        title: the engine and its interface, for people to read.
        constraints: the kinds of ``Constraint`` that it supports, the preferred first, and the field of its request
            that takes each.
        streams_every_id: whether each generated token id is streamed; otherwise some are recovered from the text.
        logprobs: whether it reports log-probabilities of generated tokens.
        logprob_kind: of which distribution they are, see ``EngineInfo``.
        prompt_logprobs: the same for the tokens of the prompt.
        cached_tokens: whether it can report how much of a prompt was cached.
        priorities: whether ``GenerationJob.priority`` has an effect.
        reads_outlooks: whether ``GenerationJob.outlook`` has one.
        salts: whether its prefix cache keeps prompts of different salts (``cache_salt``) apart.
        pictures: how a request can hold token ids and pictures; None if it cannot.
        abort: how a generation is ended early.
        kv_events: whether the server can publish what its prefix cache holds.
        model_defaults: whether sampling fields that are None take the values of the checkpoint's
            ``generation_config.json`` by themselves; otherwise singletree reads that file and sends them.
        resumable: see ``EngineInfo``.
        optional_sampling: see ``EngineInfo``.
        has_special_tags: see ``EngineInfo``.
        options: flags of the server that some abilities need, and what each is for.
        tested: how these facts are held: on which version, or from which source.
    """

    title: str
    constraints: Mapping[ConstraintKind, str] = field(default_factory=dict)
    streams_every_id: bool = True
    logprobs: bool = True
    logprob_kind: LogprobKind = "raw"
    prompt_logprobs: bool = False
    cached_tokens: bool = True
    priorities: bool = True
    reads_outlooks: bool = False
    salts: bool = True
    pictures: PictureSupport | None = None
    abort: str = "the connection is closed"
    kv_events: bool = False
    model_defaults: bool = True
    resumable: bool = True
    optional_sampling: frozenset[str] = frozenset()
    has_special_tags: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    tested: str = ""

    def info(
        self,
        name: str,
        context_window: int,
        slots: int,
        details: Mapping[str, Any] | None,
        *,
        constraints: tuple[ConstraintKind, ...] | None = None,
        blindness: str | None = None,
        salts: bool = True,
        started_at: float = 0.0,
    ) -> EngineInfo:
        """Return the ``EngineInfo`` of a model behind this interface.

        Args:
            name, context_window, slots, details, started_at: as in ``EngineInfo``.
            blindness: why this model takes no pictures, and the cure; None if it takes them as the interface does.
            salts: False for a model whose prompts the interface does not keep apart, although it does others'.
        """
        return EngineInfo(
            name,
            context_window,
            slots,
            details,
            tuple(self.constraints) if constraints is None else constraints,
            self.prompt_logprobs,
            self.resumable,
            self.optional_sampling,
            pictures=self.pictures if blindness is None else None,
            blindness=blindness or "",
            salts=salts and self.salts,
            has_special_tags=self.has_special_tags,
            logprobs=self.logprob_kind,
            streams_every_id=self.streams_every_id,
            reads_outlooks=self.reads_outlooks,
            started_at=started_at,
        )


_ALL_FORMATS = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_IN_PROCESS = "the stream is closed"
_PLACED_IN_IDS = PictureSupport("template", _ALL_FORMATS)
_PLACED_IN_TEXT = PictureSupport("template", _ALL_FORMATS, reads_text=True)

_VLLM_CONSTRAINTS: Mapping[ConstraintKind, str] = {
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "regex": "regex",
    "gbnf": "grammar",
}
"""No Lark: XGrammar, vLLM's default backend, refuses that of llguidance, and with it the whole request."""

_VLLM_OPTIONS = {
    "--enable-prompt-tokens-details": "cached tokens",
    "--scheduling-policy priority": "priorities",
    '--structured-outputs-config \'{"backend": "xgrammar"}\'': "structural tags",
    "--kv-events-config": "KV events",
}
_SGLANG_CONSTRAINTS: Mapping[ConstraintKind, str] = {
    "structural_tag": "structural_tag",
    "json_schema": "json_schema",
    "regex": "regex",
    "gbnf": "ebnf",
}
_LLAMACPP_CONSTRAINTS: Mapping[ConstraintKind, str] = {
    "lark": "grammar",
    "json_schema": "grammar",
    "regex": "grammar",
    "gbnf": "grammar",
}

ABILITIES: Mapping[str, EngineAbilities] = {
    "scripted": EngineAbilities(
        "scripts",
        {"lark": "none: scripts are not bound by it", "structural_tag": "none: scripts are not bound by it"},
        resumable=False,
        optional_sampling=ALL_SAMPLING,
        prompt_logprobs=True,
        priorities=False,
        abort=_IN_PROCESS,
        tested="in `make test`",
    ),
    "llamacpp": EngineAbilities(
        "llama.cpp, embedded",
        _LLAMACPP_CONSTRAINTS,
        streams_every_id=False,
        reads_outlooks=True,
        # It decodes pictures with stb_image, which knows no WebP.
        pictures=PictureSupport("mark", frozenset({"image/png", "image/jpeg", "image/gif"})),
        abort=_IN_PROCESS,
        tested="xllamacpp, in `make test`",
    ),
    "llama-server": EngineAbilities(
        "llama.cpp's `llama-server`: `/completion`",
        _LLAMACPP_CONSTRAINTS,
        streams_every_id=False,
        priorities=False,
        salts=False,
        tested="the server inside xllamacpp",
    ),
    "vllm": EngineAbilities(
        "vLLM, in the server's process",
        _VLLM_CONSTRAINTS,
        has_special_tags=True,
        prompt_logprobs=True,
        pictures=_PLACED_IN_IDS,
        abort=_IN_PROCESS,
        optional_sampling=ALL_SAMPLING,
        tested="vLLM 0.32 and 0.33, on the CPU",
    ),
    "vllm-generate": EngineAbilities(
        "vLLM: `/inference/v1/generate`",
        _VLLM_CONSTRAINTS,
        has_special_tags=True,
        pictures=_PLACED_IN_IDS,
        kv_events=True,
        model_defaults=False,
        optional_sampling=ALL_SAMPLING,
        options={"--enable-scale-out": "the interface itself", **_VLLM_OPTIONS},
        tested="vLLM 0.32 and 0.33",
    ),
    "vllm-completions": EngineAbilities(
        "vLLM: `/v1/completions`",
        _VLLM_CONSTRAINTS,
        has_special_tags=True,
        prompt_logprobs=True,
        kv_events=True,
        optional_sampling=ALL_SAMPLING,
        options=_VLLM_OPTIONS,
        tested="vLLM 0.32 and 0.33",
    ),
    "sglang": EngineAbilities(
        "SGLang, in the server's process",
        _SGLANG_CONSTRAINTS,
        has_special_tags=True,
        prompt_logprobs=True,
        pictures=_PLACED_IN_TEXT,
        abort=_IN_PROCESS,
        optional_sampling=frozenset({"min_tokens"}),
        logprob_kind="scaled",
        tested="SGLang 0.5.23, on the CPU",
    ),
    "sglang-generate": EngineAbilities(
        "SGLang: `/generate`",
        _SGLANG_CONSTRAINTS,
        has_special_tags=True,
        prompt_logprobs=True,
        pictures=_PLACED_IN_TEXT,
        abort="the connection is closed; it frees the request after 2 s",
        kv_events=True,
        model_defaults=False,
        optional_sampling=frozenset({"min_tokens"}),
        options={
            "--enable-priority-scheduling": "priorities",
            "--incremental-streaming-output": "streams whose size does not grow with the square of their length",
            "--grammar-backend xgrammar": "constraints",
            "--enable-multimodal": "pictures, with models that SGLang serves without them by default",
            "--kv-events-config": "KV events",
        },
        logprob_kind="scaled",
        tested="SGLang 0.5.23",
    ),
    "tensorrt-llm": EngineAbilities(
        "TensorRT-LLM: `/v1/completions`",
        {"structural_tag": "response_format", "json_schema": "response_format", "regex": "response_format"},
        kv_events=True,
        salts=False,
        model_defaults=False,
        optional_sampling=frozenset({"min_tokens"}),
        options={
            "guided_decoding_backend: xgrammar": "constraints",
            "waiting_queue_policy: priority": "priorities",
        },
        logprob_kind="unknown",
        tested="by source, not run",
    ),
}
"""Every interface of an engine, by the name that the code uses for it."""


CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = tuple(ABILITIES["llamacpp"].constraints)

_GUIDANCE = "%llguidance"
# JSON allows any amount of white space between two tokens, and small models generate it without end.
_WHITE_SPACE = {"whitespace_pattern": r"[ \n]{0,32}"}


def encode_grammar(constraint: Constraint) -> str:
    """Convert the constraint to a grammar for llama.cpp: GBNF, or Lark for the llguidance that is built into it.

    Raises InvalidRequest for a kind that llama.cpp does not support and for a text that llguidance rejects.
    """
    kind, value = constraint.kind, constraint.value
    if kind == "gbnf":
        grammar = str(value)
    elif kind == "lark":
        text = str(value)
        grammar = text if text.lstrip().startswith(_GUIDANCE) else f"{_GUIDANCE} {{}}\n{text}"
    elif kind == "regex":
        pattern = re.sub(r"(?<!\\)/", r"\/", str(value)).replace("\n", r"\n")
        grammar = f"{_GUIDANCE} {{}}\nstart: /{pattern}/"
    elif kind == "json_schema":
        grammar = f"{_GUIDANCE} {{}}\nstart: %json {json.dumps(_with_bounded_white_space(value))}"
    else:
        kinds = ", ".join(CONSTRAINT_KINDS)
        raise InvalidRequest(f"llama.cpp does not support constraints of kind {kind!r}; it supports {kinds}")
    if grammar.lstrip().startswith(_GUIDANCE):
        _validate(grammar)
    return grammar


def _with_bounded_white_space(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {"x-guidance": _WHITE_SPACE, **schema}


def _validate(grammar: str) -> None:
    """Ask llguidance first: when it rejects a grammar, llama.cpp generates without any constraint."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise InvalidRequest(
            "constraints need the package llguidance in addition to llama.cpp: pip install llguidance"
        ) from error
    if problem := LLMatcher.validate_grammar(grammar, None):
        raise InvalidRequest(
            f"llguidance rejects the constraint: {_summary(problem)}; simplify the schema or grammar"
        )


def _summary(problem: str) -> str:
    """Return llguidance's error message on one line, without its excerpt of the grammar."""
    lines = [line.strip() for line in problem.splitlines()]
    words = " ".join(itertools.takewhile(lambda line: " | " not in line, lines))
    return words.partition(": ")[2] or words
