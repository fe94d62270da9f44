"""Writes the prompt of a request with the parts of a served model, and cuts the history of one that is too long."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache, partial

from singletree.conversation import Conversation, Request, Sampling
from singletree.parsing.render_turn import render_turn
from singletree.prompts.history.canonicalization import ToolsOf, no_session
from singletree.prompts.history.truncation import Cut, first_fitting, possible_cuts
from singletree.prompts.prompt_writer import Prompt, PromptWriter
from singletree.prompts.replay.recall import Recalled
from singletree.server.models.catalog import ChatFormat, Model
from singletree.server.turn.capsule_recall import SealedTurns, refuse_tampered
from singletree.server.turn.picture_tokens import known_length
from singletree.server.turn.rendered_turn import RenderedTurnParser
from singletree.server.turn.session_clock import SessionClock, make_session_clock

_COMPLETION_SHARE = 0.125
"""Largest share of the window that a truncated history leaves for the completion; less if the client asks for less."""

_LONG_TEXT = 20_000
"""Characters of the first prompt for which a faster encoder is made: it takes twice the memory and seconds to load."""


def write_prompt(chat_format: ChatFormat, request: Request, tools_of: ToolsOf = no_session) -> Prompt:
    """Render and tokenize the prompt of ``request``.

    Args:
        chat_format: template, tokenizer, family and memory of the model.
        tools_of: returns the tools that earlier requests of the session sent.

    Raises:
        InvalidRequest: the template refuses the conversation, or a capsule was changed and that is refused.
    """
    prompt = chat_format.derived(_writer).write(request, tools_of)
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
        clock_for=partial(_clock_for, chat_format),
    )


def _capsules_for(chat_format: ChatFormat, conversation: Conversation) -> SealedTurns | None:
    """Return what opens the capsules in ``conversation``; None if the model uses none.

    Raises:
        InvalidRequest: a capsule was changed, and the server is configured to refuse that.
    """
    if chat_format.capsules is None:
        return None
    if chat_format.capsules.strict:
        refuse_tampered(chat_format.capsules, conversation)
    return SealedTurns(chat_format, conversation.tools)


def _clock_for(chat_format: ChatFormat, known: Recalled) -> SessionClock | None:
    return make_session_clock(chat_format, known, time.time())


def fit_prompt(model: Model, request: Request, tools_of: ToolsOf = no_session) -> tuple[Request, Prompt]:
    """Return ``request`` and its prompt; if it allows truncation, without the turns that do not fit the window.

    Raises:
        InvalidRequest: the template refuses the conversation.
    """
    prompt = write_prompt(model, request, tools_of)
    if not request.truncate or _length(model, prompt) < model.context_window:
        return request, prompt
    room = model.context_window - min(
        wanted_tokens(model, request.sampling), int(model.context_window * _COMPLETION_SHARE)
    )

    @cache
    def without(cut: Cut) -> tuple[Request, Prompt]:
        shorter = replace(request, conversation=cut.of(request.conversation))
        return shorter, write_prompt(model, shorter, tools_of)

    # A character is rarely more than a token, and seldom less than a quarter of one.
    found = possible_cuts(request.conversation.turns, step=max(1, model.context_window // 2))
    cut = first_fitting(found, lambda cut: _length(model, without(cut)[1]) <= room)
    if cut is None:
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
