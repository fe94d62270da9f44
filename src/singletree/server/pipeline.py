"""The way of a request: a conversation down to token ids, and the model's tokens up to events.

``prepare`` is the way down and refuses what cannot be done, before anything is answered; ``generate`` is
the way up.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from singletree.conversation import Request, Sampling, Turn
from singletree.engines.engine import Constraint
from singletree.errors import ContextOverflow, EngineFailed
from singletree.events import Event, Finished, FinishReason, Usage
from singletree.parsing import constrain
from singletree.parsing.draw import draw
from singletree.parsing.family import Family
from singletree.parsing.parser import Parser
from singletree.prompts import stability
from singletree.prompts.added_tokens import strip_guards
from singletree.prompts.thinking import thinking_arguments
from singletree.server.catalog import Model, Speech
from singletree.server.identity import CallIds
from singletree.server.reading import Reader
from singletree.server.remembering import Recorder, recalled, recorder, spell

_TAIL = 32_768
"""How much of the prompt's end the parser gets, in characters: enough for an assistant turn that is
continued.
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is given. ``turns`` are those that it writes; ``rules`` names the stability rules that changed
    something in them; ``replayed`` counts the earlier turns that stand in it by their own tokens.
    """

    text: str
    token_ids: list[int]
    turns: tuple[Turn, ...] = ()
    rules: tuple[str, ...] = ()
    replayed: int = 0


@dataclass(slots=True)
class Generation:
    """One turn about to be generated, and how far it is. ``fits`` is False when the window cuts what was
    asked for.
    """

    model: Model
    request: Request
    prompt: Prompt
    sampling: Sampling
    fits: bool
    constraint: Constraint | None
    reader: Reader
    recording: Recorder | None = None
    cached_tokens: int = 0

    @property
    def usage(self) -> Usage:
        """The exact counts so far."""
        prompt_tokens, reader = len(self.prompt.token_ids), self.reader
        cached = min(self.cached_tokens, prompt_tokens)
        return Usage(prompt_tokens, reader.tokens, cached, reader.reasoning_tokens)


def write_prompt(speech: Speech, request: Request, *, add_generation_prompt: bool = True) -> Prompt:
    """The prompt of a request, as text and as token ids.

    Raises:
        InvalidRequest: the template refuses the conversation.
    """
    conversation, rules = stability.canonicalise(request.conversation, off=speech.stability_off)
    known = recalled(
        speech.memory,
        conversation,
        restore_reasoning=speech.restore_reasoning and request.thinking.enabled is not False,
    )
    text = speech.template.render(
        known.conversation,
        draw=partial(draw, speech.family),
        template_arguments=thinking_arguments(request.thinking, speech.template.reads, known.conversation),
        add_generation_prompt=add_generation_prompt,
        guard=speech.tokenizer.guard,
        vision=False,
    )
    token_ids, replayed = spell(speech.tokenizer, speech.family, speech.layout, text, known)
    return Prompt(text, token_ids, conversation.turns, rules, replayed)


def prepare(model: Model, request: Request) -> Generation:
    """All that can be said about a request without asking the engine.

    Raises:
        ContextOverflow: the prompt does not fit the window.
        InvalidRequest: the template, a schema or a tool choice cannot be had.
    """
    prompt = write_prompt(model, request)
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
    reader = Reader(
        parser,
        model.tokenizer.stream(),
        ids,
        stop_token_ids=model.tokenizer.stop_token_ids,
        stops=sampling.stop,
        one_call=not may_call_again(request),
    )
    constraint = constraint_of(request, family, parser.in_reasoning)
    recording = recorder(model, prompt.text, prompt.turns, ids)
    return Generation(model, request, prompt, sampling, fits, constraint, reader, recording)


def may_call(request: Request) -> bool:
    """Whether what reads as a call is one: nobody would answer it where no tools are offered."""
    return bool(request.conversation.tools) and request.tool_choice.mode != "none"


def may_call_again(request: Request) -> bool:
    """Whether the turn may hold several calls. One that is named is asked for once, as on the native APIs."""
    return request.parallel_tool_calls and request.tool_choice.name is None


async def generate(generation: Generation, request_id: str) -> AsyncGenerator[list[Event] | Finished, None]:
    """The events of the turn in batches as the engine gives tokens, the first as soon as it says anything;
    then the end.

    Closing the generator frees the engine. Raises what the engine raises.
    """
    model, reader, recording = generation.model, generation.reader, generation.recording
    chunks = model.engine.generate(
        generation.prompt.token_ids,
        generation.sampling,
        request_id,
        stop_token_ids=tuple(model.tokenizer.stop_token_ids),
        constraint=generation.constraint,
    )
    reason: FinishReason | None = None
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.cached_tokens is not None:
                generation.cached_tokens = chunk.cached_tokens
            events = reader.feed(chunk.token_ids) if chunk.token_ids else []
            if recording is not None:
                recording.take(chunk.token_ids[: len(chunk.token_ids) - reader.unread], events)
            yield events
            reason = reader.ended or chunk.finish
            if reason is not None:
                break
    if reason is None:
        raise EngineFailed("the engine stopped without saying why; try again")
    if reason == "length" and not generation.fits:
        reason = "context_overflow"
    last = reader.close()
    if recording is not None:
        recording.take((), last)
        recording.close(reader.ended or reason)
    if last:
        yield last
    yield Finished(reader.ended or reason, generation.usage, reader.stop_sequence)


def fit(sampling: Sampling, prompt_tokens: int, model: Model) -> tuple[Sampling, bool]:
    """``sampling`` with as many tokens as fit, and whether that is all that was asked for.

    Raises:
        ContextOverflow: not one token fits.
    """
    room = model.context_window - prompt_tokens
    if room < 1:
        raise ContextOverflow(prompt_tokens, model.context_window - 1)
    wanted = min(
        n for n in (sampling.max_tokens, model.max_output_tokens, model.context_window) if n is not None
    )
    return replace(sampling, max_tokens=min(wanted, room)), wanted <= room


def constraint_of(request: Request, family: Family, in_reasoning: bool) -> Constraint | None:
    """What ``tool_choice`` and the response format hold the model to.

    Raises:
        InvalidRequest: it cannot be held to it.
    """
    choice, form = request.tool_choice, request.response_format
    if choice.mode == "required":
        tools = [tool for tool in request.conversation.tools if tool.name != stability.PLACEHOLDER_TOOL]
        grammar = constrain.calls_grammar(
            family, tools, choice, in_reasoning=in_reasoning, parallel=may_call_again(request)
        )
        return Constraint("lark", grammar)
    if form is not None and not request.conversation.tools:
        return Constraint("lark", constrain.json_grammar(family, form.schema, in_reasoning=in_reasoning))
    return None
