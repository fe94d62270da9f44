"""OpenAI Completions, the legacy API: raw text or token ids in, raw text out.

https://platform.openai.com/docs/api-reference/completions, with vLLM's ``return_token_ids`` and ``prompt_logprobs``.
No chat template is rendered and nothing is parsed: reasoning and calls are plain text. A prompt is used exactly as
sent: ``add_special_tokens`` has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from singletree.conversation import Conversation, Request, Turn
from singletree.errors import InvalidRequest, SingletreeError
from singletree.events import (
    Event,
    Finished,
    PromptLogprobs,
    TextDelta,
    Token,
    TokenLogprobs,
    Usage,
    UsageUpdate,
)
from singletree.protocols import limits, wire
from singletree.protocols.answer import AnswerContext, FinishedChoice, Frame
from singletree.protocols.chat import request as chat
from singletree.protocols.openai import engine_fields, errors
from singletree.protocols.openai.chunks import FINISH_REASONS, CompletionStream, usage_object
from singletree.protocols.openai.logprobs import TokenDetails, check_logprobs, ids_of, prompt_of, tokens_of
from singletree.protocols.openai.nvext import agent_of, cache_salt_of, hints_of, session_of
from singletree.protocols.wire import encode_ascii
from singletree.request_options import CompletionOptions

__all__ = ["ID_PREFIX", "ROUTES", "Encoder", "decode", "encode", "encode_error"]

ROUTES: list[tuple[str, str, str]] = [("POST", "/v1/completions", "complete")]
ID_PREFIX = "cmpl-"

_DEFAULT_TOKENS = 16

CompletionPrompt = str | tuple[int, ...]


class _Body(chat.SamplingFields, kw_only=True):
    model: str
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    skip_special_tokens: bool | None = None
    session_id: str | None = None


def decode(body: bytes, headers: Mapping[str, str] = {}) -> Request:
    """Decode the JSON ``body`` into a request with an empty conversation.

    ``options.completion`` holds the prompts.

    Raises:
        InvalidRequest: a field is invalid; ``param`` names it.
    """
    wanted = wire.decode_body(body, _Body)
    if not wanted.model:
        raise InvalidRequest("model is empty; send the name of a served model", param="model")
    choices = chat.choices_of(wanted)
    _refuse_unsupported(wanted, choices)
    prompts = _prompts(wanted.prompt)
    generated = len(prompts) * max(choices, wanted.best_of or 0)
    if generated > limits.MAX_CHOICES:
        total = f"{len(prompts)} prompts with n and best_of make {generated} choices"
        raise InvalidRequest(f"{total}; request at most {limits.MAX_CHOICES}", param="prompt")
    most = _DEFAULT_TOKENS if wanted.max_tokens is None else wanted.max_tokens
    sampling = chat.sampling_of(wanted, most, wanted.logprobs)
    if wanted.echo and wanted.logprobs is not None:
        # The echoed text comes with log-probabilities of its own: those of the prompt.
        of_prompt = max(wanted.logprobs, wanted.prompt_logprobs or 0)
        sampling = replace(sampling, prompt_logprobs=of_prompt)
    agent = agent_of(wanted.nvext)
    return Request(
        model=wanted.model,
        conversation=Conversation(()),
        sampling=sampling,
        stream=bool(wanted.stream),
        response_format=chat.format_of(wanted),
        session=wanted.session_id or session_of(agent),
        hints=hints_of(wanted.nvext),
        cache_salt=cache_salt_of(wanted.cache_salt, wanted.nvext),
        agent=agent,
        choices=choices,
        warnings=tuple(engine_fields.ignored(wanted)),
        options=chat.output_options(
            wanted,
            completion=CompletionOptions(
                prompts=prompts,
                echo=bool(wanted.echo),
                echo_only=bool(wanted.echo) and wanted.max_tokens == 0,
                best_of=choices if wanted.best_of is None else wanted.best_of,
                prompt_logprobs=wanted.prompt_logprobs is not None,
                skip_special_tokens=wanted.skip_special_tokens is not False,
            ),
        ),
    )


def _refuse_unsupported(body: _Body, choices: int) -> None:
    chat.check_sampling_fields(body)
    check_logprobs(body.logprobs, "logprobs")
    if body.suffix:
        at = "suffix"
        raise InvalidRequest(
            f"{at} is not supported; write the model's own markers for it in prompt", param=at
        )
    if body.best_of is not None and (body.best_of < choices or (body.stream and body.best_of > choices)):
        values = f"best_of is {body.best_of!s:.40} and n is {choices}"
        cure = "a stream cannot be ranked: send stream=false" if body.stream else "send best_of of at least n"
        raise InvalidRequest(f"{values}; {cure}", param="best_of")


def _prompts(sent: str | list[str | int | list[int]]) -> tuple[CompletionPrompt, ...]:
    if isinstance(sent, str):
        return (_not_empty(sent, "prompt"),)
    texts = [each for each in sent if isinstance(each, str)]
    ids = [each for each in sent if isinstance(each, int)]
    lists = [each for each in sent if isinstance(each, list)]
    if not sent or len(sent) not in (len(texts), len(ids), len(lists)):
        cure = "send a string, a list of strings, a list of token ids, or a list of such lists"
        raise InvalidRequest(f"prompt is {'mixed' if sent else 'empty'}; {cure}", param="prompt")
    if ids:
        return (tuple(ids),)
    each: Sequence[CompletionPrompt] = texts or [tuple(one) for one in lists]
    return tuple(_not_empty(one, f"prompt.{i}") for i, one in enumerate(each))


def _not_empty(prompt: CompletionPrompt, at: str) -> CompletionPrompt:
    if not prompt:
        raise InvalidRequest(f"{at} is empty; send at least one token", param=at)
    return prompt


class Encoder(CompletionStream):
    """Encode the events of one choice as chunks. ``request.prompt_report`` has the text before the generated text."""

    prompt_field = "prompt"

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context, b"text_completion")
        request = context.request
        self._index = context.index
        self._details = TokenDetails.of(request)
        self._prompt = request.prompt_report.token_ids
        self._echoed = request.prompt_report.text
        self._offset = 0
        self._is_silent = request.options.completion.echo_only
        start = b'%b{"index":%d,"text":' % (self._head, context.index)
        self._text = start, b',"logprobs":null,"finish_reason":null}]}'

    def start(self) -> list[Frame]:
        """Return the echoed prompt and its token ids, if requested."""
        ids: dict[str, Any] = (
            {} if self._prompt is None else {"prompt_token_ids": self._prompt, "token_ids": []}
        )
        return [self._chunk(self._echoed, **ids)] if self._echoed or ids else []

    def feed(self, event: Event) -> list[Frame]:
        """Encode ``event``; no frames if it adds nothing."""
        if type(event) is TextDelta:
            text = event.text
            if not text or self._is_silent:
                return []
            return [("", (encode_ascii(text) if text.isascii() else wire.dump(text)).join(self._text))]
        if isinstance(event, UsageUpdate):
            return [self._chunk("", b',"usage":%b' % wire.dump(usage_object(event.usage)))]
        if isinstance(event, PromptLogprobs):
            return self._token_details(event.tokens, of_prompt=True)
        if isinstance(event, TokenLogprobs) and not self._is_silent:
            return self._token_details(event.tokens)
        return []

    def end(self, finished: Finished) -> list[Frame]:
        """End the choice with its finish reason."""
        return [self._chunk("", finish_reason=FINISH_REASONS[finished.reason])]

    def _token_details(self, tokens: Sequence[Token], *, of_prompt: bool = False) -> list[Frame]:
        fields: dict[str, Any] = {}
        if self._details.logprobs:
            fields["logprobs"] = self._details.legacy(tokens, self._offset)
            self._offset += sum(len(token.text) for token in tokens)
        if self._details.ids and not of_prompt:
            fields["token_ids"] = ids_of(tokens)
        return [self._chunk("", **fields)] if fields else []

    def _chunk(self, text: str, behind: bytes = b"", **more: Any) -> Frame:
        """Return a chunk with ``more`` fields of the choice, and ``behind`` the choices."""
        choice = {"index": self._index, "text": text, "logprobs": None, "finish_reason": None} | more
        return "", b"%b%b]%b}" % (self._head, wire.dump(choice), behind)


def encode(choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    """Encode a response as one body; ``usage`` is the sum over all choices."""
    context = choices[0].context
    return wire.dump(
        {
            "id": context.id,
            "object": "text_completion",
            "created": context.created,
            "model": context.request.model,
            "choices": [_choice(index, *choice) for index, choice in enumerate(choices)],
            "usage": usage_object(usage),
        }
    )


def _choice(index: int, context: AnswerContext, turn: Turn, finished: Finished) -> dict[str, Any]:
    request = context.request
    details, options, prompt = TokenDetails.of(request), request.options.completion, request.prompt_report
    is_silent = options.echo_only
    tokens = () if is_silent else tokens_of(turn)
    choice = {
        "index": index,
        "text": prompt.text + ("" if is_silent else turn.text),
        "logprobs": details.legacy([*(prompt_of(turn) if options.echo else ()), *tokens], 0),
        "finish_reason": FINISH_REASONS[finished.reason],
    }
    if details.ids:
        choice |= {"prompt_token_ids": prompt.token_ids, "token_ids": ids_of(tokens)}
    if options.prompt_logprobs:
        choice["prompt_logprobs"] = details.prompt(turn)
    return choice


def encode_error(error: SingletreeError) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON body for ``error``."""
    return errors.encode_error(error, prompt="prompt")
