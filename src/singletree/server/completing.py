"""``/v1/completions``: raw prompts, and answers of which every word is text."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import partial

from starlette.types import ASGIApp

from singletree import families
from singletree.conversation import Request
from singletree.errors import InvalidRequest, Overloaded
from singletree.events import Event, Markup, TextDelta
from singletree.protocols import completions
from singletree.server import pipeline
from singletree.server.answer import Answer
from singletree.server.aside import aside
from singletree.server.catalog import Model
from singletree.server.choices import Choices, drawn_again
from singletree.server.constraining import Asking, constraint_of
from singletree.server.identity import CallIds
from singletree.server.operations import Call, hinted, warned
from singletree.server.pipeline import Generation, Prompt
from singletree.server.protocol import COMPLETIONS
from singletree.server.reading import Reader
from singletree.server.takeover import place_of
from singletree.server.told_tokens import TokenTeller, token_teller


class RawText:
    """In the place of a parser: all is text, special tokens if they are wanted."""

    in_reasoning = False

    def __init__(self, *, skip_special: bool) -> None:
        self._skip_special = skip_special

    def feed(self, text: str, special: bool = False) -> list[Event]:
        """See ``Parser``."""
        return [Markup(text)] if special and self._skip_special else [TextDelta(text, text)]

    def close(self) -> list[Event]:
        """See ``Parser``."""
        return []


async def complete(call: Call) -> ASGIApp:
    """The answers to one or more raw prompts, streamed or whole."""
    service, body = call.service, await call.body()
    request = hinted(call, completions.decode(body, call.headers))
    if service.closing:
        raise Overloaded("the server is shutting down; try again in a moment")
    model = service.catalog.get(request.model)
    choices = await aside(len(body), partial(prepare, model, request))
    warnings = choices.generations[0].held.warnings
    return Answer(
        COMPLETIONS,
        choices,
        call.trace,
        headers=warned([*request.warnings, *warnings]),
        keep_alive_seconds=service.config.keep_alive_seconds,
        hold=partial(service.places.held, place_of(call.headers, request, call.trace.route, body)),
    )


def prepare(model: Model, request: Request) -> Choices:
    """All that can be said about a request without asking the engine; raises as ``pipeline.prepare`` does."""
    prompts = [_prompt(model, given, i) for i, given in enumerate(request.extra["prompts"])]
    drawn = range(request.extra["best_of"])
    return Choices(
        [_begin(model, drawn_again(request, i), prompt) for prompt in prompts for i in drawn],
        completions,
        kept=(request.choices, len(drawn)),
    )


def _prompt(model: Model, given: completions.Prompt, at: int) -> Prompt:
    if isinstance(given, str):
        return Prompt(given, model.tokenizer.encode_array(given))
    known = model.tokenizer.vocabulary_size
    for id in given:
        if not 0 <= id < known:
            raise InvalidRequest(
                f"prompt {at} has the token {id!s:.40}; this model's ids go from 0 to {known - 1}",
                param="prompt",
            )
    return Prompt(model.tokenizer.decode(given), array("I", given))


def _begin(model: Model, request: Request, prompt: Prompt) -> Generation:
    said: dict[str, object] = {"echoed": prompt.text} if request.extra["echo"] else {}
    if request.extra["return_token_ids"]:
        said["prompt_token_ids"] = prompt.token_ids.tolist()
    request = replace(request, extra={**request.extra, **said})
    sampling, fits = pipeline.fit(request.sampling, len(prompt.token_ids), model)
    tokenizer = model.tokenizer
    reader = Reader(
        RawText(skip_special=request.extra["skip_special_tokens"]),
        tokenizer.stream(),
        CallIds(request.conversation),
        stop_token_ids=tokenizer.stop_token_ids,
        stops=sampling.stop,
    )
    held = constraint_of(Asking(model, request, families.get("plain"), "over", parallel=False))
    teller = token_teller(model, request, reader, prompt.token_ids)
    if request.extra["best_of"] > request.choices and sampling.logprobs is None:
        # To rank by, and not to be told.
        sampling = replace(sampling, logprobs=0)
        teller = teller or TokenTeller(reader, tokenizer, prompt.token_ids, request)
    return Generation(model, request, prompt, sampling, fits, held, reader, teller=teller)
