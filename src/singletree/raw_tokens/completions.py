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
from singletree.errors import InvalidRequest
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
from singletree.protocols import wire
from singletree.protocols.answer import AnswerContext, FinishedChoice, Frame
from singletree.protocols.chat import request as chat
from singletree.protocols.limits import MAX_CHOICES, check_logprobs, refused
from singletree.protocols.openai import engine_fields
from singletree.protocols.openai.answers import (
    FINISH_REASONS,
    CompletionStream,
    TokenDetails,
    ids_of,
    prompt_of,
    tokens_of,
    usage_object,
)
from singletree.protocols.openai.nvext import agent_of, cache_salt_of, hints_of, session_of
from singletree.protocols.wire import encode_ascii
from singletree.request_options import CompletionOptions

__all__ = ["ID_PREFIX", "Body", "Encoder", "decode", "encode"]

ID_PREFIX = "cmpl-"

_DEFAULT_TOKENS = 16

CompletionPrompt = str | tuple[int, ...]


class CompletionsBody(chat.SamplingFields, kw_only=True):
    """The body of a request."""

    model: str = ""
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    skip_special_tokens: bool | None = None
    session_id: str | None = None


Body = CompletionsBody


def decode(body: bytes, headers: Mapping[str, str] = {}) -> Request:
    """Decode the JSON ``body`` into a request with an empty conversation; ``options.completion`` holds the prompts."""
    wanted = wire.decode_body(body, CompletionsBody)
    choices = chat.choices_of(wanted)
    _refuse_unsupported(wanted, choices)
    prompts = _prompts(wanted.prompt)
    generated = len(prompts) * max(choices, wanted.best_of or 0)
    if generated > MAX_CHOICES:
        total = f"{len(prompts)} prompts with n and best_of make {generated} choices"
        raise InvalidRequest(f"{total}; request at most {MAX_CHOICES}", param="prompt")
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


def _refuse_unsupported(body: CompletionsBody, choices: int) -> None:
    chat.check_sampling_fields(body)
    check_logprobs(body.logprobs, "logprobs")
    if body.suffix:
        raise refused("suffix", "is not supported; write the model's own markers for it in prompt")
    if body.best_of is not None and (body.best_of < choices or (body.stream and body.best_of > choices)):
        cure = "a stream cannot be ranked: send stream=false" if body.stream else "send best_of of at least n"
        raise refused("best_of", f"is {body.best_of!s:.40} and n is {choices}; {cure}")


def _prompts(sent: str | list[str | int | list[int]]) -> tuple[CompletionPrompt, ...]:
    if isinstance(sent, str):
        return (_not_empty(sent, "prompt"),)
    kinds = set(map(type, sent))
    if len(kinds) != 1:
        cure = "send a string, a list of strings, a list of token ids, or a list of such lists"
        raise refused("prompt", f"is {'mixed' if sent else 'empty'}; {cure}")
    alike: Any = sent
    if int in kinds:
        return (tuple(alike),)
    return tuple(
        _not_empty(one if str in kinds else tuple(one), f"prompt.{i}") for i, one in enumerate(alike)
    )


def _not_empty(prompt: CompletionPrompt, at: str) -> CompletionPrompt:
    if not prompt:
        raise refused(at, "is empty; send at least one token")
    return prompt


class Encoder(CompletionStream):
    """Encode the events of one choice as chunks. ``request.prompt_report`` has the text before the generated text."""

    prompt_field = "prompt"

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context, b"text_completion")
        request = context.request
        self._index = context.index
        self._prompt = request.prompt_report.token_ids
        self._echoed = request.prompt_report.text
        self._offset = 0
        self._beside: dict[str, Any] = {}
        self._waiting = ""
        self._is_silent = request.options.completion.echo_only
        start = b'%b{"index":%d,"text":' % (self._head, context.index)
        self._text = start, b',"logprobs":null,"finish_reason":null}]}'

    def start(self) -> list[Frame]:
        ids: dict[str, Any] = {}
        if self._prompt is not None:
            ids = {"prompt_token_ids": self._prompt, "token_ids": []}
        if self._details.logprobs and self._echoed:
            # The log-probabilities of the prompt come with its text.
            self._beside, self._waiting = ids, self._echoed
            return []
        return [self._chunk(self._echoed, **ids)] if self._echoed or ids else []

    def feed(self, event: Event) -> list[Frame]:
        if type(event) is TextDelta:
            text = event.text
            if not text or self._is_silent:
                return []
            if not self._is_plain:
                return [self._detailed_chunk(text)]
            return [("", (encode_ascii(text) if text.isascii() else wire.dump(text)).join(self._text))]
        if isinstance(event, UsageUpdate):
            self.count(_shown_usage(event.usage, is_silent=self._is_silent))
        if isinstance(event, PromptLogprobs):
            fields = self._logprobs(event.tokens)
            return [self._detailed_chunk("", **fields)] if fields else []
        if isinstance(event, TokenLogprobs) and not self._is_silent:
            return self._token_details(event.tokens)
        return []

    def end(self, finished: Finished) -> list[Frame]:
        if self._counted:
            self.count(_shown_usage(finished.usage, is_silent=self._is_silent))
        return [self._detailed_chunk("", finish_reason=FINISH_REASONS[finished.reason])]

    def tail(self, usage: Usage) -> list[Frame]:
        return super().tail(_shown_usage(usage, is_silent=self._is_silent))

    def _token_details(self, tokens: Sequence[Token]) -> list[Frame]:
        # They wait for the chunk of their text. Those before them are sent now: their tokens have no text.
        without_text = [self._detailed_chunk("")] if self._beside else []
        self._beside = self._logprobs(tokens)
        if self._details.ids:
            self._beside["token_ids"] = ids_of(tokens)
        return without_text

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        if not self._details.logprobs:
            return {}
        offset = self._offset
        self._offset += sum(len(token.text) for token in tokens)
        return {"logprobs": self._details.legacy(tokens, offset)}

    def _detailed_chunk(self, text: str, **more: Any) -> Frame:
        beside, self._beside = self._beside, {}
        text, self._waiting = self._waiting + text, ""
        return self._chunk(text, self._counted, **{**beside, **more})

    def _chunk(self, text: str, behind: bytes = b"", **more: Any) -> Frame:
        choice = {"index": self._index, "text": text, "logprobs": None, "finish_reason": None} | more
        return "", b"%b%b]%b}" % (self._head, wire.dump(choice), behind)


def encode(choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    """Encode a response as one body; ``usage`` is the sum over all choices."""
    context = choices[0].context
    is_silent = context.request.options.completion.echo_only
    return wire.dump(
        {
            "id": context.id,
            "object": "text_completion",
            "created": context.created,
            "model": context.request.model,
            "choices": [_choice(index, *choice) for index, choice in enumerate(choices)],
            "usage": usage_object(_shown_usage(usage, is_silent=is_silent)),
        }
    )


def _shown_usage(usage: Usage, *, is_silent: bool) -> Usage:
    """Return ``usage``, without the one token that engines generate at least where no token is shown."""
    return replace(usage, completion_tokens=0, reasoning_tokens=0) if is_silent else usage


def _choice(index: int, context: AnswerContext, turn: Turn, finished: Finished) -> dict[str, Any]:
    request = context.request
    details, options, prompt = TokenDetails(request), request.options.completion, request.prompt_report
    tokens = () if options.echo_only else tokens_of(turn)
    choice = {
        "index": index,
        "text": prompt.text + ("" if options.echo_only else turn.text),
        "logprobs": details.legacy([*(prompt_of(turn) if options.echo else ()), *tokens], 0),
        "finish_reason": FINISH_REASONS[finished.reason],
    }
    if details.ids:
        choice |= {"prompt_token_ids": prompt.token_ids, "token_ids": ids_of(tokens)}
    if options.prompt_logprobs:
        choice["prompt_logprobs"] = details.prompt(turn)
    return choice
