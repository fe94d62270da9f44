"""The way of a request: a conversation down to token ids, and the model's tokens up to events.

``prepare`` is the way down and refuses what cannot be done, before anything is answered; ``generate`` is
the way up.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from singletree.conversation import (
    AppliedEdit,
    ClearThinking,
    Conversation,
    Request,
    Sampling,
    Thinking,
    Tool,
    Turn,
)
from singletree.errors import ContextOverflow, EngineFailed
from singletree.events import Event, Finished, FinishReason, Usage, UsageRead
from singletree.parsing.draw import draw
from singletree.parsing.parser import Parser
from singletree.prompts import clearing, stability
from singletree.prompts.added_tokens import strip_guards
from singletree.prompts.replay import Places, Recalled
from singletree.prompts.stability import Canonical, ToolsOf
from singletree.prompts.template import Rendered
from singletree.prompts.template_reads import CLOCK
from singletree.prompts.thinking import is_wanted, thinking_arguments
from singletree.prompts.truncation import Cut, cuts, first_fitting
from singletree.server.catalog import Model, Speech
from singletree.server.constraining import Asking, Held, constraint_of, thinking_of
from singletree.server.identity import CallIds
from singletree.server.protocol import Seal
from singletree.server.reading import Reader
from singletree.server.remembering import Recorder, Spelled, recalled, recorder, spell
from singletree.server.session_clock import Clock, clock_of
from singletree.server.told_tokens import TokenTeller, token_teller

_TAIL = 32_768
"""How much of the prompt's end the parser gets, in characters: enough for an assistant turn that is
continued.
"""

_KEPT_FOR_THE_ANSWER = 0.125
"""How much of the window a truncated history leaves to the answer, where the client wants that much."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is given. ``turns`` are those that it writes; ``rules`` names the stability rules that changed
    something in them; ``replayed`` counts the earlier turns that stand in it by their own tokens; ``applied_edits``
    tells what was taken out of the history on the client's wish; ``tools`` are those that stand in it; ``places`` are
    those of the turns, where they may be remembered; ``settings`` are the variables of reasoning that the client asked
    for; ``clock`` tells the time that it shows.
    """

    text: str
    token_ids: array[int]
    turns: tuple[Turn, ...] = ()
    rules: tuple[str, ...] = ()
    replayed: int = 0
    applied_edits: tuple[AppliedEdit, ...] = ()
    tools: tuple[Tool, ...] = ()
    places: Places | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    clock: Clock | None = None


@dataclass(slots=True)
class Generation:
    """One turn about to be generated, and how far it is. ``fits`` is False when the window cuts what was
    asked for. ``course`` takes the place of ``run`` where the turn is not simply generated. ``told`` are the
    tokens that the engine gave; ``ended`` is set when the turn is over.
    """

    model: Model
    request: Request
    prompt: Prompt
    sampling: Sampling
    fits: bool
    held: Held
    reader: Reader
    recording: Recorder | None = None
    teller: TokenTeller | None = None
    cached_tokens: int | None = None
    told: array[int] = field(default_factory=lambda: array("I"))
    ended: FinishReason | None = None
    course: Course | None = None

    def known_cached(self) -> int | None:
        """How many tokens of the prompt the engine had, when it has told."""
        return None if self.cached_tokens is None else self.usage.cached_tokens

    @property
    def seal(self) -> Seal | None:
        """Seals the spans of reasoning for the client to carry."""
        return None if self.recording is None or self.model.capsules is None else self.recording.seal

    @property
    def usage(self) -> Usage:
        """The exact counts so far."""
        prompt_tokens, reader = len(self.prompt.token_ids), self.reader
        cached = min(self.cached_tokens or 0, prompt_tokens)
        return Usage(prompt_tokens, reader.tokens, cached, reader.reasoning_tokens)


def write_prompt(
    speech: Speech,
    request: Request,
    tools_of: ToolsOf = stability.no_session,
) -> Prompt:
    """The prompt of a request, as text and as token ids.

    Args:
        tools_of: what is known of its session.

    Raises:
        InvalidRequest: the template refuses the conversation.
    """
    edited, applied = clearing.clear(
        request.conversation, request.context_edits, lambda text: len(speech.tokenizer.encode(text))
    )
    before, number = speech.beginnings.longest(edited.turns) or (None, None)
    canonical = stability.canonicalise_on(
        before and before.canonical, edited, off=speech.stability_off, tools_of=tools_of
    )
    conversation = canonical.conversation
    known = recalled(
        speech,
        conversation,
        restore_reasoning=speech.restore_reasoning and may_restore(request, speech.thinking),
        before=before and before.known,
    )
    set_for = partial(thinking_arguments, request.thinking, speech.template.reads, default=speech.thinking)
    arguments = set_for(known.conversation)
    clock = clock_of(speech, known, time.time())
    rendered = speech.template.render_on(
        before and before.rendered,
        known.conversation,
        draw=partial(draw, speech.family),
        template_arguments=arguments if clock is None else {**arguments, CLOCK: clock},
        add_generation_prompt=request.opens_turn,
        continues=request.continues,
        guard=speech.tokenizer.guard,
        vision=False,
    )
    text = rendered.text
    spelled = spell(speech.tokenizer, speech.family, speech.layout, text, known, before and before.spelled)
    written = Written(canonical, known, rendered, spelled)
    asked = next((i for i, turn in enumerate(reversed(edited.turns)) if turn.role == "assistant"), 0)
    speech.beginnings.keep(
        edited.turns, written, written.bytes, needed=len(edited.turns) - asked, instead_of=number
    )
    settings = set_for(Conversation(()))
    return Prompt(
        text,
        spelled.token_ids,
        conversation.turns,
        canonical.rules if clock is None else (*canonical.rules, *clock.rules),
        spelled.replayed,
        applied,
        conversation.tools,
        known.places,
        settings,
        clock,
    )


@dataclass(frozen=True, slots=True)
class Written:
    """What each stage made of a prompt, for the next one of its conversation to go on from."""

    canonical: Canonical
    known: Recalled
    rendered: Rendered
    spelled: Spelled

    @property
    def bytes(self) -> int:
        """About what it costs."""
        return self.rendered.bytes + self.spelled.bytes


def written(
    model: Model, request: Request, tools_of: ToolsOf = stability.no_session
) -> tuple[Request, Prompt]:
    """The prompt of a request, and the request as it stands there: where it lets itself be truncated, without the
    turns for which the window has no room.

    Raises:
        InvalidRequest: the template refuses the conversation.
    """
    prompt = write_prompt(model, request, tools_of)
    if not request.truncate or len(prompt.token_ids) < model.context_window:
        return request, prompt
    room = model.context_window - min(
        wanted_tokens(model, request.sampling), int(model.context_window * _KEPT_FOR_THE_ANSWER)
    )

    @cache
    def without(cut: Cut) -> tuple[Request, Prompt]:
        shorter = replace(request, conversation=cut.of(request.conversation))
        return shorter, write_prompt(model, shorter, tools_of)

    # A character is rarely more than a token, and seldom less than a quarter of one.
    found = cuts(request.conversation.turns, step=max(1, model.context_window // 2))
    cut = first_fitting(found, lambda cut: len(without(cut)[1].token_ids) <= room)
    if cut is None:
        return request, prompt
    request, prompt = without(cut)
    told = f"truncation: {cut.end - cut.start} turns behind the first question were left out"
    return replace(request, warnings=(*request.warnings, told)), prompt


def may_restore(request: Request, default: Thinking) -> bool:
    """Whether a harness that carries no reasoning may get some back: not when it switched it off or clears it."""
    edits = request.context_edits
    cleared = any(isinstance(edit, ClearThinking) and edit.keep_turns is not None for edit in edits)
    return is_wanted(request.thinking, default) is not False and not cleared


def prepare(model: Model, request: Request, tools_of: ToolsOf = stability.no_session) -> Generation:
    """All that can be said about a request without asking the engine.

    Raises:
        ContextOverflow: the prompt does not fit the window.
        InvalidRequest: the template, a schema or a tool choice cannot be had.
    """
    return begin(model, *written(model, request, tools_of))


def begin(model: Model, request: Request, prompt: Prompt) -> Generation:
    """A generation on a prompt that is written; raises as ``prepare`` does."""
    said: dict[str, object] = {"applied_edits": prompt.applied_edits} if prompt.applied_edits else {}
    if request.extra.get("return_token_ids"):
        said["prompt_token_ids"] = prompt.token_ids.tolist()
    request = replace(request, extra={**request.extra, **said}) if said else request
    sampling, fits = fit(request.sampling, len(prompt.token_ids), model)
    family = model.family if may_call(request) else model.family.without_calls()
    ids = CallIds(request.conversation)
    parser = Parser(
        family,
        request.conversation.tools,
        strip_guards(prompt.text[-_TAIL:]),
        special_tokens=model.tokenizer.special_tokens,
        mint_id=ids.mint,
    )
    places = prompt.places or Places(prompt.turns)
    shown = 0.0 if prompt.clock is None else prompt.clock.at
    recording = recorder(model, prompt.text, prompt.turns, places, ids, clock=shown)
    reader = Reader(
        parser,
        model.tokenizer.stream(),
        ids,
        stop_token_ids=model.tokenizer.stop_token_ids,
        stops=sampling.stop,
        most_calls=most_calls(request),
        tap=recording.take if recording is not None else None,
    )
    thinking = thinking_of(request, family, parser.in_reasoning, prompt.text)
    held = constraint_of(Asking(model, request, family, thinking, parallel=most_calls(request) != 1))
    teller = token_teller(model, request, reader, prompt.token_ids)
    return Generation(model, request, prompt, sampling, fits, held, reader, recording, teller)


def may_call(request: Request) -> bool:
    """Whether what reads as a call is one: nobody would answer it where no tools are offered."""
    return bool(request.conversation.tools) and request.tool_choice.mode != "none"


def most_calls(request: Request) -> int | None:
    """How many calls the turn may hold, None for any. One that is named is asked for once, as on the native APIs."""
    if not request.parallel_tool_calls or request.tool_choice.name is not None:
        return 1
    return request.max_tool_calls


Batches = AsyncGenerator[list[Event] | Finished, None]
Course = Callable[[Generation, str], Batches]


def generate(generation: Generation, request_id: str) -> Batches:
    """What answers the request: ``run`` of the generation, unless it has a course of its own."""
    return (generation.course or run)(generation, request_id)


async def run(generation: Generation, request_id: str) -> Batches:
    """The events of the turn in batches as the engine gives tokens, the first as soon as it says anything;
    then the end.

    Closing the generator frees the engine. Raises what the engine raises.
    """
    model, reader, recording = generation.model, generation.reader, generation.recording
    teller, counts = generation.teller, generation.request.extra.get("continuous_usage_stats")
    chunks = model.engine.generate(
        generation.prompt.token_ids,
        generation.sampling,
        request_id,
        stop_token_ids=tuple(model.tokenizer.stop_token_ids),
        constraint=generation.held.constraint,
        priority=generation.request.hints.rank,
    )
    reason: FinishReason | None = None
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.cached_tokens is not None:
                generation.cached_tokens = chunk.cached_tokens
            generation.told.extend(chunk.token_ids)
            batch = reader.feed(chunk.token_ids) if teller is None else teller.feed(chunk)
            yield [UsageRead(generation.usage), *batch] if counts and batch else batch
            reason = reader.ended or chunk.finish
            if reason is not None:
                break
    if reason is None:
        raise EngineFailed("the engine stopped without saying why; try again")
    if reason == "length" and not generation.fits:
        reason = "context_overflow"
    last = reader.close() if teller is None else teller.close()
    generation.ended = reader.ended or reason
    if recording is not None:
        recording.close(generation.ended)
    if last:
        yield last
    yield Finished(generation.ended, generation.usage, reader.stop_sequence)


def fit(sampling: Sampling, prompt_tokens: int, model: Model) -> tuple[Sampling, bool]:
    """``sampling`` with as many tokens as fit, and whether that is all that was asked for.

    Raises:
        ContextOverflow: not one token fits.
    """
    room = model.context_window - prompt_tokens
    if room < 1:
        raise ContextOverflow(prompt_tokens, model.context_window - 1)
    wanted = wanted_tokens(model, sampling)
    return replace(sampling, max_tokens=min(wanted, room)), wanted <= room


def wanted_tokens(model: Model, sampling: Sampling) -> int:
    """The longest answer that is asked for, were the window empty."""
    limits = (sampling.max_tokens, model.max_output_tokens, model.context_window)
    return min(limit for limit in limits if limit is not None)
