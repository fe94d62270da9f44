"""Writes the prompt of a request with the parts of a served model, and cuts the history of one that is too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from singletree import request_limits
from singletree.conversation import Conversation, Request, Sampling
from singletree.errors import ContextOverflow
from singletree.parsing.render_turn import render_turn
from singletree.prompts.history.canonicalization import SESSION_CLOCK, ToolsOf, no_session
from singletree.prompts.history.context_editing import (
    Cut,
    conversation_characters,
    first_fitting,
    possible_cuts,
)
from singletree.prompts.prompt_writer import Prompt, PromptWriter, SessionClock
from singletree.prompts.replay.recall import Recalled
from singletree.server.ids import is_minted
from singletree.server.models.chat_format import ChatFormat, known_length
from singletree.server.models.model import Model
from singletree.server.turn.capsule_recall import SealedTurns, refuse_tampered
from singletree.server.turn.round_trip import RenderedTurnParser

_COMPLETION_SHARE = 0.125
"""Largest share of the window that a truncated history leaves for the completion; less if the client asks for less."""

_USUAL_CHARACTERS = 4
"""Characters of a token in usual text, for an estimate."""

_EDITED = 4
"""How many times as long a history may be of which context edits, or the template, leave a part."""

_LONG_TEXT = 20_000
"""Characters of the first prompt for which a faster encoder is made: it takes twice the memory and seconds to load."""


def write_prompt(
    chat_format: ChatFormat,
    request: Request,
    tools_of: ToolsOf = no_session,
    check_characters: Callable[[int], None] = lambda _: None,
) -> Prompt:
    """Render and tokenize the prompt of ``request``.

    Args:
        tools_of: returns the tools that earlier requests of the session sent.
        check_characters: called with the length of the rendered text, before it is tokenized.

    Raises:
        InvalidRequest: the template refuses the conversation, or a capsule was changed and that is refused.
    """
    prompt = chat_format.derived(_writer).write(request, tools_of, check_characters)
    if len(prompt.text) > _LONG_TEXT:
        chat_format.tokenizer.accelerate_in_background()
    return prompt


def prompt_work(chat_format: ChatFormat, request: Request, size: int) -> int:
    """Return about how many bytes ``write_prompt`` has to process for a request of ``size`` bytes: the new ones."""
    return chat_format.derived(_writer).new_bytes(request, size)


def _writer(chat_format: ChatFormat) -> PromptWriter:
    family = chat_format.family
    markers = (family.reasoning or (), *family.also_reasoning)
    return PromptWriter(
        template=chat_format.template,
        tokenizer=chat_format.tokenizer,
        cache=chat_format.prompt_cache,
        render_parts=partial(render_turn, family),
        parser_for=partial(RenderedTurnParser, family),
        own_guard=chat_format.own_guard,
        delimiters=chat_format.layout,
        memory=chat_format.memory,
        reasoning_tags=tuple(marker for pair in markers for marker in pair),
        call_opener=family.forms[0].opener.strip() if family.forms else "",
        rules_off=chat_format.stability_off,
        restore_reasoning=chat_format.restore_reasoning,
        thinking=chat_format.thinking,
        placeholder_id=None if chat_format.eyes is None else chat_format.eyes.placeholder_id,
        picture_mark="" if chat_format.eyes is None else chat_format.eyes.mark,
        capsules_for=partial(_capsules_for, chat_format),
        clock_for=lambda known: make_session_clock(chat_format, known, time.time()),
        is_minted=is_minted,
        others=lambda: [other.derived(_writer) for other in chat_format.others()],
    )


def _capsules_for(chat_format: ChatFormat, conversation: Conversation) -> SealedTurns | None:
    if chat_format.capsules is None:
        return None
    if chat_format.capsules.strict:
        refuse_tampered(chat_format.capsules, conversation)
    return SealedTurns(chat_format, conversation.tools)


def refuse_long_text(model: Model, characters: int) -> None:
    """Raise ContextOverflow for a text that is not tokenized: more than ``characters_per_token`` for the window."""
    if characters > _most_characters(model):
        raise ContextOverflow(characters // _USUAL_CHARACTERS, model.context_window - 1, is_estimate=True)


def refuse_long_conversation(model: Model, request: Request) -> None:
    """Refuse a conversation that is so long that it is not rendered either, unless it may be cut. Raises the same."""
    if not request.truncate:
        refuse_long_text(model, conversation_characters(request.conversation) // _EDITED)


def _most_characters(model: Model) -> int:
    return request_limits.current().characters_per_token * model.context_window


def fit_prompt(model: Model, request: Request, tools_of: ToolsOf = no_session) -> tuple[Request, Prompt]:
    """Return ``request`` and its prompt; if it allows truncation, without the turns that do not fit the window.

    Raises:
        ContextOverflow: the conversation has too many characters to be tokenized.
        InvalidRequest: the template refuses the conversation.
    """
    if request.context_edits:
        # Edits may remove most of the history. They count its tokens, so it is bounded, too.
        refuse_long_text(model, conversation_characters(request.conversation) // _EDITED)
    if not request.truncate:
        return request, write_prompt(model, request, tools_of, partial(refuse_long_text, model))
    characters = conversation_characters(request.conversation)
    most = _most_characters(model)
    if characters <= most:
        prompt = write_prompt(model, request, tools_of)
        if _length(model, prompt) < model.context_window:
            return request, prompt
    room = model.context_window - min(
        wanted_tokens(model, request.sampling), int(model.context_window * _COMPLETION_SHARE)
    )

    @cache
    def without(cut: Cut) -> tuple[Request, Prompt]:
        shorter = replace(request, conversation=cut.of(request.conversation))
        return shorter, write_prompt(model, shorter, tools_of)

    def fits(cut: Cut) -> bool:
        left = conversation_characters(cut.of(request.conversation))
        return left <= most and _length(model, without(cut)[1]) <= room

    # A character is rarely more than a token, and seldom less than a quarter of one.
    found = possible_cuts(request.conversation.turns, step=max(1, model.context_window // 2))
    cut = first_fitting(found, fits)
    if cut is None:
        refuse_long_text(model, characters)
        return request, prompt
    request, prompt = without(cut)
    warning = f"truncation: {cut.end - cut.start} turns behind the first question were left out"
    return replace(request, warnings=(*request.warnings, warning)), prompt


def _length(model: Model, prompt: Prompt) -> int:
    return known_length(model.eyes, len(prompt.token_ids), prompt.pictures)


def wanted_tokens(model: Model, sampling: Sampling) -> int:
    """Return the largest completion that the request and the model allow, in tokens, for an empty prompt."""
    wanted = model.context_window
    for limit in (sampling.max_tokens, model.max_output_tokens):
        if limit is not None and limit < wanted:
            wanted = limit
    return wanted


_KEPT_SECONDS = 86_400.0


def make_session_clock(chat_format: ChatFormat, known: Recalled, now: float) -> SessionClock | None:
    """Return the clock for the prompt of ``known``; None if the template prints no time.

    It shows the time of the last turn in ``known`` if the rule is on and that is less than a day ago, else ``now``.
    """
    if not chat_format.template.capabilities.clock:
        return None
    last = max((number for number, turn in known.turns.items() if turn.opening.clock), default=None)
    printed = 0.0 if last is None else known.turns[last].opening.clock
    is_kept = SESSION_CLOCK.name not in chat_format.stability_off and 0 <= now - printed < _KEPT_SECONDS
    return SessionClock(printed if is_kept else now, now)
