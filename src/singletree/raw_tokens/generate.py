"""Token ids in, token ids out, as vLLM's ``/inference/v1/generate``.

``vllm/entrypoints/scale_out/token_in_token_out/protocol.py`` (0.32). Trainers that render prompts themselves use it:
verifiers' ``TrainClient`` through the package ``renderers``. Released versions of that package (0.1) expect vLLM's
earlier form of log-probabilities, so each token has both: ``token_id``, and ``token`` as ``token_id:ID``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec

from singletree.conversation import Conversation, Hints, Request
from singletree.events import (
    Event,
    Finished,
    FinishReason,
    TextDelta,
    Token,
    TokenLogprobs,
    Usage,
    UsageUpdate,
)
from singletree.protocols import wire
from singletree.protocols.answer import AnswerContext, FinishedChoice, Frame
from singletree.protocols.chat import request as chat
from singletree.protocols.limits import CacheSalt, check_logprobs, malformed
from singletree.protocols.openai.answers import (
    DONE,
    ChunkStream,
    TokenDetails,
    ids_of,
    json_logprob,
    tokens_of,
    usage_object,
)
from singletree.request_options import CompletionOptions, RequestOptions

__all__ = ["ID_PREFIX", "Body", "Encoder", "decode", "encode"]

ID_PREFIX = "generate-"

_NO_LOGPROB = -9999.0
"""vLLM's value for an unknown log-probability; the field has to be a number."""

_FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "context_overflow": "length",
    "refusal": "stop",
    "cancelled": "abort",
    "error": "abort",
}
_AT_THE_END: dict[str, Any] = {"routed_experts": None, "sampling_mask": None, "weight_versions": None}
_WITHOUT_EFFECT = ("kv_transfer_params", "ec_transfer_params")


class _Sampling(chat.SamplingFields, kw_only=True):
    logprobs: int | None = None
    skip_special_tokens: bool | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of a request."""

    token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
    sampling_params: _Sampling = msgspec.field(default_factory=_Sampling)
    request_id: str | None = None
    model: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = None
    stream_options: chat.StreamOptions | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    features: Any = None
    content_parts: Any = None
    cache_salt: CacheSalt | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


Body = GenerateBody


def decode(body: bytes, headers: Mapping[str, str] = {}) -> Request:
    """Decode the JSON ``body`` into a request with an empty conversation; ``options.completion`` holds the prompt."""
    wanted = wire.decode_body(body, GenerateBody)
    for at in ("features", "content_parts"):
        if getattr(wanted, at):
            raise malformed(at, "images are not supported; omit it")
    params = wanted.sampling_params
    params.stream = wanted.stream
    chat.check_sampling_fields(params)
    check_logprobs(params.logprobs, "sampling_params.logprobs")
    choices, options = chat.choices_of(params), wanted.stream_options or chat.StreamOptions()
    return Request(
        model=wanted.model or "",
        conversation=Conversation(()),
        sampling=chat.sampling_of(params, params.max_tokens, params.logprobs),
        stream=bool(wanted.stream),
        response_format=chat.format_of(params),
        # In vLLM a lower number is served first, in hints a higher one.
        hints=Hints(priority=-wanted.priority) if wanted.priority else Hints(),
        cache_salt=wanted.cache_salt or "",
        choices=choices,
        warnings=tuple(f"{name} is ignored" for name in _WITHOUT_EFFECT if getattr(wanted, name)),
        options=RequestOptions(
            include_usage=bool(options.include_usage),
            continuous_usage_stats=bool(options.include_usage and options.continuous_usage_stats),
            return_token_ids=True,
            completion=CompletionOptions(
                prompts=(tuple(wanted.token_ids),),
                prompt_field="token_ids",
                best_of=choices,
                skip_special_tokens=params.skip_special_tokens is not False,
                request_id=wanted.request_id or "",
                return_prompt_token_ids=bool(wanted.return_token_ids),
                return_text=wanted.output_mode == "text",
            ),
        ),
    )


class Encoder(ChunkStream):
    """Encode the events of one choice as chunks."""

    prompt_field = "token_ids"

    def __init__(self, context: AnswerContext) -> None:
        request = context.request
        self._request = request
        self._options = request.options.completion
        self._head = {"request_id": self._options.request_id or context.id, "output_mode": _mode(request)}
        self._index = context.index
        self._usage: Usage | None = None

    def start(self) -> list[Frame]:
        if self._index or not self._options.return_prompt_token_ids:
            return []
        return [self._chunk([], prompt_token_ids=self._request.prompt_report.token_ids)]

    def feed(self, event: Event) -> list[Frame]:
        if isinstance(event, TokenLogprobs):
            return [self._choice(event.tokens)]
        if isinstance(event, TextDelta) and self._options.return_text and event.text:
            return [self._choice((), event.text)]
        if isinstance(event, UsageUpdate):
            self._usage = event.usage
        return []

    def end(self, finished: Finished) -> list[Frame]:
        return [self._choice((), **_ending(finished))]

    def tail(self, usage: Usage) -> list[Frame]:
        wanted = self._request.options.include_usage
        self._usage = usage
        return [self._chunk([], usage=True), DONE] if wanted else [DONE]

    def side_event(self, name: str, data: Mapping[str, Any]) -> list[Frame]:
        return [(name, wire.dump({**self._head, "choices": [], **data}))]

    def _choice(self, tokens: Sequence[Token], text: str = "", **more: Any) -> Frame:
        choice = _choice(self._request, self._index, tokens, text) | more
        return self._chunk([choice], usage=self._request.options.continuous_usage_stats)

    def _chunk(self, choices: list[dict[str, Any]], *, usage: bool = False, **more: Any) -> Frame:
        counted = usage_object(self._usage) if usage and self._usage is not None else None
        return "", wire.dump({**self._head, "choices": choices, "usage": counted, **more})


def encode(choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    """Encode a response as one body; ``usage`` is the sum over all choices."""
    context, first = choices[0].context, choices[0].turn
    request = context.request
    options = request.options.completion
    prompt_ids = request.prompt_report.token_ids if options.return_prompt_token_ids else None
    return wire.dump(
        {
            "request_id": options.request_id or context.id,
            "output_mode": _mode(request),
            "created": context.created,
            "model": request.model,
            "choices": [
                _choice(each.context.request, index, tokens_of(each.turn), each.turn.text)
                | _ending(each.finished)
                for index, each in enumerate(choices)
            ],
            "usage": usage_object(usage),
            "prompt_logprobs": TokenDetails(request).prompt(first),
            "prompt_token_ids": prompt_ids,
        }
    )


def _mode(request: Request) -> str:
    return "text" if request.options.completion.return_text else "tokens"


def _choice(request: Request, index: int, tokens: Sequence[Token], text: str) -> dict[str, Any]:
    details, has_text = TokenDetails(request), request.options.completion.return_text
    logprobs = details.chat(tokens) if has_text else {"content": [*map(_logprob, tokens)]}
    choice = {
        "index": index,
        "token_ids": ids_of(tokens),
        "logprobs": logprobs if details.logprobs else None,
        "finish_reason": None,
        "stop_reason": None,
        **_AT_THE_END,
    }
    return choice | ({"text": text} if has_text else {})


def _ending(finished: Finished) -> dict[str, Any]:
    reason, stop = _FINISH_REASONS[finished.reason], finished.stop_sequence
    ending: dict[str, Any] = {"finish_reason": reason, "stop_reason": stop}
    if finished.weight_versions:
        ending["weight_versions"] = [asdict(each) for each in finished.weight_versions]
    if finished.routed_experts is not None:
        ending["routed_experts"] = finished.routed_experts
    return ending


def _logprob(token: Token) -> dict[str, Any]:
    others = [_candidate(each) | {"rank": rank} for rank, each in enumerate(token.alternatives, 1)]
    return _candidate(token) | {"top_logprobs": others, "bytes": None}


def _candidate(token: Token) -> dict[str, Any]:
    logprob = json_logprob(token.logprob)
    known = _NO_LOGPROB if logprob is None else logprob
    return {"token_id": token.id, "token": f"token_id:{token.id}", "logprob": known, "rank": None}
