"""``/v1/completions`` and ``/inference/v1/generate``: raw prompts, and answers that are text only."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import partial

from starlette.types import ASGIApp

from singletree import families
from singletree.conversation import PromptReport, Request
from singletree.errors import InvalidRequest, Overloaded
from singletree.events import Event, Markup, TextDelta
from singletree.prompts.prompt_writer import Prompt
from singletree.protocols import completions
from singletree.server.answers.choices import Choices, with_choice_seed
from singletree.server.answers.lifecycle import Lifecycle
from singletree.server.http.offload import offload
from singletree.server.http.request_hints import with_hints
from singletree.server.http.routes import Call, respond, warning_headers
from singletree.server.models.catalog import Model
from singletree.server.sessions.duplicate_requests import request_key
from singletree.server.turn import start
from singletree.server.turn.constraints import ConstraintRequest, build_constraints
from singletree.server.turn.decoder import TurnDecoder
from singletree.server.turn.engine_sampling import supported_sampling
from singletree.server.turn.generation import Generation
from singletree.server.turn.ids import TurnCallIds
from singletree.server.turn.logprobs import LogprobReader, make_logprob_reader


class RawText:
    """Stands in for a parser: everything is text. Special tokens are text too, unless they are skipped."""

    in_reasoning = False

    def __init__(self, *, skip_special: bool) -> None:
        self._skip_special = skip_special

    def feed(self, text: str, special: bool = False) -> list[Event]:
        """Return the events for ``text``, as ``Parser.feed`` does."""
        return [Markup(text)] if special and self._skip_special else [TextDelta(text, text)]

    def continues(self, text: str) -> bool:
        """Return True: text only continues text."""
        return True

    def close(self) -> list[Event]:
        """Return no events: nothing is held back."""
        return []


async def complete(call: Call) -> ASGIApp:
    """Answer one or more raw prompts, streamed or as one body."""
    service, body = call.service, await call.body()
    request = with_hints(
        call.protocol.decode(body, call.headers),
        call.headers,
        protocol=call.protocol,
        config=service.config,
        trace=call.trace,
    )
    if service.closing:
        raise Overloaded("the server is shutting down; try again in a moment")
    model = await service.catalog.ready(request.model)
    generations = await offload(len(body), partial(prepare_completions, model, request))
    lifecycle = Lifecycle(
        Choices(
            call.protocol,
            generations,
            call.trace.new_id,
            kept=(request.choices, request.options.completion.best_of),
        ),
        call.trace,
        headers=warning_headers([*request.warnings, *generations[0].constraints.warnings]),
        in_flight=service.in_flight,
        key=request_key(call.headers, call.trace.route, body),
    )
    return respond(call, lifecycle)


def prepare_completions(model: Model, request: Request) -> list[Generation]:
    """Check a request and prepare its generations, without the engine: for each prompt all candidates.

    Raises what ``pipeline.prepare`` raises.
    """
    options = request.options.completion
    prompts = [_prompt(model, given, i, options.prompt_field) for i, given in enumerate(options.prompts)]
    candidates = range(options.best_of)
    return [_begin(model, with_choice_seed(request, i), prompt) for prompt in prompts for i in candidates]


def _prompt(model: Model, given: completions.CompletionPrompt, at: int, field: str) -> Prompt:
    if isinstance(given, str):
        return Prompt(given, model.tokenizer.encode_array(given))
    known = model.tokenizer.vocabulary_size
    for id in given:
        if not 0 <= id < known:
            raise InvalidRequest(
                f"prompt {at} contains the token id {id!s:.40}; this model's ids go from 0 to {known - 1}",
                param=field,
            )
    return Prompt(model.tokenizer.decode(given), array("I", given))


def _begin(model: Model, request: Request, prompt: Prompt) -> Generation:
    options = request.options.completion
    report = PromptReport(
        token_ids=prompt.token_ids.tolist() if request.options.return_token_ids else None,
        text=prompt.text if options.echo else "",
    )
    request = replace(request, prompt_report=report)
    tokenizer = model.tokenizer
    requested, warnings = supported_sampling(request.sampling, tokenizer, model.engine)
    sampling, fits = start.fit_sampling(requested, len(prompt.token_ids), model)
    added_stops = () if sampling.includes_stop else sampling.stop_token_ids
    reader = TurnDecoder(
        RawText(skip_special=options.skip_special_tokens),
        tokenizer.new_detokenizer(),
        TurnCallIds(request.conversation),
        stop_token_ids=tokenizer.stop_token_ids.union(added_stops),
        stops=sampling.stop,
        includes_stop=sampling.includes_stop,
        min_tokens=sampling.min_tokens,
    )
    constraints = build_constraints(
        ConstraintRequest(model, request, families.get("plain"), "over", parallel=False)
    )
    constraints = replace(constraints, warnings=(*constraints.warnings, *warnings))
    logprob_reader = make_logprob_reader(model, request, reader, prompt.token_ids)
    if options.best_of > request.choices and sampling.logprobs is None:
        # The log probabilities rank the candidates; the client does not get them.
        sampling = replace(sampling, logprobs=0)
        logprob_reader = logprob_reader or LogprobReader(reader, tokenizer, prompt.token_ids, request)
    return Generation(
        model, request, prompt, sampling, fits, constraints, reader, logprob_reader=logprob_reader
    )
