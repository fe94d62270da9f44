"""The routes of raw prompts, whose answers are text only, and of text to tokens and back.

``/tokenize`` and ``/detokenize`` are as vLLM defines them:
https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html#tokenizer-api
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from singletree import families
from singletree.conversation import PromptReport, Request
from singletree.errors import ContextOverflow, InvalidRequest, Overloaded
from singletree.events import Event, Markup, TextDelta
from singletree.prompts.prompt_writer import Prompt
from singletree.protocols import wire
from singletree.protocols.chat import request as chat
from singletree.raw_tokens import completions
from singletree.request_options import CompletionOptions
from singletree.server.answers.choices import Choices, with_choice_seed
from singletree.server.answers.response import Lifecycle
from singletree.server.http.routes import (
    JSON,
    check_budgets,
    recall_waits,
    respond,
    warning_headers,
    with_hints,
)
from singletree.server.http.service import Call, offload
from singletree.server.ids import TurnCallIds
from singletree.server.models.model import Model
from singletree.server.sessions.request_headers import request_key
from singletree.server.turn.constraints import (
    NO_CONSTRAINTS,
    ConstraintRequest,
    constraints_of,
    loads_package,
    may_restrict,
)
from singletree.server.turn.decoder import LogprobReader, make_logprob_reader
from singletree.server.turn.generation import Generation, check_token_ids, fit_sampling, make_decoder
from singletree.server.turn.prompt import refuse_long_text, write_prompt


class RawText:
    """Stands in for a parser: everything is text. Special tokens are text too, unless they are skipped."""

    in_reasoning = False

    def __init__(self, *, skip_special: bool) -> None:
        self._skip_special = skip_special

    def feed(self, text: str, special: bool = False) -> list[Event]:
        return [Markup(text)] if special and self._skip_special else [TextDelta(text, text)]

    def continues(self, text: str) -> bool:
        return True

    def close(self) -> list[Event]:
        return []


async def complete(call: Call) -> ASGIApp:
    """Answer one or more raw prompts, streamed or as one body."""
    protocol = await call.api.load()
    service, body = call.service, await call.body()
    request = with_hints(await call.decode(body, protocol.decode), call)
    if service.shutdown.is_set():
        raise Overloaded("the server is shutting down; try again in a moment")
    call.admit()
    warnings = await check_budgets(call, None, request)
    model, request = await service.catalog.ready_for(request)
    begin = partial(prepare_completions, model, request)
    generations = await offload(len(body), begin, waits=loads_package(request))
    lifecycle = Lifecycle(
        Choices(
            protocol,
            generations,
            call.trace.new_id,
            kept=(request.choices, request.options.completion.best_of),
            capture=call.capture(generations),
        ),
        call.trace,
        headers=warning_headers([*warnings, *request.warnings, *generations[0].constraints.warnings]),
        in_flight=service.in_flight,
        key=request_key(call.headers, call.trace.route, body),
        costs=service.sessions.costs,
    )
    return respond(call, lifecycle)


def prepare_completions(model: Model, request: Request) -> list[Generation]:
    """Check a request and prepare its generations, without the engine: for each prompt all candidates. Raises what
    ``pipeline.prepare`` raises.
    """
    options = request.options.completion
    prompts = [_prompt(model, given, i, options) for i, given in enumerate(options.prompts)]
    candidates = range(options.best_of)
    return [_begin(model, with_choice_seed(request, i), prompt) for prompt in prompts for i in candidates]


def _prompt(model: Model, given: completions.CompletionPrompt, at: int, options: CompletionOptions) -> Prompt:
    if isinstance(given, str):
        refuse_long_text(model, len(given))
        return Prompt(given, model.tokenizer.encode_array(given))
    if len(given) >= model.context_window:
        raise ContextOverflow(len(given), model.context_window - 1)
    known = model.tokenizer.vocabulary_size
    if min(given) < 0 or max(given) >= known:
        id = next(id for id in given if not 0 <= id < known)
        raise InvalidRequest(
            f"prompt {at} contains the token id {id!s:.40}; this model's ids go from 0 to {known - 1}",
            param=options.prompt_field,
        )
    # To decode a prompt takes ten times as long as all else that is done with its ids.
    return Prompt(model.tokenizer.decode(given) if options.echo else "", array("I", given))


def _begin(model: Model, request: Request, prompt: Prompt) -> Generation:
    options = request.options.completion
    report = PromptReport(
        token_ids=prompt.token_ids.tolist() if request.options.return_token_ids else None,
        text=prompt.text if options.echo else "",
    )
    request = replace(request, prompt_report=report)
    tokenizer = model.tokenizer
    sampling, fits, warnings = fit_sampling(request.sampling, len(prompt.token_ids), model)
    parser = RawText(skip_special=options.skip_special_tokens)
    reader = make_decoder(parser, TurnCallIds(request.conversation), sampling, tokenizer)
    constraints = NO_CONSTRAINTS
    if may_restrict(request):
        wanted = ConstraintRequest(model, request, families.get("plain"), "over", parallel=False)
        constraints = constraints_of(wanted)
    constraints = replace(constraints, warnings=(*constraints.warnings, *warnings))
    logprob_reader = make_logprob_reader(model, request, reader, prompt.token_ids)
    if options.best_of > request.choices and sampling.logprobs is None:
        # The log probabilities rank the candidates; the client does not get them.
        sampling = replace(sampling, logprobs=0)
        logprob_reader = logprob_reader or LogprobReader(reader, tokenizer, prompt.token_ids, request)
    return Generation(
        model, request, prompt, sampling, fits, constraints, reader, logprob_reader=logprob_reader
    )


async def tokenize_text(call: Call) -> ASGIApp:
    """Tokenize a text, or the prompt of a conversation."""
    sent = await call.body()
    wanted, request = await call.decode(sent, decode_tokenize)
    model = await call.service.catalog.ready(wanted.model or "")
    if request is None:
        text = wanted.prompt or ""
        refuse_long_text(model, len(text))
        ids = await offload(len(sent), partial(model.tokenizer.encode, text))
    else:
        request = await call.service.media.read(request, model)
        write = partial(write_prompt, model, request, check_characters=partial(refuse_long_text, model))
        ids = (await offload(len(sent), write, waits=recall_waits(model))).token_ids.tolist()
    encode = partial(_encode_tokens, model, ids, with_texts=bool(wanted.return_token_strs))
    return Response(await offload(len(sent), encode), media_type=JSON)


def _encode_tokens(model: Model, ids: list[int], *, with_texts: bool) -> bytes:
    known = {id: model.tokenizer.decode([id]) for id in set(ids)} if with_texts else {}
    texts = [known[id] for id in ids] if with_texts else None
    body = {"count": len(ids), "max_model_len": model.context_window, "tokens": ids, "token_strs": texts}
    return msgspec.json.encode(body)


async def detokenize(call: Call) -> ASGIApp:
    """Decode token ids to text. Raises InvalidRequest for an id outside the vocabulary."""
    sent = await call.body()
    request = await call.decode(sent, lambda body, _: wire.decode_body(body, DetokenizeBody))
    model = await call.service.catalog.ready(request.model or "")
    return Response(await offload(len(sent), partial(_encode_text, model, request)), media_type=JSON)


def _encode_text(model: Model, request: DetokenizeBody) -> bytes:
    check_token_ids(request.tokens, "tokens", model.tokenizer)
    return msgspec.json.encode({"prompt": model.tokenizer.decode(request.tokens)})


class TokenizeBody(chat.ChatBody, kw_only=True):
    """The body of a request for the tokens of a text or of a conversation; its ``add_special_tokens`` has no effect."""

    model: str | None = None  # type: ignore[assignment]  # null is taken here, unlike in a chat
    messages: list[msgspec.Raw] | None = None  # type: ignore[assignment]
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """The body of a request for the text of tokens; it may name no model, for the one that is served."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]
    model: str | None = None


def decode_tokenize(body: bytes, headers: Mapping[str, str] = {}) -> tuple[TokenizeBody, Request | None]:
    """Decode the JSON ``body``, and its ``messages`` as in Chat Completions. Raises InvalidRequest."""
    wanted = wire.decode_body(body, TokenizeBody)
    if (wanted.prompt is None) == (wanted.messages is None):
        given = "neither prompt nor messages is" if wanted.prompt is None else "both prompt and messages are"
        raise InvalidRequest(f"{given} given; send one of the two", param="prompt")
    return wanted, None if wanted.messages is None else chat.build_request(wanted)
