"""Starts a generation: what the engine, the decoder and the recorder of a turn need, from a request and its prompt."""

from __future__ import annotations

from dataclasses import replace

from singletree.conversation import PromptReport, Request, Sampling
from singletree.errors import ContextOverflow, InvalidRequest
from singletree.parsing.parser import Parser
from singletree.prompts.prompt_writer import Prompt
from singletree.prompts.replay.history_digests import HistoryDigests
from singletree.server.models.catalog import Model
from singletree.server.turn.constraints import (
    NO_CONSTRAINTS,
    ConstraintRequest,
    build_constraints,
    may_restrict,
    thinking_state,
)
from singletree.server.turn.decoder import TurnDecoder
from singletree.server.turn.engine_sampling import supported_sampling
from singletree.server.turn.generation import Generation
from singletree.server.turn.ids import TurnCallIds
from singletree.server.turn.logprobs import make_logprob_reader
from singletree.server.turn.picture_tokens import known_length
from singletree.server.turn.prompt import wanted_tokens
from singletree.server.turn.recorder import make_recorder

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
    supported, warnings = supported_sampling(request.sampling, model.tokenizer, model.engine)
    if prompt.pictures and request.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "log-probabilities of a prompt with pictures are not supported; omit prompt_logprobs",
            param="prompt_logprobs",
        )
    length = known_length(model.eyes, len(prompt.token_ids), prompt.pictures)
    sampling, fits_window = fit_sampling(supported, length, model)
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
    added_stops = () if sampling.includes_stop else sampling.stop_token_ids
    ends = model.tokenizer.stop_token_ids
    decoder = TurnDecoder(
        parser,
        model.tokenizer.new_detokenizer(),
        ids,
        stop_token_ids=ends.union(added_stops) if added_stops else ends,
        stops=sampling.stop,
        includes_stop=sampling.includes_stop,
        min_tokens=sampling.min_tokens,
        max_calls=most_calls,
        breaks_cut_call=not request.live_arguments,
    )
    places = prompt.digests or HistoryDigests(prompt.turns)
    printed_time = 0.0 if prompt.clock is None else prompt.clock.at
    recording = make_recorder(
        model,
        prompt.text,
        prompt.turns,
        places,
        ids,
        decoder.turn,
        tools=request.conversation.tools,
        behind=prompt.remembered,
        clock=printed_time,
        names_reasoning=request.options.reasoning_item_ids,
        stop_token_ids=added_stops,
    )
    constraints = NO_CONSTRAINTS
    if may_restrict(request):
        thinking = thinking_state(request, family, parser.in_reasoning, prompt.text)
        wanted = ConstraintRequest(model, request, family, thinking, parallel=most_calls != 1)
        constraints = build_constraints(wanted)
    if prompt.pictures_lost:
        warnings = (
            *warnings,
            f"pictures: {prompt.pictures_lost} replaced by notes: the chat template left some out",
        )
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


def fit_sampling(sampling: Sampling, prompt_tokens: int, model: Model) -> tuple[Sampling, bool]:
    """Return ``sampling`` with ``max_tokens`` set to what fits the window, and whether that is all that was wanted.

    Raises:
        ContextOverflow: not one token fits.
    """
    room = model.context_window - prompt_tokens
    if room < 1:
        raise ContextOverflow(prompt_tokens, model.context_window - 1)
    wanted = wanted_tokens(model, sampling)
    most = min(wanted, room)
    least = min(sampling.min_tokens, most)
    if (most, least) != (sampling.max_tokens, sampling.min_tokens):
        sampling = replace(sampling, max_tokens=most, min_tokens=least)
    return sampling, wanted <= room
