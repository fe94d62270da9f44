"""One turn while it is generated: its start from a request and a prompt, and the value that its steps share."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct

from singletree.conversation import PromptReport, Request, Sampling
from singletree.engines.engine import Engine, Outlook, Route
from singletree.errors import ContextOverflow, InvalidRequest
from singletree.events import Event, Finished, FinishReason, Usage, WeightVersion
from singletree.parsing.parser import Parser
from singletree.prompts.prompt_writer import Prompt
from singletree.prompts.replay.turn_keys import HistoryDigests
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.protocols.answer import Seal, SealEnd
from singletree.server.ids import NewId, TurnCallIds
from singletree.server.models.chat_format import known_length, without_expansion
from singletree.server.models.model import Model
from singletree.server.turn.constraints import (
    NO_CONSTRAINTS,
    ConstraintRequest,
    Constraints,
    constraints_of,
    may_restrict,
    thinking_state,
)
from singletree.server.turn.decoder import EventParser, LogprobReader, TurnDecoder, make_logprob_reader
from singletree.server.turn.prompt import wanted_tokens
from singletree.server.turn.recorder import TurnRecorder, make_recorder


class Generation(Struct):
    """One turn that is generated: its request, its prompt, and its state.

    Attributes:
        sampling: the sampling for the engine; its ``max_tokens`` fits the window.
        fits_window: whether the window has room for as many tokens as the request asked for.
        recorder: keeps the turn for the turn memory; None if the turn is not kept.
        logprob_reader: reads tokens with their log-probabilities; None if the client asked for none.
        cached_tokens: prompt tokens that the engine had in its prefix cache; None until it reports them.
        final_usage: the counts at its end; None while it is generated.
        prompt_tokens: how many tokens the prompt has for the engine, with its pictures as far as they are known; 0 for
            as many as ``prompt.token_ids``.
        route: which of several engines generates; None where there is one.
        token_logprobs: the log-probabilities that came with the generated tokens; None where nobody keeps them.
        completed_calls: when each call became complete that has not been sent, on the clock of ``time.perf_counter``.
        ended: why the turn ended; None while it is generated.
        first_token_at: when its first token came, on the clock of ``time.perf_counter``; 0 before that.
        weight_versions: those of the engine's last chunk.
        report: returns further fields of the usage, from the counts at the end; None for none.
        runner: replaces ``run`` where the events of the turn are not sent as they are.
        deliver: takes batches of events that need not be yielded, because the engine delivers their tokens without a
            switch of tasks; None for none.
        outlook: what its conversation will do next; None where no engine reads it.
    """

    model: Model
    request: Request
    prompt: Prompt
    sampling: Sampling
    fits_window: bool
    constraints: Constraints
    decoder: TurnDecoder
    recorder: TurnRecorder | None = None
    logprob_reader: LogprobReader | None = None
    cached_tokens: int | None = None
    final_usage: Usage | None = None
    prompt_tokens: int = 0
    route: Route | None = None
    completed_calls: list[float] = []
    token_logprobs: array[float] | None = None
    ended: FinishReason | None = None
    first_token_at: float = 0.0
    weight_versions: Sequence[WeightVersion] = ()
    report: Callable[[Usage], Mapping[str, Any]] | None = None
    runner: Runner | None = None
    deliver: DeliverEvents | None = None
    outlook: Outlook | None = None

    @property
    def token_ids(self) -> array[int]:
        return self.decoder.turn.token_ids

    @property
    def events(self) -> list[Event]:
        return self.decoder.turn.events

    @property
    def session_name(self) -> str:
        """Return the session by which engines and routers know the turn; empty if it has none."""
        return self.request.session or self.request.agent.session_id

    def reported_cached_tokens(self) -> int | None:
        """Return how many of the prompt's token ids were cached; None until the engine reports it."""
        if self.cached_tokens is None:
            return None
        cached = min(self.cached_tokens, self.prompt_tokens or len(self.prompt.token_ids))
        return without_expansion(self.model.eyes, self.prompt.pictures, cached)

    def reported_route(self) -> Route | None:
        """Return the route, with its prediction as a number of the prompt's token ids."""
        route = self.route
        if route is None or route.predicted_cached_tokens is None:
            return route
        predicted = without_expansion(self.model.eyes, self.prompt.pictures, route.predicted_cached_tokens)
        return replace(route, predicted_cached_tokens=predicted)

    @property
    def seal(self) -> Seal | None:
        """The function that makes the capsule of a span of reasoning; None if the turn gets no capsules."""
        return None if self.recorder is None or self.model.capsules is None else self.recorder.seal

    def with_reasoning_ids(self, new_id: NewId) -> NewId:
        """Wrap ``new_id`` so that the ids of reasoning items identify this turn when they come back."""
        return new_id if self.recorder is None else self.recorder.with_reasoning_ids(new_id)

    @property
    def seal_end(self) -> SealEnd | None:
        """The function that makes the capsule of what follows the last span of reasoning, once the turn is over."""
        return None if self.recorder is None or self.model.capsules is None else self.recorder.seal_end

    @property
    def usage(self) -> Usage:
        if self.final_usage is not None:
            return self.final_usage
        decoder = self.decoder
        prompt_tokens = self.prompt_tokens or len(self.prompt.token_ids)
        cached = min(self.cached_tokens or 0, prompt_tokens)
        return Usage(prompt_tokens, decoder.tokens, cached, decoder.reasoning_tokens)


DeliverEvents = Callable[[list[Event]], bool]
"""Takes a batch, and returns whether the next ones may come the same way; called while a batch is awaited, and not
again after it returned False, before one has been yielded. The first batch is yielded."""
Batches = AsyncGenerator[list[Event] | Finished, None]
Runner = Callable[[Generation, str], Batches]
WithCompaction = Callable[[Generation], Generation]


_TAIL = 32_768
"""Characters of the prompt's end that the parser gets: enough for an assistant turn that is continued."""


def start_generation(model: Model, request: Request, prompt: Prompt) -> Generation:
    """Return a generation for a prompt that is complete. Raises the same errors as ``pipeline.prepare``."""
    if request.options.return_token_ids or prompt.applied_edits:
        report = PromptReport(
            token_ids=prompt.token_ids.tolist() if request.options.return_token_ids else None,
            applied_edits=prompt.applied_edits,
        )
        request = replace(request, prompt_report=report)
    if prompt.pictures and request.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "log-probabilities of a prompt with pictures are not supported; omit prompt_logprobs",
            param="prompt_logprobs",
        )
    length = known_length(model.eyes, len(prompt.token_ids), prompt.pictures)
    sampling, fits_window, warnings = fit_sampling(request.sampling, length, model)
    family = model.family if may_call(request) else model.family.without_calls()
    ids = TurnCallIds(request.conversation, are_shown=not request.options.legacy_functions)
    parser = Parser(
        family,
        request.conversation.tools,
        prompt.text[-_TAIL:],  # With its guards, so that a quoted marker opens nothing.
        special_tokens=model.tokenizer.special_tokens,
        mint_id=ids.mint,
    )
    most_calls = max_calls(request)
    decoder = make_decoder(
        parser,
        ids,
        sampling,
        model.tokenizer,
        max_calls=most_calls,
        breaks_cut_call=not request.live_arguments,
    )
    places = prompt.digests or HistoryDigests(prompt.turns)
    recording = make_recorder(
        model,
        prompt,
        places,
        ids,
        decoder.turn,
        tools=request.conversation.tools,
        is_continued=request.continues and request.opens_turn,
        names_reasoning=request.options.reasoning_item_ids,
        stop_token_ids=_added_stops(sampling),
    )
    if prompt.pictures_lost:
        warnings = (
            *warnings,
            f"pictures: {prompt.pictures_lost} replaced by notes: the chat template left some out",
        )
    constraints = NO_CONSTRAINTS
    if may_restrict(request):
        thinking = thinking_state(request, family, parser.in_reasoning, prompt.text)
        wanted = ConstraintRequest(model, request, family, thinking, parallel=most_calls != 1)
        constraints = constraints_of(wanted)
    if warnings:
        constraints = replace(constraints, warnings=(*constraints.warnings, *warnings))
    logprobs = make_logprob_reader(model, request, decoder, prompt.token_ids)
    return Generation(
        model,
        request,
        prompt,
        sampling,
        fits_window,
        constraints,
        decoder,
        recording,
        logprobs,
        prompt_tokens=length,
    )


def may_call(request: Request) -> bool:
    """Return whether the turn may contain tool calls: without tools, text in the form of a call stays text."""
    return bool(request.conversation.tools) and request.tool_choice.mode != "none"


def max_calls(request: Request) -> int | None:
    """Return the largest number of calls in the turn; None for any number.

    A ``tool_choice`` that names one tool asks for one call, as on the vendors' own APIs.
    """
    if not request.parallel_tool_calls or request.tool_choice.name is not None:
        return 1
    return request.max_tool_calls


def make_decoder(
    parser: EventParser,
    ids: TurnCallIds,
    sampling: Sampling,
    tokenizer: Tokenizer,
    *,
    max_calls: int | None = None,
    breaks_cut_call: bool = False,
) -> TurnDecoder:
    """Return the decoder of a turn that ends as ``sampling`` says. The other arguments are those of ``TurnDecoder``."""
    ends, added_stops = tokenizer.stop_token_ids, _added_stops(sampling)
    return TurnDecoder(
        parser,
        tokenizer.new_detokenizer(),
        ids,
        stop_token_ids=ends.union(added_stops) if added_stops else ends,
        stops=sampling.stop,
        includes_stop=sampling.includes_stop,
        min_tokens=sampling.min_tokens,
        max_calls=max_calls,
        breaks_cut_call=breaks_cut_call,
    )


def _added_stops(sampling: Sampling) -> tuple[int, ...]:
    """Return the tokens that end a turn in addition to the model's own."""
    return () if sampling.includes_stop else sampling.stop_token_ids


def fit_sampling(
    sampling: Sampling, prompt_tokens: int, model: Model
) -> tuple[Sampling, bool, tuple[str, ...]]:
    """Return ``sampling`` as the engine and the window allow it, whether the window has room for all, and warnings.

    Raises:
        ContextOverflow: not one token fits.
        InvalidRequest: as ``supported_sampling``.
    """
    sampling, warnings = supported_sampling(sampling, model.tokenizer, model.engine)
    room = model.context_window - prompt_tokens
    if room < 1:
        raise ContextOverflow(prompt_tokens, model.context_window - 1)
    wanted = wanted_tokens(model, sampling)
    most = min(wanted, room)
    least = min(sampling.min_tokens, most)
    if (most, least) != (sampling.max_tokens, sampling.min_tokens):
        sampling = replace(sampling, max_tokens=most, min_tokens=least)
    return sampling, wanted <= room, warnings


BANNED = -100.0
"""The strongest bias against a token that OpenAI's API and every engine accept."""

_DEFAULT = Sampling()


def supported_sampling(
    sampling: Sampling, tokenizer: Tokenizer, engine: Engine
) -> tuple[Sampling, tuple[str, ...]]:
    """Return ``sampling`` without the fields that ``engine`` does not support, and a warning for each of them.

    A bad word that is one token is banned by a logit bias, which every engine supports.

    Raises:
        InvalidRequest: a token id is not in the vocabulary; ``param`` is its path.
    """
    if not (
        sampling.min_tokens or sampling.stop_token_ids or sampling.bad_words or sampling.allowed_token_ids
    ):
        return sampling, ()
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_token_ids(getattr(sampling, name), name, tokenizer)
    info = engine.info()
    sampling, left = _with_banned_words(sampling, tokenizer)
    warnings = []
    for name in ("min_tokens", "bad_words", "allowed_token_ids"):
        if getattr(sampling, name) and name not in info.optional_sampling:
            sampling = replace(sampling, **{name: getattr(_DEFAULT, name)})
            words = f" for {', '.join(left)}, of several tokens each" if name == "bad_words" else ""
            warnings.append(f"{name} is ignored{words}: the engine {info.name} does not support it")
    return sampling, tuple(warnings)


def check_token_ids(ids: Sequence[int], field: str, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest for an id of the list ``field`` that is not in the vocabulary."""
    known = tokenizer.vocabulary_size
    for i, id in enumerate(ids):
        if not 0 <= id < known:
            at = f"{field}.{i}"
            raise InvalidRequest(f"{at} is {id!s:.40}; this model's ids go from 0 to {known - 1}", param=at)


def _with_banned_words(sampling: Sampling, tokenizer: Tokenizer) -> tuple[Sampling, list[str]]:
    """Ban the bad words that are one token; return the paths of the others, which stay in ``bad_words``."""
    if not sampling.bad_words:
        return sampling, []
    bias, left, words = dict(sampling.logit_bias or {}), [], []
    for i, word in enumerate(sampling.bad_words):
        # At the start of a word most vocabularies have other tokens.
        for spelling in dict.fromkeys((word, f" {word.lstrip()}")):
            ids = tokenizer.encode(spelling)
            if len(ids) == 1:
                bias[ids[0]] = BANNED
            elif word not in words:
                left.append(f"bad_words.{i}")
                words.append(word)
    return replace(sampling, logit_bias=bias or None, bad_words=tuple(words)), left
