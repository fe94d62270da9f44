"""OpenAI Completions, the old API: raw text or token ids in, raw text out.

https://platform.openai.com/docs/api-reference/completions, with vLLM's ``return_token_ids`` and ``prompt_logprobs``.
No chat template is printed and nothing is parsed: reasoning and calls are text like any other. A prompt is taken as
it is written: ``add_special_tokens`` has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from singletree.conversation import Conversation, Request, Turn
from singletree.errors import InvalidRequest, SingletreeError
from singletree.events import Event, Finished, PromptRead, TextDelta, Token, TokensRead, Usage, UsageRead
from singletree.protocols import chat, limits, openai_error, sse, wire
from singletree.protocols.chat_encode import FINISH_REASONS, usage_object
from singletree.protocols.choices import Choice
from singletree.protocols.hints import agent_of, hints_of, session_of
from singletree.protocols.logprobs import Telling, ids_of, prompt_of, tokens_of

__all__ = ["ID_PREFIX", "ROUTES", "Encoder", "decode", "encode", "encode_choices", "encode_error"]

ROUTES: list[tuple[str, str, str]] = [("POST", "/v1/completions", "complete")]
ID_PREFIX = "cmpl-"

_DEFAULT_TOKENS = 16
_MOST_LOGPROBS = 20

Prompt = str | tuple[int, ...]


class _Body(chat.Drawn, kw_only=True):
    model: str
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    skip_special_tokens: bool | None = None
    session_id: str | None = None


def decode(body: bytes, headers: Mapping[str, str] = {}) -> Request:
    """``body`` as a request with an empty conversation.

    ``extra`` holds ``prompts`` (tuple of ``Prompt``), ``echo``, ``echo_only`` (of which the answer is not told) and
    ``skip_special_tokens`` (bool), ``best_of`` (int), and ``prompt_logprobs`` (bool: in a field of their own).

    Raises:
        InvalidRequest: with ``param`` naming the field.
    """
    wanted = wire.read(body, _Body)
    if not wanted.model:
        raise InvalidRequest("model is empty; send the name of a served model", param="model")
    choices = chat.choices_of(wanted)
    _refuse_what_cannot_be_done(wanted, choices)
    prompts = _prompts(wanted.prompt)
    drawn = len(prompts) * max(choices, wanted.best_of or 0)
    if drawn > limits.MOST_CHOICES:
        told = f"{len(prompts)} prompts, with n and best_of, make {drawn} answers"
        raise InvalidRequest(f"{told}; ask for {limits.MOST_CHOICES} at most in a request", param="prompt")
    most = _DEFAULT_TOKENS if wanted.max_tokens is None else wanted.max_tokens
    sampling = chat.sampling_of(wanted, most, wanted.logprobs)
    if wanted.echo and wanted.logprobs is not None:
        # The echo has its own, and those alone are told with it.
        of_prompt = max(wanted.logprobs, wanted.prompt_logprobs or 0)
        sampling = replace(sampling, prompt_logprobs=of_prompt)
    agent = agent_of(wanted.nvext)
    return Request(
        model=wanted.model,
        conversation=Conversation(()),
        sampling=sampling,
        stream=bool(wanted.stream),
        response_format=chat.response_format_of(wanted.response_format),
        session=wanted.session_id or session_of(agent),
        hints=hints_of(wanted.nvext),
        agent=agent,
        choices=choices,
        extra={
            **chat.told_of(wanted),
            "prompts": prompts,
            "echo": bool(wanted.echo),
            "echo_only": bool(wanted.echo) and wanted.max_tokens == 0,
            "best_of": choices if wanted.best_of is None else wanted.best_of,
            "prompt_logprobs": wanted.prompt_logprobs is not None,
            "skip_special_tokens": wanted.skip_special_tokens is not False,
        },
    )


def _refuse_what_cannot_be_done(body: _Body, choices: int) -> None:
    chat.check(body)
    logprobs = body.logprobs
    if logprobs is not None and not 0 <= logprobs <= _MOST_LOGPROBS:
        told = f"logprobs is {logprobs!s:.40}; send a number from 0 to {_MOST_LOGPROBS}"
        raise InvalidRequest(told, param="logprobs")
    if body.suffix:
        at = "suffix"
        raise InvalidRequest(
            f"{at} is not supported; write the model's own markers for it in prompt", param=at
        )
    if body.best_of is not None and (body.best_of < choices or (body.stream and body.best_of > choices)):
        told = f"best_of is {body.best_of!s:.40} and n is {choices}"
        cure = "a stream cannot be ranked: send stream=false" if body.stream else "send n or more"
        raise InvalidRequest(f"{told}; {cure}", param="best_of")


def _prompts(given: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(given, str):
        return (_not_empty(given, "prompt"),)
    texts = [each for each in given if isinstance(each, str)]
    ids = [each for each in given if isinstance(each, int)]
    lists = [each for each in given if isinstance(each, list)]
    if not given or len(given) not in (len(texts), len(ids), len(lists)):
        told = "send a string, a list of strings, a list of token ids, or a list of such lists"
        raise InvalidRequest(f"prompt is {'mixed' if given else 'empty'}; {told}", param="prompt")
    if ids:
        return (tuple(ids),)
    each: Sequence[Prompt] = texts or [tuple(one) for one in lists]
    return tuple(_not_empty(one, f"prompt.{i}") for i, one in enumerate(each))


def _not_empty(prompt: Prompt, at: str) -> Prompt:
    if not prompt:
        raise InvalidRequest(f"{at} is empty; send at least one token", param=at)
    return prompt


class Encoder:
    """Events to the chunks of one choice. ``request.extra["echoed"]`` is what stands before the answer."""

    def __init__(
        self,
        request: Request,
        *,
        id: str,
        created: int,
        usage: Usage,
        new_id: Callable[[str], str],
        seal: Callable[[int], str] | None = None,
        index: int = 0,
    ) -> None:
        head = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":['
        self._head = head % (wire.dump(id), created, wire.dump(request.model))
        self._index = index
        self._include_usage = bool(request.extra.get("include_usage"))
        self._telling = Telling.of(request)
        self._prompt = request.extra.get("prompt_token_ids")
        self._echoed = request.extra.get("echoed", "")
        self._offset = 0
        self._is_silent = bool(request.extra.get("echo_only"))

    def start(self) -> bytes:
        """The echo and the prompt's token ids, if asked for."""
        told = {} if self._prompt is None else {"prompt_token_ids": self._prompt, "token_ids": []}
        return self._chunk(self._echoed, **told) if self._echoed or told else b""

    def feed(self, event: Event) -> bytes:
        """What ``event`` adds, ``b""`` if nothing."""
        if isinstance(event, UsageRead):
            return self._chunk("")[: -len(b"}\n\n")] + b',"usage":%b}\n\n' % wire.dump(
                usage_object(event.usage)
            )
        if isinstance(event, PromptRead):
            return self._tell(event.tokens, of_prompt=True)
        if self._is_silent:
            return b""
        if isinstance(event, TextDelta):
            return self._chunk(event.text) if event.text else b""
        return self._tell(event.tokens) if isinstance(event, TokensRead) else b""

    def keep_alive(self) -> bytes:
        """A comment."""
        return b": keep-alive\n\n"

    def close(self, finished: Finished) -> bytes:
        """The end of the only choice, and of the stream."""
        return self.end(finished) + self.tail(finished.usage)

    def end(self, finished: Finished) -> bytes:
        """The finish reason."""
        return self._chunk("", finish_reason=FINISH_REASONS[finished.reason])

    def tail(self, usage: Usage) -> bytes:
        """The usage if asked for, and the end mark."""
        told = (
            self._head + b'],"usage":%b}\n\n' % wire.dump(usage_object(usage)) if self._include_usage else b""
        )
        return told + sse.frame(b"[DONE]")

    def fail(self, error: SingletreeError) -> bytes:
        """An error object in place of a chunk, at which OpenAI's SDKs raise."""
        object = openai_error.error_object(error, prompt="prompt")
        return sse.frame(wire.dump({"error": object})) + sse.frame(b"[DONE]")

    def side_event(self, name: str, said: Mapping[str, Any]) -> bytes:
        """See Encoder of Chat Completions."""
        return b"event: %b\n%b],%b\n\n" % (name.encode(), self._head, wire.dump(said)[1:])

    def _tell(self, tokens: Sequence[Token], *, of_prompt: bool = False) -> bytes:
        told: dict[str, Any] = {}
        if self._telling.logprobs:
            told["logprobs"] = self._telling.legacy(tokens, self._offset)
            self._offset += sum(len(token.text) for token in tokens)
        if self._telling.ids and not of_prompt:
            told["token_ids"] = ids_of(tokens)
        return self._chunk("", **told) if told else b""

    def _chunk(self, text: str, **more: Any) -> bytes:
        choice = {"index": self._index, "text": text, "logprobs": None, "finish_reason": None} | more
        return self._head + wire.dump(choice) + b"]}\n\n"


def encode(
    request: Request,
    turn: Turn,
    finished: Finished,
    *,
    id: str,
    created: int,
    new_id: Callable[[str], str],
    seal: Callable[[int], str] | None = None,
) -> bytes:
    """The body of a response with one choice; ``created`` in unix seconds."""
    return encode_choices([Choice(request, turn, finished)], finished.usage, id=id, created=created)


def encode_choices(choices: Sequence[Choice], usage: Usage, *, id: str, created: int) -> bytes:
    """The body of a response that is not streamed; ``usage`` is that of all choices together."""
    return wire.dump(
        {
            "id": id,
            "object": "text_completion",
            "created": created,
            "model": choices[0].request.model,
            "choices": [_choice(index, *choice) for index, choice in enumerate(choices)],
            "usage": usage_object(usage),
        }
    )


def _choice(index: int, request: Request, turn: Turn, finished: Finished) -> dict[str, Any]:
    telling, extra = Telling.of(request), request.extra
    is_silent = extra.get("echo_only")
    tokens = () if is_silent else tokens_of(turn)
    choice = {
        "index": index,
        "text": extra.get("echoed", "") + ("" if is_silent else turn.text),
        "logprobs": telling.legacy([*(prompt_of(turn) if extra.get("echo") else ()), *tokens], 0),
        "finish_reason": FINISH_REASONS[finished.reason],
    }
    if telling.ids:
        choice |= {"prompt_token_ids": extra.get("prompt_token_ids"), "token_ids": ids_of(tokens)}
    if extra.get("prompt_logprobs"):
        choice["prompt_logprobs"] = telling.prompt(turn)
    return choice


def encode_error(error: SingletreeError) -> tuple[int, bytes]:
    """HTTP status and body of ``error``."""
    return openai_error.encode_error(error, prompt="prompt")
